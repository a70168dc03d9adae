"""The thread that owns the model: it takes asks from the event loop, and gives events back."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from queue import Empty, SimpleQueue
from time import monotonic

import psutil
import torch

from foredraft.api import Model
from foredraft.backends.base import Backend
from foredraft.errors import ForedraftError
from foredraft.generation import Request, check_request
from foredraft.serve.asks import Ask, DrainingError, Limits, QueueFullError, Status, Watch, WorkerCrashedError
from foredraft.serve.methods import Methods
from foredraft.serve.scheduler import Job, Scheduler
from foredraft.types import Completion, Event, FinishEvent, RoundStats

logger = logging.getLogger(__name__)

_KV_SHARE = 0.5  # of the memory that is free
_PLAIN_CONTEXT = 256  # tokens cached, of the plain step that answers are compared with
_PATIENCE = 30.0  # seconds for a command: more than a round takes

Command = Callable[[], None]


class Worker:
    """Runs a `Scheduler` in a thread of its own.

    A crash, whatever is its cause, fails the answers that were being made and nothing else: the queue goes on with
    fresh caches and drafters.

    Args:
        methods: The loaded target, and what drafts for it.
        limits: What is taken on at once.
        watch: Who counts what happens; `None` is nobody.
    """

    def __init__(self, methods: Methods, limits: Limits | None = None, watch: Watch | None = None) -> None:
        self.methods, self.limits = methods, limits or Limits()
        self.model: Model = methods.model
        backend = self.model.backend
        kv_limit = self.limits.kv_bytes or int(_KV_SHARE * _free_memory(backend))
        self._watch = watch or _Nobody()
        self._scheduler = Scheduler(backend, self.limits, kv_limit, self._watch)
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="foredraft-worker", daemon=True)
        self._draining = self._closed = self._restarting = False
        self._idle = threading.Event()
        self._idle.set()
        self._last_round: float | None = None

    def start(self) -> None:
        """Begin to answer."""
        gc.collect()
        gc.freeze()  # the model stays: the collector need not look at it again and again
        self._thread.start()

    async def submit(self, ask: Ask) -> RunningAnswer:
        """Take an ask into the queue.

        Raises:
            InvalidInputError: It is not right, or can never run here.
            UnsupportedError: Its rule and its drafter do not fit.
            QueueFullError: Too many wait.
            DrainingError: The server is shutting down.
        """
        if self._draining or self._closed:
            self._watch.failed(DrainingError.code)
            raise DrainingError("The server is shutting down: ask again in a while.")
        answer = RunningAnswer(self)
        self._commands.put(lambda: self._accept(ask, answer))
        try:
            await answer.accepted
        except asyncio.CancelledError:
            answer.cancel()
            raise
        return answer

    def status(self) -> Status:
        """How it is. May be called from any thread."""
        state = "draining" if self._draining else "restarting" if self._restarting else "ready"
        scheduler, last = self._scheduler, self._last_round
        kept = scheduler.prefixes
        return Status(
            state="stopped" if self._closed else state,
            running=scheduler.running,
            waiting=scheduler.waiting,
            kv_bytes=scheduler.reserved + kept.bytes,
            kv_limit=scheduler.kv_limit,
            kept_prefixes=len(kept),
            restarts=scheduler.restarts,
            seconds_since_round=monotonic() - last if last is not None else None,
        )

    def plain_tokens_per_second(self) -> float | None:
        """What plain decoding of one answer gives on this machine, as measured."""
        seconds = self.methods.costs.seconds(1, _PLAIN_CONTEXT)
        return 1 / seconds if seconds > 0 else None

    async def drain(self, seconds: float) -> None:
        """Take no more asks, and return when all have ended; those that have not after `seconds` fail."""
        self._draining = True
        error = DrainingError("The server is shutting down, and this answer was not complete: ask again in a while.")
        await self._done(self._note_busy)  # what was submitted before counts
        if not await asyncio.to_thread(self._idle.wait, seconds):
            await self._done(lambda: self._scheduler.fail(error))

    def close(self) -> None:
        """End the thread. Answers that run fail."""
        self._draining = True
        if self._thread.is_alive() and not self._closed:
            self._commands.put(self._end)
            self._thread.join()

    def cancel(self, job: Job) -> None:
        """Forget a job before the next round."""
        self._commands.put(lambda: self._scheduler.cancel(job))

    async def _done(self, command: Command) -> None:
        """Have something done by the thread, and wait for it."""
        done = threading.Event()

        def run() -> None:
            command()
            done.set()

        self._commands.put(run)
        await asyncio.to_thread(done.wait, _PATIENCE)

    def _note_busy(self) -> None:
        if self._scheduler.busy:
            self._idle.clear()

    def _end(self) -> None:
        self._scheduler.fail(DrainingError("The server has stopped."))
        self._closed = True

    def _accept(self, ask: Ask, answer: RunningAnswer) -> None:
        """Check an ask and let it wait, or say what is wrong with it."""
        try:
            self._scheduler.take_up()  # who can start does not wait
            if self._scheduler.waiting >= self.limits.waiting:
                raise QueueFullError(f"{self.limits.waiting} requests are waiting already: ask again in a while.")
            seeded = ask.params.seed is not None
            setup = self.methods.setup(ask.drafter, ask.rule, ask.draft_tokens, seeded=seeded)
            check_request(Request(ask.prompt, ask.params), setup)
            job = Job(ask, setup, answer.put, answer.fail, answer.note_start)
            self._scheduler.add(job)
        except Exception as error:
            if not isinstance(error, ForedraftError):
                logger.exception("A request could not be taken up")
                error = WorkerCrashedError.alone()
            self._watch.failed(getattr(error, "code", "invalid"))
            answer.refuse(error)
        else:
            answer.accept(job)

    def _run(self) -> None:
        with self.model.backend.running():
            while not self._closed:
                try:
                    self._turn()
                except Exception:
                    logger.exception("The worker failed; it goes on with fresh caches and drafters")
                    self._restart()

    def _turn(self) -> None:
        """All commands, then a step if there is anything to do."""
        busy = self._scheduler.busy
        if not busy:
            self._last_round = None
            self._idle.set()
        try:
            self._commands.get(block=not busy)()
            while True:
                self._commands.get_nowait()()
        except Empty:
            pass
        if self._scheduler.busy:
            self._last_round = monotonic()
            self._scheduler.step()

    def _restart(self) -> None:
        self._restarting = True
        try:
            self._scheduler.reset()
            self.methods.renew()
        except Exception:
            logger.exception("The drafters could not be loaded again")
            self._scheduler.fail(WorkerCrashedError("The server failed and could not start again."))
        self._restarting = False


class RunningAnswer:
    """See `asks.Answer`. What the worker calls may be called from its thread; the rest belongs to the event loop."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Sequence[tuple[int, Event]] | ForedraftError] = asyncio.Queue()
        self._job: Job | None = None
        self._cancelled = False
        self.accepted: asyncio.Future[None] = self._loop.create_future()
        self.queue_seconds: float | None = None
        self.reused_tokens = 0

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        """See `asks.Answer`."""
        assert self._job is not None
        left = self._job.ask.n
        while left:
            found = await self._queue.get()
            if isinstance(found, ForedraftError):
                raise found
            for index, event in found:
                left -= isinstance(event, FinishEvent)
                yield index, event

    def cancel(self) -> None:
        """See `asks.Answer`."""
        self._cancelled = True
        if self._job is not None:
            self._worker.cancel(self._job)

    def accept(self, job: Job) -> None:
        """It waits now."""
        self._job = job
        if self._cancelled:
            self._worker.cancel(job)
        self._call(self._set, None)

    def refuse(self, error: ForedraftError) -> None:
        """It cannot be."""
        self._call(self._set, error)

    def note_start(self, seconds: float, reused: int) -> None:
        """It has waited so long."""
        self.queue_seconds, self.reused_tokens = seconds, reused

    def put(self, events: Sequence[tuple[int, Event]]) -> None:
        """Events of a round."""
        self._call(self._queue.put_nowait, events)

    def fail(self, error: ForedraftError) -> None:
        """It has failed."""
        self._call(self._queue.put_nowait, error)

    def _set(self, error: ForedraftError | None) -> None:
        if self.accepted.done():
            return
        if error is None:
            self.accepted.set_result(None)
        else:
            self.accepted.set_exception(error)

    def _call(self, function: Callable[..., object], argument: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:  # the loop has ended: nobody listens any more
            self._cancelled = True


class _Nobody:
    """A `Watch` that counts nothing."""

    def waited(self, seconds: float, prompt: int, reused: int) -> None: ...

    def forward(self, sequences: int, rows: int, seconds: float) -> None: ...

    def round(self, drafter: str, stats: RoundStats) -> None: ...

    def finished(self, completion: Completion) -> None: ...

    def failed(self, code: str) -> None: ...


def _free_memory(backend: Backend) -> int:
    """Bytes that are free where the backend keeps keys and values."""
    device = backend.conditions().get("device", "cpu")
    if device != "cpu" and torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    return int(psutil.virtual_memory().available)
