"""A benchmark's figures, against those worked out by hand, and what must hold of any answers."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench_runs import CURVE, PEER, PLAIN, SUFFIX, answer, made, measured, results
from foredraft.bench.figures import (
    CellFigures,
    Interval,
    answers_of,
    figures_of,
    interval,
    promises_same_text,
    ratio,
    throughput_parts,
)
from foredraft.bench.records import Cell, Measurement, Position, Turn, by_position
from foredraft.metrics import summarize
from foredraft.types import RoundStats


def timed(tokens: int, seconds: float, ttft: float = 0.5, first: int = 0) -> Turn:
    """An answer of which only the times are known."""
    return Turn(5, tuple(range(first, first + tokens)), "", ttft, seconds)


def only(measurements: list[Measurement], cell: Cell = SUFFIX, **options: Any) -> CellFigures:
    """The figures of one cell on all items."""
    return figures_of(measurements, [cell], options.get("curve"))[0]


# By hand


def test_throughput_and_speedup_are_ratios_of_sums() -> None:
    found = only(
        [
            measured(PLAIN, "a", timed(10, 2.0)),
            measured(PLAIN, "b", timed(30, 4.5)),
            measured(SUFFIX, "a", timed(10, 1.0)),
            measured(SUFFIX, "b", timed(30, 4.0)),
        ]
    )
    assert found.throughput == pytest.approx(40 / 5)
    assert found.speedup is not None and found.decode_speedup is not None
    assert found.speedup.value == pytest.approx((40 / 5) / (40 / 6.5))
    # Of two items a resample has the first twice, the second twice, or both: the outer ones are the limits.
    assert found.speedup.low == pytest.approx((30 / 4) / (30 / 4.5))
    assert found.speedup.high == pytest.approx((10 / 1) / (10 / 2))
    assert found.decode_speedup.value == pytest.approx((38 / (0.5 + 3.5)) / (38 / (1.5 + 4.0)))
    assert (found.answers, found.tokens, found.items) == (2, 40, 2)


def test_only_what_both_cells_answered_is_compared() -> None:
    found = only(
        [
            measured(PLAIN, "a", timed(10, 2.0)),
            measured(PLAIN, "b", timed(10, 9.0), repetition=1),
            measured(SUFFIX, "a", timed(10, 1.0)),
            measured(SUFFIX, "b", timed(10, 1.0)),
            measured(SUFFIX, "c", timed(10, 5.0)),
        ]
    )
    assert found.speedup == Interval(2.0, 2.0, 2.0)
    assert found.throughput == pytest.approx(30 / 7)  # of all that it answered
    assert (found.equal, found.different) == (1, 0)


def test_nothing_is_compared_without_plain_decoding_nor_that_with_itself() -> None:
    alone = only([measured(SUFFIX, "a", timed(10, 1.0))])
    assert alone.speedup is None and alone.decode_speedup is None and alone.prediction is None
    plain = only([measured(PLAIN, "a", answer(made([0] * 9)))], PLAIN, curve=CURVE)
    assert plain.speedup is None and plain.prediction is None
    assert (plain.equal, plain.different) == (0, 0)


def test_a_single_items_interval_is_over_its_repetitions() -> None:
    both = [measured(cell, "a", timed(10, 1.0 + r), repetition=r) for cell in (PLAIN, SUFFIX) for r in range(2)]
    both[3] = replace(both[3], turns=(timed(10, 1.0),))
    found = only(both)
    assert found.items == 1
    assert found.speedup == pytest.approx((1.5, 1.0, 2.0))


def test_temperatures_have_a_plain_cell_each() -> None:
    warm, warm_plain = Cell("suffix", temperature=0.8), Cell("none", temperature=0.8)
    found = only(
        [
            measured(PLAIN, "a", timed(10, 8.0)),
            measured(warm_plain, "a", timed(10, 3.0, first=7)),
            measured(warm, "a", timed(10, 2.0, first=7)),
        ],
        warm,
    )
    assert found.speedup is not None and found.speedup.value == pytest.approx(1.5)
    assert (found.equal, found.different) == (1, 0)


def test_acceptance_by_position_counts_what_was_judged() -> None:
    # Depths 3, 3, 1, 0: accepted 3, 1, 0, 0. The second position was judged in two rounds, the first one in three.
    assert by_position([made([3, 1, 0, 0], [3, 3, 1, 0])]) == (Position(3, 2), Position(2, 1), Position(1, 1))
    # The answer ended with the draft's first token: its second one was never judged.
    assert by_position([made([0, 1], [2, 2], ended=True)]) == (Position(2, 1),)
    assert by_position([made([0, 0])]) == by_position([]) == ()


def test_counts_are_those_of_the_rounds() -> None:
    found = only([measured(SUFFIX, "a", answer(made([3, 0, 1], 4)), answer(made([0, 0], 2)))])
    assert (found.rounds, found.target_forwards, found.drafted, found.accepted) == (5, 5, 16, 4)
    assert found.lengths == (3, 1, 0, 1)
    assert found.mean_accepted_length == pytest.approx(9 / 5)
    assert found.acceptance_rate == pytest.approx(4 / 16)
    assert found.peak_memory == 512_000_000
    plain = only([measured(PLAIN, "a", answer(made([0, 0, 0])))], PLAIN)
    assert plain.mean_accepted_length == 1.0 and plain.acceptance_rate is None and plain.lengths == (3,)


def test_counts_that_somebody_did_not_tell_are_not_known() -> None:
    told = replace(timed(10, 1.0), target_forwards=4, drafted=8, accepted=6)
    found = only([measured(PEER, "a", told), measured(PEER, "b", timed(10, 1.0))], PEER)
    assert (found.target_forwards, found.drafted, found.mean_accepted_length, found.split) == (None, None, None, None)
    known = only([measured(PEER, "a", told)], PEER)
    assert known.mean_accepted_length == 2.5 and known.acceptance_rate == 0.75 and known.draft_forwards is None


def test_times_of_answers_are_spread() -> None:
    found = only([measured(SUFFIX, str(i), timed(11, 2.0 + i, ttft=1.0)) for i in range(3)])
    assert found.ttft == (1.0, 1.0, 1.0)
    assert found.tpot == pytest.approx((0.2, 0.28, 0.2))
    assert only([measured(SUFFIX, "a", timed(1, 1.0))]).tpot is None


def test_the_time_split_by_hand() -> None:
    found = only([measured(SUFFIX, "a", answer(made([1, 0], 2), prefill=0.3, other=0.07))])
    assert found.split == pytest.approx((0.3, 0.002, 0.02, 0.001, 0.07))


def test_equality_is_by_item_turn_and_repetition() -> None:
    plain = measured(PLAIN, "a", timed(3, 1.0), timed(3, 1.0, first=5))
    same, other = plain.turns
    assert (lambda f: (f.equal, f.different))(only([plain, replace(plain, cell="suffix")])) == (2, 0)
    swapped = replace(plain, cell="suffix", turns=(other, same))
    assert (lambda f: (f.equal, f.different))(only([plain, swapped])) == (0, 2)
    later = replace(plain, cell="suffix", repetition=1)
    assert (lambda f: (f.equal, f.different))(only([plain, later])) == (0, 0)


@pytest.mark.parametrize(
    ("cell", "promised"),
    [
        (Cell("suffix"), True),
        (Cell("draft:tiny"), True),
        (Cell("draft:tiny", rule="token"), True),
        (Cell("suffix", temperature=1), True),
        (Cell("none", temperature=1), True),
        (Cell("hybrid:suffix+draft:tiny", temperature=1), True),
        (Cell("auto", temperature=1), True),
        (Cell("draft:tiny", temperature=1), False),
        (Cell("early_exit:4", temperature=1), False),
        (Cell("draft:tiny", rule="seed-exact", temperature=1), True),
        (Cell("suffix", rule="walk", temperature=1), False),
        (Cell("ngram", rule="lossy-typical", temperature=1), False),
        (Cell("made up", temperature=1), False),
        (PEER, False),
    ],
)
def test_which_cells_promise_the_same_text(cell: Cell, promised: bool) -> None:
    assert promises_same_text(cell) == promised


def test_figures_come_by_cell_then_by_category() -> None:
    run = results(cells=(SUFFIX, PLAIN))
    found = [(f.cell, f.category) for f in run.figures]
    assert found == [(cell, category) for cell in (SUFFIX, PLAIN) for category in ("", "chat", "code")]
    whole, chat, code = run.figures[:3]
    assert whole.tokens == chat.tokens + code.tokens and whole.answers == 12
    assert figures_of(run.measurements, [Cell("ngram")], None) == []


def test_the_prediction_is_of_what_the_figures_measure() -> None:
    run = results()
    [found] = [f for f in run.figures if f.cell == SUFFIX and not f.category]
    assert found.prediction is not None and found.decode_speedup is not None
    assert found.prediction.measured == pytest.approx(found.decode_speedup.value)
    assert found.prediction.measured_tokens_per_round == pytest.approx(found.mean_accepted_length)
    assert [f.prediction for f in run.figures if f.cell in (PLAIN, PEER)] == [None] * 6


def test_figures_agree_with_those_of_an_answer() -> None:
    """`metrics.summarize` folds the same rounds for the command line and the API."""
    turn = answer(made([2, 0, 1, 3], 4), other=0.01)
    assert turn.rounds is not None
    columns = zip(*(getattr(turn.rounds, name) for name in ("drafted", "accepted", "emitted", "depth")), strict=True)
    rounds = [RoundStats(d, {}, a, {}, e, 0, 0.001, 0.01, 0.0005, depth=depth) for d, a, e, depth in columns]
    stats = summarize(rounds, ttft_seconds=turn.ttft, seconds=turn.seconds, drafter="", rule="", backend="")
    found = only([measured(SUFFIX, "a", turn)])
    assert found.throughput == pytest.approx(stats.tokens_per_second)
    assert found.mean_accepted_length == stats.mean_accepted_length
    assert found.acceptance_rate == stats.acceptance_rate
    assert found.tpot is not None and stats.tpot_ms is not None
    assert 1e3 * found.tpot.median == pytest.approx(stats.tpot_ms)
    assert found.split is not None
    assert found.split[1:4] == pytest.approx((stats.draft_seconds, stats.verify_seconds, stats.accept_seconds))


# Whatever the answers

SECONDS = st.floats(1e-4, 100)


@st.composite
def runs(draw: st.DrawFn) -> list[Measurement]:
    """Answers of two cells to the same items, in some order."""
    found = []
    for item in range(draw(st.integers(1, 5))):
        for repetition in range(draw(st.integers(1, 3))):
            accepted = draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
            for cell in (PLAIN, SUFFIX):
                rounds = made([0] * len(accepted) if cell == PLAIN else accepted, 0 if cell == PLAIN else 4)
                turn = answer(rounds, prefill=draw(SECONDS), other=draw(SECONDS))
                found.append(measured(cell, str(item), turn, repetition=repetition))
    return draw(st.permutations(found))


@given(runs())
def test_splits_sum_to_the_end_to_end_seconds(found: list[Measurement]) -> None:
    for figures in figures_of(found, [PLAIN, SUFFIX], None):
        mine = answers_of(found, figures.cell).values()
        assert figures.split is not None
        assert sum(figures.split) == pytest.approx(sum(turn.seconds for m in mine for turn in m.turns))
        assert min(figures.split) > -1e-9
        assert sum((i + 1) * count for i, count in enumerate(figures.lengths)) == figures.tokens


@given(runs())
def test_intervals_have_their_value(found: list[Measurement]) -> None:
    for figures in figures_of(found, [SUFFIX], None):
        assert figures.speedup is not None
        assert figures.speedup.low <= figures.speedup.value <= figures.speedup.high
        mine, plain = (answers_of(found, cell).values() for cell in (SUFFIX, PLAIN))
        each = [throughput_parts(a) + throughput_parts(b) for a, b in zip(mine, plain, strict=True)]
        tokens, seconds, plain_tokens, plain_seconds = np.array(each).sum(0)
        assert figures.speedup.value == pytest.approx(tokens / seconds / (plain_tokens / plain_seconds))


@given(runs(), st.randoms())
def test_the_order_of_the_answers_changes_nothing(found: list[Measurement], chance: random.Random) -> None:
    before = figures_of(found, [PLAIN, SUFFIX], CURVE)
    chance.shuffle(found)
    assert figures_of(found, [PLAIN, SUFFIX], CURVE) == before


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    """100 samples of 30 items: an interval that held 95 % misses more than 15 with odds of about 1e-4."""
    chance = np.random.default_rng(5)
    held = 0
    for _ in range(100):
        plain, fast = chance.gamma(4, 1, 30), chance.gamma(4, 0.5, 30)  # twice as fast
        groups = [
            {(str(i), 0): measured(PLAIN, str(i), timed(1, float(s), ttft=float(s))) for i, s in enumerate(seconds)}
            for seconds in (fast, plain)
        ]
        found = interval(groups, throughput_parts, ratio)
        assert found is not None
        held += found.low <= 2 <= found.high
    assert 85 <= held <= 99


def test_what_is_not_a_number_is_no_interval() -> None:
    group = {("a", 0): measured(PLAIN, "a", timed(1, 1.0))}
    assert interval([group, group], lambda m: (0, 0), ratio) is None
    assert interval([group, group], lambda m: (None, 1), ratio) is None
    assert interval([group, {}], throughput_parts, ratio) is None
