"""Continuous batching: asks join and leave between rounds, and long prompts are read a piece at a time between them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import monotonic

import numpy as np

from foredraft.backends.base import Backend
from foredraft.engine import play_round
from foredraft.errors import ForedraftError, InvalidInputError
from foredraft.generation import Generation, Request, Setup
from foredraft.serve.asks import Ask, AskTimeoutError, Limits, Watch, WorkerCrashedError
from foredraft.serve.prefixes import Prefixes, Source
from foredraft.serve.turns import Turns
from foredraft.types import Event, FinishEvent, RoundEvent, SamplingParams

logger = logging.getLogger(__name__)

_UNDISTURBED = 4  # times as many tokens of prompts are read at once while no answer runs
_SEEDS = 2**63

Deliver = Callable[[Sequence[tuple[int, Event]]], None]


@dataclass(eq=False)
class Job:
    """An ask on its way, and where its events go.

    `deliver` gets those of a round together, with the index of their answer; `fail` the reason if it fails, once, and
    nothing follows. `began` is called when it is taken up, with the seconds that it waited and the tokens of its prompt
    that were there already.
    """

    ask: Ask
    setup: Setup
    deliver: Deliver
    fail: Callable[[ForedraftError], None]
    began: Callable[[float, int], None] = lambda seconds, reused: None
    submitted: float = field(default_factory=monotonic)
    reserved: int = 0
    """Bytes for its keys and values."""
    gone: bool = False
    """Whether it has failed or was cancelled: nothing of it is delivered any more."""

    @property
    def user(self) -> str:
        """Whose it is."""
        return self.ask.user

    @property
    def room(self) -> int:
        """Tokens that the cache of one answer may get, a draft in flight included."""
        most = len(self.ask.prompt) + self.ask.params.max_tokens
        context = self.setup.backend.context
        return (min(most, context) if context is not None else most) + self.setup.draft_tokens + 1


@dataclass(eq=False)
class _Choice:
    """One of the answers of a job."""

    job: Job
    index: int
    generation: Generation | None = None

    @property
    def unread(self) -> int:
        """Tokens of the prompt that are not cached yet."""
        cached = self.generation.cache.length if self.generation is not None else 0
        return len(self.job.ask.prompt) - 1 - cached


class Scheduler:
    """Runs jobs over one backend, in one thread, round by round.

    Memory for keys and values is set apart for the whole of an answer before it starts, so none runs out of it in the
    middle; what is left keeps the caches of answers that have ended, for prompts that begin likewise.

    Args:
        backend: The target.
        limits: What is taken on at once.
        kv_limit: Bytes for keys and values.
        watch: Who counts.
        clock: Seconds, for timeouts.
    """

    def __init__(
        self, backend: Backend, limits: Limits, kv_limit: int, watch: Watch, clock: Callable[[], float] = monotonic
    ) -> None:
        self.backend, self.limits, self.kv_limit = backend, limits, kv_limit
        self.prefixes = Prefixes(backend)
        self.restarts = 0
        self._watch, self._clock = watch, clock
        self._waiting: Turns[Job] = Turns()
        self._reading: list[_Choice] = []
        self._running: list[_Choice] = []
        self._oldest = False  # whose piece of a prompt is read next: of who came first, or of who has least left

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._waiting or self._reading or self._running)

    @property
    def waiting(self) -> int:
        """Asks in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Answers that are being made, those whose prompts are being read included."""
        return len(self._running) + len(self._reading)

    @property
    def reserved(self) -> int:
        """Bytes set apart for them."""
        return sum(job.reserved for job in self._taken_up())

    def add(self, job: Job) -> None:
        """Let a job wait for its turn.

        Raises:
            InvalidInputError: It can never run: too many answers, or not enough memory even if nothing else ran.
        """
        ask = job.ask
        if not 1 <= ask.n <= self.limits.sequences:
            allowed = f"an integer in [1, {self.limits.sequences}], the answers that this server makes at once"
            raise InvalidInputError(f"n is {ask.n}, but must be {allowed}.", field="n")
        job.reserved = ask.n * self.backend.kv_bytes(job.room)
        if job.reserved > self.kv_limit:
            raise InvalidInputError(
                f"A prompt of {len(ask.prompt)} tokens with {ask.params.max_tokens} to come, {ask.n} times, takes "
                f"{job.reserved / 1e6:.0f} MB of keys and values, and this server has {self.kv_limit / 1e6:.0f} MB: "
                "ask for fewer tokens.",
                field="max_tokens",
            )
        self._waiting.add(job)

    def cancel(self, job: Job) -> None:
        """Forget a job, whatever it is at. Nothing happens if it has ended."""
        if job in (*self._waiting, *self._taken_up()):
            self._drop(job)
            self._watch.failed("cancelled")

    def fail(self, error: ForedraftError, *, waiting: bool = True) -> None:
        """Fail all jobs, or only those that were taken up."""
        for job in [*self._taken_up(), *(self._waiting if waiting else ())]:
            self._fail(job, error)

    def reset(self) -> None:
        """After a crash: what was taken up fails, and nothing that was computed is trusted any more."""
        self.restarts += 1
        self.prefixes.clear()
        self.fail(WorkerCrashedError("The server failed while it answered. Ask again."), waiting=False)

    def step(self) -> None:
        """One piece of a prompt, and one round of all that run."""
        self._expire()
        self.take_up()
        self._read()
        self._play()

    def _taken_up(self) -> list[Job]:
        return list(dict.fromkeys(choice.job for choice in (*self._running, *self._reading)))

    def _expire(self) -> None:
        now = self._clock()
        for job in [*self._waiting, *self._taken_up()]:
            seconds = min(job.ask.timeout or self.limits.timeout, self.limits.timeout)
            if now - job.submitted > seconds:
                advice = "ask for fewer tokens, or again when the server is less busy"
                self._fail(job, AskTimeoutError(f"The request took longer than {seconds:g} s: {advice}."))

    def take_up(self) -> None:
        """Let jobs in, in turn, while there are places and memory for the next one."""
        reserved = self.reserved
        while (job := self._waiting.first()) is not None:
            if self.running + job.ask.n > self.limits.sequences or reserved + job.reserved > self.kv_limit:
                break
            reserved += job.reserved
            self._reading += [_Choice(job, index) for index in range(job.ask.n)]
            self._waiting.pop()
        self.prefixes.shrink(self.kv_limit - reserved)

    def _read(self) -> None:
        """Read pieces of prompts, so many tokens in all."""
        budget = self.limits.prefill * (1 if self._running else _UNDISTURBED)
        while self._reading and budget > 0:
            # Who has least to read goes first, but every other piece is of who came first, lest that wait for ever.
            least = min(self._reading, key=lambda choice: choice.unread)
            choice = self._reading[0] if self._oldest else least
            self._oldest = not self._oldest
            with self._guard(choice):
                if choice.generation is None:
                    choice.generation = self._begin(choice)
                before = choice.unread
                done = choice.generation.read(budget)
                budget -= max(before - choice.unread, 1)
                if done:
                    self._reading.remove(choice)
                    self._running.append(choice)

    def _begin(self, choice: _Choice) -> Generation:
        """The generation of an answer, over what other caches have of its prompt."""
        job, running = choice.job, [g for each in self._running if (g := each.generation) is not None]
        ask, sources = job.ask, [Source(np.array(g.tokens[: g.cache.length]), g.cache) for g in running]
        cache, reused = self.prefixes.begin(ask.prompt, job.room, sources)
        if choice.index == 0:
            waited = self._clock() - job.submitted
            job.began(waited, reused)
            self._watch.waited(waited, len(ask.prompt), reused)
        allowed = ask.grammar.start(len(ask.prompt)) if ask.grammar is not None else None
        params = params_of(ask, choice.index)
        return Generation(Request(ask.prompt, params, allowed=allowed, cache=cache, detail=ask.detail), job.setup)

    def _play(self) -> None:
        """A round of all whose prompts have been read."""
        running = {choice: g for choice in self._running if (g := choice.generation) is not None}
        if not running:
            return
        events: dict[Job, list[tuple[int, Event]]] = {}
        rounds: list[RoundEvent] = []
        for choice, event in play_round(running, self.limits.nodes, self._guard):
            if choice.job.gone:  # another answer of it has failed in this round
                continue
            events.setdefault(choice.job, []).append((choice.index, event))
            if isinstance(event, RoundEvent):
                rounds.append(event)
                drafter = choice.job.setup.drafter
                self._watch.round(drafter.name if drafter is not None else "none", event.stats)
            elif isinstance(event, FinishEvent):
                self._end(choice, running[choice], event)
        if rounds:
            rows = sum(1 + event.stats.drafted for event in rounds)
            self._watch.forward(len(rounds), rows, rounds[0].stats.verify_seconds)
        for job, found in events.items():
            if not job.gone:
                job.deliver(found)

    def _end(self, choice: _Choice, generation: Generation, event: FinishEvent) -> None:
        """An answer is complete: its cache is kept for prompts that go on from it."""
        self._running.remove(choice)
        generation.close()
        self._watch.finished(event.completion)
        self.prefixes.keep(generation.tokens, generation.cache, choice.job.room)
        self.prefixes.shrink(self.kv_limit - self.reserved)

    @contextmanager
    def _guard(self, choice: _Choice) -> Iterator[None]:
        """Around what concerns one answer alone: if it fails, its job does, and nobody else's."""
        try:
            yield
        except ForedraftError as error:
            self._fail(choice.job, error)
        except Exception:
            logger.exception("An answer failed")
            self._fail(choice.job, WorkerCrashedError.alone())

    def _fail(self, job: Job, error: ForedraftError) -> None:
        if job.gone:
            return
        self._drop(job)
        self._watch.failed(getattr(error, "code", "invalid"))
        job.fail(error)

    def _drop(self, job: Job) -> None:
        """Take a job out, whatever it is at, and end what works for it."""
        job.gone = True
        if job in self._waiting:
            self._waiting.remove(job)
        own = [choice.generation for choice in (*self._reading, *self._running) if choice.job is job]
        self._reading = [choice for choice in self._reading if choice.job is not job]
        self._running = [choice for choice in self._running if choice.job is not job]
        for generation in own:
            if generation is not None:
                generation.close()


def params_of(ask: Ask, index: int) -> SamplingParams:
    """The settings of one of an ask's answers: each has a seed of its own."""
    seed = ask.params.seed
    return ask.params if seed is None else replace(ask.params, seed=(seed + index) % _SEEDS)
