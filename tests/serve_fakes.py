"""A stand-in for the server's worker: the engine in a thread for each ask, and the ways in which it can fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import uvicorn
from fastapi import FastAPI

from foredraft.api import Model
from foredraft.engine import Engine
from foredraft.errors import InvalidInputError
from foredraft.generation import Generation, Request
from foredraft.loading import stop_tokens
from foredraft.serve.asks import Ask, Limits, Status
from foredraft.serve.run import address, bind
from foredraft.types import Event


@dataclass(frozen=True)
class FakeMethods:
    default: str = "ngram"
    drafters: tuple[str, ...] = ("ngram", "none")
    rules: tuple[str, ...] = ("seed-exact", "token")


class FakeAnswer:
    """Events come from `worker` as they are made; after `fail_after` of them comes its error."""

    queue_seconds: float | None = 0.001
    reused_tokens = 2

    def __init__(self, worker: FakeWorker, requests: list[Request], engine: Engine) -> None:
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Event] | BaseException | None] = asyncio.Queue()
        self.cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(requests, engine), daemon=True)
        self._thread.start()

    def _run(self, requests: list[Request], engine: Engine) -> None:
        last: BaseException | None = None
        try:
            for number, event in enumerate(engine.run(requests)):
                if number == self._worker.fail_after and self._worker.error is not None:
                    raise self._worker.error
                if number == self._worker.stall_after:
                    self.cancelled.wait()
                if self.cancelled.is_set():
                    break
                self._put(event)
        except Exception as error:
            last = error
        self._put(last)

    def _put(self, item: tuple[int, Event] | BaseException | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        while (item := await self._queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def cancel(self) -> None:
        self.cancelled.set()
        self._worker.cancelled.set()


class FakeWorker:
    """Answers like the real one, one batch for each ask.

    `refuse` is raised by `submit`; `error` after `fail_after` events; after `stall_after` events nothing more comes.
    """

    def __init__(self, model: Model, limits: Limits | None = None) -> None:
        self.model, self.methods, self.limits = model, FakeMethods(), limits or Limits()
        self.refuse: Exception | None = None
        self.error: Exception | None = None
        self.fail_after = self.stall_after = -1
        self.asks: list[Ask] = []
        self.cancelled = threading.Event()
        self.state = "ready"

    async def submit(self, ask: Ask) -> FakeAnswer:
        if self.refuse is not None:
            raise self.refuse
        if ask.drafter is not None and ask.drafter not in self.methods.drafters:
            raise InvalidInputError(f"This server has no drafter '{ask.drafter}'.", field="drafter")
        model, drafter = self.model, self.model.drafter
        engine = Engine(
            model.backend,
            None if ask.drafter == "none" else drafter,
            tokenizer=model.tokenizer,
            stop_tokens=stop_tokens(model.backend, model.tokenizer),
            draft_tokens=ask.draft_tokens,
            rule=ask.rule,
        )
        self.asks.append(ask)
        requests = []
        for index in range(ask.n):
            seed = None if ask.params.seed is None else ask.params.seed + index
            allowed = ask.grammar.start(len(ask.prompt)) if ask.grammar is not None else None
            requests.append(Request(ask.prompt, replace(ask.params, seed=seed), allowed=allowed, detail=ask.detail))
            Generation(requests[-1], engine.setup)  # says at once what is not right
        return FakeAnswer(self, requests, engine)

    def status(self) -> Status:
        return Status(self.state, 0, 0, 1024, 2**20, 0, 0, None)

    def plain_tokens_per_second(self) -> float | None:
        return 10.0

    async def drain(self, seconds: float) -> None:
        self.state = "draining"

    def close(self) -> None:
        self.state = "closed"


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The app at a free port of this machine, in a thread; its address."""
    listener = bind("127.0.0.1", 0)
    ready = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets: object = None) -> None:
            await super().startup(sockets=[listener])
            ready.set()

    server = Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield address(listener)
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
