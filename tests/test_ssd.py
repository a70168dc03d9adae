"""Drafting while the target verifies: what is prepared, what is made of it, and that nothing is left behind."""

from __future__ import annotations

import gc
import itertools
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench_runs import PLAIN, answer, made, measured, results
from foredraft.acceptance import RULES
from foredraft.backends.base import Backend, Query
from foredraft.bench.figures import promises_same_text
from foredraft.bench.forms import percent
from foredraft.bench.records import Cell, Turn
from foredraft.bench.report import write_report
from foredraft.engine import Engine
from foredraft.errors import InvalidInputError, UnsupportedError
from foredraft.generation import Request
from foredraft.loading import EngineChoice, Loader, check_memory, parse_drafter
from foredraft.proof.ahead import ROUNDS, STEPS, Course, Rounds, distance, emitted_law
from foredraft.proof.controls import CONTROLS
from foredraft.proof.toys import toy_model
from foredraft.proof.verify import EXACT, enumerate_ahead, enumerate_control
from foredraft.proposers.base import Drafter, Proposer, Verification
from foredraft.proposers.beside import THREAD_NAME, Beside, Work
from foredraft.proposers.foresight import Endings, Fallback, Planner, Trial
from foredraft.proposers.forks import Confidence, Fork, Outcome, Plan, fan_out
from foredraft.proposers.hybrid import Hybrid
from foredraft.proposers.medusa import ParallelDrafter
from foredraft.proposers.ngram import NGram
from foredraft.proposers.recycling import Recycling
from foredraft.proposers.ssd import Saguaro, Ssd, SsdProposer, weighed_down
from foredraft.proposers.suffix import Suffix
from foredraft.randomness import DraftSource, KeyedSource, RandomSource, TorchSource
from foredraft.sampling import Law, SamplingLaw
from foredraft.trace import _foreseen
from foredraft.types import Draft, Foresight, ForesightStats, SamplingParams, Verdict
from tiny import BACKENDS, Never, collect, complete, drafter_over, generate, rounds_of, tiny_llama, without_clock
from tiny_heads import head_over

PROMPTS = [[1, 2, 3], [40, 41] * 8, [9, 8, 7, 9, 8, 7]]
FORKING = ("draft", "eagle3", "ngram", "suffix", "recycling", "hybrid")
ALSO_FORKING = ("eagle", "mtp", "layer_skip", "self_quant")


def inner_over(target: Backend, name: str) -> Drafter:
    if name == "hybrid":
        return Hybrid([Suffix.for_target(target), Recycling.for_target(target)])
    found = drafter_over(target, name)
    assert found is not None
    return found


def scripted(drafter: Drafter, steps: int = 99) -> Ssd:
    """It makes so many steps while the target verifies, neither more nor less."""
    return without_clock(Ssd(drafter, always=True), steps)


# What is prepared is what would be drafted


CASES = [*itertools.product(FORKING, (0, 1, 2, 99)), *itertools.product(ALSO_FORKING, (99,))]


@pytest.mark.parametrize(("name", "steps"), CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_text_is_that_of_plain_decoding_however_far_the_preparation_came(
    tiny_target: Any, backend: str, name: str, steps: int
) -> None:
    target = BACKENDS[backend](tiny_target)
    requests = [Request(p, SamplingParams(max_tokens=40)) for p in PROMPTS]
    requests += [Request(p, SamplingParams(max_tokens=40, temperature=0.8, seed=5)) for p in PROMPTS]
    engine = Engine(target, scripted(inner_over(target, name), steps), rule="seed-exact")
    completions = complete(engine, *requests)
    assert [c.ids for c in completions] == [c.ids for c in complete(Engine(target), *requests)]
    found = [c.stats.foresight for c in completions if c.stats.foresight is not None]
    assert len(found) == len(requests)
    hits = sum(figures.hits for figures in found)
    assert hits == 0 if steps == 0 else hits > 0 or name == "ngram" or steps < 99


@pytest.mark.parametrize("rule", ["greedy", "seed-exact", "token", "block"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prepared_chain_is_the_one_that_would_be_drafted_now(tiny_target: Any, backend: str, rule: str) -> None:
    """So the very same rounds come about, with the same coins, whether or not all of it was prepared."""
    target = BACKENDS[backend](tiny_target)
    params = SamplingParams(max_tokens=40, temperature=0.0 if rule == "greedy" else 0.8, seed=3)

    def rounds(steps: int) -> list[tuple[int, int]]:
        engine = Engine(target, scripted(inner_over(target, "draft"), steps), rule=rule)
        events = collect(engine, *(Request(prompt, params) for prompt in PROMPTS))
        return [(e.stats.drafted, e.stats.accepted) for each in events for e in rounds_of(each)]

    assert rounds(99) == rounds(0)


def prepared_and_fresh(target: Backend, name: str) -> list[tuple[Draft, Draft]]:
    """For every outcome that is prepared for, what is, and what another proposer drafts for that text."""
    law, tokens = SamplingLaw(SamplingParams()), [*PROMPTS[1], 5, 6]
    inner = inner_over(target, name)
    proposer = inner.proposer(law, KeyedSource(0))
    draft, pairs = proposer.propose(tokens, 3), []
    fork = proposer.fork(tokens, draft, Plan(lambda known: [1.0] * (1 + len(draft)), 32, 3, 99, 1.0))
    assert fork is not None
    while fork.step():
        pass
    paths = {-1: list[int]()}
    for node, parent in enumerate(draft.parents):
        paths[node] = [*paths[parent], draft.tokens[node]]
    for node, path in paths.items():
        for token in range(target.vocab_size):
            if fork.expects(Outcome(node, token)):
                fresh = inner.proposer(law, KeyedSource(0)).propose([*tokens, *path, token], 3)
                pairs.append((fork._branches[Outcome(node, token)].draft(), fresh))  # type: ignore[attr-defined]
    return pairs


def test_every_branch_of_a_draft_model_is_what_it_would_draft_there(tiny_target: Any) -> None:
    pairs = prepared_and_fresh(BACKENDS["native"](tiny_target), "draft")
    assert len(pairs) == 32
    assert all(prepared.tokens == fresh.tokens for prepared, fresh in pairs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_draft_that_grows_is_scored_as_one_that_is_there_at_once(tiny_target: Any, backend: str) -> None:
    target = BACKENDS[backend](tiny_target)
    whole = Draft((5, 6, 7, 8, 9), (-1, 0, -1, 1, 2))
    one, other = target.new_cache(), target.new_cache()
    for cache in (one, other):
        target.prefill(cache, [1, 2, 3])
    [expected] = target.forward([Query(one, 4, whole)])
    pieces, known = [], 0
    for size in (2, 3, 5):
        part = Draft(whole.tokens[:size], whole.parents[:size])
        pieces += target.forward([Query(other, 4, part, known)])
        known = 1 + size
    torch.testing.assert_close(torch.cat(pieces), expected, atol=1e-4, rtol=1e-4)
    for cache in (one, other):
        target.commit(cache, [0, 1])
    assert one.length == other.length == 6
    after = [target.forward([Query(cache, 9)])[0] for cache in (one, other)]
    torch.testing.assert_close(*after, atol=1e-4, rtol=1e-4)


def shared_state(drafter: Drafter) -> list[np.ndarray[Any, Any]]:
    if isinstance(drafter, Suffix):
        return [array.copy() for array in drafter.global_tree._arrays]
    if isinstance(drafter, Recycling):
        return [array.copy() for array in drafter.arrays]
    if isinstance(drafter, Hybrid):
        parts = [array for part in drafter.parts for array in shared_state(part)]
        return [*parts, drafter.calibration.counts.copy()]
    return []


@pytest.mark.parametrize("name", ["suffix", "recycling", "hybrid"])
def test_preparing_teaches_nothing(tiny_target: Any, name: str) -> None:
    target = BACKENDS["native"](tiny_target)
    inner = inner_over(target, name)
    complete(Engine(target, inner), *(Request(prompt, SamplingParams(max_tokens=30)) for prompt in PROMPTS))
    before, law = shared_state(inner), SamplingLaw(SamplingParams())
    proposer = inner.proposer(law, KeyedSource(0))
    tokens = [*PROMPTS[1], *PROMPTS[0]]
    draft = proposer.propose(tokens, 6)
    own = [array.copy() for array in proposer._own._arrays] if name == "suffix" else []  # type: ignore[attr-defined]
    fork = proposer.fork(tokens, draft, Plan(lambda known: [1.0] * (1 + len(draft)), 32, 6, 99, 1.0))
    assert fork is not None
    while fork.step():
        pass
    assert all(map(np.array_equal, before, shared_state(inner)))
    assert all(map(np.array_equal, own, proposer._own._arrays if own else []))  # type: ignore[attr-defined]


def test_a_prepared_draft_of_a_hybrid_calibrates_nothing(tiny_target: Any) -> None:
    target = BACKENDS["native"](tiny_target)
    hybrid = inner_over(target, "hybrid")
    assert isinstance(hybrid, Hybrid)
    proposer, before = hybrid.proposer(SamplingLaw(SamplingParams()), KeyedSource(0)), hybrid.calibration.counts.copy()
    proposer.observe(Verification(Draft((1,), (-1,)), torch.zeros(2, 64), 0), Verdict((0,), (1, 2), False))
    assert np.array_equal(before, hybrid.calibration.counts)


# Chance


def test_draws_below_a_root_depend_on_nothing_but_the_root() -> None:
    weights = torch.ones(1000, dtype=torch.float64)
    one, other = (TorchSource(torch.Generator().manual_seed(4)) for _ in range(2))
    first = one.below(7, 3).at(8).draw(weights)
    for _ in range(5):
        other.below(9, 1).at(9).draw(weights)
    drawn = {(p, r): other.below(p, r).at(8).draw(weights) for p in (6, 7) for r in (2, 3)}
    assert drawn[7, 3] == first
    assert len(set(drawn.values())) == 4
    assert isinstance(one.below(7, 3), DraftSource)
    keyed = KeyedSource(4)
    assert keyed.below(7, 3) is keyed


def test_draws_below_roots_follow_their_law() -> None:
    source, weights = TorchSource(torch.Generator().manual_seed(4)), torch.tensor([0.1, 0.2, 0.7])
    counts = np.bincount([source.below(i, i % 5).at(i + 1).draw(weights) for i in range(4000)], minlength=3)
    assert np.abs(counts / 4000 - weights.numpy()).max() < 0.04  # five standard deviations


@pytest.mark.parametrize("rule", ["token", "block"])
def test_two_rounds_have_the_targets_law_whatever_the_race_comes_to(rule: str) -> None:
    rows = enumerate_ahead(RULES[rule])
    assert len(rows) == len(STEPS)
    assert all(row.passed for row in rows), rows


def test_the_courses_of_the_race_are_what_they_are_called() -> None:
    seen: dict[Course, set[str]] = {}

    class Noting(Ssd):
        def proposer(self, law: Law, source: RandomSource) -> Proposer:
            proposer = super().proposer(law, source)
            honest = proposer.observe

            def observe(verification: Verification, verdict: Verdict) -> None:
                honest(verification, verdict)
                if proposer.foresight is not None:
                    seen[course].add(proposer.foresight.found)

            proposer.observe = observe  # type: ignore[method-assign]
            return proposer

    for course in STEPS:
        seen[course] = set()
        emitted_law(RULES["token"], ROUNDS[1], course, Noting)
    assert seen["hit"] == seen["part"] == {"hit", "miss"}
    assert "late" in seen["late"]
    assert seen["miss"] == seen["looked up"] == {"miss"}


@pytest.mark.parametrize("rule", ["token", "block"])
def test_saguaro_draws_are_exact(rule: str) -> None:
    def make(drafter: Drafter, **options: Any) -> Ssd:
        return Ssd(drafter, share=0.3, **options)

    assert distance(RULES[rule], ROUNDS[1], "hit", make) < EXACT
    assert distance(RULES[rule], ROUNDS[2], "part", make) < EXACT


def test_weighing_down_moves_mass_off_the_likeliest_tokens() -> None:
    law = torch.tensor([0.5, 0.1, 0.2, 0.1, 0.05, 0.05], dtype=torch.float64)
    found = weighed_down(law, 0.5)
    assert found.sum() == pytest.approx(1.0)
    torch.testing.assert_close(found[[0, 2]] / found[4], 0.5 * law[[0, 2]] / law[4])


# Mistakes that must be found


def test_control_a_miss_that_counts_as_drawn_is_caught_by_enumeration() -> None:
    assert not all(row.passed for row in enumerate_control(CONTROLS["ssd-miss"]))


class Wrong(SsdProposer):
    """Says of what it looked up that it was drawn from the draft model's law."""

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        draft = super().propose(tokens, budget)
        return Draft.chain(draft.tokens, [self.law_after(tuple(tokens[1:]))] * len(draft)) if self._missed else draft

    def law_after(self, text: tuple[int, ...]) -> Tensor:
        raise NotImplementedError


class Picky(SsdProposer):
    """Uses what was prepared only if it begins with a token that it likes: whether it is there depends on the draw."""

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        if len(self._prepared) and self._prepared.tokens[0] != 0:
            self._prepared = Draft()
            return Draft()
        return super().propose(tokens, budget)


@pytest.mark.parametrize(("proposer", "course"), [(Wrong, "looked up"), (Picky, "hit")])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_control_wrong_drafts_of_ssd_are_caught(rule: str, proposer: type[SsdProposer], course: Course) -> None:
    toys = Rounds(toy_model(3, 2), toy_model(3, 3), 3, 1, 1)

    class Planted(Ssd):
        def proposer(self, law: Law, source: RandomSource) -> Proposer:
            made = super().proposer(law, source)
            made.__class__ = type("Planted", (proposer,), {"law_after": staticmethod(toys.draft)})
            return made

    assert distance(RULES[rule], toys, course) < EXACT
    assert distance(RULES[rule], toys, course, Planted) > 1e-6


# For which outcomes


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("rate", [0.4, 0.8])
def test_fan_out_is_the_capped_geometric_rule(rate: float, exponent: float) -> None:
    """F_k ~ a^(k / (1 + r)), the last one times (1 - a)^(-1 / (1 + r))."""
    ends = [rate**k * (1 - rate) for k in range(4)] + [rate**4]
    rule = [rate ** (k / (1 + exponent)) for k in range(5)]
    rule[-1] *= (1 - rate) ** (-1 / (1 + exponent))
    found = fan_out(ends, 1000, exponent)
    assert sum(found) == 1000
    assert np.allclose(np.array(found) / 1000, np.array(rule) / sum(rule), atol=2e-3)


def test_fan_out_of_a_larger_budget_takes_nothing_away() -> None:
    ends = [0.3, 0.0, 0.25, 0.45]
    before = [0] * 4
    for branches in range(30):
        found = fan_out(ends, branches, 1.0)
        assert sum(found) == branches
        assert found[1] == 0
        assert all(now >= then for now, then in zip(found, before, strict=True))
        before = found
    assert fan_out([0.0], 5, 1.0) == [0]


def test_endings_follow_scores_or_the_recent_rate() -> None:
    endings = Endings()
    chain = Draft.chain([1, 2])
    for _ in range(200):
        endings.learn(chain, (), Verdict((0,), (1, 9), True))
    assert endings.rate == pytest.approx(0.5, abs=0.02)
    assert endings.chances(chain, [None, None]) == pytest.approx([0.5, 0.25, 0.25], abs=0.02)
    scored = Draft((1, 2, 3), (-1, 0, -1), scores=(0.6, 0.5, 0.1))
    assert endings.chances(scored, [None] * 3) == pytest.approx([0.3, 0.1, 0.5, 0.1])
    assert endings.expected(2) == pytest.approx(1.75, abs=0.05)


def test_the_predictor_learns_what_the_drafts_probabilities_say() -> None:
    """Tokens are accepted as often as the draft's own probability: by the rate alone all have the same chance."""
    dice, endings = random.Random(0), Endings(learned=True)
    for _ in range(3000):
        p = dice.choice([0.1, 0.5, 0.95])
        accepted = dice.random() < p
        verdict = Verdict((0,), (1, 2), False) if accepted else Verdict((), (2,), True)
        endings.learn(Draft.chain([1]), [Confidence(p, 1.0)], verdict)
    found = [endings.chances(Draft.chain([1]), [Confidence(p, 1.0)])[1] for p in (0.1, 0.5, 0.95)]
    assert found == pytest.approx([0.1, 0.5, 0.95], abs=0.1)


def test_the_plan_fits_the_time_that_verifying_takes() -> None:
    def plan(verify: float, per_step: float, per_row: float) -> Plan:
        planner = Planner()
        for rows in (1, 2, 4, 8) * 8:
            planner.note(verify, [(rows, per_step + per_row * rows)])
        return planner.plan(lambda known: [1.0], 4, 4, model=True)

    roomy, tight, hopeless = plan(0.100, 0.002, 0.001), plan(0.040, 0.005, 0.0005), plan(0.010, 0.009, 0.001)
    assert (roomy.branches, roomy.steps) == (18, 5)
    assert (tight.branches, tight.steps) == (6, 5)
    assert (hopeless.branches, hopeless.steps) == (6, 2)


def test_the_fallback_is_whichever_gives_more_for_its_time() -> None:
    for cheap_tokens, expected in ((2.0, True), (1.1, False)):
        fallback = Fallback()
        for _ in range(40):
            cheap = fallback.cheap(0.010)
            fallback.note(cheap, round(10 * (cheap_tokens if cheap else 2.5)), 0.0 if cheap else 0.010)
        assert sum(fallback.cheap(0.010) for _ in range(20)) == (20 if expected else 0)


def rounds_of_trial(trial: Trial, count: int, on_seconds: float) -> list[bool]:
    seen = []
    for _ in range(count):
        seen.append(trial.on)
        trial.note(0.010, on_seconds if trial.on else 0.020, 4)
    return seen


def test_a_trial_turns_it_off_where_it_does_not_pay_and_says_why() -> None:
    trial = Trial(Endings(), tries=4, again=20)
    seen = rounds_of_trial(trial, 200, on_seconds=0.030)
    assert seen[:4] == [True] * 4
    assert seen[4:10] == [False] * 6
    assert 0 < sum(seen[10:]) <= 18  # tried again, ever more seldom
    remark = trial.remark("ssd:draft")
    assert remark is not None
    assert "0.67 x" in remark
    assert "30.0 ms" in remark
    assert "did not pay" in remark


def test_a_trial_leaves_it_on_where_it_pays() -> None:
    trial = Trial(Endings(), tries=4, again=20)
    seen = rounds_of_trial(trial, 150, on_seconds=0.012)
    assert sum(seen) > 130
    assert trial.remark("ssd:draft") is None


# The thread


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def gone() -> bool:
    """Whether no thread is left, or about to end."""
    gc.collect()
    for thread in threads():
        thread.join(5)
    return not threads()


@pytest.fixture
def threaded(tiny_target: Any) -> Engine:
    target = BACKENDS["native"](tiny_target)
    ssd = Ssd(inner_over(target, "draft"), always=True)
    ssd.fallback = Never()
    return Engine(target, ssd)


def test_the_thread_ends_with_the_last_answer(threaded: Engine) -> None:
    events = threaded.run([Request(PROMPTS[0], SamplingParams(max_tokens=20))] * 2)
    next(events)
    assert len(threads()) == 1
    assert len(list(events)) > 0
    assert gone()
    generate(threaded, PROMPTS[0], SamplingParams(max_tokens=8))  # another one begins
    assert gone()


def test_a_thousand_cancelled_answers_leave_nothing_behind(threaded: Engine) -> None:
    dice, before = random.Random(0), threading.active_count()
    for _ in range(1000):
        events = threaded.run([Request(dice.choice(PROMPTS), SamplingParams(max_tokens=20))])
        for _ in range(dice.randrange(4)):
            next(events)
        if dice.random() < 0.5:  # else it is just dropped
            events.close()  # type: ignore[attr-defined]
        del events
    assert gone()
    assert threading.active_count() == before
    plain = generate(Engine(threaded.setup.backend), PROMPTS[1], SamplingParams(max_tokens=20))
    assert generate(threaded, PROMPTS[1], SamplingParams(max_tokens=20)).ids == plain.ids


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_the_thread_ends_if_the_target_fails(threaded: Engine, error: BaseException) -> None:
    backend: Any = threaded.setup.backend
    honest, calls = backend.forward, []

    def forward(queries: Sequence[Query]) -> list[Tensor]:
        calls.append(queries)
        if len(calls) == 3:
            raise error
        return honest(queries)  # type: ignore[no-any-return]

    backend.forward = forward
    try:
        generate(threaded, PROMPTS[0])
    except type(error):
        pass
    del forward
    calls.clear()
    assert gone()


def test_what_fails_in_the_thread_is_told(threaded: Engine) -> None:
    class Broken(Fork):
        def step(self) -> bool:
            raise RuntimeError("the draft model broke")

        def expects(self, outcome: Outcome) -> bool:
            return False

        def settle(self, outcome: Outcome | None) -> Draft:
            return Draft()

    ssd: Any = threaded.setup.drafter
    made = ssd.drafter.proposer

    def proposer(law: Law, source: RandomSource) -> Proposer:
        found: Any = made(law, source)
        found.fork = lambda *_: Broken()
        return found  # type: ignore[no-any-return]

    ssd.drafter.proposer = proposer
    began = ssd.race.begin

    def begin(fork: Fork, seconds: float | None) -> Any:
        work = began(fork)
        while not work.steps:
            pass
        return work

    ssd.race.begin = begin
    with pytest.raises(RuntimeError, match="the draft model broke"):
        generate(threaded, PROMPTS[0])
    del proposer, begin
    ssd.drafter.proposer, ssd.race.begin = made, began
    assert gone()


def test_a_step_in_flight_is_waited_for_and_the_rest_forgotten() -> None:
    class Slow(Fork):
        def __init__(self) -> None:
            self.made, self.begun, self.go_on = 0, threading.Event(), threading.Event()

        def step(self) -> bool:
            self.begun.set()
            self.go_on.wait(5)
            self.made += 1
            return True

        def expects(self, outcome: Outcome) -> bool:
            return False

        def settle(self, outcome: Outcome | None) -> Draft:
            return Draft()

    race, fork, other = Beside(), Slow(), Slow()  # no end is foreseen for the verification
    race.enter()
    race.begin(fork)
    race.begin(other)
    assert fork.begun.wait(5)
    threading.Timer(0.05, fork.go_on.set).start()
    race.pause()
    assert (fork.made, other.made) == (1, 0)
    race.close()
    assert gone()


def test_a_step_that_would_mostly_come_too_late_is_not_begun() -> None:
    class Quick(Fork):
        def step(self) -> bool:
            return True

        def expects(self, outcome: Outcome) -> bool:
            return False

        def settle(self, outcome: Outcome | None) -> Draft:
            return Draft()

    assert Work(Quick(), until=time.perf_counter() + 60).step()
    assert not Work(Quick(), until=time.perf_counter()).step()


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import os, signal, threading, time
from tiny import BACKENDS, drafter_over, tiny_llama
from foredraft.engine import Engine
from foredraft.generation import Request
from foredraft.proposers.ssd import Ssd
from foredraft.types import SamplingParams
target = BACKENDS["transformers"](tiny_llama(0))
engine = Engine(target, Ssd(drafter_over(target, "draft"), always=True))
events = engine.run([Request([1, 2, 3], SamplingParams(max_tokens=500))])
next(events)
if sys.argv[2] == "interrupt":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    def interrupt():  # again, if need be: where C code asks for an attribute, Python loses what is raised
        while True:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt, daemon=True).start()
    list(events)
if sys.argv[2] == "raise":
    raise SystemExit(3)
"""


@pytest.mark.parametrize(("way", "status"), [("interrupt", -2), ("raise", 3), ("end", 0)])
def test_a_process_ends_at_once_whatever_is_being_drafted(way: str, status: int, request: Any) -> None:
    here = str(request.path.parent)
    ended = subprocess.run([sys.executable, "-c", PROGRAM, here, way], timeout=60, capture_output=True, check=False)
    assert ended.returncode in (status, 130 if status == -2 else status), ended.stderr.decode()


# Names


def test_ssd_is_asked_for_by_name(tiny_target: Any) -> None:
    target = BACKENDS["native"](tiny_target)
    loader = Loader(engine=EngineChoice(backend="native", threads=1))
    for name, inner in (("ssd:suffix", Suffix), ("ssd:hybrid:suffix+ngram", Hybrid), ("ssd:ngram", NGram)):
        found = loader.drafter(parse_drafter(name), target, None)
        assert isinstance(found, Ssd)
        assert found.name == name
        assert isinstance(found.drafter, inner)
    found = loader.drafter(parse_drafter("saguaro:self_quant"), target, None)
    assert isinstance(found, Saguaro)
    assert found.drafter.reweigh is not None


@pytest.mark.parametrize("name", ["ssd:none", "ssd:auto", "ssd:ssd:ngram", "ssd:auto:ngram", "saguaro:ssd:ngram"])
def test_what_cannot_be_asked_ahead_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"'{name}' cannot be: use .*draft:REF .* or a hybrid"):
        parse_drafter(name)


def test_ssd_needs_a_drafter() -> None:
    with pytest.raises(InvalidInputError, match="'ssd' needs more: ssd:DRAFTER with draft:REF"):
        parse_drafter("ssd")
    with pytest.raises(InvalidInputError, match="must join"):
        parse_drafter("hybrid:ngram+ssd:suffix")


def test_a_drafter_that_cannot_fork_is_refused(tiny_target: Any) -> None:
    target = BACKENDS["native"](tiny_target)
    lookahead = Loader().drafter(("lookahead", ""), target, None)
    assert lookahead is not None
    for drafter in (lookahead, ParallelDrafter(head_over(target, "medusa"), target)):  # type: ignore[arg-type]
        with pytest.raises(UnsupportedError, match=f"'{drafter.name}' cannot draft for texts .* ssd: with draft:REF"):
            Ssd(drafter)
    with pytest.raises(UnsupportedError, match=r"'suffix' draws nothing.*use ssd:suffix"):
        Saguaro(Suffix.for_target(target))


def test_memory_is_that_of_the_drafter_within(tmp_path: Any) -> None:
    assert check_memory(tmp_path, parse_drafter("ssd:suffix")) == tmp_path
    with pytest.raises(UnsupportedError):
        check_memory(tmp_path, parse_drafter("ssd:ngram"))


def test_options_of_draft_models() -> None:
    engine = EngineChoice(backend="native", threads=2, weights="q8", draft_threads=1)
    assert engine.for_drafts == EngineChoice(backend="native", threads=1, weights="q8")
    assert EngineChoice(threads=2).for_drafts == EngineChoice(threads=2)
    on_cpu = EngineChoice("transformers", "cpu", draft_device="cpu").for_drafts
    assert (on_cpu.backend, on_cpu.device) == ("auto", "cpu")
    with pytest.raises(InvalidInputError, match="draft_threads"):
        EngineChoice(draft_threads=0)
    with pytest.raises(InvalidInputError):
        EngineChoice(draft_device="toaster")


def test_twins_of_the_target_get_threads_of_their_own(tiny_target: Any) -> None:
    target: Any = BACKENDS["native"](tiny_target)
    quantized: Any = drafter_over(target, "self_quant")
    assert quantized.backend.team is target.team
    Ssd(quantized, threads=1)
    assert quantized.backend.team is not target.team


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_head_reads_tokens_of_any_depth_at_once(tiny_target: Any, backend: str) -> None:
    """Logits below nodes of different depths are those that come of going level by level."""
    target: Any = BACKENDS[backend](tiny_target)
    head: Any = inner_over(target, "eagle3")
    features, totals = torch.randn(4, 3, target.hidden_size), [3, 4, 5, 6]

    def run() -> Any:
        found = head.new_run()
        found.commit(features, totals)
        found.expand([-1, -1], [7, 8])
        found.expand([0], [9])
        return found

    together = run().expand([-1, 2, 1], [10, 11, 12])
    for row, (parent, token) in enumerate([(-1, 10), (2, 11), (1, 12)]):
        torch.testing.assert_close(together[row : row + 1], run().expand([parent], [token]), atol=1e-4, rtol=1e-4)
    assert run().depth(2) == 2


# Figures


def test_figures_say_what_was_foreseen(tiny_target: Any) -> None:
    target = BACKENDS["native"](tiny_target)
    completion = generate(
        Engine(target, scripted(inner_over(target, "draft"))), PROMPTS[1], SamplingParams(max_tokens=40)
    )
    found = completion.stats.foresight
    assert found is not None
    assert found.rounds == completion.stats.target_forwards - 1  # the last one ends the answer
    assert sum(hits for hits, _ in found.by_accepted.values()) == found.hits > 0
    assert sum(rounds for _, rounds in found.by_accepted.values()) == found.rounds
    assert found.wasted == found.branches - found.hits
    figures = completion.stats.to_dict()["foresight"]
    assert figures["hit_rate"] == found.hits / found.rounds
    plain = generate(Engine(target), PROMPTS[1], SamplingParams(max_tokens=4))
    assert plain.stats.foresight is None


def test_forwards_beside_the_target_are_counted(tiny_target: Any) -> None:
    target = BACKENDS["native"](tiny_target)
    stats = [
        generate(
            Engine(target, scripted(inner_over(target, "draft"), steps)), PROMPTS[0], SamplingParams(max_tokens=40)
        ).stats
        for steps in (0, 99)
    ]
    assert stats[1].draft_forwards > stats[0].draft_forwards


def test_when_it_was_turned_off_the_completion_says_why() -> None:
    target = BACKENDS["native"](tiny_llama(3))
    ssd = scripted(inner_over(target, "draft"))
    ssd.trial = Trial(ssd.endings, tries=2, again=1000)
    honest = ssd.trial.note
    ssd.trial.note = lambda verify, seconds, depth: honest(1.0, 3.0 if ssd.trial.on else 2.0, 4)  # type: ignore
    completion = generate(Engine(target, ssd), PROMPTS[0], SamplingParams(max_tokens=60))
    assert any("did not pay" in warning and "0.67 x" in warning for warning in completion.warnings)


def test_reports_of_the_benchmark_have_what_was_foreseen(tmp_path: Path) -> None:
    seen = ForesightStats(8, 5, 1, {0: (2, 4), 2: (3, 4)}, 40, 0.08, 0.004)
    turn = replace(answer(made([2, 0, 2, 0], 4)), foresight=seen)
    kept = Turn.from_json(json.loads(json.dumps(asdict(turn))))
    assert kept == turn
    cell = Cell("ssd:suffix")
    run = results(cells=(PLAIN,))
    run = replace(run, cells=(*run.cells, cell), measurements=(*run.measurements, measured(cell, "item-0", kept, kept)))
    [figures] = [figures for figures in run.figures if figures.cell == cell and not figures.category]
    assert figures.foresight is not None
    assert figures.foresight.by_accepted == {0: (4, 8), 2: (6, 8)}
    write_report([run], tmp_path / "report.html", tmp_path / "report.md")
    text, page = ((tmp_path / f"report.{kind}").read_text(encoding="utf-8") for kind in ("md", "html"))
    assert "Drafted while the target verified" in text
    assert f"0: {percent(0.5)}, 2: {percent(0.75)}" in text
    assert "Drafted while the target verified" in page
    assert promises_same_text(Cell("ssd:draft:REF", temperature=1.0))  # its usual rule is keyed


def test_a_trace_tells_what_was_drafted_meanwhile() -> None:
    assert _foreseen(None) == ""
    assert "for 3 ways" in _foreseen(Foresight("hit", 3, 0.1))
    assert "the next draft is there already" in _foreseen(Foresight("hit", 3, 0.1))
    assert "for one way" in _foreseen(Foresight("miss", 1, 0.1))
