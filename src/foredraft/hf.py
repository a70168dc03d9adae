"""foredraft inside transformers: `model.generate(**inputs, custom_generate=foredraft.custom_generate(...))`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from foredraft.backends.transformers import TransformersBackend, TransformersCache
from foredraft.engine import Engine
from foredraft.errors import InvalidInputError, UnsupportedError
from foredraft.generation import Request
from foredraft.loading import EngineChoice, Loader, parse_drafter
from foredraft.tree import paths, reachable
from foredraft.types import Draft, SamplingParams, TokenEvent

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from foredraft.loading import DrafterLike
    from foredraft.proposers.base import Drafter

# The parts of transformers' classes that are used here.
Criteria = Callable[[Tensor, Any], Tensor]


class Processors(Protocol):
    """`LogitsProcessorList`."""

    def __call__(self, input_ids: Any, scores: Any) -> Tensor:
        """Scores `[1, V]` for ids `[1, n]`."""
        ...

    def __iter__(self) -> Iterator[Any]:
        """The single processors."""
        ...

    def __len__(self) -> int:
        """How many there are."""
        ...


class Streamer(Protocol):
    """`BaseStreamer`."""

    def put(self, value: Tensor) -> None:
        """Take the next ids."""
        ...

    def end(self) -> None:
        """Know that no more will come."""
        ...


_CACHE_NAMES = ("cache", "past_key_values")  # the newer name first
_UNUSED = {"attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep", *_CACHE_NAMES}
_STATEFUL = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)


def custom_generate(
    drafter: DrafterLike = "ngram",
    *,
    draft_tokens: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    streamer: Streamer | None = None,
) -> Callable[..., Any]:
    """A decoding method for transformers' `generate` that drafts and verifies, and returns what `generate` would.

    Greedy output is the same ids; sampled output follows the same law, with all of `generate`'s logits processors and
    stopping criteria applied at every drafted position, and draws from torch's global generator.

    Args:
        drafter: One of `api.KNOWN_DRAFTERS`, a transformers model of the same vocabulary, or a `Drafter`.
        draft_tokens: Most tokens a draft may have; `None` takes what suits the drafter.
        tokenizer: The target's tokenizer; needed for `"draft:REF"`, whose vocabulary is compared with it.
        streamer: Receives the prompt and then tokens as they are emitted, of one sequence. Give it here: `generate`
            does not pass its own on.

    Returns:
        A callable for `custom_generate=`. It raises `UnsupportedError` for beam search, requested scores and whatever
        else cannot be had; the message names it.
    """
    choice = parse_drafter(drafter)
    if isinstance(drafter, str) and "draft:" in drafter and tokenizer is None:
        raise InvalidInputError(f"Drafter '{drafter}' needs the target's tokenizer to compare with: pass tokenizer=…")
    prepared: list[tuple[PreTrainedModel, Drafter | None]] = []  # for the model of the last call

    def drafter_for(model: PreTrainedModel, backend: TransformersBackend) -> Drafter | None:
        if not prepared or prepared[0][0] is not model:
            dtype = str(model.dtype).removeprefix("torch.")
            loader = Loader(engine=EngineChoice("transformers", str(model.device), dtype))
            prepared[:] = [(model, loader.drafter(choice, backend, tokenizer))]
        return prepared[0][1]

    def decode(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Processors,
        stopping_criteria: Criteria,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        _refuse_what_cannot_be_had(generation_config, logits_processor, model_kwargs)
        masks = _masks(input_ids, model_kwargs)
        rows = [_Row(index, input_ids, mask) for index, mask in enumerate(masks)]
        caches = _starting_caches(model_kwargs, rows)
        backend = TransformersBackend(model)
        backend.context = None  # as in generate, max_length alone ends an answer
        engine = Engine(backend, drafter_for(model, backend), draft_tokens=draft_tokens)
        if streamer is not None:
            if len(rows) > 1:
                raise UnsupportedError(f"A streamer follows one sequence, but there are {len(rows)}: leave it out.")
            streamer.put(input_ids.cpu())
        requests = [
            Request(
                row.prompt,
                SamplingParams(
                    max_tokens=generation_config.max_length - input_ids.shape[1],
                    seed=_fresh_seed() if generation_config.do_sample else 0,
                ),
                law=_ProcessorLaw(row, logits_processor, greedy=not generation_config.do_sample),
                halt=row.halt(stopping_criteria),
                cache=cache,
            )
            for row, cache in zip(rows, caches, strict=True)
        ]
        for index, event in engine.run(requests):
            if isinstance(event, TokenEvent):
                rows[index].emitted.append(event.token)
                if streamer is not None:
                    streamer.put(torch.tensor([event.token]))
        if streamer is not None:
            streamer.end()
        return _output(input_ids, rows, caches, generation_config)

    return decode


class _Row:
    """One row of the batch: its prompt without padding, and the ids as transformers' processors expect to see them."""

    def __init__(self, index: int, input_ids: Tensor, mask: Tensor) -> None:
        row = input_ids[index]
        self.index = index
        self.batch = len(input_ids)
        self._padded: list[int] = row.tolist()
        self._device = row.device
        self.prompt: list[int] = row[mask.bool()].tolist()
        self.padding = len(self._padded) - len(self.prompt)
        self.emitted: list[int] = []

    def seen(self, tokens: Sequence[int]) -> Tensor:
        """`[B, n]`: the padded prompt and what follows the prompt in `tokens`, as every row of the batch.

        Processors and criteria may hold something for each row of the batch; what they say of row `index` counts.
        """
        ids = [*self._padded, *tokens[len(self.prompt) :]]
        return torch.tensor([ids] * self.batch, dtype=torch.long, device=self._device)

    def halt(self, criteria: Criteria) -> Callable[[Sequence[int]], bool]:
        """The stopping criteria as a test of all tokens so far."""
        return lambda tokens: bool(criteria(self.seen(tokens), None)[self.index].item())

    def processors(self, processors: Processors) -> Processors:
        """The processors, with a function of the batch's row and the ids asked about this row alone."""
        return LogitsProcessorList([self._of_this_row(processor) for processor in processors])

    def _of_this_row(self, processor: Any) -> Any:
        if not isinstance(processor, PrefixConstrainedLogitsProcessor):
            return processor
        allowed: Any = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(self.index, ids), num_beams=1)


class _ProcessorLaw:
    """The law of `generate`: its logits processors at every node, each with the node's own history."""

    def __init__(self, row: _Row, processors: Processors, greedy: bool) -> None:
        self._row = row
        self._processors = row.processors(processors)
        self.greedy = greedy

    def __call__(self, history: Sequence[int], draft: Draft, logits: Tensor) -> Tensor:
        """Distributions `[N+1, V]`; see `foredraft.sampling.Law`."""
        scores = self._scores(history, draft, logits)
        return scores if self.greedy else scores.double().softmax(-1)

    def logprobs(self, history: Sequence[int], draft: Draft, logits: Tensor) -> Tensor:
        """Log-probabilities `[N+1, V]`; see `foredraft.sampling.Law`."""
        return self._scores(history, draft, logits).double().log_softmax(-1)

    def _scores(self, history: Sequence[int], draft: Draft, logits: Tensor) -> Tensor:
        scores = logits.float()
        if not len(self._processors):
            return scores
        scores = scores.clone()
        histories = [[*history, *path] for path in [(), *paths(draft)]]
        for row in reachable(draft, lambda row, token: bool(scores[row, token] > -torch.inf)):
            scores[row] = self._process(self._row.seen(histories[row]).to(scores.device), scores[row])[0]
        return scores

    def _process(self, ids: Tensor, scores: Tensor) -> Tensor:
        batch = self._processors(ids, scores.repeat(len(ids), 1))
        return batch[self._row.index, None]


def _refuse_what_cannot_be_had(config: GenerationConfig, processors: Processors, model_kwargs: dict[str, Any]) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UnsupportedError(
            f"custom_generate does greedy decoding and sampling, but the settings ask for {mode.value}: "
            "set num_beams=1 and leave contrastive and assisted decoding out."
        )
    wanted = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
    asked = [name for name in wanted if config.return_dict_in_generate and getattr(config, name)]
    if asked:
        raise UnsupportedError(f"custom_generate does not return {', '.join(asked)}: leave it out.")
    for processor in processors:
        if isinstance(processor, _STATEFUL):
            raise UnsupportedError(
                f"{type(processor).__name__} keeps a state from call to call, which drafts would disturb: leave it out."
            )
    unknown = sorted(name for name, value in model_kwargs.items() if value is not None and name not in _UNUSED)
    if unknown:
        raise UnsupportedError(f"custom_generate takes text alone, but was given {', '.join(unknown)}: leave it out.")


def _fresh_seed() -> int:
    """A seed from torch's global generator, so that `torch.manual_seed` governs this decoding as it does `generate`."""
    return int(torch.randint(2**62, ()))


def _masks(input_ids: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
    """`[B, n]` bool: where `input_ids` are not padding."""
    given = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids, dtype=torch.bool) if given is None else given.bool()
    positions = model_kwargs.get("position_ids")
    if positions is None or positions.dim() != 2:
        positions = mask.cumsum(-1) - 1
    if mask.shape != input_ids.shape or positions.shape[1] != mask.shape[1]:
        raise UnsupportedError(
            f"custom_generate was given {input_ids.shape[1]} ids with a mask or positions of another length: give all "
            "ids, those that a cache holds already included."
        )
    if not mask[:, -1].all():
        raise UnsupportedError("A row of input_ids ends with padding: pad on the left (padding_side='left').")
    if (positions != mask.cumsum(-1) - 1)[mask].any():
        raise UnsupportedError("custom_generate numbers positions itself: leave position_ids out.")
    return mask


def _starting_caches(model_kwargs: dict[str, Any], rows: Sequence[_Row]) -> list[TransformersCache | None]:
    """The caller's cache for a single row; `None` where the engine makes its own."""
    given = next((model_kwargs[name] for name in _CACHE_NAMES if model_kwargs.get(name) is not None), None)
    filled = given.get_seq_length() if given is not None else 0
    if len(rows) == 1 and isinstance(given, DynamicCache) and not rows[0].padding and filled < len(rows[0].prompt):
        return [TransformersCache(given)]
    if filled > 0:
        raise UnsupportedError(
            f"custom_generate continues a filled cache only if it is a DynamicCache of one sequence without padding, "
            f"and leaves at least one id to feed (it holds {filled} tokens of {len(rows[0].prompt)})."
        )
    return [None] * len(rows)


def _output(
    input_ids: Tensor, rows: Sequence[_Row], caches: Sequence[TransformersCache | None], config: GenerationConfig
) -> Any:
    longest = max(len(row.emitted) for row in rows)
    ends = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    padding = next((i for i in (config.pad_token_id, ends) if i is not None), 0)
    padded = [row.emitted + [padding] * (longest - len(row.emitted)) for row in rows]
    emitted = torch.tensor(padded, dtype=input_ids.dtype, device=input_ids.device)
    sequences = torch.cat([input_ids, emitted], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    cache = caches[0].kv if caches[0] is not None else None
    output: Any = GenerateDecoderOnlyOutput
    name = next(n for n in _CACHE_NAMES if n in output.__dataclass_fields__)
    return output(sequences=sequences, **{name: cache})
