"""The one test of the proof that needs luck, with its odds: counts against an exact law."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple, TypeVar

import torch

FALSE_FAILURE = 1e-9
"""Odds that a right program fails a sampled test."""
_STATED_POWER = 0.9
_SMALLEST_EXPECTED = 5.0  # the chi-squared approximation wants no smaller cells


Outcome = TypeVar("Outcome", bound=Hashable)


class GTest(NamedTuple):
    """Outcome of `g_test`."""

    samples: int
    cells: int
    statistic: float
    p_value: float
    detectable: float
    """Divergence (nats a sample) of a wrong law that would be found with 90 % probability."""

    @property
    def passed(self) -> bool:
        """Whether the counts may come from the law."""
        return self.p_value >= FALSE_FAILURE


def g_test(counts: Mapping[Outcome, int], law: Mapping[Outcome, float]) -> GTest:
    """Likelihood-ratio test of counts against the law they should follow.

    Rare outcomes are put into one cell. An outcome that the law gives no mass to fails at once.
    """
    samples = sum(counts.values())
    if any(law.get(outcome, 0.0) <= 0 for outcome, n in counts.items() if n):
        return GTest(samples, len(law), float("inf"), 0.0, 0.0)
    rare = [outcome for outcome, mass in law.items() if 0 < samples * mass < _SMALLEST_EXPECTED]
    cells = [[outcome] for outcome, mass in law.items() if samples * mass >= _SMALLEST_EXPECTED] + (
        [rare] if rare else []
    )
    observed = torch.tensor([sum(counts.get(x, 0) for x in cell) for cell in cells], dtype=torch.float64)
    expected = torch.tensor([samples * sum(law[x] for x in cell) for cell in cells], dtype=torch.float64)
    statistic = float(2 * torch.special.xlogy(observed, observed / expected).sum())
    freedom = max(1, len(cells) - 1)
    return GTest(samples, len(cells), statistic, _tail(freedom, statistic), _detectable(freedom, samples))


def _tail(freedom: int, statistic: float) -> float:
    """P(chi-squared with `freedom` degrees > statistic)."""
    half = torch.tensor([freedom / 2, max(statistic, 0.0) / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _power(freedom: int, noncentrality: float, critical: float) -> float:
    """P(noncentral chi-squared > critical), as a Poisson mixture of central ones."""
    j = torch.arange(0, int(noncentrality) + 200, dtype=torch.float64)
    half = torch.tensor(noncentrality / 2, dtype=torch.float64)
    weights = (torch.special.xlogy(j, half) - half - torch.lgamma(j + 1)).exp()
    tails = torch.special.gammaincc(freedom / 2 + j, torch.full_like(j, critical / 2))
    return float((weights * tails).sum())


def _detectable(freedom: int, samples: int) -> float:
    critical = _first(10.0 * freedom + 500, lambda x: _tail(freedom, x) <= FALSE_FAILURE)
    noncentrality = _first(10.0 * critical, lambda x: _power(freedom, x, critical) >= _STATED_POWER)
    return noncentrality / (2 * samples)


def _first(high: float, holds: Callable[[float], bool]) -> float:
    """The smallest number in [0, high] from which on `holds`."""
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
