"""What travels between HTTP and the worker: an ask, the limits that it must keep to, and why one fails."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from foredraft.checks import is_integer, is_number, require
from foredraft.errors import ForedraftError
from foredraft.sampling import AllowedTokens
from foredraft.types import Completion, Event, RoundStats, SamplingParams


class Grammar(Protocol):
    """A language that answers must belong to."""

    def start(self, prompt_length: int) -> AllowedTokens:
        """A mask for one answer, which begins after so many tokens. It is asked of any continuation, in any order."""
        ...


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request as the worker takes it: a prompt, and how `n` answers to it are drawn and drafted.

    Args:
        prompt: Token ids.
        params: Of each answer. With a seed, answer i has `seed + i`.
        n: Answers.
        drafter: Of those that the server has; `None` takes its default, `none` is plain decoding.
        draft_tokens: Most nodes of a draft; 0 is plain decoding, `None` what suits the drafter.
        rule: Acceptance rule; `None` takes the one that fits.
        grammar: What answers must belong to.
        user: Whose it is. Users take turns.
        timeout: Seconds until it fails, waiting included; `None` takes the server's.
        detail: Whether round events tell what each round looked at.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    n: int = 1
    drafter: str | None = None
    draft_tokens: int | None = None
    rule: str | None = None
    grammar: Grammar | None = None
    user: str = ""
    timeout: float | None = None
    detail: bool = False


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the server takes on at once.

    Args:
        sequences: Most answers in one batch.
        nodes: Most drafted nodes of one forward, of all answers together.
        prefill: Most tokens of prompts that are read between two rounds while answers run.
        kv_bytes: Most memory for keys and values, those kept for later prompts included; `None` takes half of what is
            free when the server starts.
        waiting: Most asks in the queue.
        timeout: Seconds that an ask may take.

    Raises:
        InvalidInputError: A value is out of range.
    """

    sequences: int = 16
    nodes: int = 64
    prefill: int = 128
    kv_bytes: int | None = None
    waiting: int = 256
    timeout: float = 600.0

    def __post_init__(self) -> None:
        for name in ("sequences", "prefill", "waiting"):
            value = getattr(self, name)
            require(name, value, is_integer(value) and value >= 1, "an integer >= 1")
        require("nodes", self.nodes, is_integer(self.nodes) and self.nodes >= 0, "an integer >= 0")
        good = self.kv_bytes is None or (is_integer(self.kv_bytes) and self.kv_bytes >= 1)
        require("kv_bytes", self.kv_bytes, good, "a number of bytes >= 1, or None")
        require("timeout", self.timeout, is_number(self.timeout) and self.timeout > 0, "a number of seconds > 0")


class Refusal(ForedraftError):  # noqa: N818  (what is refused says so by its own name)
    """The server does not answer, though the ask is right. `status` is HTTP's."""

    status = 503
    code = "unavailable"
    retry_after: int | None = None
    """Seconds after which it may be worth asking again."""


class QueueFullError(Refusal):
    """Too many are waiting."""

    code = "queue_full"
    retry_after = 5


class DrainingError(Refusal):
    """The server is shutting down."""

    code = "shutting_down"
    retry_after = 10


class AskTimeoutError(Refusal):
    """It took longer than it may."""

    status = 504
    code = "timeout"


class WorkerCrashedError(Refusal):
    """Something broke that is no fault of the ask."""

    status = 500
    code = "worker_crashed"
    retry_after = 1

    @classmethod
    def alone(cls) -> WorkerCrashedError:
        """Only this ask has failed."""
        return cls("The server failed at this request. Other requests go on.")


class Answer(Protocol):
    """A submitted ask."""

    @property
    def queue_seconds(self) -> float | None:
        """How long it waited; `None` while it does."""
        ...

    @property
    def reused_tokens(self) -> int:
        """Of the prompt, those whose keys and values were there already."""
        ...

    def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        """Events with the index of their answer, in [0, n), until all have finished.

        Raises:
            ForedraftError: It failed: a `Refusal`, or an `InvalidInputError` that shows only while it runs.
        """
        ...

    def cancel(self) -> None:
        """Stop it within a round, and give its memory back. Nothing happens if it has ended."""
        ...


class Status(NamedTuple):
    """How the worker is."""

    state: str
    """`ready`, `restarting` after a crash, or `draining`."""
    running: int
    waiting: int
    kv_bytes: int
    """Of running answers, kept prefixes included."""
    kv_limit: int
    kept_prefixes: int
    restarts: int
    seconds_since_round: float | None
    """`None` while nothing runs."""


class Watch(Protocol):
    """Who counts what happens. Called from the worker's thread."""

    def waited(self, seconds: float, prompt: int, reused: int) -> None:
        """An ask was taken up, whose prompt has so many tokens, so many of them read before."""
        ...

    def forward(self, sequences: int, rows: int, seconds: float) -> None:
        """The target scored so many rows for so many answers."""
        ...

    def round(self, drafter: str, stats: RoundStats) -> None:
        """One answer's part of that round."""
        ...

    def finished(self, completion: Completion) -> None:
        """An answer is complete."""
        ...

    def failed(self, code: str) -> None:
        """An ask failed or was refused: the code of a `Refusal`, `cancelled`, or `invalid`."""
        ...
