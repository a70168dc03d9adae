"""The model of drafting beside the target: what it foretells, and that threads which sleep as planted agree with it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.backends.base import Backend, Capabilities, KVCache, Query
from foredraft.bench.overlap import Text, Times, gain, simulate
from foredraft.engine import Engine
from foredraft.proposers.base import Drafter, Proposer
from foredraft.proposers.foresight import Planner
from foredraft.proposers.forks import Fork, Outcome, Plan
from foredraft.proposers.ssd import Ssd
from foredraft.randomness import RandomSource
from foredraft.sampling import Law
from foredraft.types import Draft, SamplingParams
from tiny import generate

ACCEPTANCES = (0.4, 0.6, 0.8, 0.9, 0.95)
"""Those of the table of check values in the theory of speculation."""
HIT_RATE = 0.7


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize("share", [1.0, 0.75, 0.5])
def test_with_a_device_of_its_own_it_gains_as_the_paper_says(acceptance: float, share: float) -> None:
    """Drafts of 4 take as long as a forward of the target, or down to half of that."""
    times = Times(draft=share / 4, step=share / 4, verify=lambda rows: 1.0)
    assert gain(times, Text.of(20_000, acceptance, HIT_RATE), [4]) >= 1.3


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_it_gains_the_hidden_time_at_most(acceptance: float) -> None:
    """`(T_draft + T_verify) / T_verify`, with every outcome foreseen; little where drafting takes little."""
    for share in (0.1, 0.5, 1.0):
        times = Times(draft=share / 4, step=share / 4, verify=lambda rows: 1.0)
        sure = gain(times, Text.of(20_000, acceptance, 1.0), [4])
        assert sure <= 1 + share + 1e-9
        assert sure >= 1 + 0.65 * share


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_it_does_not_pay_on_one_device(acceptance: float) -> None:
    """For all outcomes together a step takes longer than for one, and what they take the target waits for."""
    times = Times(draft=0.1, step=0.15, verify=lambda rows: 1.0, shared=True)
    assert gain(times, Text.of(20_000, acceptance, HIT_RATE), [1, 2, 4]) < 1.0


def test_a_round_takes_what_the_clock_says() -> None:
    times = Times(draft=1.0, step=2.0, verify=lambda rows: 5.0)
    right, never = Text([True] * 9, [True] * 9), Text([False] * 4, [False] * 4)
    assert simulate(times, never, 2, ahead=False)[:3] == (2, 14.0, 2)
    # Steps end after 2, 4 and 6 seconds: the third was in flight when the verification was over.
    assert simulate(times, never, 2, ahead=True)[:3] == (2, 2 + 6 + 2 + 6, 2)
    assert simulate(times, right, 2, ahead=True)[:3] == (9, 2 + 6 + 6 + 6, 3)


# The same with real threads, which sleep

_SLEEP = 0.03  # seconds of a forward; drafting takes such shares of it that no step ends with it


class Cache(KVCache):
    """Counts."""

    def __init__(self) -> None:
        self.tokens = 0
        self.features = []

    @property
    def length(self) -> int:
        return self.tokens


class SleepingTarget(Backend):
    """Writes a text that counts up, and takes its time."""

    name = "sleeping"
    capabilities = Capabilities(trees=True)
    vocab_size, context, stop_tokens = 512, None, frozenset()

    def new_cache(self, room: int = 0) -> KVCache:
        return Cache()

    def prefill(self, cache: KVCache, tokens: Sequence[int]) -> None:
        assert isinstance(cache, Cache)
        cache.tokens += len(tokens)

    def forward(self, queries: Sequence[Query]) -> list[Tensor]:
        time.sleep(_SLEEP)
        [query] = queries
        rows = torch.zeros(1 + len(query.draft), self.vocab_size)
        for row in range(len(rows)):
            rows[row, query.cache.length + row + 1] = 1.0
        return [rows]

    def commit(self, cache: KVCache, path: Sequence[int]) -> None:
        assert isinstance(cache, Cache)
        cache.tokens += 1 + len(path)

    def truncate(self, cache: KVCache, length: int) -> None:
        assert isinstance(cache, Cache)
        cache.tokens = length


class SleepingDrafter(Drafter):
    """Is right where it is planted to be, and takes its time."""

    name = usage = "sleeper"
    draft_tokens, forks = 4, True
    when_nothing_is_accepted = "planted so"

    def __init__(self, text: Text, seconds: float) -> None:
        self.text, self.seconds = text, seconds

    def chain(self, position: int, length: int) -> Draft:
        """Tokens from a position of the answer on."""
        right = self.text.drafted[position : position + length]
        return Draft.chain([position + i + 1 if ok else 0 for i, ok in enumerate(right)])

    def proposer(self, law: Law, source: RandomSource) -> Proposer:
        return _Sleeper(self)


class _Sleeper(Proposer):
    def __init__(self, drafter: SleepingDrafter) -> None:
        self._drafter = drafter

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        time.sleep(budget * self._drafter.seconds)
        return self._drafter.chain(len(tokens) - 1, budget)

    def fork(self, tokens: Sequence[int], draft: Draft, plan: Plan) -> Fork:
        return _SleepingFork(self._drafter, len(tokens) - 1, len(draft), plan)


class _SleepingFork(Fork):
    def __init__(self, drafter: SleepingDrafter, position: int, drafted: int, plan: Plan) -> None:
        self._drafter, self._position, self._drafted, self._plan = drafter, position, drafted, plan
        self._steps = 0

    def step(self) -> bool:
        time.sleep(self._drafter.seconds)
        self._steps += 1
        return self._steps < self._plan.steps

    def expects(self, outcome: Outcome) -> bool:
        return self._drafter.text.foreseen[self._position + outcome.node + 1]

    def settle(self, outcome: Outcome | None) -> Draft:
        if outcome is None or not self.expects(outcome):
            return Draft()
        ready = self._steps - (outcome.node == self._drafted - 1)
        return self._drafter.chain(self._position + outcome.node + 2, max(min(ready, self._plan.budget), 0))


class _AllSteps(Planner):
    def plan(self, ends: Any, deepest: int, budget: int, model: bool) -> Plan:
        return Plan(ends, 1, budget, budget + 1, 1.0)


@pytest.mark.parametrize("draft", [0.3, 0.12])
@pytest.mark.parametrize("acceptance", [0.6, 0.9])
def test_threads_that_sleep_as_planted_agree_with_the_model(acceptance: float, draft: float) -> None:
    text = Text.of(80, acceptance, HIT_RATE, seed=1)
    sleeper = SleepingDrafter(text, draft * _SLEEP)
    times = Times(draft * _SLEEP, draft * _SLEEP, lambda rows: _SLEEP)
    for ahead in (False, True):
        drafter: Drafter = sleeper
        if ahead:
            drafter = ssd = Ssd(sleeper, always=True)
            ssd.planner = _AllSteps()
        expected = simulate(times, text, 4, ahead=ahead)
        engine, params = Engine(SleepingTarget(), drafter, draft_tokens=4), SamplingParams(max_tokens=expected.tokens)
        took = [generate(engine, [0], params).stats.seconds]
        while took[-1] > 1.1 * expected.seconds and len(took) < 4:  # others may have kept the threads waiting
            took.append(generate(engine, [0], params).stats.seconds)
        assert took[-1] == pytest.approx(expected.seconds, rel=0.10)
