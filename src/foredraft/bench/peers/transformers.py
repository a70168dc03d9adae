"""transformers' `generate`: plain, with prompt lookup, and with an assistant model."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from foredraft.backends.transformers import TransformersBackend
from foredraft.bench.peers.base import Peer, PeerOptions, PeerRequest, Watch
from foredraft.bench.records import Turn
from foredraft.loading import EngineChoice, Loader, stop_tokens

_LOOKUP_TOKENS = 10  # the library gives no default of its own; this is its class's


class TransformersPeer(Peer):
    """The model that foredraft loads, by the same reader, under the library's own decoding.

    Drafters: `prompt-lookup` (`prompt_lookup_num_tokens`, 10 if not told) and `assistant=REF` (`assistant_model`; its
    `num_assistant_tokens`, 20 if not told, and its confidence threshold as the library has them).
    """

    name = "transformers"
    drafters = ("none", "prompt-lookup", "assistant")

    def __init__(self, options: PeerOptions) -> None:
        super().__init__(options)
        backend, self._tokenizer = self._load(options.model)
        self._target: Any = backend.model
        self._stop_tokens = sorted(options.stop_tokens or stop_tokens(backend, self._tokenizer))
        self._target.generation_config = _neutral()
        self._assistants: dict[str, tuple[Any, Any]] = {}

    def answer(self, request: PeerRequest) -> Turn:
        """See `Peer`. The first token is there when the library hands it to a streamer."""
        import torch

        kind, reference = self.kind_of(request)
        arguments = self._with_assistant(reference, request.draft_tokens) if kind == "assistant" else {}
        lookup = {"prompt_lookup_num_tokens": request.draft_tokens or _LOOKUP_TOKENS}
        sampling = {"do_sample": True, "temperature": request.temperature, "top_k": 0, "top_p": 1.0}
        settings = _neutral(
            max_new_tokens=request.max_tokens,
            eos_token_id=self._stop_tokens or None,
            pad_token_id=self._stop_tokens[0] if self._stop_tokens else 0,
            **(sampling if request.temperature else {"do_sample": False}),
            **(lookup if kind == "prompt-lookup" else {}),
        )
        prompt = torch.tensor([request.ids], device=self._target.device)
        torch.manual_seed(request.seed)
        watch = Watch()
        with (
            _counted(arguments.get("assistant_model")) as draft_forwards,
            _drafts(self._target, len(request.ids)) as drafts,
        ):
            self._target.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=settings,
                streamer=_Streamer(watch, drafts),
                **arguments,
            )
        text = str(self._tokenizer.decode(watch.ids, skip_special_tokens=True))
        return watch.turn(request, text, draft_forwards=len(draft_forwards))

    def conditions(self) -> dict[str, str]:
        """See `Peer`."""
        import torch
        import transformers

        dtype, device = str(self._target.dtype).removeprefix("torch."), str(self._target.device)
        threads = str(torch.get_num_threads())
        return {"version": transformers.__version__, "weights": dtype, "device": device, "threads": threads}

    def _load(self, reference: str) -> tuple[TransformersBackend, Any]:
        """The backend over the library's model, whose settings are not neutral yet, and the tokenizer."""
        import torch

        torch.set_num_threads(self.options.most_threads())
        engine = EngineChoice("transformers", self.options.device, self.options.dtype)
        backend, tokenizer, _ = Loader(self.options.cache, engine).model(reference)
        assert isinstance(backend, TransformersBackend)
        return backend, tokenizer

    def _with_assistant(self, reference: str, tokens: int | None) -> dict[str, Any]:
        """What `generate` must be told for a draft model."""
        if reference not in self._assistants:
            backend, tokenizer = self._load(reference)
            self._assistants[reference] = backend.model, tokenizer
        assistant, tokenizer = self._assistants[reference]
        assistant.generation_config = _neutral(**({} if tokens is None else {"num_assistant_tokens": tokens}))
        arguments = {"assistant_model": assistant}
        if tokenizer.get_vocab() != self._tokenizer.get_vocab():
            arguments |= {"tokenizer": self._tokenizer, "assistant_tokenizer": tokenizer}
        return arguments


def _neutral(**settings: Any) -> Any:
    """Generation settings that nothing else adds to: those that a model brings would change the law."""
    import transformers

    kind: Any = transformers.GenerationConfig  # its constructor has no type hints
    return kind(**settings)


class _Streamer:
    """What `generate` hands its tokens to: first the prompt, then what each forward gave, in their order.

    On some devices that is after the next forward has begun, which may then have been for nothing.
    """

    def __init__(self, watch: Watch, drafts: deque[list[int]]) -> None:
        self._watch = watch
        self._drafts = drafts
        self._prompt = True

    def put(self, value: Any) -> None:
        """Tokens `[n]` or `[1, n]`."""
        if not self._prompt:
            self._watch.forward(self._drafts.popleft())
            self._watch.emit(value.flatten().tolist())
        self._prompt = False

    def end(self) -> None:
        """No more will come."""


@contextmanager
def _drafts(target: Any, prompt: int) -> Iterator[deque[list[int]]]:
    """The draft that each forward scores, behind the prompt or behind the last token: those not taken out yet."""
    drafts: deque[list[int]] = deque()
    known = prompt

    def before(module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        nonlocal known
        rows = keywords["input_ids"] if "input_ids" in keywords else arguments[0]
        drafts.append(rows[0, known:].tolist())
        known = 1

    handle = target.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield drafts
    finally:
        handle.remove()


@contextmanager
def _counted(model: Any) -> Iterator[list[None]]:
    """A list that grows with each forward of the model, if there is one."""
    forwards: list[None] = []
    handle = None if model is None else model.register_forward_pre_hook(lambda *_: forwards.append(None))
    try:
        yield forwards
    finally:
        if handle is not None:
            handle.remove()
