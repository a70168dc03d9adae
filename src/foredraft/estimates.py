"""How likely drafted nodes are to be accepted, before they are verified: raw scores, calibrated by what came true."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

UNSCORED = 0.6  # acceptance taken for each token of a draft without scores, until more is known
_BINS = 24  # of a node's raw score, two for each halving
_LEAST = 2.0 ** (-_BINS / 2)  # what is below goes to the last bin
_PRIOR_TRIES = 8.0  # how many tries an estimate is worth before acceptances are seen


class Counts(NamedTuple):
    """Hits and tries, by bin; `keep` is what is left of them at the next try."""

    hits: list[float]
    tries: list[float]
    keep: float


class Calibration:
    """How often nodes came true, by who proposed them, raw score, and what else was known of them.

    An estimate starts from the wider one and moves from there to the share of hits as these become many: from the raw
    score to the proposers' own record, to their record in like circumstances (`context`), and from the workload's
    records (`above`) to the request's.

    Args:
        above: The wider calibration, which learns the same.
        memory: Tries after which a try has lost most of its weight; infinite keeps all alike.
    """

    def __init__(self, above: Calibration | None = None, memory: float = math.inf) -> None:
        self._above = above
        self._keep = 1.0 - 1.0 / memory
        self._counts: dict[str, Counts] = {}
        self._levels: dict[tuple[str, str], list[Counts]] = {}  # of a proposer in a context, the widest first

    def __call__(self, who: str, raw: float, context: str = "", prior: float | None = None) -> float:
        """The acceptance to expect of a node.

        Args:
            who: Who proposed it.
            raw: The proposer's score of its path, which decides the bin.
            context: What else is known of it.
            prior: What to expect before anything was seen, if not `raw`.
        """
        at, estimate = _bin(raw), raw if prior is None else prior
        for hits, tries, _ in self._levels.get((who, context)) or self._levels_of(who, context):
            estimate = (hits[at] + _PRIOR_TRIES * estimate) / (tries[at] + _PRIOR_TRIES)
        return estimate

    def note(self, who: str, raw: float, accepted: bool, context: str = "") -> None:
        """Count one node of which is known whether it came true."""
        at = _bin(raw)
        for hits, tries, keep in self._levels.get((who, context)) or self._levels_of(who, context):
            tries[at] = tries[at] * keep + 1
            hits[at] = hits[at] * keep + accepted

    def arrays(self) -> dict[str, torch.Tensor]:
        """Hits and tries `[2, bins]` by proposer, and by proposer and context."""
        seen = {key: counts for key, counts in self._counts.items() if any(counts.tries)}
        return {key: torch.tensor(counts[:2], dtype=torch.float64) for key, counts in seen.items()}

    def take_up(self, arrays: Mapping[str, torch.Tensor]) -> bool:
        """Go on from what `arrays` gave, if these can be that. Returns whether they can."""
        for counts in arrays.values():
            if counts.shape != (2, _BINS) or not counts.isfinite().all():
                return False
            if (counts[0] < 0).any() or (counts[0] > counts[1]).any():
                return False
        for key in {*arrays, *self._counts}:
            own, taken = self._of(key), arrays.get(key, torch.zeros(2, _BINS))
            own.hits[:], own.tries[:] = taken.tolist()
        return True

    def _levels_of(self, who: str, context: str) -> list[Counts]:
        """From the workload's record of a proposer to the request's in this context."""
        above = self._above._levels_of(who, context) if self._above is not None else []
        own = [self._of(key) for key in ((who, f"{who}@{context}") if context else (who,))]
        self._levels[who, context] = [*above, *own]
        return self._levels[who, context]

    def _of(self, key: str) -> Counts:
        if key not in self._counts:
            self._counts[key] = Counts([0.0] * _BINS, [0.0] * _BINS, self._keep)
        return self._counts[key]


def _bin(raw: float) -> int:
    return min(int(-2 * math.log2(raw)), _BINS - 1) if raw > _LEAST else _BINS - 1
