"""A few threads that run one compiled function together and wait for each other between its stages."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import torch
from llvmlite import ir
from numba import extending, njit, types

intrinsic: Any = extending.intrinsic
compiled: Any = njit(nogil=True, cache=True, error_model="numpy")
"""How every compiled function of the engine is made: without the GIL, kept on disk, additions in the order written."""

_PATIENCE = 4096  # turns of waiting before the thread lets another one have the core
_YIELD = types.ExternalFunction("SwitchToThread" if sys.platform == "win32" else "sched_yield", types.intc())


def physical_cores() -> int:
    """Cores that this process may use, two threads of one core counted once."""
    allowed = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else psutil.cpu_count()
    return max(1, min(allowed or 1, psutil.cpu_count(logical=False) or 1))


class _TorchThreads:
    """torch's setting of how many threads it uses, which is one for its whole process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = 1

    @contextmanager
    def one(self) -> Iterator[None]:
        """Only one, until all who asked for that have left."""
        with self._lock:
            if self._users == 0:
                self._before = torch.get_num_threads()
                torch.set_num_threads(1)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    torch.set_num_threads(self._before)


TORCH_THREADS = _TorchThreads()
"""Threads of torch that have nothing to do go on looking for work for a while, on the cores that a team needs."""


class Team:
    """`threads` threads, of which the caller is one.

    `run(function, …)` calls `function(thread, threads, arrivals, …)` in each, a compiled function that holds no GIL;
    inside, `wait` lets none go on before all have come. One call at a time.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._others = ThreadPoolExecutor(threads - 1, "foredraft") if threads > 1 else None
        self._arrivals = np.zeros(1, dtype=np.int64)
        self._lock = threading.Lock()

    def run(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Return when every thread has."""
        with self._lock:
            self._arrivals[0] = 0
            shared = (self.threads, self._arrivals, *arguments)
            waiting = (
                [self._others.submit(function, i, *shared) for i in range(1, self.threads)] if self._others else []
            )
            function(0, *shared)
            for other in waiting:
                other.result()


@intrinsic
def _arrive(typing: Any, address: Any) -> Any:
    """Add one to the integer at an address, as one step for all threads."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counter = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "seq_cst")

    return types.int64(types.intp), generate


@intrinsic
def _arrived(typing: Any, address: Any) -> Any:
    """The integer at an address, with all that other threads wrote before they added to it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counter = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(counter, "seq_cst", 8)

    return types.int64(types.intp), generate


@compiled
def wait(threads: int, arrivals: Any, stage: int) -> Any:
    """Wait until all threads have ended this stage (they count from 0); returns the number of the next."""
    if threads > 1:
        address = np.intp(arrivals.ctypes.data)
        _arrive(address)
        turns = 0
        while _arrived(address) < (stage + 1) * threads:
            turns += 1
            if turns > _PATIENCE:
                _YIELD()
                turns = 0
    return stage + 1
