"""A peer in a process of its own, so that its threads, memory and crashes are its own affair: the parent's side."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import IO, Any

from foredraft.bench.peers.base import Peer, PeerError, PeerOptions, PeerRequest
from foredraft.bench.records import Turn

_COMMAND = (sys.executable, "-m", "foredraft.bench.peers.worker")
_LAST_WORDS = 2000  # bytes of a dead worker's stderr that are looked at
_FAREWELL = 10.0  # seconds in which an idle worker must end by itself


class ProcessPeer(Peer):
    """A peer of this kind in a worker, which is started at once. One that died or hung is replaced at the next request.

    Args:
        kind: The peer's class.
        options: What it is started with.
        command: What runs the worker.

    Raises:
        PeerError: It does not start, or not within `options.start_timeout`.
    """

    def __init__(self, kind: type[Peer], options: PeerOptions, command: Sequence[str] = _COMMAND) -> None:
        super().__init__(replace(options, threads=options.most_threads()))  # to count cores takes torch: not there
        self.name, self.drafters = kind.name, kind.drafters
        self._command = command
        self._worker: _Worker | None = None
        self._peak: int | None = None
        self._conditions: dict[str, str] = {}
        self._start()

    def answer(self, request: PeerRequest) -> Turn:
        """See `Peer`; a worker that says nothing for `options.timeout` is ended."""
        self.kind_of(request)
        self._peak = None
        worker = self._worker or self._start()
        reply = self._ask(worker, {"request": asdict(request)}, self.options.timeout, "answering")
        try:
            turn = Turn.from_json(reply["turn"])
            self._peak = int(reply["peak_memory"])
        except (KeyError, TypeError, ValueError, AssertionError) as error:
            self._stop(patience=0)
            raise PeerError(f"{self.name}: its worker's answer is none ({error!r}).") from error
        return turn

    def conditions(self) -> dict[str, str]:
        """See `Peer`."""
        return self._conditions

    @property
    def peak_memory(self) -> int | None:
        """See `Peer`."""
        return self._peak

    def close(self) -> None:
        """See `Peer`."""
        self._stop(_FAREWELL)

    def _start(self) -> _Worker:
        self._worker = worker = _Worker(self._command)
        try:
            first = {"peer": self.name, "options": self.options.to_json()}
            reply = self._ask(worker, first, self.options.start_timeout, "starting")
            self._conditions = dict(reply.get("ready", {}))
        except PeerError:
            self._stop(patience=0)
            raise
        return worker

    def _stop(self, patience: float) -> None:
        if self._worker is not None:
            self._worker.stop(patience)
            self._worker = None

    def _ask(self, worker: _Worker, message: dict[str, Any], timeout: float, doing: str) -> dict[str, Any]:
        """The worker's reply.

        Raises:
            PeerError: It says why not (and lives on), or is dead, silent or not to be understood (and is ended).
        """
        try:
            line = worker.ask(json.dumps(message).encode() + b"\n", timeout)
        except BaseException:  # interrupted: the reply would come to the next request
            self._stop(patience=0)
            raise
        if line is None:
            self._stop(patience=0)
            raise PeerError(f"{self.name}: its process said nothing for {timeout:g} s while {doing}, and was ended.")
        if not line:
            status, words = worker.end()
            self._stop(patience=0)
            raise PeerError(f"{self.name}: its process ended with status {status} while {doing}. {words}".rstrip())
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            self._stop(patience=0)
            raise PeerError(f"{self.name}: its process said {line[:80]!r} while {doing}, which is no reply.")
        if "error" in reply:
            raise PeerError(f"{self.name}: {reply['error']}")
        return reply


class _Worker:
    """A running worker: lines to its stdin, lines from its stdout, its stderr kept in a file."""

    def __init__(self, command: Sequence[str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (`stop` closes it)
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C is for the parent alone
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        assert self._process.stdout is not None
        threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True).start()

    def _listen(self, stdout: IO[bytes]) -> None:
        with stdout:
            for line in stdout:
                self._lines.put(line)
        self._lines.put(b"")

    def ask(self, line: bytes, timeout: float) -> bytes | None:
        """The line that it says to this one: empty if it is dead, `None` if it says nothing in time."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except OSError:
            return b""
        try:
            return self._lines.get(timeout=timeout)
        except queue.Empty:
            return None

    def end(self) -> tuple[int, str]:
        """Of a worker that says no more: its status, and its last words."""
        try:
            status = self._process.wait(_FAREWELL)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        size = self._log.seek(0, 2)
        self._log.seek(max(0, size - _LAST_WORDS))
        words = self._log.read().decode(errors="replace").strip()
        return status, f"Its last words: {words}" if words else ""

    def stop(self, patience: float) -> None:
        """End it: by itself if it does so within this many seconds, else by force."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # if it is dead, and something was still to be written
            self._process.stdin.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
