"""How likely drafted nodes are to be accepted, before they are verified: raw scores, calibrated by what came true."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

UNSCORED = 0.6  # acceptance taken for each token of a draft without scores, until more is known
_BINS = 24  # of a node's raw score, two for each halving
_LEAST = 2.0 ** (-_BINS / 2)  # what is below goes to the last bin
_PRIOR_TRIES = 8.0  # how many tries an estimate is worth before acceptances are seen

Counts = tuple[list[float], list[float]]
"""Hits and tries, by bin."""


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

    def __call__(self, who: str, raw: float, context: str = "", prior: float | None = None) -> float:
        """The acceptance to expect of a node.

        Args:
            who: Who proposed it.
            raw: The proposer's score of its path, which decides the bin.
            context: What else is known of it.
            prior: What to expect before anything was seen, if not `raw`.
        """
        return self._estimate(_keys(who, context), _bin(raw), raw if prior is None else prior)

    def note(self, who: str, raw: float, accepted: bool, context: str = "") -> None:
        """Count one node of which is known whether it came true."""
        self._note(_keys(who, context), _bin(raw), accepted)

    def arrays(self) -> dict[str, torch.Tensor]:
        """Hits and tries `[2, bins]` by proposer, and by proposer and context."""
        return {key: torch.tensor(counts, dtype=torch.float64) for key, counts in self._counts.items()}

    def take_up(self, arrays: Mapping[str, torch.Tensor]) -> bool:
        """Go on from what `arrays` gave, if these can be that. Returns whether they can."""
        for counts in arrays.values():
            if counts.shape != (2, _BINS) or not counts.isfinite().all():
                return False
            if (counts[0] < 0).any() or (counts[0] > counts[1]).any():
                return False
        self._counts = {key: (counts[0].tolist(), counts[1].tolist()) for key, counts in arrays.items()}
        return True

    def _estimate(self, keys: tuple[str, ...], at: int, prior: float) -> float:
        estimate = prior if self._above is None else self._above._estimate(keys, at, prior)
        for key in keys:
            counts = self._counts.get(key)
            if counts is not None:
                estimate = (counts[0][at] + _PRIOR_TRIES * estimate) / (counts[1][at] + _PRIOR_TRIES)
        return estimate

    def _note(self, keys: tuple[str, ...], at: int, accepted: bool) -> None:
        if self._above is not None:
            self._above._note(keys, at, accepted)
        for key in keys:
            counts = self._counts.get(key)
            if counts is None:
                counts = self._counts[key] = [0.0] * _BINS, [0.0] * _BINS
            hits, tries = counts
            tries[at] = tries[at] * self._keep + 1
            hits[at] = hits[at] * self._keep + accepted


def _keys(who: str, context: str) -> tuple[str, ...]:
    return (who, f"{who}@{context}") if context else (who,)


def _bin(raw: float) -> int:
    return min(int(-2 * math.log2(raw)), _BINS - 1) if raw > _LEAST else _BINS - 1
