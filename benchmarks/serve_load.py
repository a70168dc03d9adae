"""Load on the server: many streams at once, with cancels, bad requests and slow readers; every answer must be right.

    python benchmarks/serve_load.py smollm2-135m --seconds 300

starts `foredraft serve`, answers each request of a pool alone and without speculation, then has `--streams` clients ask
for them at random. Throughput is that of other prompts, each asked once: one at a time and all at once, plain and with
`auto`. Prints it with latencies, memory before and after, and one JSON line; the status is 1 if an answer was wrong,
a stream stalled, or memory grew by more than 5 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from time import perf_counter
from typing import Any

import httpx
import psutil

from foredraft.bench.workloads import load_workload

STALLED = 10.0  # seconds without a chunk
LEAK = 0.05
QUESTIONS = (
    "List the planets of the solar system, one a line, with one fact about each.",
    "Write a Python function that reverses a string, then explain it step by step.",
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
    "What is the difference between weather and climate?",
    "Translate into French: Good morning, how are you today? I would like a coffee, please.",
    "A train goes 60 km in 45 minutes. How far does it go in 2 hours at the same speed?",
)
BAD: tuple[dict[str, Any], ...] = (
    {"temperature": -1},
    {"messages": []},
    {"max_tokens": 0},
    {"n": 1000},
    {"foredraft": {"drafter": "sufix"}},
    {"stop": ["a", "b", "c", "d", "e"]},
    {"nonsense": True},
)


@dataclass
class Tally:
    """What one phase saw."""

    tokens: int = 0
    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def pool(model: str, size: int) -> list[dict[str, Any]]:
    """Requests of all kinds, each of them with one right answer: greedy or seeded."""
    dice, found = random.Random(0), []
    drafters = ("auto", "suffix", "recycling", "ngram", "none")
    system = "You are a careful assistant who explains things. " * 12  # shared by some: prefixes are reused
    for index in range(size):
        messages = [{"role": "user", "content": dice.choice(QUESTIONS)}]
        if index % 3 == 0:
            messages.insert(0, {"role": "system", "content": system})
        body: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": dice.choice((24, 48, 96))}
        body["temperature"] = dice.choice((0.0, 0.0, 0.8))
        body["seed"] = index
        if index % 4:
            body["foredraft"] = {"drafter": drafters[index % len(drafters)]}
        if index % 7 == 5:
            body["frequency_penalty"] = 0.5
        if index % 7 == 6:
            body["n"] = 2
        found.append(body)
    return found


class Client:
    """Asks the server, streaming."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self._url, self._http = f"{url}/v1/chat/completions", http

    async def ask(self, body: dict[str, Any], tally: Tally, *, slow: float = 0.0, leave: int = 0) -> list[str] | None:
        """The texts of all choices; `None` if the answer was left after so many chunks, or failed."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        texts: dict[int, str] = {}
        started = last = perf_counter()
        chunks = 0
        async with self._http.stream("POST", self._url, json=body, timeout=None) as response:
            if response.status_code != 200:
                tally.outcomes[f"status {response.status_code}"] += 1
                return None
            async for chunk in _events(response):
                now = perf_counter()
                if "error" in chunk:
                    tally.outcomes[f"error {chunk['error'].get('code')}"] += 1
                    return None
                (tally.gaps if chunks else tally.first).append(now - (last if chunks else started))
                last, chunks = now, chunks + 1
                for choice in chunk["choices"]:
                    texts[choice["index"]] = texts.get(choice["index"], "") + (choice["delta"].get("content") or "")
                if chunk.get("usage"):
                    tally.tokens += chunk["usage"]["completion_tokens"]
                if leave and chunks >= leave:
                    tally.outcomes["left"] += 1
                    return None
                if slow:
                    await asyncio.sleep(slow)
                    last = perf_counter()
        tally.answers += 1
        return [texts[index] for index in sorted(texts)]

    async def refused(self, body: dict[str, Any], bad: dict[str, Any], tally: Tally) -> None:
        """A bad request: anything but a clear 400 is wrong."""
        response = await self._http.post(self._url, json={**body, **bad})
        tally.outcomes[f"status {response.status_code}"] += 1
        if response.status_code != 400 or not response.json()["error"]["param"]:
            tally.wrong.append(f"{bad}: {response.status_code} {response.text[:200]}")


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


async def alone(client: Client, requests: list[dict[str, Any]]) -> list[list[str]]:
    """Each request by itself and without speculation: what is right."""
    tally, found = Tally(), []
    for body in requests:
        texts = await client.ask({**body, "foredraft": {"drafter": "none"}}, tally)
        assert texts is not None, f"{body} failed alone: {tally.outcomes}"
        found.append(texts)
    return found


async def once(client: Client, model: str, prompts: list[str], streams: int, drafter: str) -> Tally:
    """Each prompt once, by so many clients: nothing is known of it beforehand."""
    tally, left, started = Tally(), list(reversed(prompts)), perf_counter()

    async def one() -> None:
        while left:
            messages = [{"role": "user", "content": left.pop()}]
            body = {"model": model, "messages": messages, "temperature": 0.0, "max_tokens": 64, "ignore_eos": True}
            await client.ask({**body, "foredraft": {"drafter": drafter}}, tally)

    await asyncio.gather(*(one() for _ in range(streams)))
    tally.seconds = perf_counter() - started
    assert tally.answers == len(prompts), tally.outcomes
    return tally


async def crowd(
    client: Client, requests: list[dict[str, Any]], expected: list[list[str]], *, streams: int, seconds: float
) -> Tally:
    """So many clients at once, for so long. Some leave, some read slowly, some ask for nonsense."""
    tally, started = Tally(), perf_counter()

    async def one(number: int) -> None:
        dice = random.Random(number)
        while perf_counter() - started < seconds:
            index = dice.randrange(len(requests))
            body, luck = requests[index], dice.random()
            if luck < 0.10:
                await client.refused(body, dice.choice(BAD), tally)
                continue
            leave = dice.randint(1, 8) if luck < 0.20 else 0
            texts = await client.ask(body, tally, leave=leave, slow=0.2 if 0.20 <= luck < 0.25 else 0.0)
            if texts is not None and texts != expected[index]:
                tally.wrong.append(f"request {index}: {texts!r} instead of {expected[index]!r}")

    await asyncio.gather(*(one(number) for number in range(streams)))
    tally.seconds = perf_counter() - started
    return tally


@asynccontextmanager
async def server(arguments: argparse.Namespace) -> AsyncIterator[tuple[str, psutil.Process]]:
    """A server of its own on a free port; its log goes to `--log`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "foredraft", "serve", arguments.model, "--port", str(port)]
    with Path(arguments.log).open("wb") as log:
        process = subprocess.Popen([*command, *arguments.serve], stderr=log, stdout=log)
        url = f"http://127.0.0.1:{port}"
        try:
            async with httpx.AsyncClient() as http:
                while True:
                    assert process.poll() is None, f"the server did not start: see {arguments.log}"
                    try:
                        if (await http.get(f"{url}/health")).status_code == 200:
                            break
                    except httpx.TransportError:
                        await asyncio.sleep(0.2)
            yield url, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(60)


_LIMITS = httpx.Limits(max_connections=None)


async def compare(arguments: argparse.Namespace) -> dict[str, float]:
    """Tokens a second of plain and of speculative decoding, one at a time and many at once, each by a fresh server."""
    prompts = [item.turns[0] for item in load_workload("bundled").spread(arguments.prompts).items]
    found = {}
    for streams in (1, arguments.streams):
        for drafter in ("none", "auto"):
            async with server(arguments) as (url, _), httpx.AsyncClient(limits=_LIMITS) as http:
                tally = await once(Client(url, http), arguments.model, prompts, streams, drafter)
                found[f"{drafter}, {streams} at once"] = round(tally.tokens_per_second, 1)
    return found


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    throughput = await compare(arguments)
    async with server(arguments) as (url, process), httpx.AsyncClient(limits=_LIMITS) as http:
        client, requests = Client(url, http), pool(arguments.model, arguments.requests)
        expected = await alone(client, requests)
        await crowd(client, requests, expected, streams=arguments.streams, seconds=arguments.warm)
        before = process.memory_info().rss
        load = await crowd(client, requests, expected, streams=arguments.streams, seconds=arguments.seconds)
        after = process.memory_info().rss
        status = (await http.get(f"{url}/foredraft/status")).json()["status"]
    return {
        "tokens_per_second": {
            **throughput,
            "under load": round(load.tokens_per_second, 1),
        },
        "answers": load.answers,
        "outcomes": dict(load.outcomes),
        "wrong": load.wrong,
        "ttft_ms": _percentiles(load.first),
        "between_chunks_ms": _percentiles(load.gaps),
        "longest_wait_s": round(max(load.gaps + load.first), 2),
        "rss_mb": [round(before / 1e6, 1), round(after / 1e6, 1)],
        "left": status,
        "seconds": round(load.seconds, 1),
    }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    cut = quantiles(seconds, n=100)
    return {name: round(1e3 * cut[at - 1], 1) for name, at in (("p50", 50), ("p90", 90), ("p99", 99))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=300.0, help="of the load")
    parser.add_argument("--warm", type=float, default=20.0, help="seconds of the same before memory is measured")
    parser.add_argument("--prompts", type=int, default=44, help="of the comparison")
    parser.add_argument("--requests", type=int, default=28, help="different ones")
    parser.add_argument("--log", default="serve_load.log", help="where the server's log goes")
    parser.add_argument("serve", nargs="*", help="further arguments for `foredraft serve`, after --")
    found = asyncio.run(measure(parser.parse_args()))
    for name, value in found.items():
        print(f"{name:20} {value if name != 'wrong' else len(value)}")
    for wrong in found["wrong"][:5]:
        print("WRONG:", wrong)
    before, after = found["rss_mb"]
    good = not found["wrong"] and found["longest_wait_s"] < STALLED and after <= before * (1 + LEAK)
    print(json.dumps({**found, "wrong": len(found["wrong"]), "good": good}))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
