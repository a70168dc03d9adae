"""vLLM as a process of ours: started, waited for until it answers, started again if it ends, ended with us."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from time import monotonic

import httpx

logger = logging.getLogger("foredraft.serve")

_LOOK = 0.25  # seconds between two looks at a process that starts or runs
_PATIENCE = 5.0  # seconds for an answer to a health check
_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # seconds before the next start, after so many that failed
_STABLE = 60.0  # seconds after which an end counts as the first one again
_LAST_WORDS = 20.0  # seconds between SIGTERM and SIGKILL


class Supervised:
    """A server that is kept running.

    Args:
        command: Program and arguments; it must serve at `url`.
        url: Its address, without `/v1`.
        stop_after: Starts that end before the server answered, after which it is given up; `None` never gives up.
        pauses: Seconds before each further start.
    """

    def __init__(
        self, command: Sequence[str], url: str, *, stop_after: int | None = None, pauses: Sequence[float] = _PAUSES
    ) -> None:
        self.command, self.url = tuple(command), url
        self.state = "starting"
        """`starting`, `ready`, `restarting`, `draining`, or `failed`."""
        self.restarts = 0
        self.last_end: str | None = None
        self._stop_after, self._pauses = stop_after, tuple(pauses)
        self._process: subprocess.Popen[bytes] | None = None
        self._task: asyncio.Task[None] | None = None
        self._settled, self._given_up = asyncio.Event(), asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return self._process.pid if self._process is not None else None

    def begin(self) -> None:
        """Start it, and watch it from now on. Needs a running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def ready(self) -> bool:
        """Waits until it answers for the first time; `False` if it was given up."""
        await self._settled.wait()
        return self.state != "failed"

    async def given_up(self) -> None:
        """Waits until it is not started any more, because it ended again and again."""
        await self._given_up.wait()

    def drain(self) -> None:
        """No more starts: what ends now stays ended."""
        if self.state != "failed":
            self.state = "draining"

    async def close(self) -> None:
        """End it: first politely, then not. All processes of its session go."""
        self.drain()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        process = self._process
        if process is not None:
            _signal(process, signal.SIGTERM)
            try:
                await asyncio.to_thread(process.wait, _LAST_WORDS)
            except subprocess.TimeoutExpired:
                logger.warning("vLLM did not end in %g s and is killed", _LAST_WORDS)
            _signal(process, _KILL)
            await asyncio.to_thread(process.wait)
            self._process = None

    async def _keep(self) -> None:
        failures = 0
        while self.state != "draining":
            started = monotonic()
            answered = await self._run()
            if self.state == "draining":
                return
            failures = 1 if answered and monotonic() - started > _STABLE else failures + 1
            if not answered and self._stop_after is not None and failures >= self._stop_after:
                logger.error("vLLM ended %d times before it answered, and is given up: %s", failures, self.last_end)
                self.state = "failed"
                self._settled.set()
                self._given_up.set()
                return
            pause = self._pauses[min(failures, len(self._pauses)) - 1]
            logger.error("vLLM ended (%s); it is started again in %g s", self.last_end, pause)
            self.state, self.restarts = "restarting", self.restarts + 1
            await asyncio.sleep(pause)

    async def _run(self) -> bool:
        """One life of the process; whether it ever answered."""
        try:
            self._process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, start_new_session=_POSIX)
        except OSError as error:
            self.last_end = f"'{self.command[0]}' cannot be started: {error.strerror}"
            return False
        answered = False
        async with httpx.AsyncClient(timeout=_PATIENCE) as client:
            while (status := self._process.poll()) is None:
                if not answered and await _healthy(client, f"{self.url}/health"):
                    answered = True
                    if self.state != "draining":
                        self.state = "ready"
                    self._settled.set()
                await asyncio.sleep(_LOOK)
        _signal(self._process, _KILL)  # whatever of its session is left
        self.last_end = f"status {status}" if status >= 0 else f"signal {-status}"
        return answered


_POSIX = sys.platform != "win32"
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)


async def _healthy(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == 200
    except httpx.HTTPError:
        return False


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """To the whole session, engine processes included; nothing happens if it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if _POSIX:
            os.killpg(process.pid, number)
        else:
            process.terminate()
