"""Any Hugging Face causal language model with full attention, on CPU or GPU."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from foredraft.backends.base import Backend, Capabilities, Features, KVCache, Query
from foredraft.backends.int8 import quantize
from foredraft.backends.partial import Split, refuse_unless_layered, split, sublayers, without
from foredraft.backends.sublayers import Sublayers
from foredraft.errors import UnsupportedError
from foredraft.tree import ancestor_mask, depths, is_straight
from foredraft.types import Draft

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LAYER_WEIGHTS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("input_layernorm", "post_attention_layernorm"),
)
_PREFILL_CHUNK = 1024  # tokens; bounds the attention scores of a long prompt


class Early(NamedTuple):
    """What the first layers made of a root and a chain: their hidden states `[1, n, H]`. Their KV rows are cached."""

    layers: int
    tokens: tuple[int, ...]
    hidden: Tensor


class TransformersCache(KVCache):
    """A transformers cache, its committed length, and the nodes of the last forward that are not committed yet.

    After an early exit the pending rows are those of `early`, in its first layers only.
    """

    def __init__(self, kv: DynamicCache) -> None:
        self.kv = kv
        self.pending = 0
        self.early: Early | None = None
        self.features: list[Features] = []

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return self.kv.get_seq_length() - self.pending

    def states(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values of each layer, `[1, heads, rows, head_dim]`."""
        for layer in self.kv.layers:
            assert isinstance(layer, DynamicLayer)
            assert isinstance(layer.keys, Tensor) and isinstance(layer.values, Tensor)
            yield layer.keys, layer.values

    def gather(self, path: Sequence[int]) -> None:
        """Move the rows of these pending nodes up behind the root's."""
        first = self.length + 1
        rows = torch.tensor(path) + first
        for layer in self.states():
            for states in layer:
                states[..., first : first + len(path), :] = states[..., rows.to(states.device), :]

    def drop(self, rows: int) -> None:
        """Forget the last `rows` rows."""
        if rows > 0:
            self.kv.crop(-rows)

    def keep_early(self, query: Query, layers: int | None = None) -> int:
        """How many of the query's first tokens are in `early` (of as many layers); the first layers forget the rest."""
        if self.early is None:
            return 0
        early = self.early
        same = query.begins_with(early.tokens) if layers in (None, early.layers) else 0
        self.crop_early(same)
        return same

    def crop_early(self, kept: int) -> None:
        """Forget all but the first `kept` tokens of what an early exit left."""
        if self.early is None:
            return
        early = self.early
        for layer in self.kv.layers[: early.layers]:
            assert isinstance(layer, DynamicLayer)
            layer.crop(kept - self.pending)
        self.pending = kept
        self.early = Early(early.layers, early.tokens[:kept], early.hidden[:, :kept]) if kept else None


class TransformersBackend(Backend):
    """The contract of `Backend` over a loaded transformers model.

    Args:
        model: A decoder-only model; its device and dtype stay, and it is put into evaluation mode.
        vocab_size: Logits past this are cut off (padding of the embedding); `None` keeps all.

    Raises:
        UnsupportedError: Its cache cannot be rolled back; the message names the kind of layer.
    """

    name = "transformers"

    def __init__(self, model: PreTrainedModel, vocab_size: int | None = None) -> None:
        refuse_unless_croppable(model)
        self.capabilities = Capabilities(trees=True, early_exit=_layered(model), features=_has_features(model))
        config = model.config.get_text_config(decoder=True)
        self.config = config
        self.layers, self.hidden_size = config.num_hidden_layers, config.hidden_size
        self.model: Any = model
        self.device = model.device
        torch.nn.Module.eval(model)
        self.vocab_size = min(vocab_size or config.vocab_size, config.vocab_size)
        embeddings: Any = model.get_input_embeddings()
        self.embedding_rows = len(embeddings.weight)
        self.context = getattr(config, "max_position_embeddings", None)
        ends = getattr(model.generation_config, "eos_token_id", None)
        self.stop_tokens = frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)
        self._cache_keyword = _cache_keywords(model)[0]
        self._splits: dict[int, Split] = {}
        self._token_bytes: int | None = None

    def new_cache(self, room: int = 0) -> TransformersCache:
        """See `Backend`. It gets a layer for each of the model's that writes to it, and grows with every token."""
        return TransformersCache(DynamicCache())

    @torch.inference_mode()
    def copy(self, cache: KVCache, length: int, room: int = 0) -> TransformersCache:
        """See `Backend`."""
        assert isinstance(cache, TransformersCache) and length <= cache.length
        fresh = self.new_cache(room)
        for index, (keys, values) in enumerate(cache.states() if length else ()):
            fresh.kv.update(keys[..., :length, :].clone(), values[..., :length, :].clone(), index)
        return fresh

    def kv_bytes(self, tokens: int) -> int:
        """See `Backend`: as one token's turn out to be."""
        if self._token_bytes is None:
            cache = self.new_cache()
            self.prefill(cache, [0])
            self._token_bytes = sum(keys.nbytes + values.nbytes for keys, values in cache.states())
        return tokens * self._token_bytes

    @torch.inference_mode()
    def prefill(self, cache: KVCache, tokens: Sequence[int]) -> None:
        """Append tokens to the cache without scoring them: the body of the model runs, its head does not."""
        assert isinstance(cache, TransformersCache) and cache.pending == 0
        for start in range(0, len(tokens), _PREFILL_CHUNK):
            self._run(self.model.base_model, cache, self._ids(tokens[start : start + _PREFILL_CHUNK]), certain=True)

    @torch.inference_mode()
    def forward(self, queries: Sequence[Query]) -> list[Tensor]:
        """Logits `[N+1, V]` for each query; several sequences are scored one after the other."""
        return [self._score(query) for query in queries]

    @torch.inference_mode()
    def commit(self, cache: KVCache, path: Sequence[int]) -> None:
        """Keep the root and the nodes of the path, moved together where siblings lay between them."""
        assert isinstance(cache, TransformersCache)
        if not is_straight(path):
            cache.gather(path)
        cache.drop(cache.pending - 1 - len(path))
        cache.pending = 0
        for features in cache.features:
            features.commit(path)

    def truncate(self, cache: KVCache, length: int) -> None:
        """Forget committed tokens past the first `length`."""
        assert isinstance(cache, TransformersCache) and cache.pending == 0
        cache.drop(cache.length - length)

    def conditions(self) -> dict[str, str]:
        """See `Backend`."""
        device, dtype = self.model.device, str(self.model.dtype).removeprefix("torch.")
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return {"weights": dtype, "device": name, "threads": str(torch.get_num_threads())}

    def refuse_early_exit(self, layers: int) -> None:
        """See `Backend`."""
        self._split(layers)

    @torch.inference_mode()
    def early_logits(self, query: Query, layers: int) -> Tensor:
        """See `Backend`."""
        assert query.draft.is_chain
        hidden = self._first_layers(query, layers)[:, -1:]
        logits: Tensor = self._split(layers).head(inputs_embeds=hidden, use_cache=False, return_dict=True).logits
        return logits[0, :, : self.vocab_size]

    @torch.no_grad()  # not inference mode: training goes on from it
    def embed(self, tokens: Sequence[int]) -> Tensor:
        """See `Backend`."""
        ids = torch.as_tensor(tokens, dtype=torch.long, device=self.model.device)
        rows: Tensor = self.model.get_input_embeddings()(ids)
        return rows.float()

    @torch.inference_mode()
    def head(self, states: Tensor) -> Tensor:
        """See `Backend`."""
        linear = self.model.get_output_embeddings()
        logits: Tensor = linear(states.to(self.model.device, self.model.dtype))[:, : self.vocab_size].float()
        cap = getattr(self.model.config.get_text_config(decoder=True), "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @torch.no_grad()  # not inference mode: training goes on from it
    def head_rows(self, tokens: Sequence[int]) -> Tensor:
        """See `Backend`."""
        ids = torch.as_tensor(tokens, dtype=torch.long, device=self.model.device)
        rows: Tensor = self.model.get_output_embeddings().weight[ids]
        return rows.float()

    @torch.no_grad()  # not inference mode: training goes on from it
    def final_norm(self) -> tuple[Tensor, float]:
        """See `Backend`: read off what it makes of ones, for some families add 1 to their weights."""
        norm = self.model.base_model.norm
        weight: Tensor = norm(torch.ones(1, self.hidden_size, dtype=self.model.dtype, device=self.model.device))[0]
        epsilon = next(
            (float(getattr(norm, name)) for name in ("variance_epsilon", "eps") if hasattr(norm, name)), 1e-6
        )
        return weight.float() * (1 + epsilon) ** 0.5, epsilon

    @torch.no_grad()
    def layer_weights(self, layer: int) -> dict[str, Tensor] | None:
        """See `Backend`."""
        found: dict[str, Tensor] = {}
        module = self.model.base_model.layers[layer]
        for name in LAYER_WEIGHTS:
            owner = module.self_attn if name[0] in "qkvo" else module if "norm" in name else module.mlp
            weights = getattr(getattr(owner, name, None), "weight", None)
            if weights is None:
                return None
            found[name] = weights.float()
        return found

    def sublayers(self) -> Sublayers:
        """See `Backend`."""
        return sublayers(self.model)

    def without(self, attention: Collection[int], mlp: Collection[int]) -> TransformersBackend:
        """See `Backend`."""
        return TransformersBackend(without(self.model, attention, mlp), self.vocab_size)

    def quantized(self) -> TransformersBackend:
        """See `Backend`. Only on a CPU: elsewhere unpacking the weights takes longer than reading them saves."""
        return TransformersBackend(quantize(self.model), self.vocab_size)

    def _score(self, query: Query) -> Tensor:
        cache, known, tokens = query.cache, query.known, (query.root, *query.draft.tokens)
        assert isinstance(cache, TransformersCache) and (cache.pending == known or cache.early is not None)
        if cache.features:
            cache.crop_early(0)  # features are wanted of all layers
        if cache.keep_early(query):
            logits = self._finish(cache, query)
        else:
            straight = query.draft.is_chain and not known
            shape = {} if straight else self._tree_shape(cache.length, query.draft, known)
            logits = self._run(self.model, cache, self._ids(tokens[known:]), certain=False, **shape).logits
            cache.pending = len(tokens)
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)  # so that time spent verifying is counted as such
        return logits[0, :, : self.vocab_size]

    def _first_layers(self, query: Query, layers: int) -> Tensor:
        """Hidden states `[1, N+1, H]` after the first layers. Only what the cache does not have is computed."""
        cache, tokens = query.cache, (query.root, *query.draft.tokens)
        assert isinstance(cache, TransformersCache) and (cache.pending == 0 or cache.early is not None)
        known = cache.keep_early(query, layers)
        if known < len(tokens):
            shape = self._tree_shape(cache.length, query.draft, known)
            hidden = self._run(self._split(layers).first, cache, self._ids(tokens[known:]), **shape).last_hidden_state
            if cache.early is not None:
                hidden = torch.cat([cache.early.hidden, hidden], dim=1)
            cache.early, cache.pending = Early(layers, tokens, hidden), len(tokens)
        assert cache.early is not None
        return cache.early.hidden

    def _finish(self, cache: TransformersCache, query: Query) -> Tensor:
        """Logits `[1, N+1, V]` of a query that the first layers have begun."""
        assert cache.early is not None
        layers = cache.early.layers
        hidden = self._first_layers(query, layers)
        cache.early = None
        shape = self._tree_shape(cache.length, query.draft)
        logits: Tensor = self._run(self._split(layers).rest, cache, {"inputs_embeds": hidden}, **shape).logits
        return logits

    def _split(self, layers: int) -> Split:
        if layers not in self._splits:
            self._splits[layers] = split(self.model, layers)
        return self._splits[layers]

    def _tree_shape(self, committed: int, draft: Draft, known: int = 0) -> dict[str, Any]:
        """What makes tokens a tree: who sees whom, `[1, 1, N+1 - known, committed + N+1]`, and where each stands."""
        among = ancestor_mask(draft)[known:]
        seen = torch.cat([torch.ones(len(among), committed, dtype=torch.bool), among], dim=1)
        mask = torch.zeros(seen.shape, dtype=self.model.dtype)
        mask.masked_fill_(~seen, torch.finfo(mask.dtype).min)
        positions = torch.tensor([depths(draft)[known:]]) + committed
        return {
            "attention_mask": mask[None, None].to(self.model.device),
            "position_ids": positions.to(self.model.device),
        }

    def _ids(self, tokens: Sequence[int]) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([tokens], dtype=torch.long, device=self.model.device)}

    def _run(
        self,
        module: Any,
        cache: TransformersCache,
        what: dict[str, Tensor],
        *,
        certain: bool | None = None,
        **shape: Any,
    ) -> Any:
        """Run a model or a part; where it says whether the tokens are `certain`, hand out its hidden states."""
        layers = cache.wanted_layers if certain is not None else ()
        wants = {"output_hidden_states": True} if layers else {}
        found = module(**what, use_cache=True, return_dict=True, **{self._cache_keyword: cache.kv}, **shape, **wants)
        if layers:
            states = torch.stack([found.hidden_states[layer][0] for layer in layers], dim=1)
            cache.hand_out(layers, states.float(), certain=bool(certain))
        return found


def _layered(model: PreTrainedModel) -> bool:
    try:
        refuse_unless_layered(model, "early_exit")
    except UnsupportedError:
        return False
    return True


def _has_features(model: PreTrainedModel) -> bool:
    head: Any = model
    return hasattr(model.base_model, "norm") and hasattr(head.get_output_embeddings(), "weight")


def refuse_unless_croppable(model: PreTrainedModel) -> None:
    """Raise `UnsupportedError` for models whose cache cannot forget rejected tokens, naming why."""
    config = model.config.get_text_config(decoder=True)
    kind = config.model_type
    advice = "Use a decoder-only model with full attention in every layer."
    if model.config.is_encoder_decoder:
        raise UnsupportedError(f"Model type '{kind}' is an encoder-decoder, which foredraft does not run. {advice}")
    if getattr(model, "_is_stateful", False):
        raise UnsupportedError(
            f"Model type '{kind}' keeps a recurrent state, which cannot forget rejected tokens yet. {advice}"
        )
    if not _cache_keywords(model):
        raise UnsupportedError(f"Model type '{kind}' takes no KV cache. {advice}")
    layers = DynamicCache(config=model.config).layers
    other = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if other:
        named = {"DynamicSlidingWindowLayer": "sliding-window attention"}
        kinds = ", ".join(named.get(name, name) for name in other)
        raise UnsupportedError(
            f"Model type '{kind}' has layers of {kinds} in its cache, which cannot forget rejected tokens yet. {advice}"
        )


def _cache_keywords(model: PreTrainedModel) -> list[str]:
    """Names by which the model takes a cache. It was renamed in transformers 5.2x, where the old name warns."""
    inner: Any = model
    if hasattr(inner, "get_base_model"):  # adapters around a model take any argument
        inner = inner.get_base_model()
    taken = inspect.signature(inner.forward).parameters
    return [name for name in ("cache", "past_key_values") if name in taken]
