"""The Python front door: load a model with a way of drafting, generate or stream."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs
import torch

from foredraft.backends.base import Backend
from foredraft.backends.checkpoint import load_checkpoint, pick_device
from foredraft.backends.native.backend import MOST_THREADS, NativeBackend
from foredraft.backends.native.reading import read_native, weights_of_model
from foredraft.backends.native.tensors import WEIGHTS
from foredraft.backends.transformers import TransformersBackend
from foredraft.checks import is_integer, require
from foredraft.engine import Engine
from foredraft.errors import InvalidInputError, UnsupportedError
from foredraft.generation import Request
from foredraft.models import ModelFiles, Notify, file_key, resolve
from foredraft.proposers import DRAFTERS
from foredraft.proposers.base import Drafter
from foredraft.proposers.draft_model import DraftModel
from foredraft.proposers.hybrid import Hybrid
from foredraft.proposers.translation import translation_between
from foredraft.types import Completion, Event, FinishEvent, SamplingParams

if TYPE_CHECKING:
    from typing import TypeAlias

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    DrafterLike: TypeAlias = str | Drafter | PreTrainedModel | None

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "native", "transformers")
KNOWN_DRAFTERS = ", ".join(("none", *(drafter.usage for drafter in DRAFTERS.values()), Hybrid.usage))

Prompt = str | Sequence[int] | Sequence[dict[str, str]]
"""A user's message, token ids as they are, or chat messages with `role` and `content`."""


def cache_folder() -> Path:
    """Where fetched and converted models lie: `FOREDRAFT_CACHE`, else the platform's cache folder."""
    override = os.environ.get("FOREDRAFT_CACHE")
    return Path(override).expanduser() if override else platformdirs.user_cache_path("foredraft", appauthor=False)


def load(
    model: str | Path | PreTrainedModel,
    drafter: DrafterLike = "ngram",
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft_tokens: int | None = None,
    rule: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    backend: str = "auto",
    weights: str = "auto",
    threads: int | None = None,
    cache: str | Path | None = None,
    notify: Notify = lambda _: None,
) -> Model:
    """Load a target and what drafts for it.

    Args:
        model: A bundled name, a folder, a `.gguf` file, a hub id, or a transformers model (then give its `tokenizer`).
        drafter: One of `KNOWN_DRAFTERS` (REF is a model reference), `None` for none, a transformers model of the same
            vocabulary, or a `Drafter`.
        tokenizer: The tokenizer of a transformers model that was passed in.
        draft_tokens: Most tokens a draft may have; `None` takes what suits the drafter.
        rule: Name of the acceptance rule; `None` takes the one that fits each request.
        device: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`.
        dtype: Of the transformers backend: `auto` (float32 on a CPU, else the checkpoint's own), `float32`, `bfloat16`
            or `float16`.
        backend: `native` (a CPU engine on which verifying a draft costs little more than one token), `transformers`, or
            `auto`: native on a CPU where it knows the model. A transformers model that was passed in stays one.
        weights: Of the native backend: `auto` (as they are stored), `f32`, `bf16` or `q8` (8 bits, which changes the
            model a little).
        threads: Of the native backend; `None` takes the physical cores.
        cache: Folder for fetched and converted models; `None` takes `cache_folder()`.
        notify: Called with a sentence when something that takes time begins.

    Raises:
        ModelError: A model cannot be found, fetched or read.
        UnsupportedError: The model or the pair of models cannot be run.
        InvalidInputError: An argument is not one of those above.
    """
    engine = EngineChoice(backend, device, dtype, weights, threads)
    loader = Loader(cache, engine, notify)
    choice = parse_drafter(drafter)  # a wrong name is told before anything is loaded
    if isinstance(model, (str, Path)):
        target, tokenizer, files = loader.model(str(model))
    elif tokenizer is None:
        raise InvalidInputError("A transformers model was given without its tokenizer: pass tokenizer=…")
    else:
        target, files = loader.backend_of(model, tokenizer), None
    ready = loader.drafter(choice, target, tokenizer)
    return Model(target, tokenizer, ready, draft_tokens=draft_tokens, rule=rule, files=files)


class Model:
    """A target with its tokenizer, and what drafts for it. Made by `load`."""

    def __init__(
        self,
        backend: Backend,
        tokenizer: PreTrainedTokenizerBase,
        drafter: Drafter | None,
        *,
        draft_tokens: int | None = None,
        rule: str | None = None,
        files: ModelFiles | None = None,
    ) -> None:
        self.backend = backend
        self.files = files
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.engine = Engine(
            backend,
            drafter,
            tokenizer=tokenizer,
            stop_tokens=_stop_tokens(backend, tokenizer),
            draft_tokens=draft_tokens,
            rule=rule,
        )

    def plain(self) -> Model:
        """The same target without drafting: what every speculative run is compared with."""
        return Model(self.backend, self.tokenizer, None, files=self.files)

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, *, chat: bool | None = None) -> Completion:
        """The completion of one prompt; see `stream`."""
        for event in self.stream(prompt, params, chat=chat):
            if isinstance(event, FinishEvent):
                return event.completion
        raise AssertionError("the engine ended without a completion")

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, chat: bool | None = None
    ) -> Iterator[Event]:
        """Events of one prompt as they happen: tokens with their origin, figures of each round, the completion.

        Args:
            prompt: A string, chat messages, or token ids.
            params: Sampling settings; the default is greedy decoding of up to 256 tokens.
            chat: Whether to put a string into the model's chat template; `None` does so if it has one.

        Raises:
            InvalidInputError: The prompt is empty or too long, or the model has no chat template but needs one.
        """
        request = Request(self.encode(prompt, chat=chat), params or SamplingParams())
        return (event for _, event in self.engine.run([request]))

    def encode(self, prompt: Prompt, *, chat: bool | None = None) -> list[int]:
        """The token ids of a prompt, chat template and special tokens included."""
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidInputError("The prompt is empty: give some text.")
            if any("\ud800" <= character <= "\udfff" for character in prompt):
                raise InvalidInputError("The prompt is not valid Unicode (it was not UTF-8 where it came from).")
            if chat is None:
                chat = bool(self.tokenizer.chat_template)
            if not chat:
                return [int(i) for i in self.tokenizer(prompt)["input_ids"]]
            return self._apply_template([{"role": "user", "content": prompt}])
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], dict):
            return self._apply_template(prompt)
        try:
            return [index(i) for i in prompt]  # type: ignore[arg-type]
        except TypeError:
            given = type(prompt).__name__
            raise InvalidInputError(f"A prompt is a string, chat messages or token ids, but this is {given}.") from None

    def _apply_template(self, messages: Sequence[Any]) -> list[int]:
        if not self.tokenizer.chat_template:
            raise InvalidInputError("This model has no chat template: give plain text instead (chat=False, --no-chat).")
        text = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return [int(i) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"]]


def parse_drafter(drafter: DrafterLike) -> tuple[str, Any] | None:
    """Split `name` or `name:argument`; anything that is loaded already is passed on.

    Returns:
        `(name, argument)`, or `None` for plain decoding.

    Raises:
        InvalidInputError: Unknown name (with the nearest known one), or an argument too many or too few.
    """
    if drafter is None or drafter == "none":
        return None
    if isinstance(drafter, Drafter):
        return drafter.name, drafter
    if isinstance(drafter, torch.nn.Module):
        return DraftModel.name, drafter
    if not isinstance(drafter, str):
        kind = type(drafter).__name__
        raise InvalidInputError(f"A drafter is a name, a transformers model or a Drafter, but this is {kind}.")
    name, _, argument = drafter.partition(":")
    if name == "hybrid":
        return name, _parse_parts(argument)
    known = ("none", *DRAFTERS)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise InvalidInputError(f"There is no drafter '{name}'.{hint} Known: {KNOWN_DRAFTERS}.")
    if name == "none":
        _refuse_argument(name, argument)
        return None
    usage = DRAFTERS[name].usage
    if usage == name:
        _refuse_argument(name, argument)
    elif "[" not in usage and not argument:
        raise InvalidInputError(f"Drafter '{name}' needs more: draft:REF with a model, early_exit:L with a number.")
    return name, argument


def _refuse_argument(name: str, argument: str) -> None:
    if argument:
        raise InvalidInputError(f"Drafter '{name}' takes no argument, but was given '{argument}'.")


def _parse_parts(argument: str) -> list[tuple[str, Any]]:
    parts = [parse_drafter(part) for part in argument.split("+")]
    found = [part for part in parts if part is not None and part[0] != "hybrid"]
    names = [name for name, _ in found]
    if len(found) < max(2, len(parts)) or len(set(names)) < len(names):
        raise InvalidInputError(
            f"Drafter 'hybrid:{argument}' must join two or more different drafters, such as hybrid:ngram+recycling."
        )
    return found


@dataclass(frozen=True)
class EngineChoice:
    """Which backend runs the models, and how; `load` documents the values.

    Raises:
        InvalidInputError: An unknown value, or values that no backend takes together.
    """

    backend: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    weights: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        require("backend", self.backend, self.backend in BACKENDS, f"one of {', '.join(BACKENDS)}")
        require("weights", self.weights, self.weights in WEIGHTS, f"one of {', '.join(WEIGHTS)}")
        good = self.threads is None or (is_integer(self.threads) and 1 <= self.threads <= MOST_THREADS)
        require("threads", self.threads, good, f"an integer in [1, {MOST_THREADS}]")
        reason = self.not_native
        if reason is not None and (self.weights != "auto" or self.threads is not None or self.backend == "native"):
            wanted = "weights and threads belong to" if self.backend != "native" else "you asked for"
            raise InvalidInputError(f"The native backend, which {wanted}, cannot be taken: {reason}.")

    @property
    def not_native(self) -> str | None:
        """Why the native backend is out of the question whatever the model; `None` if it is not."""
        if self.backend == "transformers":
            return "backend is 'transformers'"
        if pick_device(self.device).type != "cpu":
            return "it runs on a CPU, and the device is not one (device='cpu' takes the CPU)"
        return "dtype belongs to the transformers backend (use weights instead)" if self.dtype != "auto" else None


class Loader:
    """Loads targets and draft models alike; `load` documents the arguments."""

    def __init__(
        self,
        cache: str | Path | None = None,
        engine: EngineChoice | None = None,
        notify: Notify = lambda _: None,
    ) -> None:
        self._cache = Path(cache) if cache is not None else cache_folder()
        self._engine = engine or EngineChoice()
        self._notify = notify

    def model(self, reference: str) -> tuple[Backend, PreTrainedTokenizerBase, ModelFiles]:
        """The model that a reference names, its tokenizer, and where it lies."""
        files = resolve(reference, self._cache, self._notify)
        self._notify(f"Loading {reference}")
        reason = self._engine.not_native
        if reason is None:
            try:
                return *self._native(files), files
            except UnsupportedError as error:
                if self._engine.backend == "native" or self._engine.weights != "auto":
                    raise
                reason = str(error)
        logger.info("Backend transformers for %s: %s", reference, reason)
        converted = self._cache / "converted" / file_key(files.path) if files.is_gguf else None
        device, dtype = self._engine.device, self._engine.dtype
        model, tokenizer = load_checkpoint(files.path, device=device, dtype=dtype, converted=converted)
        return TransformersBackend(model, _vocabulary_size(tokenizer)), tokenizer, files

    def backend_of(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Backend:
        """A transformers model that is loaded already, on the native backend only where that was asked for."""
        if self._engine.backend != "native":
            return TransformersBackend(model, _vocabulary_size(tokenizer))
        weights = weights_of_model(model, self._engine.weights)
        return NativeBackend(weights, _vocabulary_size(tokenizer), threads=self._engine.threads)

    def _native(self, files: ModelFiles) -> tuple[NativeBackend, PreTrainedTokenizerBase]:
        read = read_native(files.path, weights=self._engine.weights, cache=self._cache, notify=self._notify)
        backend = NativeBackend(read.weights, _vocabulary_size(read.tokenizer), threads=self._engine.threads)
        threads = f"{backend.team.threads} thread{'s' if backend.team.threads > 1 else ''}"
        megabytes = read.weights.bytes_per_token / 1e6
        logger.info("Backend native for %s: %s, %.0f MB of weights a forward", files.reference, threads, megabytes)
        return backend, read.tokenizer

    def drafter(
        self, choice: tuple[str, Any] | None, target: Backend, tokenizer: PreTrainedTokenizerBase | None
    ) -> Drafter | None:
        """What `parse_drafter` chose, ready to draft for `target`; a draft model is loaded and compared with it."""
        if choice is None:
            return None
        name, argument = choice
        if isinstance(argument, Drafter):
            return argument
        if name == "hybrid":
            parts = [self.drafter(part, target, tokenizer) for part in argument]
            return Hybrid([part for part in parts if part is not None])
        if name != DraftModel.name:
            return DRAFTERS[name].for_target(target, argument)
        translation = None
        if isinstance(argument, str):
            draft, draft_tokenizer, _ = self.model(argument)
            rows = draft.embedding_rows
            sizes = target.vocab_size, draft.vocab_size
            assert tokenizer is not None
            translation = translation_between(tokenizer, draft_tokenizer, sizes, rows)
        else:
            draft = TransformersBackend(argument)
            if draft.vocab_size < target.vocab_size:
                raise UnsupportedError(
                    f"The draft model has {draft.vocab_size} token ids and the target {target.vocab_size}: "
                    "use a draft model with the target's vocabulary."
                )
        return DraftModel(draft, target.vocab_size, _stop_tokens(target, tokenizer), translation)


def _stop_tokens(backend: Backend, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """The ids that end an answer: the tokenizer's own and those of the model's generation settings."""
    own: Any = tokenizer.eos_token_id if tokenizer is not None else None
    return backend.stop_tokens | ({int(own)} if own is not None else set())


def _vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id that has a token."""
    return max(tokenizer.get_vocab().values()) + 1
