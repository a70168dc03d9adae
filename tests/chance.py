"""Tests of random draws against an exact law, with stated odds of failing by chance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

from scipy.stats import power_divergence

FALSE_FAILURE = 1e-9
"""Odds that a right sampler fails one test. The seeds are fixed, so a test that passed once passes always."""

_LEAST_EXPECTED = 10  # a cell expected less often joins the others like it: the chi-square law is poor there

Outcome = TypeVar("Outcome", bound=Hashable)


def g_test(outcomes: Iterable[Outcome], law: Mapping[Outcome, float]) -> float:
    """p-value of the G-test that `outcomes` were drawn from `law`; 0 if one of them is impossible."""
    counts = Counter(outcomes)
    if any(law.get(outcome, 0.0) == 0 for outcome in counts):
        return 0.0
    n = counts.total()
    rare = {outcome for outcome, mass in law.items() if n * mass < _LEAST_EXPECTED}
    common = [outcome for outcome in law if outcome not in rare]
    observed: list[float] = [counts[outcome] for outcome in common]
    expected = [n * law[outcome] for outcome in common]
    if any(law[outcome] > 0 for outcome in rare):
        observed.append(sum(counts[outcome] for outcome in rare))
        expected.append(n * sum(law[outcome] for outcome in rare))
    total = sum(expected)
    return float(power_divergence(observed, [n * e / total for e in expected], lambda_="log-likelihood").pvalue)
