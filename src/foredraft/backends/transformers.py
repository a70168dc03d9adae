"""Any Hugging Face causal language model with full attention, on CPU or GPU."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from foredraft.backends.base import Backend, Capabilities, KVCache, Query
from foredraft.errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PREFILL_CHUNK = 1024  # tokens; bounds the attention scores of a long prompt


class TransformersCache(KVCache):
    """A transformers cache, its committed length, and the nodes of the last forward that are not committed yet."""

    def __init__(self, kv: DynamicCache) -> None:
        self.kv = kv
        self.pending = 0

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return self.kv.get_seq_length() - self.pending

    def drop(self, rows: int) -> None:
        """Forget the last `rows` rows."""
        if rows > 0:
            self.kv.crop(-rows)


class TransformersBackend(Backend):
    """The contract of `Backend` over a loaded transformers model.

    Args:
        model: A decoder-only model; its device and dtype stay, and it is put into evaluation mode.
        vocab_size: Logits past this are cut off (padding of the embedding); `None` keeps all.

    Raises:
        UnsupportedError: Its cache cannot be rolled back; the message names the kind of layer.
    """

    name = "transformers"
    capabilities = Capabilities(trees=False)

    def __init__(self, model: PreTrainedModel, vocab_size: int | None = None) -> None:
        refuse_unless_croppable(model)
        config = model.config.get_text_config(decoder=True)
        self.model: Any = model
        torch.nn.Module.eval(model)
        self.vocab_size = min(vocab_size or config.vocab_size, config.vocab_size)
        self.context = getattr(config, "max_position_embeddings", None)
        ends = getattr(model.generation_config, "eos_token_id", None)
        self.stop_tokens = frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)
        self._cache_keyword = _cache_keywords(model)[0]

    def new_cache(self) -> TransformersCache:
        """An empty cache for one sequence."""
        return TransformersCache(DynamicCache(config=self.model.config))

    @torch.inference_mode()
    def prefill(self, cache: KVCache, tokens: Sequence[int]) -> None:
        """Append tokens to the cache without scoring them: the body of the model runs, its head does not."""
        assert isinstance(cache, TransformersCache) and cache.pending == 0
        for start in range(0, len(tokens), _PREFILL_CHUNK):
            self._run(self.model.base_model, cache, tokens[start : start + _PREFILL_CHUNK])

    @torch.inference_mode()
    def forward(self, queries: Sequence[Query]) -> list[Tensor]:
        """Logits `[N+1, V]` for each query. Chains only; several sequences are scored one after the other."""
        return [self._score(query) for query in queries]

    def commit(self, cache: KVCache, path: Sequence[int]) -> None:
        """Keep the root and the accepted beginning of the chain."""
        assert isinstance(cache, TransformersCache) and list(path) == list(range(len(path)))
        cache.drop(cache.pending - 1 - len(path))
        cache.pending = 0

    def truncate(self, cache: KVCache, length: int) -> None:
        """Forget committed tokens past the first `length`."""
        assert isinstance(cache, TransformersCache) and cache.pending == 0
        cache.drop(cache.length - length)

    def _score(self, query: Query) -> Tensor:
        cache, tokens = query.cache, (query.root, *query.draft.tokens)
        assert isinstance(cache, TransformersCache) and cache.pending == 0 and query.draft.is_chain
        logits: Tensor = self._run(self.model, cache, tokens).logits[0, :, : self.vocab_size]
        cache.pending = len(tokens)
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)  # so that time spent verifying is counted as such
        return logits

    def _run(self, module: Any, cache: TransformersCache, tokens: Sequence[int]) -> Any:
        ids = torch.tensor([tokens], dtype=torch.long, device=self.model.device)
        return module(input_ids=ids, use_cache=True, return_dict=True, **{self._cache_keyword: cache.kv})


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
