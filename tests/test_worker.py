"""The worker's thread: asks from an event loop, refusals, cancels, shutdown, and a crash that harms nobody for long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foredraft.backends.native.backend import NativeBackend
from foredraft.errors import InvalidInputError, UnsupportedError
from foredraft.loading import EngineChoice, Loader
from foredraft.serve.asks import Ask, DrainingError, Limits, QueueFullError, WorkerCrashedError
from foredraft.serve.methods import Methods
from foredraft.serve.worker import Worker
from foredraft.types import Completion, FinishEvent, SamplingParams, TokenEvent

PROMPT = (5, 9, 3, 5, 9, 3, 7, 5)
ENDLESS = 900  # tokens: more than any test waits for


@pytest.fixture(scope="module")
def methods(tiny_folder: Path) -> Methods:
    return Methods(Loader(engine=EngineChoice(backend="native", threads=1)), str(tiny_folder))


@pytest.fixture
def worker(methods: Methods) -> Iterator[Worker]:
    worker = Worker(methods, Limits(sequences=2, waiting=1))
    worker.start()
    yield worker
    worker.close()
    assert worker.status().state == "stopped"


def asked(max_tokens: int = 20, **other: Any) -> Ask:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=2, ignore_eos=True)
    return replace(Ask(prompt=PROMPT, params=params), **other)


async def answered(worker: Worker, ask: Ask) -> list[Completion]:
    found = {}
    async for index, event in await worker.submit(ask):
        if isinstance(event, FinishEvent):
            found[index] = event.completion
    return [found[index] for index in sorted(found)]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.001)


def test_answers_come_from_the_thread(worker: Worker) -> None:
    async def ask() -> None:
        one, two = await asyncio.gather(answered(worker, asked()), answered(worker, asked(n=2)))
        assert [len(one), len(two)] == [1, 2]
        assert one[0].ids == two[0].ids != two[1].ids

    run(ask())
    assert worker.plain_tokens_per_second()


def test_what_is_wrong_with_an_ask_is_told_at_once(worker: Worker) -> None:
    wrong: list[tuple[Ask, type[Exception], str]] = [
        (asked(drafter="sufix"), InvalidInputError, "This server has no drafter 'sufix'; it has auto, none, ngram"),
        (asked(drafter="eagle3"), InvalidInputError, "no drafter 'eagle3'"),
        (asked(rule="lossy-typical"), InvalidInputError, "changes the text"),
        (asked(rule="greedy"), InvalidInputError, "by itself at temperature 0"),
        (asked(rule="best"), InvalidInputError, "is unknown: leave it out, or take one of token, block"),
        (asked(draft_tokens=65), InvalidInputError, r"draft_tokens is 65, but must be an integer in \[0, 64\]"),
        (asked(prompt=()), InvalidInputError, "prompt is empty"),
        (asked(prompt=(10**6,)), InvalidInputError, "outside the vocabulary"),
        (asked(n=3), InvalidInputError, "n is 3"),
        (asked(drafter="recycling", rule="token"), UnsupportedError, "Use "),
    ]

    async def ask() -> None:
        for bad, kind, words in wrong:
            with pytest.raises(kind, match=words):
                await worker.submit(bad)
        assert len(await answered(worker, asked())) == 1

    run(ask())


def test_a_seed_makes_the_text_independent_of_the_batch_whatever_draws_the_drafts(methods: Methods) -> None:
    assert methods.setup("suffix", seeded=True).rule_for(greedy=False).keyed
    assert methods.setup("suffix", "recursive", seeded=True).rule_for(greedy=False).name == "recursive"
    assert methods.setup("suffix", draft_tokens=0).drafter is None
    assert methods.setup("suffix", draft_tokens=3).draft_tokens == 3
    assert methods.setup("none", draft_tokens=3).draft_tokens == 0


def test_a_drafter_that_draws_gets_a_rule_that_is_exact_for_the_seed(tiny_folder: Path) -> None:
    name = f"draft:{tiny_folder}"
    methods = Methods(Loader(engine=EngineChoice(backend="native", threads=1)), str(tiny_folder), default=name)
    assert methods.setup(None).rule_for(greedy=False).name == "block"
    assert methods.setup(None, seeded=True).rule_for(greedy=False).name == "seed-exact"
    assert methods.setup(None, seeded=True).drafter is not None


def test_a_full_queue_refuses_and_goes_on(worker: Worker) -> None:
    async def ask() -> None:
        running = [await worker.submit(asked(ENDLESS)) for _ in range(2)]
        await until(lambda: worker.status().running == 2)
        waiting = await worker.submit(asked())
        with pytest.raises(QueueFullError, match="1 requests are waiting already"):
            await worker.submit(asked())
        running[0].cancel()
        completions = [event.completion async for _, event in waiting if isinstance(event, FinishEvent)]
        assert len(completions) == 1 and waiting.queue_seconds is not None and waiting.queue_seconds > 0
        running[1].cancel()
        await until(lambda: worker.status().running == 0)

    run(ask())


def test_a_cancelled_answer_gives_its_memory_back(worker: Worker) -> None:
    async def ask() -> None:
        answer = await worker.submit(asked(ENDLESS))
        async for _, event in answer:
            if isinstance(event, TokenEvent):
                break
        assert worker.status().kv_bytes > 0
        answer.cancel()
        await until(lambda: worker.status().running == 0)
        assert worker.status().kv_bytes == 0
        answer.cancel()  # nothing happens

    run(ask())


def test_an_ask_whose_caller_is_cancelled_while_it_is_submitted_does_not_run(worker: Worker) -> None:
    async def ask() -> None:
        held = threading.Event()
        worker._commands.put(lambda: (held.wait(), None)[1])
        submitting = asyncio.create_task(worker.submit(asked(ENDLESS)))
        await asyncio.sleep(0)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        held.set()
        assert len(await answered(worker, asked())) == 1
        assert worker.status().running == 0

    run(ask())


def test_a_crash_fails_what_ran_and_the_queue_goes_on(
    worker: Worker, methods: Methods, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(answered(worker, asked()))[0].ids
    original, crashes = NativeBackend.forward, iter([True])

    def forward(self: NativeBackend, queries: Any) -> Any:
        if len(queries) == 2 and next(crashes, False):
            raise MemoryError("no memory for this forward")
        return original(self, queries)

    monkeypatch.setattr(NativeBackend, "forward", forward)

    async def ask() -> None:
        running = [await worker.submit(asked(ENDLESS)) for _ in range(2)]
        waiting = asyncio.create_task(answered(worker, asked()))
        for answer in running:
            with pytest.raises(WorkerCrashedError, match="Ask again"):
                async for _ in answer:
                    pass
        assert (await waiting)[0].ids == expected
        assert worker.status().restarts == 1 and worker.status().state == "ready"

    run(ask())


def test_a_request_that_cannot_even_be_taken_up_is_told_so(
    worker: Worker, methods: Methods, monkeypatch: pytest.MonkeyPatch
) -> None:
    def setup(*_: Any, **__: Any) -> Any:
        raise OSError("the disk is gone")

    async def ask() -> None:
        running = asyncio.create_task(answered(worker, asked(60)))
        await until(lambda: worker.status().running == 1 or running.done())
        with monkeypatch.context() as broken:
            broken.setattr(methods, "setup", setup)
            with pytest.raises(WorkerCrashedError, match="Other requests go on"):
                await worker.submit(asked())
        assert len(await running) == 1
        assert worker.status().restarts == 0

    run(ask())


def test_draining_waits_for_what_runs_and_refuses_what_comes(methods: Methods) -> None:
    worker = Worker(methods, Limits())
    worker.start()

    async def ask() -> None:
        running = asyncio.create_task(answered(worker, asked()))
        await until(lambda: worker.status().running == 1 or running.done())
        draining = asyncio.create_task(worker.drain(30.0))
        await asyncio.sleep(0)
        with pytest.raises(DrainingError, match="shutting down"):
            await worker.submit(asked())
        assert worker.status().state == "draining"
        await draining
        assert len(await running) == 1

    run(ask())
    worker.close()
    worker.close()


def test_what_has_not_ended_in_time_fails_when_the_server_stops(methods: Methods) -> None:
    worker = Worker(methods, Limits())
    worker.start()

    async def ask() -> None:
        answer = await worker.submit(asked(ENDLESS))
        await worker.drain(0.0)
        with pytest.raises(DrainingError, match="was not complete"):
            async for _ in answer:
                pass

    run(ask())
    worker.close()


def test_the_default_drafter_goes_on_from_its_memory(tiny_folder: Path, tmp_path: Path) -> None:
    def load() -> Methods:
        loader = Loader(engine=EngineChoice(backend="native", threads=1))
        return Methods(loader, str(tiny_folder), default="suffix", others=[], memory=tmp_path / "memory")

    worker = Worker(load())
    worker.start()
    first = run(answered(worker, asked(60)))[0]
    worker.close()
    worker.methods.save_memory()
    worker = Worker(load())
    worker.start()
    again = run(answered(worker, asked(60)))[0]
    worker.close()
    assert again.ids == first.ids
    assert again.stats.target_forwards < first.stats.target_forwards


def test_the_default_drafter_may_be_told_how_much_to_draft(tiny_folder: Path) -> None:
    loader = Loader(engine=EngineChoice(backend="native", threads=1))
    methods = Methods(loader, str(tiny_folder), default="ngram:2-3", others=("ngram",), draft_tokens=3)
    assert methods.setup().draft_tokens == 3 and methods.setup(draft_tokens=5).draft_tokens == 5
    assert methods.setup("ngram").draft_tokens == 7
