"""What the benchmark asks of another engine (a peer), what it is told, and what every peer promises."""

from __future__ import annotations

import importlib.util
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from foredraft.bench.records import Turn
from foredraft.checks import is_integer, is_number, require
from foredraft.errors import ForedraftError, ModelError


class PeerError(ForedraftError):
    """A peer that cannot be used, or that failed to answer; the message says which, and why."""


@dataclass(frozen=True)
class PeerRequest:
    """One answer to be given.

    Args:
        ids: The prompt's token ids, chat template included.
        messages: The same as chat messages, for a peer with a template of its own; empty for a raw text.
        drafter: One of the peer's `drafters`; `assistant=REF` names the draft model; of a URL it is the URL.
        draft_tokens: Most tokens a draft may have; `None` takes the peer's default.
        max_tokens: Most tokens to emit.
        temperature: 0 is greedy. Nothing else changes the law: no top-k, no penalty, not even the model's own.
        seed: Of sampling. Peers have their own random sources: equal seeds give equal texts only within one peer.

    Raises:
        InvalidInputError: A value is outside its range.
    """

    ids: tuple[int, ...]
    messages: tuple[Mapping[str, str], ...]
    drafter: str
    draft_tokens: int | None
    max_tokens: int
    temperature: float
    seed: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple(self.ids))
        object.__setattr__(self, "messages", tuple(self.messages))
        require("ids", self.ids, bool(self.ids) and all(is_integer(i) for i in self.ids), "one token id or more")
        good = self.draft_tokens is None or (is_integer(self.draft_tokens) and self.draft_tokens >= 1)
        require("draft_tokens", self.draft_tokens, good, "an integer >= 1, or None for the peer's default")
        require("max_tokens", self.max_tokens, is_integer(self.max_tokens) and self.max_tokens >= 1, "an integer >= 1")
        require("temperature", self.temperature, is_number(self.temperature) and self.temperature >= 0, "a number >= 0")
        require("seed", self.seed, is_integer(self.seed) and 0 <= self.seed < 2**63, "an integer in [0, 2**63)")


@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    """What peers are started with.

    Args:
        model: Reference of the target, as `foredraft.load` takes it.
        cache: Folder of fetched and converted models.
        gguf: A GGUF file of the target, for peers that read nothing else; `None` takes `model` if it is one.
        threads: How many a peer may use; `None` takes the physical cores, as foredraft does.
        device: Of transformers: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`.
        dtype: Of transformers: `auto` (float32 on a CPU), `float32`, `bfloat16` or `float16`.
        context: Tokens of a prompt and its answer for which room is made.
        stop_tokens: Ids that end an answer, foredraft's; empty takes the peer's own.
        api_key: Sent to a URL as its bearer token.
        timeout: Seconds that an answer may take.
        start_timeout: Seconds that starting a peer and loading its model may take.

    Raises:
        InvalidInputError: A value is outside its range.
    """

    model: str = ""
    cache: str = ""
    gguf: str | None = None
    threads: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    context: int = 4096
    stop_tokens: tuple[int, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 600
    start_timeout: float = 600

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_tokens", tuple(self.stop_tokens))
        good = self.threads is None or (is_integer(self.threads) and self.threads >= 1)
        require("threads", self.threads, good, "an integer >= 1, or None for the physical cores")
        require("context", self.context, is_integer(self.context) and self.context >= 2, "an integer >= 2")
        for name in ("timeout", "start_timeout"):
            value = getattr(self, name)
            require(name, value, is_number(value) and value > 0, "a number of seconds > 0")

    def to_json(self) -> dict[str, Any]:
        """A plain dict for a worker, without the key that only URLs need."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "api_key"}

    def most_threads(self) -> int:
        """`threads`, or the physical cores."""
        from foredraft.backends.native.team import physical_cores

        return self.threads or physical_cores()

    def gguf_file(self) -> Path:
        """The GGUF file of the target.

        Raises:
            PeerError: There is none; the message says what to give.
        """
        from foredraft.models import resolve

        try:
            files = resolve(self.gguf or self.model, Path(self.cache))
        except ModelError as error:
            raise PeerError(str(error)) from error
        if not files.is_gguf:
            raise PeerError(f"it reads GGUF files, and '{self.gguf or self.model}' is none: give one (option gguf)")
        return files.path


class Peer(ABC):
    """One other engine with one model loaded. Answers one request at a time, and keeps nothing from one to the next.

    `drafters` are the ways in which it can draft; each loads what it needs when it is first asked for.
    """

    name: str
    drafters: tuple[str, ...]
    package: tuple[str, str] = ("", "")
    """The module it needs, and what to tell pip."""

    def __init__(self, options: PeerOptions) -> None:
        self.options = options

    @classmethod
    def missing(cls, options: PeerOptions | None = None) -> str | None:
        """Why it cannot be used here; `None` if nothing is known to be in the way. Without options: its package."""
        module, requirement = cls.package
        if module and importlib.util.find_spec(module) is None:
            return f"{module} is not installed: pip install '{requirement}'"
        return None

    @abstractmethod
    def answer(self, request: PeerRequest) -> Turn:
        """The answer to one request, timed by `perf_counter` around the engine's own public interface.

        Raises:
            PeerError: It failed, with the reason.
        """

    def conditions(self) -> dict[str, str]:
        """What its speed depends on: its version, threads and the like."""
        return {}

    @property
    def peak_memory(self) -> int | None:
        """Bytes: the most that its process held during the last answer; `None` where that is unknown."""
        return None

    def close(self) -> None:
        """End it, and free what it holds."""
        return

    def kind_of(self, request: PeerRequest) -> tuple[str, str]:
        """The drafter asked for, and the draft model after `=`.

        Raises:
            PeerError: It has no such drafter.
        """
        kind, _, reference = request.drafter.partition("=")
        if kind not in self.drafters:
            raise PeerError(f"{self.name} does not draft with '{kind}', but with one of {', '.join(self.drafters)}.")
        return kind, reference


class GgufPeer(Peer):
    """A peer that reads GGUF files, and loads its model anew for each way of drafting."""

    def __init__(self, options: PeerOptions) -> None:
        super().__init__(options)
        self._file = options.gguf_file()
        self._loaded: dict[str, Any] = {}

    @classmethod
    def missing(cls, options: PeerOptions | None = None) -> str | None:
        """See `Peer`."""
        if (missing := super().missing()) is not None or options is None:
            return missing
        try:
            options.gguf_file()
        except PeerError as error:
            return str(error)
        return None


class Watch:
    """Follows one answer from the moment it is made: times, tokens, and the target's forwards with what came of them.

    Forwards are counted as foredraft counts its own: those that scored tokens which then were emitted. Other engines'
    first forward reads the prompt and gives the first token; it counts, chunks of the prompt before it do not. So
    plain decoding of n tokens has n forwards everywhere.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._rounds: list[tuple[tuple[int, ...], list[int]]] = []  # draft, emitted
        self._first = self._last = 0.0
        self._start = time.perf_counter()

    def forward(self, draft: Sequence[int] = ()) -> None:
        """The target is about to score the token after the last one, and those after each token of a draft."""
        self._rounds.append((tuple(draft), []))

    def emit(self, tokens: Iterable[int]) -> None:
        """These tokens are there now, all from the latest forward."""
        self._last = time.perf_counter()
        if not self.ids:
            self._first = self._last
        known = len(self.ids)
        self.ids += tokens
        if self._rounds:
            self._rounds[-1][1].extend(self.ids[known:])

    def turn(
        self,
        request: PeerRequest,
        text: str,
        *,
        target_forwards: int | None = None,
        draft_forwards: int | None = None,
        drafted: int | None = None,
        accepted: int | None = None,
    ) -> Turn:
        """The answer. Counts are those of the forwards that were seen; if none were, those given.

        Accepted are the emitted tokens that begin a round's draft. A rejected token cannot be emitted in its own
        place, so this is exact, and counts a drafted token that ends the answer.

        Raises:
            PeerError: Nothing was emitted.
        """
        if not self.ids:
            raise PeerError("it ended without a token")
        scored = [(draft, emitted) for draft, emitted in self._rounds if emitted]
        if scored:
            target_forwards = len(scored)
            drafted = sum(len(draft) for draft, _ in scored)
            accepted = sum(_common(draft, emitted) for draft, emitted in scored)
        return Turn(
            prompt_tokens=len(request.ids),
            ids=tuple(self.ids),
            text=text,
            ttft=self._first - self._start,
            seconds=self._last - self._start,
            target_forwards=target_forwards,
            draft_forwards=draft_forwards,
            drafted=drafted,
            accepted=accepted,
        )


def _common(draft: Sequence[int], emitted: Sequence[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(draft, emitted, strict=False)) if a != b), min(len(draft), len(emitted))
    )
