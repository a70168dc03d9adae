"""What a benchmark writes down: every answer with every round of it. All figures are computed from these, later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from foredraft.errors import InvalidInputError
from foredraft.types import Completion, ForesightStats, RoundStats

OWN = "foredraft"
"""The engine's name in cells that are no peer's."""


@dataclass(frozen=True)
class Cell:
    """A method to be compared: who runs it, what drafts, and how it is sampled.

    `rule` is empty where the drafter's own suits or a peer has none to choose. `draft_tokens` is the most that a draft
    may have, `None` what suits.
    """

    drafter: str
    draft_tokens: int | None = None
    rule: str = ""
    temperature: float = 0.0
    engine: str = OWN

    @property
    def method(self) -> str:
        """Its name but for the temperature: `suffix`, `suffix 8`, `ngram block`, `llama.cpp: prompt-lookup 4`."""
        peer = "" if self.engine == OWN else f"{self.engine}: "
        tokens = "" if self.draft_tokens is None else f" {self.draft_tokens}"
        return f"{peer}{self.drafter}{tokens}{f' {self.rule}' if self.rule else ''}"

    @property
    def name(self) -> str:
        """Its whole name, unlike that of any other cell."""
        return f"{self.method} T={self.temperature:g}" if self.temperature else self.method

    @property
    def plain(self) -> Cell:
        """The cell that its speed is compared with: plain decoding by foredraft at its temperature."""
        return Cell("none", temperature=self.temperature)


@dataclass(frozen=True)
class Rounds:
    """The rounds of one answer, in columns; `RoundStats` defines each. Seconds."""

    drafted: tuple[int, ...] = ()
    depth: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    emitted: tuple[int, ...] = ()
    draft_forwards: tuple[int, ...] = ()
    draft_seconds: tuple[float, ...] = ()
    verify_seconds: tuple[float, ...] = ()
    accept_seconds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, tuple(getattr(self, field.name)))
        assert len({len(getattr(self, field.name)) for field in fields(self)}) == 1

    def __len__(self) -> int:
        return len(self.drafted)

    @classmethod
    def of(cls, rounds: Sequence[RoundStats]) -> Rounds:
        """The columns of these rounds."""
        return cls(**{field.name: tuple(getattr(r, field.name) for r in rounds) for field in fields(cls)})


class Position(NamedTuple):
    """Rounds that judged a draft's token at one depth, and those of them that accepted it."""

    tried: int
    accepted: int

    @property
    def rate(self) -> float:
        """The share accepted."""
        return self.accepted / self.tried


def by_position(rounds: Sequence[Rounds]) -> tuple[Position, ...]:
    """How often the token at each depth was accepted, of rounds that judged one there.

    A token is judged if all above it were accepted. Where the answer ended within a draft (so that the target added no
    token), what follows was never judged.
    """
    depth, accepted, emitted = (
        np.array([n for r in rounds for n in getattr(r, name)], dtype=np.int64)
        for name in ("depth", "accepted", "emitted")
    )
    judged = np.minimum(depth, accepted + (emitted > accepted))
    deepest = int(judged.max(initial=0))
    return tuple(Position(int((judged >= d).sum()), int((accepted >= d).sum())) for d in range(1, deepest + 1))


@dataclass(frozen=True)
class Turn:
    """One answer. `ids` are the emitted tokens, the one that ended it included.

    `ttft` and `seconds` are from the request to the first and the last token. `target_forwards` and `draft_forwards`
    are those that scored or drafted tokens, without the prompt's prefill; `None` where a peer does not tell. `drafted`
    and `accepted` likewise. `rounds` are foredraft's own.
    """

    prompt_tokens: int
    ids: tuple[int, ...]
    text: str
    ttft: float
    seconds: float
    target_forwards: int | None = None
    draft_forwards: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    rounds: Rounds | None = None
    foresight: ForesightStats | None = None
    """Of drafters that draft while the target verifies."""

    @property
    def tokens(self) -> int:
        """How many were emitted."""
        return len(self.ids)

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; `None` of a single token."""
        return (self.seconds - self.ttft) / (self.tokens - 1) if self.tokens > 1 else None

    @classmethod
    def of(cls, prompt_tokens: int, completion: Completion, rounds: Sequence[RoundStats] | None = None) -> Turn:
        """foredraft's own answer, with its rounds if they were kept."""
        stats = completion.stats
        return cls(
            prompt_tokens=prompt_tokens,
            ids=completion.ids,
            text=completion.text,
            ttft=stats.ttft_ms / 1e3,
            seconds=stats.seconds,
            target_forwards=stats.target_forwards,
            draft_forwards=stats.draft_forwards,
            drafted=stats.drafted,
            accepted=stats.accepted,
            rounds=Rounds.of(rounds) if rounds is not None else None,
            foresight=stats.foresight,
        )

    @classmethod
    def from_json(cls, found: Any) -> Turn:
        """The turn of the dict that `Measurement.to_json` has for it."""
        rounds = Rounds(**found["rounds"]) if found["rounds"] is not None else None
        seen = found.get("foresight")
        foresight = ForesightStats.from_json(seen) if seen is not None else None
        return cls(**{**found, "ids": tuple(found["ids"]), "rounds": rounds, "foresight": foresight})


@dataclass(frozen=True)
class Measurement:
    """One item of the workload, answered by one cell in one repetition: a line of `answers.jsonl`."""

    cell: str
    repetition: int
    item: str
    category: str
    turns: tuple[Turn, ...]
    peak_memory: int | None = None
    """Bytes: the most that the process that ran it held meanwhile."""

    @property
    def key(self) -> tuple[str, int, str]:
        """What no other measurement of a run has."""
        return self.cell, self.repetition, self.item

    def to_json(self) -> dict[str, Any]:
        """A plain dict; `from_json` takes it."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Any) -> Measurement:
        """The measurement of such a dict.

        Raises:
            InvalidInputError: It is none.
        """
        try:
            turns = tuple(Turn.from_json(turn) for turn in found["turns"])
            return cls(**{**found, "turns": turns})
        except (TypeError, KeyError, AssertionError) as error:
            raise InvalidInputError(f"This is no measurement of a benchmark ({error}).") from error
