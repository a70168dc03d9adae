"""The formula, what it foretells of measured rounds, the curves it takes, its plot and its command."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.bench import limits, theory_plot
from foredraft.bench.records import Rounds
from foredraft.bench.theory import (
    Prediction,
    best_k,
    break_even,
    expected_by_position,
    expected_tokens,
    free,
    predict,
    round_cost,
    speedup,
)
from foredraft.bench.verify_curve import read_verify_curve
from foredraft.cli import main
from foredraft.costs import CostCurve, Costs
from foredraft.errors import InvalidInputError, UnsupportedError

RATES = st.floats(0, 1)
CURVE = CostCurve((1, 2, 4, 8), (0, 100, 1000), [[0.01, 0.011, 0.013, 0.02], [0.011, 0.012, 0.015, 0.022], [0.02] * 4])
JUNK: Any = [None, -1, 1.5, math.nan, "x", True]


def rising(rows: int) -> float:
    return 1 + 0.1 * (rows - 1)


# The formula


@pytest.mark.parametrize(
    ("alpha", "tokens", "gain"),
    [(0.4, 1.65, 1.53), (0.6, 2.31, 2.13), (0.8, 3.36, 3.11), (0.9, 4.10, 3.79), (0.95, 4.52, 4.19)],
)
def test_published_values_are_met(alpha: float, tokens: float, gain: float) -> None:
    assert round(expected_tokens(alpha, 4), 2) == tokens
    assert round(speedup(alpha, 4, 1 / 50), 2) == gain


def test_the_value_that_was_misprinted() -> None:
    assert expected_tokens(0.6, 4) == pytest.approx(2.3056)


@given(st.floats(0, 0.999), st.integers(0, 64))
def test_the_sum_is_the_fraction_of_the_paper(alpha: float, k: int) -> None:
    assert expected_tokens(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))


@pytest.mark.parametrize("k", [0, 1, 7, 1024])
def test_the_ends_are_exact(k: int) -> None:
    assert expected_tokens(1, k) == k + 1
    assert expected_tokens(0, k) == 1


@given(RATES, st.integers(0, 20))
def test_one_rate_at_every_position_is_the_formula(alpha: float, k: int) -> None:
    assert expected_by_position([alpha] * k) == pytest.approx(expected_tokens(alpha, k))


def test_each_position_counts_only_if_all_before_it_were_accepted() -> None:
    assert expected_by_position([0.5, 0.25, 0, 1]) == 1 + 0.5 + 0.125
    assert expected_by_position([]) == 1


@given(RATES, st.floats(0, 2), st.floats(0, 1), st.integers(0, 24))
def test_the_best_k_is_the_first_that_no_other_beats(alpha: float, cost: float, slope: float, most: int) -> None:
    def v(rows: int) -> float:
        return 1 + slope * (rows - 1)

    best = best_k(alpha, cost, v, most)
    gains = [speedup(alpha, k, cost, v) for k in range(most + 1)]
    assert gains[best] == max(gains) >= 1 and best == gains.index(max(gains))


@given(st.integers(1, 32), st.floats(0, 1), st.floats(0, 1))
def test_at_break_even_drafting_is_as_fast_as_plain_decoding(k: int, cost: float, slope: float) -> None:
    def v(rows: int) -> float:
        return 1 + slope * (rows - 1)

    rate = break_even(k, cost, v)
    if rate is None:
        assert speedup(1, k, cost, v) < 1
    else:
        assert speedup(rate, k, cost, v) == pytest.approx(1, abs=1e-9)


def test_break_even_agrees_with_the_one_of_a_measured_curve() -> None:
    for k in (1, 2, 3):
        assert break_even(k, 0.05, CURVE.v) == pytest.approx(CURVE.break_even(k + 1, draft_step=0.05))
    assert break_even(3, 2.0, CURVE.v) is None is CURVE.break_even(4, draft_step=2.0)


def test_what_costs_nothing_pays_at_any_acceptance() -> None:
    assert break_even(5) == 0.0
    assert best_k(0.0, 0.0) == 0 and best_k(0.9, 3.0) == 0
    assert round_cost(4, 0.02) == 1.08 and free(7) == 1


@pytest.mark.parametrize("junk", [*JUNK, 1.01])
def test_a_wrong_acceptance_is_refused(junk: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"alpha is .*, but must be a number in \[0, 1\]"):
        expected_tokens(junk, 4)
    with pytest.raises(InvalidInputError, match="rate is"):
        expected_by_position([0.5, junk])


@pytest.mark.parametrize("junk", [*JUNK, 1025])
def test_a_wrong_number_of_tokens_is_refused(junk: Any) -> None:
    for function in (partial(expected_tokens, 0.5), partial(speedup, 0.5), break_even):
        with pytest.raises(InvalidInputError, match=r"k is .*, but must be an integer in"):
            function(junk)
    with pytest.raises(InvalidInputError, match="most is"):
        best_k(0.5, most=junk)
    with pytest.raises(InvalidInputError, match=r"k is 0, but must be an integer in \[1,"):
        break_even(0)


def test_wrong_costs_are_refused() -> None:
    for junk in (-0.1, math.inf, None):
        with pytest.raises(InvalidInputError, match=r"draft_cost is .*, but must be a number of plain"):
            speedup(0.5, 2, junk)  # type: ignore[arg-type]
    for junk in (0.0, math.nan, None):
        with pytest.raises(InvalidInputError, match=r"v\(3\) is .*, but must be a number > 0"):
            speedup(0.5, 2, 0.0, lambda _, junk=junk: junk)  # type: ignore[misc]


# Predictions


def answer(depths: list[int], accepted: list[int], *, cut: bool = False, verify: list[float] | None = None) -> Rounds:
    """Rounds of chains; if `cut`, the answer ended with the last accepted token."""
    emitted = [a + 1 for a in accepted]
    emitted[-1] -= cut
    count = len(depths)
    return Rounds(
        drafted=tuple(depths),
        depth=tuple(depths),
        accepted=tuple(accepted),
        emitted=tuple(emitted),
        draft_forwards=(0,) * count,
        draft_seconds=tuple(0.002 * d for d in depths),
        verify_seconds=tuple(verify or [0.03] * count),
        accept_seconds=(0.001,) * count,
    )


def as_by_the_curve(depths: list[int], accepted: list[int], context: int) -> Rounds:
    """The same, each forward as long as the curve says."""
    cached, seconds = context - 1, []
    for depth, a in zip(depths, accepted, strict=True):
        seconds.append(CURVE.seconds(1 + depth, cached))
        cached += a + 1
    return answer(depths, accepted, verify=seconds)


def own(rounds: Rounds) -> float:
    """Seconds of all rounds but the first, with half a millisecond each that nobody measured."""
    columns = (rounds.draft_seconds, rounds.verify_seconds, rounds.accept_seconds)
    return sum(sum(column[1:]) for column in columns) + 0.0005 * (len(rounds) - 1)


def predicted(answers: list[Rounds], contexts: list[int], plain: list[Rounds], plain_contexts: list[int]) -> Prediction:
    """With what these rounds took all together."""
    plain_tokens = sum(len(r) - 1 for r in plain)
    found = predict(
        answers,
        contexts,
        CURVE,
        plain=plain,
        plain_contexts=plain_contexts,
        decode_seconds=sum(map(own, answers)),
        plain_tpot=sum(map(own, plain)) / plain_tokens,
        tokens=sum(sum(r.emitted) - 1 for r in answers),
    )
    assert found is not None
    return found


CONTEXTS = [20, 300]
PLAIN = [as_by_the_curve([0] * n, [0] * n, c) for n, c in zip((30, 40), CONTEXTS, strict=True)]


def test_forwards_as_the_curve_says_and_drafts_of_one_depth_are_foretold_exactly() -> None:
    rng = random.Random(0)
    answers = [as_by_the_curve([3] * 20, [rng.choice([0, 0, 1, 2, 3]) for _ in range(20)], c) for c in CONTEXTS]
    found = predicted(answers, CONTEXTS, PLAIN, CONTEXTS)
    assert found.speedup == pytest.approx(found.measured)
    assert found.tokens_per_round == pytest.approx(found.measured_tokens_per_round)
    assert found.verify_seconds == pytest.approx(found.measured_verify_seconds)
    assert found.plain_seconds == pytest.approx(found.measured_plain_seconds)
    assert found.draft_seconds == pytest.approx(0.006)
    assert found.other_seconds == pytest.approx(0.0015)
    assert found.rounds == 40
    assert found.explanation == f"predicted {found.measured:.2f}x, measured {found.measured:.2f}x (+0%)"


def test_the_measured_speedup_is_of_what_follows_the_first_token() -> None:
    rounds = [as_by_the_curve([2] * 4, [2, 1, 0, 2], 20)]
    found = predicted(rounds, [20], PLAIN[:1], [20])
    assert found.measured == pytest.approx((3 + 2 + 1 + 3 - 1) / own(rounds[0]) * own(PLAIN[0]) / 29)


def test_the_prediction_by_hand() -> None:
    rounds = [answer([2, 1, 0], [1, 1, 0])]  # after 10 tokens of prompt: 9, then 11, then 13 cached
    first, second = 1.0, 0.0
    by_depth = [1, 1 + first, 1 + first + first * second]
    found = predicted(rounds, [10], [answer([0, 0], [0, 0])], [10])
    assert found.tokens_per_round == pytest.approx((by_depth[2] + by_depth[1] + by_depth[0]) / 3)
    assert found.verify_seconds == pytest.approx((CURVE.seconds(2, 11) + CURVE.seconds(1, 13)) / 2)
    assert found.measured_verify_seconds == pytest.approx(0.03)
    assert found.plain_seconds == pytest.approx(CURVE.seconds(1, 10) + 0.0015)
    assert found.measured_plain_seconds == pytest.approx(0.0315)
    round_seconds = found.draft_seconds + found.verify_seconds + found.other_seconds
    assert found.speedup == pytest.approx((3 * found.tokens_per_round - 1) / (2 * round_seconds) * found.plain_seconds)


def test_a_draft_cut_by_the_end_of_the_answer_is_judged_only_up_to_there() -> None:
    whole = [answer([2] * 4, [2, 2, 0, 2]), answer([2] * 4, [2, 2, 0, 1], cut=True)]
    found = predicted(whole, [20, 20], PLAIN, CONTEXTS)
    # First position 6 of 8; second 5 of 5, as the one of the cut draft was never judged. Cut off: 1 + 1 tokens.
    expected = 8 * (1 + 0.75 + 0.75) - 2
    assert found.tokens_per_round == pytest.approx(expected / 8)
    assert found.measured_tokens_per_round == pytest.approx((3 + 3 + 1 + 3 + 3 + 3 + 1 + 1) / 8)


@pytest.mark.parametrize("stop", [0.02, 0.2])
def test_answers_that_end_anywhere_are_foretold_right_on_average(stop: float) -> None:
    rng = random.Random(1)
    answers: list[Rounds] = []
    while len(answers) < 400:
        depths: list[int] = []
        accepted: list[int] = []
        cut = False
        while len(depths) < 200:
            depth = rng.randrange(5)
            reached = next((i for i in range(depth) if rng.random() > 0.8), depth)
            ended = next((i + 1 for i in range(reached + 1) if rng.random() < stop), None)  # the i-th token ends it
            depths.append(depth)
            accepted.append(reached if ended is None else min(reached, ended))
            if ended is not None:
                cut = ended <= reached
                break
        answers.append(answer(depths, accepted, cut=cut))
    found = predicted(answers, [20] * len(answers), PLAIN, CONTEXTS)
    assert found.tokens_per_round == pytest.approx(found.measured_tokens_per_round, rel=0.03)


def test_a_position_that_nobody_judged_has_the_rate_before_it() -> None:
    rounds = [answer([1, 1, 3], [1, 0, 0]), answer([1, 2], [1, 1], cut=True)]
    found = predicted(rounds, [20, 20], PLAIN, CONTEXTS)
    a = 3 / 5
    cut_off = 1 + a  # of the last draft: its own token was accepted, the next one at the same rate
    whole = 3 * (1 + a) + (1 + a + a**2 + a**3) + (1 + a + a**2)
    assert found.tokens_per_round == pytest.approx((whole - cut_off) / 5)


def test_slow_forwards_are_named_as_what_is_off() -> None:
    rounds = [answer([3] * 20, [1] * 20, verify=[0.05] * 20)]
    found = predicted(rounds, [20], PLAIN, CONTEXTS)
    assert found.error > 0.10
    assert "the forwards are off most" in found.explanation and "50.00 measured" in found.explanation
    assert f"({found.error:+.0%})" in found.explanation


def test_a_slow_machine_that_slows_plain_decoding_alike_is_no_error() -> None:
    slower = [answer([0] * 30, [0] * 30, verify=[2 * s for s in PLAIN[0].verify_seconds])]
    as_measured = as_by_the_curve([1] * 20, [1] * 20, 20)
    rounds = answer([1] * 20, [1] * 20, verify=[2 * s for s in as_measured.verify_seconds])
    found = predicted([rounds], [20], slower, [20])
    assert found.measured_verify_seconds > 1.9 * found.verify_seconds
    assert abs(found.error) < 0.10


@pytest.mark.parametrize("readily", ["more", "less"])
def test_drafts_whose_acceptance_depends_on_their_depth_are_named_as_what_is_off(readily: str) -> None:
    accepted = [0, 6, 0, 6] if readily == "more" else [1, 0, 1, 6]
    rounds = as_by_the_curve([1, 6] * 20, accepted * 10, 20)
    found = predicted([rounds], [20], PLAIN, CONTEXTS)
    assert abs(found.error) > 0.10
    assert found.explanation.endswith(f"as long drafts are accepted {readily} readily than short ones")
    assert "the tokens are off most" in found.explanation


def test_a_hundred_thousand_rounds_are_no_matter() -> None:
    rng = random.Random(2)
    answers = []
    for _ in range(1000):
        depths = [rng.randrange(9) for _ in range(100)]
        answers.append(answer(depths, [rng.randint(0, d) for d in depths]))
    assert predicted(answers, [rng.randint(1, 900) for _ in answers], PLAIN, CONTEXTS).rounds == 100_000


def test_answers_of_one_round_foretell_nothing() -> None:
    one, more = [answer([2], [1])], [answer([2, 2], [1, 0])]
    rest: Any = {"decode_seconds": 1.0, "plain_tpot": 1.0}
    for rounds, plain, tokens in ((one, PLAIN, 1), (more, [answer([0], [0])], 2), ([], PLAIN, 0)):
        contexts = ([20] * len(rounds), [20] * len(plain))
        assert (
            predict(rounds, contexts[0], CURVE, plain=plain, plain_contexts=contexts[1], tokens=tokens, **rest) is None
        )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"contexts": [20, 20]}, "contexts is .*, but must be 1 numbers of tokens >= 1"),
        ({"contexts": [0]}, "contexts is"),
        ({"plain_contexts": [20]}, "contexts is .*, but must be 2 numbers"),
        ({"tokens": 3}, "tokens is 3, but must be 2: those after each answer's first"),
        ({"decode_seconds": 0}, "decode_seconds is 0, but must be a number of seconds > 0"),
        ({"plain_tpot": math.nan}, "plain_tpot is nan"),
    ],
)
def test_figures_that_do_not_fit_are_refused(wrong: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {
        "contexts": [20],
        "plain": PLAIN,
        "plain_contexts": CONTEXTS,
        "decode_seconds": 1.0,
        "plain_tpot": 1.0,
        "tokens": 2,
    }
    with pytest.raises(InvalidInputError, match=message):
        predict([answer([2, 2], [1, 0])], curve=CURVE, **(right | wrong))


# Verify curves


def read(tmp_path: Path, text: str) -> CostCurve:
    file = tmp_path / "curve"
    file.write_text(text, encoding="utf-8")
    return read_verify_curve(file)


POINTS = {1: 4.0, 2: 4.4, 8: 10.0}


@pytest.mark.parametrize(
    "text",
    [
        "rows,ms\n1,4\n2,4.4\n8,10\n",
        "\ufeffn, extra, v\r\n8,x,2.5\r\n\r\n2,x,1.1\r\n",
        "1,4\n2,4.4\n8,10",
        json.dumps([{"rows": n, "seconds": t} for n, t in POINTS.items()]),
        json.dumps([{"n": n, "v": t / 4} for n, t in POINTS.items() if n > 1]),
        json.dumps(list(POINTS.items())),
        json.dumps(POINTS),
        json.dumps({"curve": [{"rows": n, "ms": t, "v": 9, "break_even": None} for n, t in POINTS.items()]}),
        json.dumps({"curve": CostCurve(tuple(POINTS), (64,), [list(POINTS.values())]).to_json()}),
        json.dumps(Costs({1: CostCurve(tuple(POINTS), (64,), [list(POINTS.values())])}).to_json()),
    ],
)
def test_every_kind_of_file_is_read(tmp_path: Path, text: str) -> None:
    curve = read(tmp_path, text)
    assert [curve.v(n) for n in (1, 2, 8)] == pytest.approx([1, 1.1, 2.5])
    assert curve.v(5) == pytest.approx((1.1 + 2.5) / 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be pairs of rows and costs. Give a file of foredraft's costs"),
        ("{", "no whole JSON"),
        ("[" * 100_000, "no whole JSON"),
        ("[1, 2]", "must be pairs"),
        ("1\n2", "must be pairs"),
        ("a,b\n1,2", "'a' and 'b' must be a number of rows and its cost"),
        ("rows,time\n1,2", "each point must have rows or n, and seconds, ms or v"),
        ("rows,v\n1", "must be pairs"),
        ("rows,x,v\n1,2", "each point must have"),
        ("2,4\n3,5", "the cost of one row and of some more must be there"),
        ("1,4", "the cost of one row and of some more must be there"),
        ("1,4\n2,-1", "'2' and '-1' must be a whole number of rows >= 1 and a cost > 0"),
        ("1,4\n2.5,5", "whole number of rows"),
        ("1,4\n2,nan", "a cost > 0"),
        ("1,4\n2,5\n2,6", "it has 2 rows twice"),
        ('{"foredraft": "costs", "version": 9}', "version is 9"),
        ('{"rows": [1, 2], "contexts": [0]}', "These are no costs"),
        ('{"curve": null}', "must be pairs"),
    ],
)
def test_a_file_that_is_no_curve_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as refused:
        read(tmp_path, text)
    assert str(refused.value).startswith(f"{tmp_path / 'curve'} is no verify curve: ")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for file in (tmp_path / "none", tmp_path, tmp_path / "bytes"):
        with pytest.raises(InvalidInputError, match=r"Cannot read .*: give a file of foredraft's costs"):
            read_verify_curve(file)


# The plot


@pytest.mark.parametrize(
    ("alpha", "k", "cost", "v"),
    [(0.8, 4, 0.02, free), (0.6, 2, 0.02, CURVE.v), (0.95, 64, 0.0, free), (0.05, 3, 2.0, free), (1, 0, 0, rising)],
)
def test_the_plot_is_one_svg_with_its_title(alpha: float, k: int, cost: float, v: Any) -> None:
    drawn = theory_plot.draw(alpha, k, cost, v)
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert f"acceptance {theory_plot.percent(alpha)}, draft cost {cost:g}" in drawn
    assert drawn == theory_plot.draw(alpha, k, cost, v)


@pytest.mark.parametrize(
    ("alpha", "shown"), [(0.8, [0.6, 0.7, 0.8, 0.9]), (0.1, [0.1, 0.2]), (1, [0.8, 0.9, 1]), (0, [0, 0.1])]
)
def test_the_plot_shows_acceptances_nearby(alpha: float, shown: list[float]) -> None:
    assert theory_plot.neighbours(alpha) == shown


def test_without_matplotlib_the_plot_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'foredraft\[bench\]'"):
        theory_plot.draw(0.8, 4)


# The command


class Ran(NamedTuple):
    status: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def theory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `foredraft theory` in this process, 80 columns wide, on a machine that reads 1 GB/s and does 100 GFLOP/s."""
    for name, value in (("COLUMNS", "80"), ("TERM", "xterm-256color"), ("TQDM_DISABLE", "1")):
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def measure(device: str, *, threads: int | None, dtype: Any, notify: Any) -> limits.Machine:
        notify("Measuring")
        return limits.Machine("cpu", threads or 2, str(dtype or "float32").removeprefix("torch."), 1e9, 1e11)

    monkeypatch.setattr(limits, "measure_machine", measure)

    def run(*arguments: object) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main(["theory", *map(str, arguments)])
        status = ended.value.code
        assert status is None or isinstance(status, int)
        return Ran(status or 0, *capsys.readouterr())

    return run


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_command_says_what_is_gained_and_when(theory: Run) -> None:
    result = theory("--alpha", 0.8, "-k", 4, "--draft-cost", 0.02)
    assert result.status == 0 and result.err == ""
    shown = lines(result.out)
    assert shown[0] == "K = 4, acceptance 80%, draft cost 0.02, verifying is free"
    for line in (
        "tokens of a round 3.36 expected, the target's own one included",
        "speedup 3.11x over plain decoding",
        "break-even 7.4% acceptance above which that pays",
        "best 3.82x with K = 11",
        "4 3.36 1.08 3.11x 7.4%",
        "11 4.66 1.22 3.82x 18.0% best",
        "60% 2.31 2.13x 6 2.17x",
        "80% 3.36 3.11x 11 3.82x",
    ):
        assert line in shown
    assert max(map(len, result.out.splitlines())) <= 80
    first = shown.index("K tokens cost speedup break-even") + 1
    assert [line.split()[0] for line in shown[first : first + 16]] == [str(k) for k in range(1, 17)]


def test_the_command_takes_the_best_k_by_itself(theory: Run) -> None:
    found = json.loads(theory("--alpha", 0.8, "--draft-cost", 0.02, "--json").out)["theory"]
    assert found["k"] == found["best"]["k"] == 11
    assert found["speedup"] == pytest.approx(speedup(0.8, 11, 0.02))
    assert "best 5.00x with K = 64, the most there is" in lines(theory("--alpha", 0.8).out)


def test_the_command_says_where_drafting_does_not_pay(theory: Run) -> None:
    shown = lines(theory("--alpha", 0.1, "--draft-cost", 2).out)
    assert "best 1.00x plain decoding: do not draft" in shown
    assert "1 1.10 3.00 0.37x never" in shown
    assert not any("break-even 0" in line for line in shown)


def test_the_command_takes_a_verify_curve_and_a_context(theory: Run, tmp_path: Path) -> None:
    file = tmp_path / "curve.json"
    file.write_text(json.dumps(Costs({1: CURVE}).to_json()), encoding="utf-8")
    for context in (None, 1000):
        options = [] if context is None else ["--context", context]
        found = json.loads(theory("--alpha", 0.7, "-k", 3, "--verify-curve", file, "--json", *options).out)["theory"]
        assert found["cost"] == pytest.approx(CURVE.v(4, context))
    assert f"verifying costs as in {file}" in theory("--alpha", 0.7, "--verify-curve", file).out


def test_json_holds_everything(theory: Run) -> None:
    result = theory("--alpha", 0.8, "-k", 20, "--draft-cost", 0.02, "--json")
    assert result.out.count("\n") == 1
    found = json.loads(result.out)["theory"]
    assert [row["k"] for row in found["by_k"]] == [*range(1, 17), 20]
    assert all(row["speedup"] == pytest.approx(speedup(0.8, row["k"], 0.02)) for row in found["by_k"])
    assert [row["alpha"] for row in found["by_alpha"]] == [0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
    assert all(row["best"]["k"] == best_k(row["alpha"], 0.02) for row in found["by_alpha"])


def test_the_command_draws(theory: Run, tmp_path: Path) -> None:
    file = tmp_path / "theory.svg"
    assert f"written: {file}" in theory("--alpha", 0.8, "-k", 4, "--plot", file).out
    assert file.read_text(encoding="utf-8") == theory_plot.draw(0.8, 4)


def test_the_machine_by_itself(theory: Run) -> None:
    result = theory("--machine", "--threads", 1)
    assert lines(result.out)[1:] == [
        "memory 1.0 GB/s reading, cpu, 1 thread",
        "arithmetic 100 GFLOP/s matrix product, float32",
    ]
    assert "Measuring" in result.err


def test_the_machine_and_a_model(theory: Run, tiny_folder: Path) -> None:
    result = theory("--machine", tiny_folder, "--measured", 5000, "--alpha", 0.75)
    assert result.status == 0, result.err
    found = json.loads(theory("--machine", tiny_folder, "--measured", 5000, "--alpha", 0.75, "--json").out)
    seen, theory_too = found["machine"], found["theory"]
    assert theory_too["alpha"] == 0.75
    allowed = limits.Limits(1e9, 1e11, seen["bytes_per_token"], seen["parameters"])
    assert seen["bytes_per_token"] == 4 * seen["parameters"]
    assert (
        seen["plain_tokens_per_second"] == pytest.approx(allowed.plain) == pytest.approx(1e9 / seen["bytes_per_token"])
    )
    assert seen["free_width"] == pytest.approx(200)
    assert seen["share_of_plain"] == pytest.approx(5000 / allowed.plain)
    assert seen["share_of_speculative"] == pytest.approx(allowed.share(5000, 0.75))
    assert [row["alpha"] for row in seen["speculative"]] == [0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 0.95]
    share = f"{seen['share_of_plain']:.0%} of that limit, {seen['share_of_speculative']:.0%} of that with drafts"
    assert f"measured 5,000.0 tokens/s {share}" in lines(result.out)
    assert "free width 200.0 rows that cost no more than one, at the limit" in lines(result.out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "Error: Give --alpha, the acceptance of drafted tokens (such as 0.8), or --machine."),
        (["--alpha", "1.5"], "Error: alpha is 1.5, but must be a number in [0, 1]"),
        (["--alpha", "nan"], "Error: alpha is nan"),
        (["--alpha", "0.8", "-k", "65"], "Error: k is 65, but must be an integer in [0, 64]"),
        (["--alpha", "0.8", "-k", "-1"], "Error: k is -1"),
        (["--alpha", "0.8", "--draft-cost", "-1"], "Error: draft_cost is -1.0, but must be a number of plain steps"),
        (["--alpha", "0.8", "--verify-curve", "no"], "Error: Cannot read no ("),
        (
            ["--alpha", "0.8", "--context", "5"],
            "Error: context is 5, but must be an integer >= 0, for a --verify-curve",
        ),
        (["--alpha", "0.8", "--plot", "no/such/folder.svg"], "Error: Cannot write no/such/folder.svg"),
        (["--alpha", "0.8", "smollm2-135m"], "Error: A model such as 'smollm2-135m' belongs to --machine"),
        (["--machine", "--measured", "5"], "Error: --measured is compared with the limit of a model"),
        (["--machine", "--plot", "a.svg"], "Error: --plot draws what --alpha gains: give --alpha."),
        (["--machine", "smolm2-135m"], "Error: There is no model 'smolm2-135m'. Did you mean"),
        (["--machine", "--threads", "0"], "Error: threads is 0, but must be an integer in"),
        (["--machine", "--backend", "fast"], "Error: backend is 'fast'"),
    ],
)
def test_what_is_wrong_is_refused(options: list[str], message: str, theory: Run) -> None:
    result = theory(*options)
    assert result.status == 2 and result.out == ""
    assert message in " ".join(result.err.split())
    assert "Measuring" not in result.err


def test_a_measured_speed_must_be_one(theory: Run, tiny_folder: Path) -> None:
    result = theory("--machine", tiny_folder, "--measured", 0)
    assert result.status == 2 and "tokens_per_second is 0.0, but must be a number > 0" in result.err
