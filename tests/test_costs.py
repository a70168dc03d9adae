"""Cost curves: what they say between and beyond what was measured, what rounds teach them, and their files."""

from __future__ import annotations

import copy
import json
import math
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.costs import CostCurve, Costs, isotonic
from foredraft.draft_cost import DraftCost
from foredraft.errors import InvalidInputError

ROWS = (1, 2, 4, 8, 16, 32)
PLANTED = (0.010, 0.0102, 0.011, 0.014, 0.024, 0.042)
TIMES = st.floats(1e-4, 1.0)
GRIDS = st.lists(st.lists(TIMES, min_size=6, max_size=6), min_size=1, max_size=3)


JUNK: Any = [None, -1, 0, "x", [], {}, [[]], 1e300, 10**400, math.nan, True, [1, 1], {"a": 1}]


def curve(seconds: tuple[float, ...] = PLANTED, **other: Any) -> CostCurve:
    return CostCurve(ROWS, (128,), [seconds], **other)


def of_grid(grid: list[list[float]]) -> CostCurve:
    return CostCurve(ROWS, [64, 512, 2048][: len(grid)], grid)


# Between and beyond


def test_measured_points_are_met_and_lines_run_between_them() -> None:
    for n, seconds in zip(ROWS, PLANTED, strict=True):
        assert curve().seconds(n) == pytest.approx(seconds)
    assert curve().seconds(6) == pytest.approx((0.011 + 0.014) / 2)
    assert curve().all_seconds(40).tolist() == pytest.approx([curve().seconds(n) for n in range(1, 41)])


def test_beyond_the_last_point_the_last_doubling_goes_on() -> None:
    slope = (0.042 - 0.024) / 16
    assert [curve().seconds(n) for n in (33, 64)] == pytest.approx([0.042 + slope, 0.042 + 32 * slope])


def test_contexts_are_interpolated_extrapolated_and_flat_below_the_first() -> None:
    two = CostCurve((1, 2), (100, 300), [[0.01, 0.02], [0.03, 0.05]])
    assert [two.seconds(1, c) for c in (0, 100, 200, 300, 500)] == pytest.approx([0.01, 0.01, 0.02, 0.03, 0.05])
    assert two.seconds(2, 200) == pytest.approx(0.035)
    assert two.seconds(1) == two.seconds(1, 100)
    assert curve().seconds(4, 5000) == curve().seconds(4, 0), "of one context nothing is known about others"


@given(GRIDS, st.integers(0, 5000), st.lists(st.tuples(st.integers(1, 80), st.integers(0, 4000), TIMES), max_size=30))
def test_more_rows_never_cost_less_whatever_was_measured_and_noted(
    grid: list[list[float]], context: int, notes: list[tuple[int, int, float]]
) -> None:
    costs = of_grid(grid)
    for n, where, seconds in notes:
        costs.note(n, where, seconds)
    found = costs.all_seconds(80, context)
    assert (np.diff(found) >= -1e-12 * found[1:]).all()
    assert (found > 0).all() and np.isfinite(found).all()


@given(GRIDS, st.integers(0, 1900))
def test_a_longer_context_never_costs_less(grid: list[list[float]], context: int) -> None:
    costs = of_grid(grid)
    assert (costs.all_seconds(32, context + 100) >= costs.all_seconds(32, context) * (1 - 1e-12)).all()


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=20))
def test_isotonic_values_increase_keep_the_mean_and_are_nearest(values: list[float]) -> None:
    found = isotonic(np.array(values))
    assert (np.diff(found) >= 0).all()
    assert found.mean() == pytest.approx(np.mean(values), abs=1e-9)
    assert isotonic(found).tolist() == found.tolist()
    # The condition of the least squares: no end of the sequence lies below its fit on the whole.
    left = np.cumsum(np.array(values) - found)
    assert (left >= -1e-9).all()


def test_v_is_in_plain_steps_of_the_same_batch() -> None:
    assert curve().v(1) == 1
    assert curve().v(8) == pytest.approx(1.4)
    batch = CostCurve((4, 8, 16), (128,), [[0.02, 0.03, 0.05]], sequences=4)
    assert batch.v(4) == 1 and batch.v(16) == pytest.approx(2.5)


@given(st.integers(2, 40), st.floats(0, 0.5), GRIDS)
def test_break_even_is_where_a_chain_emits_what_it_costs(rows: int, draft_step: float, grid: list[list[float]]) -> None:
    costs = of_grid(grid)
    price = costs.v(rows) + (rows - 1) * draft_step
    alpha = costs.break_even(rows, draft_step=draft_step)
    if alpha is None:
        assert price > rows
    else:
        assert sum(alpha**i for i in range(rows)) == pytest.approx(price, rel=1e-9)


def test_break_even_of_free_and_of_hopeless_drafts() -> None:
    flat = curve((0.01,) * 6)
    assert flat.break_even(5) == pytest.approx(0, abs=1e-9)
    assert flat.break_even(2, draft_step=0.3) == pytest.approx(0.3)
    steep = curve((0.01, 0.025, 0.05, 0.1, 0.2, 0.4))
    assert steep.break_even(2) is None


# Learning


def noisy(seconds: float, source: random.Random, spread: float = 0.1) -> float:
    return seconds * math.exp(source.gauss(0, spread))


@given(st.sampled_from([1, 2, 5, 8, 20, 32, 50]), st.floats(0.33, 3))
def test_a_machine_that_changes_as_a_whole_is_learned_from_any_rows(visited: int, factor: float) -> None:
    costs, before = curve(), curve().all_seconds(40)
    for _ in range(30):
        costs.note(visited, 128, curve().seconds(visited))
    for _ in range(100):
        costs.note(visited, 128, factor * curve().seconds(visited))
    assert costs.all_seconds(40) == pytest.approx(factor * before, rel=0.1)


def test_points_that_are_visited_win_over_the_calibration() -> None:
    real = {1: 0.012, 4: 0.012, 8: 0.025}  # another shape than what was measured
    costs, source = curve(), random.Random(1)
    for _ in range(100):
        for n, seconds in real.items():
            costs.note(n, 128, noisy(seconds, source))
    for n, seconds in real.items():
        assert costs.seconds(n) == pytest.approx(seconds, rel=0.06)  # 4 standard errors, the drift taken in
    assert costs.v(8) == pytest.approx(25 / 12, rel=0.1)


@pytest.mark.parametrize("stall", [10.0, 1e4])
def test_one_stalled_round_moves_nothing_by_more_than_a_few_percent(stall: float) -> None:
    costs, source = curve(), random.Random(2)
    for _ in range(50):
        costs.note(8, 128, noisy(0.014, source))
    before = costs.all_seconds(40)
    costs.note(8, 128, stall)
    assert costs.all_seconds(40) == pytest.approx(before, rel=0.07)


def test_rounds_teach_what_longer_contexts_cost_where_only_one_was_measured() -> None:
    def real(n: int, context: int) -> float:
        return curve().seconds(n) * (1 + 0.5 * (context - 128) / 1024)

    costs, source = curve(), random.Random(3)
    for turn in range(300):
        n, context = (1, 4, 8)[turn % 3], source.randrange(128, 1400)
        costs.note(n, context, noisy(real(n, context), source, 0.05))
    for n in (1, 4, 8, 16):
        for context in (200, 700, 1300):
            assert costs.seconds(n, context) == pytest.approx(real(n, context), rel=0.12)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, 1e300])
def test_what_cannot_be_a_time_teaches_nothing(seconds: float) -> None:
    costs = curve()
    costs.note(4, 128, seconds)
    assert costs.all_seconds(40).tolist() == curve().all_seconds(40).tolist()


def test_a_draft_costs_something_and_each_node_something() -> None:
    cost, source = DraftCost(), random.Random(4)
    for turn in range(200):
        nodes = turn % 6
        cost.note(nodes, noisy(0.001 + 0.0005 * nodes, source, 0.02))
    assert cost.per_draft == pytest.approx(0.001, rel=0.05)
    assert cost.per_node == pytest.approx(0.0005, rel=0.05)
    assert cost.seconds(3) == pytest.approx(cost.per_draft + 3 * cost.per_node)
    assert cost.seconds() == pytest.approx(0.001 + 2.5 * 0.0005, rel=0.1)


def test_a_first_draft_that_compiled_something_does_not_count_as_it_took() -> None:
    cost = DraftCost()
    cost.note(4, 5.0)
    for _ in range(9):
        cost.note(4, 0.0001)
    assert cost.seconds(4) < 0.00013


def test_a_drafter_whose_drafts_are_all_alike_is_taken_for_a_model() -> None:
    cost = DraftCost([(4, 0.008)] * 3)
    assert cost.per_node == pytest.approx(0.002) and cost.seconds(2) == pytest.approx(0.004)
    assert DraftCost([(0, 0.001)]).seconds(5) == pytest.approx(0.001)
    assert DraftCost().seconds() == 0


def test_drafts_that_became_dearer_are_learned() -> None:
    cost = DraftCost()
    for seconds in (0.001, 0.004):
        for turn in range(80):
            cost.note(turn % 3, seconds)
            cost.seconds()
    assert cost.seconds(1) == pytest.approx(0.004)


@given(st.lists(st.tuples(st.integers(0, 20), st.floats(0, 1)), min_size=1, max_size=80))
def test_draft_costs_are_never_negative(drafts: list[tuple[int, float]]) -> None:
    cost = DraftCost()
    for nodes, seconds in drafts:
        cost.note(nodes, seconds)
    assert cost.per_draft >= -1e-12 and cost.per_node >= 0


# Everything of a model


def everything() -> Costs:
    costs = Costs(
        {1: curve(), 2: CostCurve((2, 4), (64, 128), [[0.01, 0.02], [0.02, 0.02]], sequences=2)},
        about={"model": "abc", "backend": "native"},
        measured="2026-01-02T03:04:05+00:00",
        acceptance={"suffix": 0.25},
    )
    for turn in range(20):
        costs.note(1 + turn % 9, 100 + turn, 0.02 / (1 + turn % 3))
        costs.note_draft("suffix", turn % 4, 0.0001 * (turn % 4 + 1))
    return costs


def test_costs_come_back_from_json_as_they_were() -> None:
    costs = everything()
    again = Costs.from_json(json.loads(json.dumps(costs.to_json())))
    assert again.to_json() == costs.to_json()
    for context in (0, 100, 5000):
        assert again.curve.all_seconds(50, context).tolist() == costs.curve.all_seconds(50, context).tolist()
        assert again.seconds(3, context, sequences=2) == costs.seconds(3, context, sequences=2)
    assert again.draft_seconds("suffix", 3) == costs.draft_seconds("suffix", 3) > 0
    assert again.draft_seconds("ngram") == 0


@given(st.data())
def test_damaged_costs_are_refused_and_nothing_else_happens(data: st.DataObject) -> None:
    found = copy.deepcopy(everything().to_json())
    junk: Any = data.draw(st.sampled_from(JUNK))
    place: Any = found
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        deeper = isinstance(place[key], (dict, list)) and place[key]
        if not deeper or data.draw(st.booleans()):
            break
        place = place[key]
    if isinstance(place, dict) and data.draw(st.booleans()):
        del place[key]
    else:
        place[key] = junk
    try:
        costs = Costs.from_json(found)
    except InvalidInputError:
        return
    assert np.isfinite(costs.curve.all_seconds(40)).all()  # what was put there could have been measured
    assert math.isfinite(costs.draft_seconds("suffix", 4))


@pytest.mark.parametrize("found", [None, [], "costs", {}, {"foredraft": "costs", "version": 99}])
def test_what_are_no_costs_is_refused(found: Any) -> None:
    with pytest.raises(InvalidInputError):
        Costs.from_json(found)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (((1,), (0,), [[0.1]]), "rows"),
        (((2, 1), (0,), [[0.1, 0.1]]), "rows"),
        (((1, 2), (), []), "contexts"),
        (((1, 2), (0,), [[0.1]]), "seconds"),
        (((1, 2), (0,), [[0.1, 0.0]]), "seconds"),
        (((1, 2), (0,), [[0.1, math.nan]]), "seconds"),
    ],
)
def test_what_is_no_curve_is_refused_by_name(arguments: Any, named: str) -> None:
    with pytest.raises(InvalidInputError, match=named):
        CostCurve(*arguments)


def test_costs_need_the_curve_of_one_sequence() -> None:
    with pytest.raises(InvalidInputError, match="one sequence"):
        Costs({2: curve(sequences=2)})


def test_a_batch_that_was_not_measured_is_guessed_and_then_learned() -> None:
    costs = Costs({1: curve()})
    assert costs.seconds(8, 128, sequences=4) == pytest.approx(curve().seconds(8))
    for turn in range(40):  # a backend that takes one sequence after the other
        n = (1, 2, 4, 8)[turn % 4]
        costs.note(4 * n, 128, 4 * curve().seconds(n), sequences=4)
    for n in (1, 2, 4, 8):
        assert costs.seconds(4 * n, 128, sequences=4) == pytest.approx(4 * curve().seconds(n), rel=0.1)
    assert costs.curve.all_seconds(32).tolist() == curve().all_seconds(32).tolist(), "other batches are left alone"
    assert [found["sequences"] for found in costs.to_json()["curves"]] == [1]


def test_curves_of_batches_that_were_not_measured_increase() -> None:
    costs = Costs({1: curve(), 4: CostCurve((4, 8, 16), (128,), [[0.02, 0.03, 0.05]], sequences=4)})
    for size in (2, 3, 5, 7, 64):
        rows = costs.curve_of(size).rows
        assert rows[0] == size and all(a < b for a, b in pairwise(rows))
