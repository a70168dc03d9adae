"""A thread that drafts while the target verifies, and never at any other time."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

from foredraft.proposers.forks import Fork

THREAD_NAME = "foredraft-ssd"


@dataclass(eq=False)
class Work:
    """A fork that is being drafted, and how far it has come."""

    fork: Fork
    until: float | None = None
    """When the verification should be over, on `perf_counter`: a step of which most would come after is not begun."""
    steps: list[tuple[int, float]] = field(default_factory=list)
    """Of each step so far: nodes that a model read, and seconds."""
    error: BaseException | None = None
    """What a step ended with, if it failed: then there are no more."""

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return sum(seconds for _, seconds in self.steps)

    def step(self) -> bool:
        """One step further; returns whether there is more to do."""
        started = perf_counter()
        try:
            more = self.fork.step()
        except BaseException as error:  # told to whoever waits for the draft
            self.error, more = error, False
        ended = perf_counter()
        self.steps.append((self.fork.rows, ended - started))
        return more and (self.until is None or ended + (ended - started) / 2 <= self.until)


class Race(Protocol):
    """What forks are drafted by, until the verification is over."""

    def enter(self) -> None:
        """One more sequence may have something to draft."""
        ...

    def leave(self) -> None:
        """One less."""
        ...

    def begin(self, fork: Fork, seconds: float | None = None) -> Work:
        """Draft, from now on; the verification should take so long."""
        ...

    def pause(self) -> float:
        """Nothing is drafted after this; returns for how many seconds the step in flight had to be waited for."""
        ...


@dataclass(eq=False)
class _Shared:
    """What the thread and those who use it both see; the thread knows nothing else, so nothing is kept alive by it."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: deque[Work] = field(default_factory=deque)
    working: bool = False
    ended: bool = False
    verification: int = 0
    """Steps that were begun before it changed are the last ones of their work."""

    def end(self) -> None:
        """Nothing more is drafted; the thread ends after the step in flight."""
        with self.changed:
            self.ended = True
            self.waiting.clear()
            self.changed.notify_all()


class Beside:
    """The thread of one drafter. It is there while any sequence is.

    A step that has begun cannot be broken off, so `pause` waits for its end; whatever is left is forgotten. Works of
    several sequences are drafted in turns, a step each.
    """

    def __init__(self) -> None:
        self._shared = _Shared()
        self._thread: threading.Thread | None = None
        self._sequences = 0

    def enter(self) -> None:
        """See `Race`."""
        with self._shared.changed:
            self._sequences += 1

    def leave(self) -> None:
        """See `Race`. After the last one the thread ends by itself: this may be called wherever memory is freed."""
        with self._shared.changed:
            self._sequences -= 1
            if not self._sequences:
                self._end()

    def begin(self, fork: Fork, seconds: float | None = None) -> Work:
        """See `Race`."""
        work, shared = Work(fork, perf_counter() + seconds if seconds is not None else None), self._shared
        with shared.changed:
            if self._thread is None:
                self._thread = threading.Thread(target=_draft, args=(shared,), name=THREAD_NAME, daemon=True)
                self._thread.start()
                weakref.finalize(self, _join, shared, self._thread)  # at the latest when the interpreter ends
            shared.waiting.append(work)
            shared.changed.notify_all()
        return work

    def pause(self) -> float:
        """See `Race`."""
        shared, started = self._shared, perf_counter()
        with shared.changed:
            shared.verification += 1
            shared.waiting.clear()
            while shared.working:
                shared.changed.wait()
        return perf_counter() - started

    def close(self) -> None:
        """End the thread, and wait for it. Another one begins with the next work."""
        with self._shared.changed:
            shared, thread = self._shared, self._thread
            self._end()
        if thread is not None:
            _join(shared, thread)

    def _end(self) -> None:
        shared, self._shared, self._thread = self._shared, _Shared(), None
        shared.end()


def _draft(shared: _Shared) -> None:
    """What the thread does."""
    while True:
        with shared.changed:
            while not shared.waiting and not shared.ended:
                shared.changed.wait()
            if shared.ended:
                return
            work, verification = shared.waiting.popleft(), shared.verification
            shared.working = True
        more = work.step()
        with shared.changed:
            shared.working = False
            if more and verification == shared.verification and not shared.ended:
                shared.waiting.append(work)
            del work  # its sequence is not to live on because of this thread
            shared.changed.notify_all()


def _join(shared: _Shared, thread: threading.Thread) -> None:
    shared.end()
    if thread is not threading.current_thread():
        thread.join()
