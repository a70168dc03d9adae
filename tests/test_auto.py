"""`auto` in the engine: it never changes the text, it is off where nothing pays, and what it chose can be seen."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft import calibration
from foredraft.acceptance import RULES
from foredraft.backends.base import Backend
from foredraft.backends.transformers import TransformersBackend
from foredraft.costs import CostCurve, Costs
from foredraft.engine import Engine
from foredraft.errors import InvalidInputError, UnsupportedError
from foredraft.estimates import UNSCORED
from foredraft.explanation import best_chain, explain
from foredraft.generation import Request
from foredraft.loading import parse_drafter
from foredraft.proposers.auto import Auto
from foredraft.proposers.base import Drafter
from foredraft.proposers.lookahead import Lookahead
from foredraft.proposers.ngram import NGram
from foredraft.types import Draft, SamplingParams
from tiny import (
    BACKENDS,
    DRAFTER_MAKERS,
    CountingBackend,
    Oracle,
    PlantedCosts,
    auto_over,
    cheap_rows,
    complete,
    generate,
    keep,
)

PROMPT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
PROMPTS = [PROMPT, [40, 41] * 8, [7], [9, 8, 7, 9, 8, 7, 9, 8]]
GREEDY = SamplingParams(max_tokens=60)
SAMPLED = SamplingParams(max_tokens=60, temperature=0.9, seed=4)


def dear_rows() -> Costs:
    """Every row costs as much as the first: only certainty would pay."""
    return PlantedCosts({1: CostCurve((1, 64), (0,), [[1.0, 64.0]])})


class Random(Auto):
    """Decides by dice what is verified: any nodes, as long as their parents are."""

    dice = random.Random(0)

    def select(
        self, drafts: Sequence[Draft], context: int, others: Sequence[Draft] = (), most: int | None = None
    ) -> list[Draft]:
        return [self._some(draft) for draft in super().select(drafts, context, others, most)]

    def _some(self, draft: Draft) -> Draft:
        share, kept = self.dice.random(), []
        for node, parent in enumerate(draft.parents):
            if (parent == -1 or parent in kept) and self.dice.random() < share:
                kept.append(node)
        return keep(draft, kept)


def random_over(target: Backend, parts: Sequence[str]) -> Random:
    return Random([DRAFTER_MAKERS[part](target, 0.1) for part in parts], cheap_rows())


# The text


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parts", [("suffix", "recycling", "ngram"), ("draft", "ngram"), ("early_exit", "recycling")])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_whatever_is_decided_the_text_is_that_of_plain_decoding(
    tiny_target: Any, backend: str, parts: tuple[str, ...], params: SamplingParams
) -> None:
    target = BACKENDS[backend](tiny_target)
    requests = [Request(prompt, params) for prompt in PROMPTS]
    plain = complete(Engine(target), *requests)
    for _ in range(3):
        dice = complete(Engine(target, random_over(target, parts)), *requests)
        assert [c.ids for c in dice] == [c.ids for c in plain]
        assert 0 < sum(c.stats.accepted for c in dice) < sum(c.stats.drafted for c in dice)


@pytest.mark.parametrize("rule", [rule.name for rule in RULES.values() if rule.trees and not rule.lossy])
def test_greedy_text_is_the_same_under_every_rule(target: TransformersBackend, rule: str) -> None:
    plain = generate(Engine(target), PROMPT, GREEDY).ids
    drafter = random_over(target, ("suffix", "recycling", "ngram"))
    assert generate(Engine(target, drafter, rule=rule), PROMPT, GREEDY).ids == plain


def test_alone_or_in_a_batch_a_request_says_the_same(target: TransformersBackend) -> None:
    requests = [Request(prompt, SAMPLED) for prompt in PROMPTS]
    together = complete(Engine(target, auto_over(target)), *requests)
    alone = [complete(Engine(target, auto_over(target)), request)[0] for request in requests]
    assert [c.ids for c in together] == [c.ids for c in alone]


# What it decides


def test_where_a_row_costs_as_much_as_a_step_nothing_is_drafted(target: TransformersBackend) -> None:
    backend, auto = CountingBackend(target), auto_over(target, dear_rows())
    auto.clock = lambda: 0.0  # where drafting took long, a sure token would be worth a step: it shares the draft's time
    stats = generate(Engine(backend, auto), [7], GREEDY).stats
    assert stats.drafted <= 2  # certainties
    assert stats.plain_rounds >= stats.target_forwards - 2
    assert backend.forwards == stats.target_forwards


def test_what_tune_saw_is_expected_until_more_is_known(target: TransformersBackend) -> None:
    costs = cheap_rows()
    costs.acceptance["ngram"] = 0.25
    auto = Auto([NGram(), DRAFTER_MAKERS["suffix"](target, 0.1)], costs)
    assert auto.arms["usual"].tolist() == [0.25, UNSCORED]


def test_what_pays_is_drafted_and_seen_in_the_figures(target: TransformersBackend) -> None:
    known = generate(Engine(target), PROMPT, GREEDY).ids
    auto = Auto([Oracle(PROMPT, known), NGram()], cheap_rows())
    stats = generate(Engine(target, auto), PROMPT, GREEDY).stats
    assert stats.drafter == "auto:oracle+ngram"
    assert sum(stats.accepted_from.values()) == stats.accepted > 40
    assert sum(stats.drafted_from.values()) == stats.drafted
    assert stats.target_forwards < 20


def test_a_draft_model_that_is_right_is_run_and_one_that_is_wrong_is_left_aside(target: TransformersBackend) -> None:
    """Whatever it drafts takes a fifth of a step."""
    right, wrong = (DRAFTER_MAKERS["draft"](target, noise) for noise in (0.0, 5.0))
    counts = {}
    for name, drafter in (("right", right), ("wrong", wrong)):
        ticks = count(0.0, 0.2)
        auto = Auto([drafter], cheap_rows(), clock=lambda ticks=ticks: next(ticks))  # type: ignore[misc]
        stats = generate(Engine(target, auto), [7, 5], SamplingParams(max_tokens=200)).stats
        counts[name] = stats.draft_forwards / stats.target_forwards
    assert counts["right"] > 3 > 1 > counts["wrong"]


def test_a_part_that_is_left_aside_costs_next_to_nothing(target: TransformersBackend) -> None:
    class Useless(Oracle):
        name = "useless"

    ticks = count(0.0, 0.02)  # of a step of a second
    auto = Auto([Useless([], [63] * 1000)], cheap_rows(), clock=lambda: next(ticks))
    stats = generate(Engine(target, auto), [7], SamplingParams(max_tokens=900)).stats
    assert 0 < auto.arms["asked"][0] < 0.5 * stats.target_forwards


def test_forwards_teach_what_they_cost(target: TransformersBackend) -> None:
    costs = Costs({1: CostCurve((1, 64), (0,), [[10.0, 10.0]])})
    generate(Engine(target, auto_over(target, costs)), PROMPT, GREEDY)
    assert costs.seconds(1, 30) < 5.0


def test_advice_has_the_known_speedups() -> None:
    """With c = 1/50 and free rows, four tokens that are right 80 % of the time give 3.11 x; more tokens, more."""
    free = CostCurve((1, 64), (0,), [[1.0, 1.0]])
    rate, length = best_chain(free, 0, 0.8, 1 / 50)
    assert rate > 3.11 and length > 4
    four = CostCurve((1, 5, 6), (0,), [[1.0, 1.0, 9.0]])
    rate, length = best_chain(four, 0, 0.8, 1 / 50)
    assert rate == pytest.approx(3.3616 / 1.08) and length == 4
    assert best_chain(four, 0, 0.05, 0.5) == (1.0, 0)


def test_an_explanation_has_figures_of_every_part(target: TransformersBackend) -> None:
    auto = auto_over(target)
    stats = generate(Engine(target, auto), PROMPT, GREEDY).stats
    found = explain(auto, stats, 40)
    assert [part.name for part in found.parts] == ["suffix", "recycling"]
    assert sum(part.accepted for part in found.parts) == pytest.approx(stats.accepted)
    assert sum(part.verified for part in found.parts) == pytest.approx(stats.drafted)
    assert (found.rounds, found.plain_rounds) == (stats.target_forwards, stats.plain_rounds)
    assert found.plain_ms == pytest.approx(1000.0) and found.break_even == pytest.approx(0.0)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_where_a_rule_takes_no_trees_it_drafts_chains(target: TransformersBackend, params: SamplingParams) -> None:
    auto = auto_over(target)
    auto.trees = False
    backend = CountingBackend(target)
    assert generate(Engine(backend, auto, rule="token"), PROMPT, params).stats.accepted > 0
    assert all(draft.is_chain for draft in backend.drafts)


# How it is asked for


def test_parts_are_written_with_plus() -> None:
    assert parse_drafter("auto") == ("auto", "")
    assert parse_drafter("auto:ngram+draft:some/model") == ("auto", [("ngram", ""), ("draft", "some/model")])
    assert parse_drafter("auto:ngram") == ("auto", [("ngram", "")])


@pytest.mark.parametrize("text", ["auto:ngram+ngram", "auto:none", "auto:hybrid:ngram+suffix", "auto:auto", "auto:+"])
def test_parts_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(InvalidInputError):
        parse_drafter(text)


def test_lookahead_cannot_be_a_part() -> None:
    with pytest.raises(UnsupportedError, match="'lookahead' cannot be a part of 'auto'"):
        Auto([Lookahead(), NGram()], cheap_rows())


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "QUICK_SECONDS", 0.01)


def test_it_is_the_default_and_measures_a_live_model(tiny_target: Any, hasty: None, tokenizer: Any) -> None:
    model = foredraft.load(tiny_target, tokenizer=tokenizer)
    assert isinstance(model.drafter, Auto)
    assert model.drafter.costs.curve.rows[:4] == (1, 2, 3, 4)
    assert model.generate([1, 2, 3], SamplingParams(max_tokens=4)).stats.drafter == "auto"


def test_what_was_measured_of_a_folder_is_kept(tiny_folder: Path, hasty: None, tmp_path: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        foredraft.load(tiny_folder, "auto:ngram", backend="transformers", cache=tmp_path, notify=said.append)
    assert sum("Measuring" in line for line in said) == 1


def test_a_drafter_made_for_a_target_has_the_default_parts(target: TransformersBackend, hasty: None) -> None:
    drafter: Drafter = Auto.for_target(target)
    assert drafter.name == "auto"
    assert [part.name for part in drafter.parts] == ["suffix", "recycling"]  # type: ignore[attr-defined]
