"""The server as a process of its own: what it prints, how it ends, and that it begins again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="is ended by signals, which Windows does not have")

STREAMS = 8
LONG = {"prompt": "the hell in the hell", "max_tokens": 900, "ignore_eos": True, "stream": True}
SHORT = {**LONG, "max_tokens": 60}


class Served:
    """A running server."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        assert process.stderr is not None
        for line in process.stderr:
            self.lines.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                self.url = found[0]
                break
        else:
            raise AssertionError("".join(self.lines))
        threading.Thread(target=lambda: self.lines.extend(process.stderr or ()), daemon=True).start()
        while httpx.get(f"{self.url}/health").status_code != 200:
            assert process.poll() is None

    def stop(self, sign: int = signal.SIGTERM) -> int:
        self.process.send_signal(sign)
        return self.process.wait(60)


@contextmanager
def serving(model: Path | str, *options: Any) -> Iterator[Served]:
    command = [sys.executable, "-m", "foredraft", "serve", model, "--port", "0", "--threads", "1", *options]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "400"}
    with subprocess.Popen(
        [str(part) for part in command], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        try:
            yield Served(process)
        finally:
            process.kill()


class Stream(threading.Thread):
    """A client that reads one answer to its end."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__()
        self._url, self._body = f"{url}/v1/completions", body
        self.begun = threading.Event()
        self.data: list[str] = []
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=60) as response:
                assert response.status_code == 200
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.data.append(line[6:])
                        self.begun.set()
        except Exception as error:
            self.failure = error
        self.begun.set()

    @property
    def chunks(self) -> list[Any]:
        return [json.loads(line) for line in self.data[:-1]]


def streams(served: Served, body: dict[str, Any]) -> list[Stream]:
    """So many, all of which have got something."""
    name = httpx.get(f"{served.url}/v1/models").json()["data"][0]["id"]
    found = [Stream(served.url, {**body, "model": name, "seed": seed}) for seed in range(STREAMS)]
    for stream in found:
        stream.start()
    for stream in found:
        assert stream.begun.wait(60)
    return found


def ended(found: list[Stream], right: Callable[[Any], bool]) -> None:
    for stream in found:
        stream.join(60)
        assert stream.failure is None
        assert stream.data[-1] == "[DONE]"
        assert right(stream.chunks[-1]), stream.chunks[-1]


def test_sigterm_ends_every_stream_properly_and_the_server_starts_again(tiny_folder: Path) -> None:
    with serving(tiny_folder, "--grace", 0) as served:
        found = streams(served, LONG)
        assert served.stop() == 0
        ended(found, lambda chunk: bool(chunk["error"]["code"] == "shutting_down"))
        port = served.url.rpartition(":")[2]
    with serving(tiny_folder, "--port", port) as served:
        assert served.url.endswith(port)
        ended(streams(served, SHORT), lambda chunk: bool(chunk["choices"][0]["finish_reason"] == "length"))
        assert served.stop(signal.SIGINT) == 0


def test_running_answers_finish_while_new_requests_are_refused(tiny_folder: Path) -> None:
    with serving(tiny_folder, "--grace", 60) as served:
        found = streams(served, {**LONG, "max_tokens": 400})
        served.process.send_signal(signal.SIGTERM)
        seen = set()
        while served.process.poll() is None and 503 not in seen:
            try:
                seen.add(
                    httpx.post(f"{served.url}/v1/completions", json={"prompt": "the", "max_tokens": 1}).status_code
                )
            except httpx.TransportError:  # it has ended
                break
        assert served.process.wait(60) == 0
        ended(found, lambda chunk: bool(chunk["choices"][0]["finish_reason"] == "length"))


def test_a_second_signal_ends_at_once(tiny_folder: Path) -> None:
    with serving(tiny_folder, "--grace", 600) as served:
        found = streams(served, LONG)
        served.process.send_signal(signal.SIGTERM)
        while not any("stopping" in line for line in served.lines):
            assert served.process.poll() is None
        assert served.stop() in (0, -signal.SIGTERM)
        for stream in found:
            stream.join(60)


def test_a_port_in_use_is_told_in_one_sentence(tiny_folder: Path) -> None:
    with serving(tiny_folder) as served:
        port = served.url.rpartition(":")[2]
        command = [sys.executable, "-m", "foredraft", "serve", str(tiny_folder), "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and f"port {port}" in done.stderr.replace("\n", " ")
