"""The compiled decisions against plain Python that says the same, on random drafts; and how parts are asked or left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft import deciding_kernels as kernels
from foredraft.arms import new_arms, new_turns
from foredraft.controller import Controller
from foredraft.costs import CostCurve, Costs
from foredraft.estimates import UNSCORED, Calibration
from foredraft.proposers.base import NO_SCORE
from foredraft.proposers.joint import State
from foredraft.types import Draft

PARTS = ("a", "b", "c")
TRIES = 8.0


# The reference


@dataclass
class Node:
    token: int
    parent: int
    depth: int
    raw: dict[int, float] = field(default_factory=dict)
    prior: dict[int, float] = field(default_factory=dict)
    context: int = 0
    score: float = 0.0
    right: bool | None = None

    @property
    def who(self) -> int:
        return sum(1 << part for part in self.raw)

    @property
    def best(self) -> float:
        return max(self.raw.values())


def bin_of(raw: float) -> int:
    return min(int(-2 * math.log2(raw)), 23) if raw > 2**-12 else 23


def moved(counts: Any, node: Node, estimate: float) -> float:
    for level in sorted({0, node.context}):
        hits, tries = counts[node.who, level, bin_of(node.best)]
        estimate = (hits + TRIES * estimate) / (tries + TRIES)
    return estimate


def counted(counts: Any, node: Node, keep: float) -> None:
    for level in sorted({0, node.context}):
        counts[node.who, level, bin_of(node.best)] *= keep
        counts[node.who, level, bin_of(node.best)] += (node.right, 1)


def merged(drafts: dict[int, Draft], chances: Sequence[float], contexts: Sequence[int]) -> list[Node]:
    nodes: list[Node] = []
    places: dict[tuple[int, int], int] = {}
    for part, draft in drafts.items():
        own: list[int] = []
        for at, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            key = (own[parent] if parent >= 0 else -1, token)
            if key not in places:
                places[key] = len(nodes)
                nodes.append(Node(token, key[0], nodes[key[0]].depth + 1 if key[0] >= 0 else 1))
            node = nodes[places[key]]
            own.append(places[key])
            node.context = max(node.context, contexts[part])
            scored = draft.scores[at] if draft.scores else None
            node.raw.setdefault(part, UNSCORED**node.depth if scored is None else scored)
            node.prior.setdefault(part, chances[part] ** node.depth if scored is None else scored)
    return nodes


def scored(nodes: list[Node], workload: Any, request: Any) -> None:
    for node in nodes:
        above = nodes[node.parent].score if node.parent >= 0 else 1.0
        node.score = min(above, moved(request, node, moved(workload, node, max(node.prior.values()))))


def judged(nodes: list[Node], text: Sequence[int], workload: Any, request: Any) -> None:
    """Of nodes that were not judged before; the text begins where they do."""
    for node in nodes:
        above = nodes[node.parent].right if node.parent >= 0 else True
        known = node.right is not None
        node.right = above and (text[node.depth - 1] == node.token if node.depth <= len(text) else None)
        if above is False:
            node.right = False
        if node.right is not None and not known:
            counted(workload, node, 1 - 1 / 200)
            counted(request, node, 1 - 1 / 45)


# What is compiled, over the same arrays


class Compiled:
    """The arrays of one request, and drafts put into them."""

    def __init__(self, costly: Sequence[bool] = [False] * len(PARTS), stops: bool = False) -> None:
        self.arms = new_arms(costly, [UNSCORED] * len(costly))
        self.turns = new_turns(self.arms, [stops and each for each in costly])
        names = PARTS[: len(costly)]
        self.workload, self.request = (Calibration(names, at_times=any(costly)).counts for _ in range(2))
        self.book = Controller(Costs({1: CostCurve((1, 64), (0,), [[1.0, 1.0]])})).book
        self.state = State(self.arms, self.turns, self.book, self.workload, self.request, trees=True)
        self.cost(1.0)

    def cost(self, plain: float, row: float = 0.0) -> None:
        """What forwards take."""
        self.state.costs(np.array([plain + row * nodes for nodes in range(65)]))

    @property
    def held(self) -> int:
        return int(self.state.record["held"][0])

    @property
    def nodes(self) -> Any:
        """Of the last tree."""
        return self.state.nodes[self.held :][: int(self.state.record["fresh"][0])]

    def begin(self, text: Sequence[int]) -> int:
        return kernels.begin(self.state.record, np.array(text, dtype=np.int64))

    def offer(self, drafts: dict[int, Draft]) -> int:
        """Returns whose these are."""
        self.turns["offered"] = 0
        for part, draft in drafts.items():
            rows = self.state.offers[part, : len(draft)]
            rows["token"], rows["parent"], rows["score"] = draft.tokens, draft.parents, draft.scores or NO_SCORE
            self.turns["offered"][part] = len(draft)
        return sum(1 << part for part in drafts)

    def join(self, drafts: dict[int, Draft], budget: int = 64, trees: bool = True) -> list[tuple[Any, ...]]:
        self.state.record["trees"] = trees
        size, *_ = kernels.join(self.state.record, self.offer(drafts), budget, 0, False, 0.0)
        return list(self.state.drafted[:size].tolist())

    def whom(self, drafts: dict[int, Draft], most: int = 8) -> tuple[int, int, float]:
        """Whose model should run beside these, for how many tokens, and where it should stop."""
        _, part, length, least = kernels.join(self.state.record, self.offer(drafts), 64, most, False, 0.0)
        return part, length, least

    def advance(self, asked: int, took: float, gain: float, steps: int = 0) -> int:
        """A round in which one node was verified if that was a gain. Returns who is asked in the next."""
        self.turns["took"], self.turns["steps"] = took, steps
        self.state.drafted[0]["score"], self.state.drafted[0]["who"] = gain, asked
        _, following = kernels.advance(self.state.record, 0, int(gain > 0), 0, asked, 0.0, 0.0)
        return following


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    count = draw(st.integers(0, 8))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(count))
    scores: list[float] = []
    for parent in parents:
        scores.append((scores[parent] if parent >= 0 else 1.0) * draw(st.sampled_from([0.01, 0.2, 0.5, 0.9, 1.0])))
    tokens = tuple(draw(st.integers(0, 2)) for _ in range(count))
    return Draft(tokens, parents, scores=tuple(scores) if draw(st.booleans()) else ())


several = st.dictionaries(st.integers(0, 2), drafts(), min_size=1).map(lambda found: dict(sorted(found.items())))
texts = st.lists(st.integers(0, 2), min_size=1, max_size=4)


@given(st.lists(st.tuples(several, texts), min_size=1, max_size=5), st.integers(1, 12))
def test_round_by_round_they_say_what_plain_python_says(
    rounds: list[tuple[dict[int, Draft], list[int]]], budget: int
) -> None:
    compiled, text, known = Compiled(), [0], list[tuple[int, list[Node]]]()
    workload, request = (Calibration(PARTS).counts for _ in range(2))
    compiled.begin(text)
    for offers, more in rounds:
        nodes = merged(offers, compiled.turns["chance"].tolist(), compiled.turns["context"].tolist())
        scored(nodes, workload, request)
        draft = compiled.join(offers, budget)
        order = sorted(range(len(nodes)), key=lambda i: -nodes[i].score)[:budget]
        wanted = [(nodes[i].token, pytest.approx(nodes[i].score), nodes[i].who) for i in order]
        assert [(token, score, who) for token, _, score, who, _ in draft] == wanted
        assert [parent for _, parent, *_ in draft] == [
            order.index(p) if (p := nodes[i].parent) >= 0 else -1 for i in order
        ]
        known.append((len(text), nodes))
        text += more
        for start, earlier in known:
            judged(earlier, text[start:], workload, request)
        compiled.begin(more)
        assert compiled.workload == pytest.approx(workload) and compiled.request == pytest.approx(request)
        assert compiled.held == sum(node.right is None for _, earlier in known for node in earlier)


@given(several)
def test_without_trees_the_draft_is_the_best_child_of_the_best_child(offers: dict[int, Draft]) -> None:
    compiled, path, at = Compiled(), list[int](), -1
    compiled.begin([0])
    chain = compiled.join(offers, trees=False)
    nodes = compiled.nodes
    while below := [i for i, node in enumerate(nodes) if node["parent"] == at]:
        at = max(below, key=lambda i: nodes[i]["score"])
        path.append(nodes[at]["token"])
    assert [token for token, *_ in chain] == path
    assert [parent for _, parent, *_ in chain] == list(range(-1, len(path) - 1))


def test_a_part_is_told_what_it_had_right_and_when_it_went_wrong() -> None:
    compiled = Compiled()
    compiled.begin([9])
    compiled.join({0: Draft.chain([1, 2, 3]), 1: Draft.chain([1, 2]), 2: Draft()})
    compiled.begin([1, 2, 7])
    assert compiled.arms["foreseen"].tolist() == [2, 2, 0]
    assert compiled.turns["run"].tolist() == [0, 2, 0]  # the second one's draft ended before it could go wrong
    assert compiled.turns["records"][:, 0, :2].tolist() == [[2, 3], [2, 2], [0, 1]]
    assert compiled.turns["chance"][1] > compiled.turns["chance"][0] > compiled.turns["chance"][2]


def test_what_finds_no_room_is_forgotten() -> None:
    compiled = Compiled([False])
    compiled.begin([0])
    for _ in range(40):
        compiled.join({0: Draft.chain([5] * 60)})
        compiled.begin([5])
    assert compiled.held == kernels.MOST_HELD
    assert compiled.request[1, 0, :, 0].sum() > 100


# Estimates


def test_an_estimate_moves_from_the_raw_score_to_what_happened() -> None:
    counts = Calibration(["a"]).counts
    assert kernels.estimate(counts, 1, 0, 0.5, 0.5) == pytest.approx(0.5)
    for _ in range(200):
        kernels.count(counts, 1.0, 1, 0, 0.5, False)
    assert kernels.estimate(counts, 1, 0, 0.5, 0.5) < 0.05


def test_a_context_has_a_record_of_its_own_and_new_ones_begin_with_the_common_one() -> None:
    counts = Calibration(["a"]).counts
    for _ in range(100):
        kernels.count(counts, 1.0, 1, 1, 0.5, True)
        kernels.count(counts, 1.0, 1, 2, 0.5, False)
    likely, unlikely, new = (kernels.estimate(counts, 1, context, 0.5, 0.5) for context in (1, 2, 3))
    assert likely > 0.9 > 0.1 > unlikely
    assert new == pytest.approx(0.5, abs=0.05)


def test_a_request_differs_from_its_workload_and_forgets() -> None:
    compiled = Compiled([False])
    compiled.workload[1, :, 2] = 300.0, 300.0
    compiled.turns["chance"] = 0.6

    def score(right: bool) -> float:
        """After many rounds in which a node was right or not."""
        draft = {0: Draft((5,), (-1,), scores=(0.5,))}
        for _ in range(60):
            compiled.join(draft)
            compiled.begin([5 if right else 6])
        return float(compiled.join(draft)[0][2])

    assert score(False) < 0.2
    assert score(True) > 0.8


# Who is asked


def asked_in(compiled: Compiled, rounds: int, took: float, gain: float) -> list[bool]:
    compiled.cost(0.1)
    found, asked = [], compiled.begin([0])
    for _ in range(rounds):
        found.append(bool(asked))
        asked = compiled.advance(asked, took, gain if asked else 0.0)
    return found


def test_what_is_left_aside_is_tried_again_at_a_bounded_cost_and_ever_less() -> None:
    asked = asked_in(Compiled([False]), 20_000, took=0.01, gain=0.0)
    assert sum(asked[:50]) > 4  # it had its chance
    assert 0.01 * sum(asked[1000:]) / (0.1 * len(asked[1000:])) < 0.003  # of a plain step
    assert sum(asked[-2000:]) >= 3


def test_what_pays_is_asked_every_round() -> None:
    assert all(asked_in(Compiled([False]), 100, took=0.01, gain=0.5))


def test_one_interruption_does_not_make_a_part_slow() -> None:
    compiled = Compiled([False])
    compiled.cost(0.1)
    for seconds in [0.001] * 20 + [5.0]:
        compiled.advance(1, seconds, 0.5)
    assert compiled.arms["asking"][0] < 0.0012
    assert compiled.arms["spent"][0] == pytest.approx(5.02)


# Whose model is run


def drafting(compiled: Compiled, steps: Sequence[int], beginning: float = 0.1, step: float = 0.02) -> None:
    """Rounds in which the first part, which runs a model, drafted with so many steps of it."""
    for count in steps:
        compiled.advance(1, beginning + count * step, 0.5, count)


@pytest.mark.parametrize("stops", [False, True])
def test_what_drafts_take_is_learned_by_least_squares(stops: bool) -> None:
    compiled = Compiled([True], stops)
    compiled.begin([0])
    compiled.advance(1, 7.0, 0.0, 1)  # it had all of the text to catch up with
    drafting(compiled, [1, 2, 3, 1, 4] * 8)
    assert compiled.arms["beginning"][0] == pytest.approx(0.1)
    assert compiled.arms["step"][0] == pytest.approx(0.02)
    compiled.advance(1, 5.0, 0.0, 1)  # an interruption
    assert compiled.arms["beginning"][0] + compiled.arms["step"][0] < 0.14
    compiled.advance(0, 0.0, 0.0)
    compiled.advance(1, 0.3, 0.0, 1)  # after a while there is more to catch up with
    assert compiled.arms["beginning"][0] + compiled.arms["step"][0] < 0.14


def test_drafts_that_were_compiled_meanwhile_are_forgotten() -> None:
    compiled = Compiled([True])
    compiled.begin([0])
    for seconds in (9.0, 9.0, 8.0, 0.1):
        compiled.advance(1, seconds, 0.0, 1)
    assert compiled.arms["step"][0] == pytest.approx(0.1)


def test_a_model_is_run_where_what_it_usually_gains_pays_and_the_others_leave_room() -> None:
    compiled = Compiled([True, False], stops=True)
    compiled.cost(1.0, row=0.1)
    compiled.begin([0])
    drafting(compiled, [1, 1, 2, 1])
    sure, unsure = (Draft((5,), (-1,), scores=(score,)) for score in (0.95, 0.1))
    compiled.arms["asked"] = 4
    compiled.turns["worth"][0], compiled.turns["wait"] = 0.4, 1000
    assert compiled.whom({1: unsure})[:2] == (0, 8)
    assert compiled.whom({1: sure})[:2] == (-1, 0)
    assert compiled.whom({})[:2] == (0, 8)
    compiled.turns["worth"][0] = 0.05  # less than the draft costs
    assert compiled.whom({})[:2] == (-1, 0)
    compiled.turns["wait"] = 0
    part, length, least = compiled.whom({})
    assert (part, length, least) == (0, 1, math.inf)  # a trial takes one step


def test_a_draft_goes_on_while_the_next_token_is_worth_its_step_and_its_row() -> None:
    compiled = Compiled([True], stops=True)
    compiled.begin([0])
    drafting(compiled, [1, 1, 2, 1])
    compiled.turns["worth"][0] = 0.9
    compiled.cost(1.0, row=0.01)
    *_, cheap = compiled.whom({})
    compiled.cost(1.0, row=0.2)
    *_, dear = compiled.whom({})
    assert 0 < cheap < 0.1 < dear < 1


def test_a_model_that_does_not_stop_by_itself_is_told_how_long_to_draft() -> None:
    compiled = Compiled([True])
    compiled.begin([0])
    drafting(compiled, [1, 2, 2, 1])
    compiled.cost(1.0, row=0.02)
    lengths = []
    for chance in (0.2, 0.6, 0.9):
        compiled.turns["chance"], compiled.turns["wait"] = chance, 1000
        lengths.append(compiled.whom({})[1])
    assert 0 <= lengths[0] < lengths[1] < lengths[2] <= 8
