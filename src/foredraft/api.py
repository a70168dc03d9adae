"""The Python front door: load a model with a way of drafting, generate or stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.backends.base import Backend
from foredraft.engine import Engine
from foredraft.errors import InvalidInputError
from foredraft.generation import Request
from foredraft.loading import EngineChoice, Loader, check_memory, parse_drafter, stop_tokens
from foredraft.models import ModelFiles, Notify
from foredraft.proposers.base import Drafter
from foredraft.types import Completion, Event, FinishEvent, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from foredraft.loading import DrafterLike

Prompt = str | Sequence[int] | Sequence[dict[str, str]]
"""A user's message, token ids as they are, or chat messages with `role` and `content`."""


def load(
    model: str | Path | PreTrainedModel,
    drafter: DrafterLike = "auto",
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft_tokens: int | None = None,
    rule: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    backend: str = "auto",
    weights: str = "auto",
    threads: int | None = None,
    kv: str = "f32",
    draft_threads: int | None = None,
    draft_device: str | None = None,
    cache: str | Path | None = None,
    memory: str | Path | None = None,
    notify: Notify = lambda _: None,
) -> Model:
    """Load a target and what drafts for it.

    Args:
        model: A bundled name, a folder, a `.gguf` file, a hub id, or a transformers model (then give its `tokenizer`).
        drafter: One of `KNOWN_DRAFTERS` (REF is a model reference), `None` for none, a transformers model of the same
            vocabulary, or a `Drafter`. `auto` needs to know what forwards cost here: it takes a second to measure that,
            once for a model that lies in a folder or file.
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
        kv: Of the native backend: keys and values in `f32`, or in `bf16`, which halves their memory.
        draft_threads: Of the native backend, for draft models, and for heads with `ssd`; `None` takes as many as the
            target has, for heads one.
        draft_device: Of draft models; `None` takes the target's.
        cache: Folder for fetched and converted models; `None` takes `cache_folder()`.
        memory: Folder of what the drafter learned in earlier runs: read if it is there, written by `Model.save_memory`.
        notify: Called with a sentence when something that takes time begins.

    Raises:
        ModelError: A model or the memory cannot be found, fetched or read.
        UnsupportedError: The model or the pair of models cannot be run, or the drafter has no use for a memory.
        InvalidInputError: An argument is not one of those above.
    """
    engine = EngineChoice(backend, device, dtype, weights, threads, kv, draft_threads, draft_device)
    loader = Loader(cache, engine, notify)
    choice = parse_drafter(drafter)  # a wrong name is told before anything is loaded
    memory = check_memory(memory, choice) if memory is not None else None
    if isinstance(model, (str, Path)):
        target, tokenizer, files = loader.model(str(model))
    elif tokenizer is None:
        raise InvalidInputError("A transformers model was given without its tokenizer: pass tokenizer=…")
    else:
        target, files = loader.backend_of(model, tokenizer), None
    ready = loader.drafter(choice, target, tokenizer, files)
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
            stop_tokens=stop_tokens(backend, tokenizer),
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
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat: bool | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[Event]:
        """Events of one prompt as they happen: tokens with their origin, figures of each round, the completion.

        Args:
            prompt: A string, chat messages, or token ids.
            params: Sampling settings; the default is greedy decoding of up to 256 tokens.
            chat: Whether to put a string into the model's chat template; `None` does so if it has one.
            progress: Told how many of the prompt's tokens have been read, and of how many, while it is read.

        Raises:
            InvalidInputError: The prompt is empty or too long, or the model has no chat template but needs one.
        """
        request = Request(self.encode(prompt, chat=chat), params or SamplingParams(), progress=progress)
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
