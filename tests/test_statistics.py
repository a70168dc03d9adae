"""The G-test: its odds of failing a right program and of finding a wrong one are what it says."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

import pytest
import torch
from scipy.stats import binom, chi2, ncx2, power_divergence
from torch import Tensor

from foredraft.proof import statistics
from foredraft.proof.statistics import FALSE_FAILURE, GTest, g_test

LAW = {"a": 0.4, "b": 0.3, "c": 0.2, "d": 0.1}


def drawn(law: Mapping[str, float], samples: int, runs: int, seed: int) -> Iterator[Counter[str]]:
    """Counts of many runs, each of independent samples from the law."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.tensor(list(law.values()), dtype=torch.float64)
    for _ in range(runs):
        found: Tensor = torch.multinomial(weights, samples, replacement=True, generator=generator)
        counts = torch.bincount(found, minlength=len(law)).tolist()
        yield Counter(dict(zip(law, counts, strict=True)))


def within(hits: int, runs: int, odds: float) -> bool:
    """Whether so many hits have two-sided odds of 1e-6 at least."""
    return bool(min(binom.cdf(hits, runs, odds), binom.sf(hits - 1, runs, odds)) > 1e-6)


@pytest.mark.parametrize("level", [0.05, 0.01])
def test_a_right_program_fails_as_often_as_the_level_says(level: float) -> None:
    runs = 500
    failed = sum(g_test(counts, LAW).p_value < level for counts in drawn(LAW, 2000, runs, seed=1))
    assert within(failed, runs, level)


def test_so_it_does_where_rare_outcomes_share_a_cell() -> None:
    law = {str(i): 0.003 for i in range(100)} | {"rest": 0.7}
    runs = 500
    tests = [g_test(counts, law) for counts in drawn(law, 500, runs, seed=2)]
    assert {test.cells for test in tests} == {2}  # 1.5 expected of each rare one: all hundred are one cell
    assert within(sum(test.p_value < 0.05 for test in tests), runs, 0.05)


def tilted(divergence: float) -> dict[str, float]:
    """A law of LAW's outcomes that is this many nats away from it: mass moved between the first two."""
    low, high = 0.0, 0.3
    for _ in range(60):
        shift = (low + high) / 2
        law = LAW | {"a": 0.4 + shift, "b": 0.3 - shift}
        nats = sum(q * math.log(q / LAW[x]) for x, q in law.items())
        low, high = (shift, high) if nats < divergence else (low, shift)
    return law


def test_a_wrong_law_at_the_stated_distance_is_found_nine_times_in_ten() -> None:
    samples, runs = 20_000, 400
    stated = g_test(dict.fromkeys(LAW, samples // 4), LAW).detectable
    found = sum(not g_test(counts, LAW).passed for counts in drawn(tilted(stated), samples, runs, seed=3))
    assert 0.84 < found / runs < 0.96  # 0.9 and four standard errors


def test_a_law_far_off_is_found_and_one_much_nearer_is_not() -> None:
    samples = 20_000
    stated = g_test(dict.fromkeys(LAW, samples // 4), LAW).detectable
    assert not any(g_test(counts, LAW).passed for counts in drawn(tilted(4 * stated), samples, 20, seed=4))
    assert all(g_test(counts, LAW).passed for counts in drawn(tilted(stated / 10), samples, 20, seed=5))


# The figures


def test_statistic_and_p_value_are_those_of_scipy() -> None:
    for counts in drawn(LAW, 300, 20, seed=6):
        test = g_test(counts, LAW)
        expected = [300 * mass for mass in LAW.values()]
        theirs = power_divergence([counts[x] for x in LAW], expected, lambda_="log-likelihood")
        assert test.statistic == pytest.approx(theirs.statistic, rel=1e-9, abs=1e-9)
        assert test.p_value == pytest.approx(theirs.pvalue, rel=1e-9)
        assert (test.samples, test.cells) == (300, 4)


@pytest.mark.parametrize("freedom", [1, 3, 10, 60])
def test_tail_and_power_are_those_of_scipy(freedom: int) -> None:
    for x in (0.5, 5.0, 40.0, 150.0):
        assert statistics._tail(freedom, x) == pytest.approx(chi2.sf(x, freedom), rel=1e-9)
        assert statistics._power(freedom, 50.0, x) == pytest.approx(ncx2.sf(x, freedom, 50.0), rel=1e-6)
    noncentrality = 2 * 1000 * statistics._detectable(freedom, 1000)
    assert ncx2.sf(chi2.isf(FALSE_FAILURE, freedom), freedom, noncentrality) == pytest.approx(0.9, abs=1e-6)


def test_more_samples_find_smaller_faults() -> None:
    few, many = (g_test({x: int(n * mass) for x, mass in LAW.items()}, LAW).detectable for n in (1000, 100_000))
    assert few == pytest.approx(100 * many)


# The edges


def test_an_impossible_outcome_fails_at_once() -> None:
    test = g_test({"a": 10_000, "never": 1}, {"a": 1.0, "never": 0.0})
    assert (test.p_value, test.statistic, test.passed) == (0.0, math.inf, False)
    assert not g_test({"a": 10_000, "unheard of": 1}, {"a": 1.0}).passed


def test_impossible_outcomes_that_did_not_come_are_no_cells() -> None:
    with_them = g_test({"a": 60, "b": 40, "never": 0}, {"a": 0.5, "b": 0.5, "never": 0.0, "nor this": 0.0})
    assert with_them == g_test({"a": 60, "b": 40}, {"a": 0.5, "b": 0.5})


def test_what_never_came_counts_against_the_law() -> None:
    assert not g_test({"a": 1000}, {"a": 0.9, "b": 0.1}).passed
    assert g_test({"a": 1000}, {"a": 1.0}).p_value == 1.0


def test_the_level_is_the_stated_one() -> None:
    assert GTest(1, 2, 0.0, FALSE_FAILURE, 0.0).passed and not GTest(1, 2, 0.0, FALSE_FAILURE / 2, 0.0).passed
    assert FALSE_FAILURE == 1e-9
