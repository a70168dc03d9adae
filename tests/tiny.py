"""Tiny seeded models and tokenizers, and the few ways the tests run them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from foredraft.backends.base import Backend, KVCache, Query
from foredraft.backends.native.backend import NativeBackend
from foredraft.backends.native.reading import weights_of_model
from foredraft.backends.native.weights import Layer, Linear, Matrix, Weights
from foredraft.backends.transformers import TransformersBackend
from foredraft.costs import CostCurve, Costs
from foredraft.engine import Engine
from foredraft.generation import Request
from foredraft.proof.ahead import ScriptedRace
from foredraft.proposers.auto import DEFAULT_PARTS, Auto
from foredraft.proposers.base import Drafter, Proposer
from foredraft.proposers.draft_model import DraftModel
from foredraft.proposers.early_exit import EarlyExit
from foredraft.proposers.foresight import Fallback, Planner
from foredraft.proposers.forks import Plan
from foredraft.proposers.hybrid import Hybrid
from foredraft.proposers.layer_skip import LayerSkip
from foredraft.proposers.lookahead import Lookahead
from foredraft.proposers.ngram import NGram
from foredraft.proposers.recycling import Recycling
from foredraft.proposers.self_quant import SelfQuantized
from foredraft.proposers.ssd import Ssd
from foredraft.proposers.suffix import Suffix
from foredraft.randomness import RandomSource, TorchSource
from foredraft.sampling import Law
from foredraft.types import Completion, Draft, Event, FinishEvent, RoundEvent, SamplingParams, TokenEvent
from tiny_heads import head_drafter

_FAST: Any = PreTrainedTokenizerFast  # its constructor has no type hints

VOCABULARY = 64

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_llama(seed: int, *, layers: int = 2, vocabulary: int = VOCABULARY, context: int = 1024, **other: Any) -> Any:
    """A Llama with random weights, wide enough that its output is far from uniform and does not soon repeat."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        **other,
    )
    return seeded(LlamaForCausalLM, config, seed)


def seeded(model_class: Any, config: Any, seed: int = 0) -> Any:
    """A model with the weights that `seed` gives, in evaluation mode; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config).eval()


def perturbed(model: Any, noise: float, seed: int = 0) -> Any:
    """A copy whose weights are off by `noise` times their spread: a draft model that is often, not always, right."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.dim() > 1:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=generator).to(weight.device)
    return other


def native(model: Any) -> NativeBackend:
    """The CPU engine over a tiny model; it shares its weights."""
    return NativeBackend(weights_of_model(model), threads=1)


BACKENDS: dict[str, Callable[[Any], Backend]] = {"transformers": TransformersBackend, "native": native}
"""How each backend is made over a tiny model."""


def perturbed_weights(weights: Weights, noise: float, seed: int = 0) -> Weights:
    """The same of the native engine's weights. What pads them stays zero."""
    generator = np.random.default_rng(seed)

    def wrong(matrix: Matrix) -> Matrix:
        floats = matrix.floats()
        noisy = floats + noise * floats.std() * generator.standard_normal(floats.shape) * (floats != 0)
        return Matrix.from_floats(noisy.astype(np.float32), matrix.format)

    def wrong_layer(layer: Layer) -> Layer:
        parts = {name: part for name, part in layer._asdict().items() if isinstance(part, Linear)}
        others: dict[str, Any] = {name: Linear(wrong(part.weight), part.bias) for name, part in parts.items()}
        return layer._replace(**others)

    layers = tuple(wrong_layer(layer) for layer in weights.layers)
    return weights._replace(embedding=wrong(weights.embedding), layers=layers, head=wrong(weights.head))


def tiny_tokenizer() -> Any:
    """A byte-level BPE tokenizer of all 256 bytes, a few merges and ChatML's special tokens."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("e", "r"), ("l", "l"), ("he", "ll"), ("ð", "Ł")]
    tokens += ["".join(pair) for pair in merges]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return _FAST(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )


def tiny_metaspace_tokenizer(words: Sequence[str]) -> Any:
    """A tokenizer in the way of SentencePiece: words begin with a space, which decoding drops at the very beginning."""
    vocabulary = {"<unk>": 0, **{f"▁{word}": i for i, word in enumerate(words, start=1)}}
    word_level = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    word_level.pre_tokenizer = pre_tokenizers.Metaspace()
    word_level.decoder = decoders.Metaspace()
    return _FAST(tokenizer_object=word_level, unk_token="<unk>", eos_token="</s>")


def collect(engine: Engine, *requests: Request) -> list[list[Event]]:
    """The events of each request."""
    events: list[list[Event]] = [[] for _ in requests]
    for index, event in engine.run(requests):
        events[index].append(event)
    return events


def complete(engine: Engine, *requests: Request) -> list[Completion]:
    """The completion of each request, all run together."""
    ends = [events[-1] for events in collect(engine, *requests)]
    return [end.completion for end in ends if isinstance(end, FinishEvent)]


def generate(engine: Engine, prompt: Sequence[int], params: SamplingParams | None = None) -> Completion:
    """The completion of one prompt."""
    return complete(engine, Request(prompt, params or SamplingParams()))[0]


def rounds_of(events: Sequence[Event]) -> list[RoundEvent]:
    return [event for event in events if isinstance(event, RoundEvent)]


def tokens_of(events: Sequence[Event]) -> list[TokenEvent]:
    return [event for event in events if isinstance(event, TokenEvent)]


class CountingBackend(Backend):
    """Passes everything on and counts forwards, the queries in them, and prefills."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.name, self.vocab_size = inner.name, inner.vocab_size
        self.context, self.stop_tokens, self.capabilities = inner.context, inner.stop_tokens, inner.capabilities
        self.forwards = self.scored = self.prefilled = 0
        self.drafts: list[Draft] = []

    def new_cache(self, room: int = 0) -> KVCache:
        return self.inner.new_cache(room)

    def copy(self, cache: KVCache, length: int, room: int = 0) -> KVCache:
        return self.inner.copy(cache, length, room)

    def kv_bytes(self, tokens: int) -> int:
        return self.inner.kv_bytes(tokens)

    def prefill(self, cache: KVCache, tokens: Sequence[int]) -> None:
        self.prefilled += 1
        self.inner.prefill(cache, tokens)

    def forward(self, queries: Sequence[Query]) -> list[Tensor]:
        self.forwards += 1
        self.scored += len(queries)
        self.drafts += [query.draft for query in queries]
        return self.inner.forward(queries)

    def commit(self, cache: KVCache, path: Sequence[int]) -> None:
        self.inner.commit(cache, path)

    def truncate(self, cache: KVCache, length: int) -> None:
        self.inner.truncate(cache, length)


class Oracle(Drafter):
    """Drafts what it was told will follow, right or wrong: `known` are the answers' tokens after their prompts."""

    name = usage = "oracle"
    draft_tokens = 7
    when_nothing_is_accepted = "the oracle was told something wrong"

    def __init__(self, prompt: Sequence[int], known: Sequence[int]) -> None:
        self._known = [*prompt, *known]

    def proposer(self, law: Law, source: RandomSource) -> Proposer:
        return _OracleProposer(self._known)


class _OracleProposer(Proposer):
    def __init__(self, known: Sequence[int]) -> None:
        self._known = known

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        return Draft.chain(self._known[len(tokens) : len(tokens) + budget])


def _perturbed_draft(target: Backend, noise: float) -> Drafter:
    wrong: Backend
    if isinstance(target, NativeBackend):
        wrong = NativeBackend(perturbed_weights(target.weights, noise), threads=1)
    else:
        assert isinstance(target, TransformersBackend)
        wrong = TransformersBackend(perturbed(target.model, noise))
    return DraftModel(wrong, target.vocab_size)


class PlantedCosts(Costs):
    """Costs that no round refines."""

    def note(self, rows: int, context: int, seconds: float, sequences: int = 1) -> None:
        pass


def keep(draft: Draft, nodes: Sequence[int]) -> Draft:
    """The draft of these nodes alone, which stand in order and have their parents among them."""
    place = {-1: -1, **{old: new for new, old in enumerate(nodes)}}
    return Draft(
        tokens=tuple(draft.tokens[node] for node in nodes),
        parents=tuple(place[draft.parents[node]] for node in nodes),
        q=tuple(draft.q[node] for node in nodes),
        scores=tuple(draft.scores[node] for node in nodes) if draft.scores else (),
        proposers=tuple(draft.proposers[node] for node in nodes) if draft.proposers else (),
    )


def cheap_rows() -> Costs:
    """A forward takes a second, whatever it has to score: then any chance is worth a row."""
    return PlantedCosts({1: CostCurve((1, 64), (0,), [[1.0, 1.0]])})


def auto_over(target: Backend, costs: Costs | None = None) -> Auto:
    """`auto` with its default parts, over costs that are planted: what is measured would make tests differ."""
    return Auto([part.for_target(target) for part in DEFAULT_PARTS], costs or cheap_rows(), usual=True)


DRAFTER_MAKERS: dict[str, Callable[[Backend, float], Drafter]] = {
    "auto": lambda target, noise: auto_over(target),
    "ngram": lambda target, noise: NGram(),
    "suffix": lambda target, noise: Suffix.for_target(target),
    "recycling": lambda target, noise: Recycling.for_target(target),
    "lookahead": lambda target, noise: Lookahead(),
    "draft": _perturbed_draft,
    "early_exit": lambda target, noise: EarlyExit(target, 1),
    "layer_skip": lambda target, noise: LayerSkip(target),
    "self_quant": lambda target, noise: SelfQuantized(target),
    "eagle3": lambda target, noise: head_drafter(target, "eagle3"),
    "eagle": lambda target, noise: head_drafter(target, "eagle"),
    "mtp": lambda target, noise: head_drafter(target, "mtp"),
    "medusa": lambda target, noise: head_drafter(target, "medusa"),
    "mtp-independent": lambda target, noise: head_drafter(target, "mtp-independent"),
    "mtp-cascaded": lambda target, noise: head_drafter(target, "mtp-cascaded"),
    "auto:suffix+eagle3": lambda target, noise: Auto(
        [Suffix.for_target(target), head_drafter(target, "eagle3")], cheap_rows()
    ),
    "ssd:draft": lambda target, noise: Ssd(_perturbed_draft(target, noise), always=True),
    "ssd:eagle3": lambda target, noise: Ssd(head_drafter(target, "eagle3"), always=True),
    "ssd:suffix": lambda target, noise: Ssd(Suffix.for_target(target), always=True),
    "ssd:hybrid:suffix+recycling": lambda target, noise: Ssd(
        Hybrid([Suffix.for_target(target), Recycling.for_target(target)]), always=True
    ),
}
"""How the tests make each drafter of the registry and one with each kind of head for a target.

A draft model is as wrong as `noise` makes it; heads were trained for a moment."""


def drafter_over(target: Backend, name: str, noise: float = 0.1) -> Drafter | None:
    """A drafter by name; `none` is plain decoding."""
    return None if name == "none" else DRAFTER_MAKERS[name](target, noise)


class Everything(Planner):
    """Prepares for many outcomes, in as many steps as it takes."""

    def plan(self, ends: Any, deepest: int, budget: int, model: bool) -> Plan:
        return Plan(ends, 32, budget, 12, 1.0)


class Never(Fallback):
    """Looks nothing up."""

    def cheap(self, verify_seconds: float) -> bool:
        return False


def without_clock(ssd: Ssd, steps: int = 99) -> Ssd:
    """The same drafter, but it makes so many steps while the target verifies, whatever time these take."""
    ssd.race, ssd.planner, ssd.fallback = ScriptedRace(steps), Everything(), Never()
    return ssd


def plain_chain(model: Any, ids: Sequence[int]) -> Tensor:
    """Logits `[n, V]` of one plain forward over all ids, no cache."""
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits


class RecordingSource(TorchSource):
    """Keeps what it drew, and from which weights."""

    def __init__(self, seed: int) -> None:
        super().__init__(torch.Generator().manual_seed(seed))
        self.drawn: list[int] = []
        self.weights: list[Tensor] = []

    def draw(self, weights: Tensor, depth: int = 0) -> int:
        self.weights.append(weights)
        self.drawn.append(super().draw(weights, depth))
        return self.drawn[-1]
