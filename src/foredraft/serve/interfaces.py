"""What the HTTP side needs of the worker: signatures alone, so that tests can stand in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from foredraft.serve.asks import Answer, Ask, Limits, Status

if TYPE_CHECKING:
    from foredraft.api import Model

Render = Callable[[str | None], tuple[bytes, str]]
"""The counters as Prometheus reads them: a body and its content type, by the `Accept` header."""


class Drains(Protocol):
    """What the server waits for before it ends."""

    async def drain(self, seconds: float) -> None:
        """Take no more; return when all have ended. What still runs after so many seconds fails."""
        ...


class Methods(Protocol):
    """The ways of drafting that the server has."""

    @property
    def default(self) -> str:
        """The drafter of requests that name none."""
        ...

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names that a request may choose, `none` among them."""
        ...

    @property
    def rules(self) -> tuple[str, ...]:
        """The same of acceptance rules."""
        ...


class Worker(Drains, Protocol):
    """Who answers."""

    @property
    def model(self) -> Model:
        """The target and its tokenizer."""
        ...

    @property
    def methods(self) -> Methods:
        """What requests may choose."""
        ...

    @property
    def limits(self) -> Limits:
        """What it takes on at once."""
        ...

    async def submit(self, ask: Ask) -> Answer:
        """Queue an ask.

        Raises:
            InvalidInputError: The ask is not right.
            UnsupportedError: Its parts do not fit each other.
            Refusal: There is no room, or no more are taken.
        """
        ...

    def status(self) -> Status:
        """How it is."""
        ...

    def plain_tokens_per_second(self) -> float | None:
        """Plain decoding's measured rate here."""
        ...

    def close(self) -> None:
        """End its thread."""
        ...
