"""What tune finds out on tiny models, its arithmetic on planted rounds, and how it says so."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from foredraft.api import Model
from foredraft.backends.base import Capabilities
from foredraft.backends.transformers import TransformersBackend
from foredraft.costs import CostCurve, Costs
from foredraft.curve_plot import draw
from foredraft.draft_cost import DraftCost
from foredraft.errors import InvalidInputError
from foredraft.generation import Request
from foredraft.proposers.recycling import Recycling
from foredraft.tune import CANDIDATES, Trial, Tuning, speedup_with, tune
from foredraft.types import Draft, SamplingParams
from foredraft.watched import Round, Watched, likeliest_first

TEXTS = ("hello hello hello", "the end of the end of the end")


def planted(step: float = 0.01, row: float = 0.001, draft: float = 0.0) -> Costs:
    """A forward takes a step and something for each drafted node, a draft something for each node."""
    rows = (1, 2, 4, 8, 16)
    curve = CostCurve(rows, (64, 512), [[step + row * (n - 1) for n in rows]] * 2)
    return Costs({1: curve}, drafts={"some": DraftCost([(0, 0.0), (4, 4 * draft)])})


def trial(**other: Any) -> Trial:
    counts = {"rounds": 50, "tokens": 75, "drafted": 100, "accepted": 25}
    figures = {"draft_ms": 0.1, "speedup": 1.1, "best_draft_tokens": 3, "expected": 1.2}
    return Trial(**{"drafter": "some", "draft_tokens": 8, **counts, **figures, **other})


def tuning(*trials: Trial, confirmed: Trial | None = None) -> Tuning:
    return Tuning(planted(), 64, 100.0, list(trials), confirmed)


# Watching


def test_a_watched_drafter_drafts_the_same_and_has_its_rounds_noted(text_target: Any, tokenizer: Any) -> None:
    watched = Watched(Recycling.for_target(text_target))
    bare = Model(text_target, tokenizer, Recycling.for_target(text_target))
    model = Model(text_target, tokenizer, watched)
    prompt = tokenizer("hello hello")["input_ids"]
    params = SamplingParams(max_tokens=30)
    answer, expected = model.generate(prompt, params), bare.generate(prompt, params)
    assert answer.ids == expected.ids and answer.stats.drafted == expected.stats.drafted
    rounds = watched.rounds
    assert len(rounds) == answer.stats.target_forwards
    assert sum(r.nodes for r in rounds) == answer.stats.drafted
    assert sum(len(r.ranks) for r in rounds) == answer.stats.accepted
    assert rounds[0].context == len(prompt) - 1 and all(r.seconds > 0 for r in rounds)
    assert all(rank < r.nodes for r in rounds for rank in r.ranks)


def test_a_smaller_draft_has_the_likeliest_nodes_parents_first() -> None:
    draft = Draft((5, 6, 7, 8), (-1, -1, 0, 1), scores=(0.5, 0.4, 0.2, 0.4))
    assert list(likeliest_first(draft)) == [0, 1, 3, 2]
    assert list(likeliest_first(Draft.chain([3, 4, 5]))) == [0, 1, 2]


# Arithmetic


def test_the_gain_of_smaller_drafts_follows_from_ranks_and_costs() -> None:
    rounds = [Round(64, 4, (0, 1, 3), 0.0), Round(64, 4, (), 0.0), Round(64, 0, (), 0.0)]
    costs = planted(draft=0.002)
    # tokens 3 + 3; forwards of 5, 5 and 1 rows, drafts of 8 ms twice
    assert speedup_with(4, rounds, costs, "some", (0.0, 0.0)) == pytest.approx(0.01 * 6 / (0.038 + 0.016))
    # tokens 1 + 1 + 3; forwards of 2, 2 and 1 rows, drafts of 2 ms twice
    assert speedup_with(1, rounds, costs, "some", (0.0, 0.0)) == pytest.approx(0.01 * 4 / (0.032 + 0.004))
    slower = speedup_with(4, rounds, costs, "some", (0.001, 0.0005))
    assert slower == pytest.approx(0.0105 * 6 / (0.038 + 0.016 + 0.003))


# What it says


def test_a_drafter_that_pays_is_recommended_with_its_figures() -> None:
    again = trial(draft_tokens=3, speedup=1.15, accepted=40)
    found = tuning(trial(drafter="other", expected=1.1), trial(), confirmed=again)
    assert found.pays
    assert found.recommendation == (
        "Use some with 3 draft tokens: 1.20x of plain decoding by its costs, 1.15x when timed (40% of its tokens are "
        "accepted, 1.50 tokens come of a forward)."
    )
    recommended = found.to_dict()["recommendation"]
    assert (recommended["drafter"], recommended["draft_tokens"]) == ("some", 3)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            tuning(trial(expected=0.93, best_draft_tokens=1)),
            "None of these pays here: the best, some with 1 draft token,",
        ),
        (tuning(trial(), confirmed=trial(speedup=0.98)), "None of these surely pays here"),
        (tuning(), "No drafter"),
    ],
)
def test_none_may_pay(found: Tuning, words: str) -> None:
    assert not found.pays
    assert words in found.recommendation
    assert found.to_dict()["recommendation"]["drafter"] == "none"


def test_the_report_is_plain_json() -> None:
    report = json.loads(json.dumps(tuning(trial(), trial(drafted=0, accepted=0)).to_dict(), allow_nan=False))
    first, second, *_ = report["curve"]
    assert first == {"rows": 1, "ms": pytest.approx(10), "v": 1, "break_even": None}
    assert second["v"] == pytest.approx(1.1) and second["break_even"] == pytest.approx(0.1)
    assert report["drafters"][1]["acceptance_rate"] is None
    assert Costs.from_json(report["costs"]).curve.seconds(1) == pytest.approx(0.01)


@pytest.mark.parametrize("title", ["tiny", "<b>&\"'"])
def test_the_plot_is_an_svg_with_a_line_for_each_context(title: str) -> None:
    root = ElementTree.fromstring(draw(planted(), title))
    texts = ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert title in texts and {"after 64 tokens", "after 512 tokens", "n plain steps"} <= set(texts)
    lines = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines) == 3
    inside = [float(x) for line in lines for point in line.get("points", "").split() for x in point.split(",")]
    assert all(0 <= x <= 640 for x in inside)


@pytest.mark.parametrize("step", [1e-6, 0.0333, 20.0])
def test_the_plot_has_room_for_any_times(step: float) -> None:
    root = ElementTree.fromstring(draw(planted(step, step / 3), ""))
    for line in root.iter("{http://www.w3.org/2000/svg}polyline"):
        assert all(0 <= float(point.split(",")[1]) <= 400 for point in line.get("points", "").split())


# All of it


@pytest.fixture(scope="module")
def found(text_target: TransformersBackend, tokenizer: Any) -> Tuning:
    params, model = SamplingParams(max_tokens=12, ignore_eos=True), Model(text_target, tokenizer, None)
    return tune(model, prompts=TEXTS, params=params, seconds=0.01)


def test_every_candidate_is_tried_on_the_same_text(found: Tuning) -> None:
    assert [t.drafter for t in found.trials] == list(CANDIDATES)
    for t in found.trials:
        assert t.tokens == 24 and 0 <= t.accepted <= t.drafted
        assert t.rounds + t.accepted == t.tokens
        assert t.speedup > 0 and t.expected > 0 and 1 <= t.best_draft_tokens <= t.draft_tokens
        assert found.costs.draft_seconds(t.drafter) > 0
    assert found.best is not None and found.best.expected == max(t.expected for t in found.trials)
    assert (found.confirmed is not None) == (found.best.expected > 1)
    assert set(found.costs.acceptance) == set(CANDIDATES)
    assert found.plain_tokens_per_second > 0 and found.recommendation


def test_trees_are_not_tried_where_they_cannot_be_verified(text_target: Any, tokenizer: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(text_target, "capabilities", Capabilities(trees=False))
    params = SamplingParams(max_tokens=4)
    found = tune(Model(text_target, tokenizer, None), prompts=TEXTS, params=params, seconds=0.01)
    assert [t.drafter for t in found.trials] == ["ngram"]


def test_a_wrong_prompt_is_told_before_anything_is_measured(text_target: Any, tokenizer: Any) -> None:
    told: list[str] = []
    with pytest.raises(InvalidInputError, match="empty"):
        tune(Model(text_target, tokenizer, None), prompts=["fine", ""], notify=told.append)
    assert not told


def test_requests_run_as_ever_afterwards(found: Tuning, text_target: Any, tokenizer: Any) -> None:
    model = Model(text_target, tokenizer, None)
    assert found.trials
    assert list(model.engine.run([Request(model.encode("hello"), SamplingParams(max_tokens=2))]))
