"""transformers' `generate`: plain, with prompt lookup, and with an assistant model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foredraft.bench.peers.base import Peer, PeerOptions, PeerRequest, Watch
from foredraft.bench.records import Turn

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
        self._target, self._tokenizer = self._load(options.model)
        self._stop_tokens = sorted(options.stop_tokens) or self._own_stop_tokens()
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
            _followed(self._target, watch, len(request.ids)),
        ):
            self._target.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=settings,
                streamer=_Streamer(watch),
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

    def _load(self, reference: str) -> tuple[Any, Any]:
        from foredraft.models import file_key, resolve

        cache = Path(self.options.cache)
        files = resolve(reference, cache)  # what is not there is told before the slow imports
        import torch

        from foredraft.backends.checkpoint import load_checkpoint

        torch.set_num_threads(self.options.most_threads())
        converted = cache / "converted" / file_key(files.path) if files.is_gguf else None
        return load_checkpoint(files.path, device=self.options.device, dtype=self.options.dtype, converted=converted)

    def _own_stop_tokens(self) -> list[int]:
        ends = self._target.generation_config.eos_token_id
        own = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        return sorted({*own, *([] if self._tokenizer.eos_token_id is None else [self._tokenizer.eos_token_id])})

    def _with_assistant(self, reference: str, tokens: int | None) -> dict[str, Any]:
        """What `generate` must be told for a draft model."""
        if reference not in self._assistants:
            self._assistants[reference] = self._load(reference)
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
    """What `generate` hands its tokens to: first the prompt, then what each forward gave."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._prompt = True

    def put(self, value: Any) -> None:
        """Tokens `[n]` or `[1, n]`."""
        if not self._prompt:
            self._watch.emit(value.flatten().tolist())
        self._prompt = False

    def end(self) -> None:
        """No more will come."""


@contextmanager
def _followed(target: Any, watch: Watch, prompt: int) -> Iterator[None]:
    """Tells the watch of each forward, which scores the draft behind the prompt or behind the last token."""
    known = prompt

    def before(module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        nonlocal known
        rows = keywords["input_ids"] if "input_ids" in keywords else arguments[0]
        watch.forward(rows[0, known:].tolist())
        known = 1

    handle = target.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
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
