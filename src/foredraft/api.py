"""The Python front door: load a model with a way of drafting, generate or stream."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs
import torch

from foredraft.backends.base import Backend
from foredraft.backends.checkpoint import load_checkpoint
from foredraft.backends.transformers import TransformersBackend
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

_WITH_HYBRID: dict[str, type[Drafter]] = {**DRAFTERS, "hybrid": Hybrid}
KNOWN_DRAFTERS = ", ".join(("none", *(drafter.usage for drafter in _WITH_HYBRID.values())))

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
    cache: str | Path | None = None,
    memory: str | Path | None = None,
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
        dtype: `auto` (float32 on a CPU, else the checkpoint's own), `float32`, `bfloat16` or `float16`.
        cache: Folder for fetched and converted models; `None` takes `cache_folder()`.
        memory: Folder of what the drafter learned in earlier runs: read if it is there, written by `Model.save_memory`.
        notify: Called with a sentence when something that takes time begins.

    Raises:
        ModelError: A model or the memory cannot be found, fetched or read.
        UnsupportedError: The model or the pair of models cannot be run, or the drafter has no use for a memory.
        InvalidInputError: An argument is not one of those above.
    """
    loader = Loader(cache, device=device, dtype=dtype, notify=notify)
    choice = parse_drafter(drafter)  # a wrong name is told before anything is loaded
    memory = check_memory(memory, choice) if memory is not None else None
    if isinstance(model, (str, Path)):
        target, tokenizer, files = loader.model(str(model))
    elif tokenizer is None:
        raise InvalidInputError("A transformers model was given without its tokenizer: pass tokenizer=…")
    else:
        target, files = TransformersBackend(model, _vocabulary_size(tokenizer)), None
    ready = loader.drafter(choice, target, tokenizer)
    loaded = Model(target, tokenizer, ready, draft_tokens=draft_tokens, rule=rule, files=files, memory=memory)
    if memory is not None and ready is not None:
        notify(f"Reading what {ready.name} learned")
        ready.load(memory)
    return loaded


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
        memory: Path | None = None,
    ) -> None:
        self.backend = backend
        self.files = files
        self.memory = memory
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

    def save_memory(self) -> None:
        """Write what the drafter has learned into the folder that `load` was given as `memory`.

        Raises:
            InvalidInputError: It was given none.
            ModelError: The folder cannot be written; what it held before is still there.
        """
        if self.memory is None or self.drafter is None:
            raise InvalidInputError("This model was loaded without a memory: pass memory=FOLDER to load.")
        self.drafter.save(self.memory)

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


def check_memory(folder: str | Path, choice: tuple[str, Any] | None) -> Path:
    """The folder, if what `parse_drafter` chose can keep there what it learns.

    Raises:
        UnsupportedError: It learns nothing; the message names those that do.
        InvalidInputError: The path is that of a file.
    """
    name, argument = choice or ("none", None)
    if not (argument.learns if isinstance(argument, Drafter) else name != "none" and _WITH_HYBRID[name].learns):
        *others, last = (drafter.usage for drafter in _WITH_HYBRID.values() if drafter.learns)
        raise UnsupportedError(
            f"Drafter '{name}' learns nothing that a memory could keep. Use {', '.join(others)} or {last}."
        )
    folder = Path(folder).expanduser()
    if folder.exists() and not folder.is_dir():
        raise InvalidInputError(f"The memory {folder} is a file, but must be a folder, or a name for a new one.")
    return folder


def _parse_parts(argument: str) -> list[tuple[str, Any]]:
    parts = [parse_drafter(part) for part in argument.split("+")]
    found = [part for part in parts if part is not None and part[0] != "hybrid"]
    names = [name for name, _ in found]
    if len(found) < max(2, len(parts)) or len(set(names)) < len(names):
        raise InvalidInputError(
            f"Drafter 'hybrid:{argument}' must join two or more different drafters, such as hybrid:ngram+recycling."
        )
    return found


class Loader:
    """Loads targets and draft models alike; `load` documents the arguments."""

    def __init__(
        self,
        cache: str | Path | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        notify: Notify = lambda _: None,
    ) -> None:
        self._cache = Path(cache) if cache is not None else cache_folder()
        self._device, self._dtype, self._notify = device, dtype, notify

    def model(self, reference: str) -> tuple[TransformersBackend, PreTrainedTokenizerBase, ModelFiles]:
        """The model that a reference names, its tokenizer, and where it lies."""
        files = resolve(reference, self._cache, self._notify)
        converted = self._cache / "converted" / file_key(files.path) if files.is_gguf else None
        self._notify(f"Loading {reference}")
        model, tokenizer = load_checkpoint(files.path, device=self._device, dtype=self._dtype, converted=converted)
        return TransformersBackend(model, _vocabulary_size(tokenizer)), tokenizer, files

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
            rows = draft.model.get_input_embeddings().num_embeddings
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
