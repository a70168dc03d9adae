"""Continuous batching without HTTP: who runs when, that nobody's text depends on others, and what memory is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foredraft.errors import ForedraftError, InvalidInputError
from foredraft.loading import EngineChoice, Loader
from foredraft.serve.asks import (
    Ask,
    AskTimeoutError,
    Limits,
    WorkerCrashedError,
)
from foredraft.serve.methods import Methods
from foredraft.serve.prefixes import Prefixes, Source
from foredraft.serve.scheduler import Job, Scheduler
from foredraft.serve.turns import Turns
from foredraft.types import Completion, Event, FinishEvent, RoundEvent, RoundStats, SamplingParams, TokenEvent
from tiny import CountingBackend

PROMPTS = [[5 + i, 9, 3, 5 + i, 9, 3, 7, 5 + i] for i in range(6)]
LONG = [3 + i % 29 for i in range(300)]
KV_LIMIT = 10**9


class Counts:
    """A `Watch` that remembers."""

    def __init__(self) -> None:
        self.forwards: list[tuple[int, int]] = []
        self.reused: list[int] = []
        self.completions: list[Completion] = []
        self.failures: list[str] = []
        self.rounds: list[tuple[str, RoundStats]] = []

    def waited(self, seconds: float, prompt: int, reused: int) -> None:
        assert seconds >= 0
        self.reused.append(reused)

    def forward(self, sequences: int, rows: int, seconds: float) -> None:
        self.forwards.append((sequences, rows))

    def round(self, drafter: str, stats: RoundStats) -> None:
        self.rounds.append((drafter, stats))

    def finished(self, completion: Completion) -> None:
        self.completions.append(completion)

    def failed(self, code: str) -> None:
        self.failures.append(code)


@pytest.fixture(scope="module", params=["native", "transformers"])
def methods(request: Any, tiny_folder: Path) -> Methods:
    """A tiny target with what needs nothing, on each backend."""
    return Methods(Loader(engine=EngineChoice(backend=request.param)), str(tiny_folder))


@pytest.fixture
def counts() -> Counts:
    return Counts()


@pytest.fixture
def scheduler(methods: Methods, counts: Counts) -> Scheduler:
    return Scheduler(methods.model.backend, Limits(prefill=16), KV_LIMIT, counts)


class Run:
    """A job and what came of it."""

    def __init__(self, scheduler: Scheduler, methods: Methods, ask: Ask) -> None:
        self.events: list[tuple[int, Event]] = []
        self.errors: list[ForedraftError] = []
        self.deliveries = 0
        setup = methods.setup(ask.drafter, ask.rule, ask.draft_tokens, seeded=ask.params.seed is not None)
        self.job = Job(ask, setup, self._deliver, self.errors.append)
        scheduler.add(self.job)

    def _deliver(self, events: Sequence[tuple[int, Event]]) -> None:
        assert not self.errors
        self.deliveries += 1
        self.events += events

    @property
    def completions(self) -> list[Completion]:
        found = [(index, event.completion) for index, event in self.events if isinstance(event, FinishEvent)]
        return [completion for _, completion in sorted(found, key=lambda each: each[0])]

    @property
    def ids(self) -> list[tuple[int, ...]]:
        return [completion.ids for completion in self.completions]


def asked(prompt: Sequence[int], *, drafter: str | None = None, **params: Any) -> Ask:
    settings = {"max_tokens": 24, "temperature": 0.9, "seed": 3, "ignore_eos": True, **params}
    return Ask(prompt=tuple(prompt), params=SamplingParams(**settings), drafter=drafter)


def finish(scheduler: Scheduler) -> int:
    """Steps until nothing is left."""
    steps = 0
    while scheduler.busy:
        scheduler.step()
        steps += 1
        assert steps < 2000
    return steps


def alone(methods: Methods, ask: Ask) -> list[tuple[int, ...]]:
    fresh = Scheduler(methods.model.backend, Limits(), KV_LIMIT, Counts())
    run = Run(fresh, methods, ask)
    finish(fresh)
    return run.ids


def mixed() -> list[Ask]:
    """Sampled and greedy asks of every drafter, with prompts of all lengths, some of several answers."""
    drafters = ["auto", "suffix", "none", "ngram", "recycling", "hybrid:suffix+recycling"]
    asks = [asked(prompt, drafter=drafters[i], seed=i) for i, prompt in enumerate(PROMPTS)]
    asks += [asked(prompt, drafter=drafters[i], temperature=0.0) for i, prompt in enumerate(PROMPTS)]
    return [*asks, asked(LONG, seed=8), replace(asked(LONG[:50], seed=4), n=3)]


def test_text_does_not_depend_on_who_else_is_in_the_batch(
    methods: Methods, scheduler: Scheduler, counts: Counts
) -> None:
    expected = [alone(methods, ask) for ask in mixed()]
    runs = [Run(scheduler, methods, ask) for ask in mixed()]
    finish(scheduler)
    assert [run.ids for run in runs] == expected
    assert max(sequences for sequences, _ in counts.forwards) >= 12
    assert not counts.failures and len(counts.completions) == 16


def test_answers_of_one_ask_have_seeds_of_their_own_and_share_the_prompt(
    methods: Methods, scheduler: Scheduler, counts: Counts
) -> None:
    run = Run(scheduler, methods, replace(asked(LONG, seed=11), n=3))
    finish(scheduler)
    assert run.ids == [alone(methods, asked(LONG, seed=11 + i))[0] for i in range(3)]
    assert len(set(run.ids)) == 3
    assert counts.reused == [0]  # told of the ask, which is taken up once; the others copy what the first has read
    assert [completion.settings.seed for completion in run.completions] == [11, 12, 13]


def test_the_events_of_a_round_come_together_and_are_those_of_the_completion(
    methods: Methods, scheduler: Scheduler
) -> None:
    run = Run(scheduler, methods, asked(PROMPTS[0]))
    finish(scheduler)
    rounds = [event for _, event in run.events if isinstance(event, RoundEvent)]
    tokens = tuple(event.token for _, event in run.events if isinstance(event, TokenEvent))
    assert run.deliveries == len(rounds)
    assert (tokens,) == tuple(run.ids)


def test_a_long_prompt_is_read_in_pieces_between_the_rounds_of_others(methods: Methods, counts: Counts) -> None:
    backend = CountingBackend(methods.model.backend)
    scheduler = Scheduler(backend, Limits(prefill=16), KV_LIMIT, counts)
    first = Run(scheduler, methods, asked(PROMPTS[0], drafter="none", max_tokens=200))
    scheduler.step()
    long = Run(scheduler, methods, asked(LONG))
    before = first.deliveries
    while not long.events:
        assert scheduler.busy
        scheduler.step()
    pieces = -(-(len(LONG) - 1) // 16)
    assert first.deliveries - before >= pieces  # a round of the other for every piece


def test_a_short_prompt_does_not_wait_for_a_long_one(methods: Methods, scheduler: Scheduler) -> None:
    running = Run(scheduler, methods, asked(PROMPTS[0], drafter="none", max_tokens=200))
    scheduler.step()
    long = Run(scheduler, methods, asked(LONG))
    scheduler.step()
    short = Run(scheduler, methods, asked(PROMPTS[1]))
    while not short.events:
        scheduler.step()
    assert not long.events and running.events
    finish(scheduler)
    assert long.ids and short.ids


def test_the_next_turn_of_a_conversation_reads_only_what_is_new(
    methods: Methods, scheduler: Scheduler, counts: Counts
) -> None:
    first = Run(scheduler, methods, asked(LONG[:40]))
    finish(scheduler)
    history = [*LONG[:40], *first.ids[0]]
    ask = asked([*history, 9, 8, 7])
    second = Run(scheduler, methods, ask)
    finish(scheduler)
    assert counts.reused == [0, len(history) - 1]
    assert second.ids == alone(methods, ask)
    third = Run(scheduler, methods, asked([*LONG[:30], 11, 12]))  # another branch of it
    finish(scheduler)
    assert counts.reused[-1] == 30
    assert third.ids == alone(methods, third.job.ask)


def test_what_was_not_used_for_longest_is_forgotten_first(methods: Methods) -> None:
    backend = methods.model.backend
    prefixes = Prefixes(backend)
    for start in (3, 10, 17):
        tokens = [start, *LONG[:40]]
        cache, reused = prefixes.begin(tokens, 60)
        assert reused == 0
        backend.prefill(cache, tokens[:-1])
        prefixes.keep(tokens, cache, 60)
    one = prefixes.bytes // 3
    assert prefixes.begin([3, *LONG[:40], 5], 60)[1] == 40
    prefixes.shrink(2 * one)
    assert len(prefixes) == 2
    assert [prefixes.begin([start, *LONG[:40], 5], 60)[1] for start in (3, 10, 17)] == [40, 0, 40]
    prefixes.shrink(0)
    assert len(prefixes) == prefixes.bytes == 0


def test_a_kept_beginning_gives_way_to_what_goes_on_from_it(methods: Methods) -> None:
    backend, prefixes = methods.model.backend, Prefixes(methods.model.backend)
    for length in (20, 30, 40):
        cache, _ = prefixes.begin(LONG[:length], 60)
        backend.prefill(cache, LONG[cache.length : length - 1])
        prefixes.keep(LONG[:length], cache, 60)
    assert len(prefixes) == 1
    cache = backend.copy(prefixes.begin([*LONG[:40], 1], 60)[0], 20)
    assert prefixes.begin([*LONG[:15], 30, 30], 60, [Source(np_array(LONG[:20]), cache)])[1] == 0  # of 15 it is no use


def np_array(tokens: Sequence[int]) -> Any:
    import numpy as np

    return np.array(tokens)


def test_memory_is_bounded_and_who_does_not_fit_waits(methods: Methods, counts: Counts) -> None:
    backend = methods.model.backend
    probe = Run(Scheduler(backend, Limits(), KV_LIMIT, Counts()), methods, asked(LONG, seed=1))
    scheduler = Scheduler(backend, Limits(), 2 * probe.job.reserved, counts)
    runs = [Run(scheduler, methods, asked(LONG, seed=seed)) for seed in range(5)]
    most = 0
    while scheduler.busy:
        scheduler.step()
        most = max(most, scheduler.reserved + scheduler.prefixes.bytes)
        assert scheduler.running <= 2
    assert most <= scheduler.kv_limit
    assert all(run.ids for run in runs)


def test_what_can_never_fit_is_refused_with_the_numbers(methods: Methods, counts: Counts) -> None:
    scheduler = Scheduler(methods.model.backend, Limits(sequences=2), 1000, counts)
    with pytest.raises(InvalidInputError, match=r"takes .* MB of keys and values, and this server has") as told:
        Run(scheduler, methods, asked(LONG))
    assert told.value.field == "max_tokens"
    with pytest.raises(InvalidInputError, match=r"n is 3, but must be an integer in \[1, 2\]"):
        Run(scheduler, methods, replace(asked(LONG), n=3))


def test_users_take_turns(methods: Methods, counts: Counts) -> None:
    scheduler = Scheduler(methods.model.backend, Limits(sequences=1), KV_LIMIT, counts)
    users = "aaaabbc"
    runs = [Run(scheduler, methods, replace(asked(PROMPTS[0], seed=i), user=u)) for i, u in enumerate(users)]
    order: list[int] = []
    while scheduler.busy:
        scheduler.step()
        order += [i for i, run in enumerate(runs) if run.completions and i not in order]
    assert "".join(users[i] for i in order) == "abcabaa"


def test_turns_forget_whom_they_are_told_to() -> None:
    class Item:
        def __init__(self, user: str) -> None:
            self.user = user

    items = [Item(user) for user in "aab"]
    turns: Turns[Item] = Turns()
    for item in items:
        turns.add(item)
    turns.remove(items[0])
    assert len(turns) == 2 and list(turns) == items[1:]
    assert [turns.pop(), turns.pop()] == items[1:]
    assert turns.first() is None


def test_a_cancelled_job_is_gone_at_once(methods: Methods, scheduler: Scheduler, counts: Counts) -> None:
    runs = [Run(scheduler, methods, asked(PROMPTS[i], drafter="none", max_tokens=100)) for i in range(2)]
    reading = Run(scheduler, methods, asked(LONG))
    waiting = [Run(scheduler, methods, replace(asked(LONG), n=16))]
    for _ in range(3):
        scheduler.step()
    for run in (runs[0], reading, *waiting):
        scheduler.cancel(run.job)
    before = runs[0].deliveries
    assert scheduler.running == 1 and not scheduler.waiting
    finish(scheduler)
    scheduler.cancel(runs[0].job)
    assert runs[0].deliveries == before and not runs[0].completions and not reading.events
    assert runs[1].ids == alone(methods, runs[1].job.ask)
    assert counts.failures == ["cancelled"] * 3
    assert scheduler.reserved == 0


def test_who_takes_too_long_fails_alone(methods: Methods, counts: Counts) -> None:
    now = [0.0]
    scheduler = Scheduler(methods.model.backend, Limits(timeout=50.0), KV_LIMIT, counts, clock=lambda: now[0])
    slow, other = (Run(scheduler, methods, asked(PROMPTS[i], max_tokens=80)) for i in range(2))
    for run in (slow, other):
        run.job.submitted = 0.0
    slow.job.ask = replace(slow.job.ask, timeout=5.0)
    scheduler.step()
    now[0] = 6.0
    finish(scheduler)
    assert [type(error) for error in slow.errors] == [AskTimeoutError]
    assert other.ids == alone(methods, other.job.ask)
    assert counts.failures == ["timeout"]


@pytest.mark.parametrize("when", ["propose", "score", "read"])
def test_one_bad_request_fails_alone(
    methods: Methods, scheduler: Scheduler, counts: Counts, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    good, bad = (Run(scheduler, methods, asked(PROMPTS[i], drafter="suffix", max_tokens=40)) for i in range(2))
    if when != "read":
        scheduler.step()
    from foredraft.generation import Generation

    original: Callable[..., Any] = getattr(Generation, when)

    def broken(self: Generation, *arguments: Any) -> Any:
        if self.tokens[: len(PROMPTS[1])] == PROMPTS[1]:
            raise RuntimeError("a defect")
        return original(self, *arguments)

    monkeypatch.setattr(Generation, when, broken)
    finish(scheduler)
    assert [type(error) for error in bad.errors] == [WorkerCrashedError] and not bad.completions
    monkeypatch.undo()
    assert good.ids == alone(methods, good.job.ask)
    assert counts.failures == ["worker_crashed"]


def test_an_answer_that_fails_while_another_of_its_ask_ends_harms_nobody_else(
    methods: Methods, scheduler: Scheduler, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = Run(scheduler, methods, asked(PROMPTS[0], drafter="none", max_tokens=40))
    bad = Run(scheduler, methods, replace(asked(PROMPTS[1], drafter="none", max_tokens=1), n=2))
    from foredraft.generation import Generation

    original, failing = Generation.score, iter([True])

    def broken(self: Generation, *arguments: Any) -> Any:
        if self.tokens[: len(PROMPTS[1])] == PROMPTS[1] and next(failing, False):
            raise RuntimeError("a defect")
        return original(self, *arguments)

    monkeypatch.setattr(Generation, "score", broken)
    finish(scheduler)
    assert [type(error) for error in bad.errors] == [WorkerCrashedError] and not bad.events
    monkeypatch.undo()
    assert good.ids == alone(methods, good.job.ask)
    assert counts.failures == ["worker_crashed"]


def test_a_grammar_that_leaves_nothing_is_the_fault_of_its_request_alone(
    methods: Methods, scheduler: Scheduler
) -> None:
    import torch

    class Nothing:
        def start(self, prompt_length: int) -> Any:
            return lambda tokens: torch.zeros(methods.model.backend.vocab_size, dtype=torch.bool)

    bad = Run(scheduler, methods, replace(asked(PROMPTS[0]), grammar=Nothing()))
    good = Run(scheduler, methods, asked(PROMPTS[1]))
    finish(scheduler)
    assert [type(error) for error in bad.errors] == [InvalidInputError]
    assert good.ids == alone(methods, good.job.ask)


def test_all_requests_share_one_budget_of_nodes(methods: Methods, counts: Counts) -> None:
    scheduler = Scheduler(methods.model.backend, Limits(nodes=6), KV_LIMIT, counts)
    runs = [
        Run(scheduler, methods, asked([7, 7, 7, 7, 7, 7, 5 + i], drafter=drafter, temperature=0.0, max_tokens=60))
        for i, drafter in enumerate(("suffix", "auto", "recycling", "auto"))
    ]
    finish(scheduler)
    assert all(rows <= sequences + 6 for sequences, rows in counts.forwards)
    assert any(rows > sequences for sequences, rows in counts.forwards)
    assert [run.ids for run in runs] == [alone(methods, run.job.ask) for run in runs]
