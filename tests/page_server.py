"""A stand-in for the server behind its page: it plays a recorded answer, and fails as a message asks it to."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from foredraft.serve.page import page, policy

ROUNDS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "page_rounds.json").read_text(encoding="utf-8"))
"""The `foredraft` part of each streamed chunk of one answer: its tokens, and its round with the tree."""

ANSWER = "".join(token["text"] for chunk in ROUNDS for token in chunk["tokens"])


class PageServer:
    """What it was asked, and how it is to behave.

    A message that contains `refuse` gets a 503, `break` an error after some tokens, `cut` an end without an ending,
    and `hang` some tokens and then nothing until the client goes away.
    """

    def __init__(self, pause: float = 0.0) -> None:
        self.pause = pause
        self.key = ""
        self.asked: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.left = threading.Event()
        """A client went away while its answer was not complete."""
        routes = [
            Route("/", self._page),
            Route("/foredraft/status", self._status),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def _page(self, request: Request) -> Response:
        self.paths.append(request.url.path)
        return HTMLResponse(page(), headers={"Content-Security-Policy": policy()})

    def _closed(self, request: Request) -> bool:
        self.paths.append(request.url.path)
        return bool(self.key) and request.headers.get("authorization") != f"Bearer {self.key}"

    async def _status(self, request: Request) -> Response:
        return _error(401, "An API key is needed.") if self._closed(request) else JSONResponse(self.status())

    def status(self) -> dict[str, Any]:
        """What `GET /foredraft/status` says."""
        recent = [
            {
                "id": f"chatcmpl-{i}",
                "at": 1767225600.0 - 7 * i,
                "endpoint": "chat",
                "drafter": ("auto", "suffix", "hybrid:suffix+recycling", "none")[i % 4],
                "rule": "greedy",
                "prompt_tokens": 40 + i,
                "completion_tokens": 128,
                "target_forwards": 70 + i,
                "mean_accepted_length": 128 / (70 + i),
                "tokens_per_second": 151.5 - 3 * i,
                "ttft_ms": 44.0 + i,
                "seconds": 0.9,
                "outcome": ("stop", "length", "cancelled")[i % 3],
            }
            for i in range(min(len(self.asked) * 4, 12))
        ]
        return {
            "model": "smollm2-135m",
            "context": 8192,
            "backend": "native",
            "default_drafter": "auto",
            "drafters": ["auto", "suffix", "hybrid:suffix+recycling", "eagle3", "none"],
            "rules": ["seed-exact", "block", "token"],
            "plain_tokens_per_second": 61.3,
            "status": {"state": "ready", "running": 1, "waiting": 0, "kv_bytes": 83886080, "kv_limit": 2147483648},
            "limits": {"sequences": 16},
            "recent": recent,
        }

    async def _chat(self, request: Request) -> Response:
        if self._closed(request):
            return _error(401, "An API key is needed.")
        body = await request.json()
        self.asked.append(body)
        message = body["messages"][-1]["content"]
        if "refuse" in message:
            return _error(503, "256 requests are waiting already.", {"Retry-After": "5"})
        return EventSourceResponse(self._chunks(message))

    async def _chunks(self, message: str) -> AsyncIterator[str]:
        done = False
        try:
            for i, chunk in enumerate(ROUNDS):
                if i == 12 and "hang" in message:
                    await asyncio.Event().wait()
                if i == 12 and "break" in message:
                    yield json.dumps({"error": {"message": "The worker was restarted.", "code": "worker_crashed"}})
                    yield "[DONE]"
                if i == 12 and ("break" in message or "cut" in message):
                    done = True
                    return
                await asyncio.sleep(self.pause)
                yield json.dumps(_chunk("".join(token["text"] for token in chunk["tokens"])) | {"foredraft": chunk})
            yield json.dumps(_chunk("", "stop"))
            yield json.dumps({"choices": [], "usage": _usage()})
            yield "[DONE]"
            done = True
        finally:
            if not done:
                self.left.set()


def _chunk(text: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]}


def _usage() -> dict[str, Any]:
    tokens = sum(len(chunk["tokens"]) for chunk in ROUNDS)
    figures = {
        "drafter": "hybrid:suffix+recycling",
        "rule": "greedy",
        "target_forwards": len(ROUNDS),
        "ttft_ms": 41.5,
        "tpot_ms": 8.0,
    }
    return {"prompt_tokens": 30, "completion_tokens": tokens, "foredraft": figures}


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"message": message}}, status_code=status, headers=headers)


@contextmanager
def serving(server: PageServer) -> Iterator[str]:
    """The address of the server, which runs in a thread meanwhile."""
    config = uvicorn.Config(server.app, port=0, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    running = uvicorn.Server(config)
    sock = config.bind_socket()
    thread = threading.Thread(target=lambda: running.run([sock]), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/"
    finally:
        running.should_exit = True
        thread.join()
        sock.close()
