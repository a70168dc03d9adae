"""One request on its way to vLLM and back: sent, streamed on as it comes, figures put in, cancelled if nobody reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import httpx
from sse_starlette.sse import EventSourceResponse, SendTimeoutError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from foredraft.handover.edge import Drafting, usage_of
from foredraft.serve.asks import AskTimeoutError, Refusal, WorkerCrashedError
from foredraft.serve.logs import Record, logger
from foredraft.serve.problems import ApiError, problem
from foredraft.serve.settings import ServerSettings

_CLIENT_GONE = 499
_TOLD = (
    "drafter",
    "rule",
    "target_forwards",
    "mean_accepted_length",
    "tokens_per_second",
    "queue_ms",
    "ttft_ms",
    "tpot_ms",
)
_CONTEXT = ("maximum context length", "max_model_len", "longer than the maximum model length")


@dataclass
class Relay:
    """Carries one body to vLLM and its answer back.

    Args:
        client: Asks vLLM.
        path: Of the API.
        body: For vLLM.
        record: Where it is noted.
        settings: Of the server.
        drafting: What drafts there.
        include_usage: Whether the client wants the figures at the end of a stream.
        timeout: Seconds that the request may take.
        ended: Told the outcome once, when a response that was begun is over.
    """

    client: httpx.AsyncClient
    path: str
    body: dict[str, Any]
    record: Record
    settings: ServerSettings
    drafting: Drafting
    include_usage: bool
    timeout: float
    ended: Callable[[str | None], None]
    _first: float | None = field(default=None, init=False)
    _finish: str | None = field(default=None, init=False)

    async def respond(self, request: Request) -> Response:
        """The response; an error of vLLM's before it began is raised in our own shape."""
        if self.body.get("stream"):
            upstream = await self._opened()
            return _Relayed(self, upstream)
        work = asyncio.ensure_future(self._whole())
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.record.outcome = "cancelled"
                response = Response(status_code=_CLIENT_GONE)
            else:
                response = JSONResponse(work.result())
            self.ended(self.record.outcome)
            return response
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _whole(self) -> dict[str, Any]:
        try:
            response = await asyncio.wait_for(self.client.post(self.path, json=self.body), self.timeout)
        except asyncio.TimeoutError:
            raise _too_slow(self.timeout) from None
        except httpx.HTTPError as error:
            raise _gone() from error
        answer = _answer(response.status_code, response.content)
        choices = answer.get("choices") or [{}]
        answer["usage"] = self._figures(answer.get("usage") or {}, answer.pop("metrics", None), len(choices))
        self.record.outcome = choices[0].get("finish_reason")
        return answer

    async def _opened(self) -> httpx.Response:
        """The response to a stream, its headers read."""
        asked = self.client.build_request("POST", self.path, json=self.body)
        try:
            response = await asyncio.wait_for(self.client.send(asked, stream=True), self.timeout)
        except asyncio.TimeoutError:
            raise _too_slow(self.timeout) from None
        except httpx.HTTPError as error:
            raise _gone() from error
        if response.status_code != 200:
            content = await response.aread()
            await response.aclose()
            _answer(response.status_code, content)
        return response

    async def chunks(self, upstream: httpx.Response) -> AsyncIterator[str]:
        """The data of each event. What fails after it began is its last but one."""
        try:
            async with aclosing(self._events(upstream)) as events:
                async for event in events:
                    yield json.dumps(event, separators=(",", ":"))
            self.record.outcome = self._finish
        except (asyncio.CancelledError, GeneratorExit):
            self.record.outcome = self.record.outcome or "cancelled"
            raise
        except Exception as error:
            found = problem(_gone() if isinstance(error, httpx.HTTPError) else error, self.record.id)
            if found.code == "internal":
                logger.exception("stream failed", extra={"fields": {"id": self.record.id}})
            self.record.outcome = found.code
            yield json.dumps(found.body, separators=(",", ":"))
        yield "[DONE]"

    async def _events(self, upstream: httpx.Response) -> AsyncGenerator[dict[str, Any], None]:
        """vLLM's events with foredraft's figures, until its own end."""
        choices: set[int] = set()
        lines = upstream.aiter_lines()
        while True:
            line = await self._line(lines)
            if line is None:
                raise _gone()
            name, _, data = line.partition(":")
            if name != "data":
                continue
            if data.strip() == "[DONE]":
                return
            event = _event(data)
            for choice in event.get("choices") or ():
                choices.add(int(choice.get("index") or 0))
                self._finish = choice.get("finish_reason") or self._finish
                if self._first is None and _says(choice):
                    self._first = perf_counter()
            figures, metrics = event.pop("usage", None), event.pop("metrics", None)
            if figures is not None:
                told = self._figures(figures, metrics, len(choices))
                if not self.include_usage:
                    continue
                event["usage"] = told
            elif self.include_usage:
                event["usage"] = None
            yield event

    async def _line(self, lines: AsyncIterator[str]) -> str | None:
        """The next line; `None` at the end."""
        left = self.timeout - (perf_counter() - self.record.started)
        try:
            return await asyncio.wait_for(anext(lines, None), max(left, 0.0))
        except asyncio.TimeoutError:
            raise _too_slow(self.timeout) from None

    def _figures(self, usage: dict[str, Any], metrics: dict[str, Any] | None, choices: int) -> dict[str, Any]:
        """`usage`, noted too."""
        started, first = self.record.started, self._first
        found = usage_of(
            usage,
            metrics,
            self.drafting,
            choices=max(choices, 1),
            first_seconds=first - started if first is not None else None,
            seconds=perf_counter() - started,
        )
        told = found["foredraft"]
        counts = {name: found[name] for name in ("prompt_tokens", "completion_tokens")}
        self.record.figures = {**counts, **{name: told[name] for name in _TOLD}}
        return found


class _Relayed(EventSourceResponse):
    """Server-sent events; when they end, however they do, so does the request to vLLM, which then stops."""

    def __init__(self, relay: Relay, upstream: httpx.Response) -> None:
        settings = relay.settings
        super().__init__(relay.chunks(upstream), ping=settings.ping, sep="\n", send_timeout=settings.send_timeout)
        self._relay, self._upstream = relay, upstream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = self._relay.record
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            record.outcome = "slow_reader"
            logger.warning("dropped a client that reads nothing", extra={"fields": {"id": record.id}})
        finally:
            self._relay.ended(record.outcome)
            await self._upstream.aclose()


def _says(choice: dict[str, Any]) -> bool:
    """Whether a part of a stream has text, or a part of a tool call."""
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning") or delta.get("tool_calls"))


def _event(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise _gone() from error
    if not isinstance(event, dict):
        raise _gone()
    if event.get("error"):
        raise _refused(int((event["error"] or {}).get("code") or 500), event)
    return event


def _answer(status: int, content: bytes) -> dict[str, Any]:
    """The object of a good answer.

    Raises:
        ApiError: vLLM refuses the request.
        WorkerCrashedError: It failed.
    """
    try:
        found = json.loads(content)
    except ValueError:
        found = {}
    found = found if isinstance(found, dict) else {}
    if status != 200:
        raise _refused(status, found)
    return found


def _refused(status: int, found: dict[str, Any]) -> Exception:
    """vLLM's error in our shape: what the client did wrong is told, what broke is not."""
    error = found.get("error")
    error = error if isinstance(error, dict) else found
    message = str(error.get("message") or "vLLM refused the request.")
    if status >= 500:
        logger.error("vLLM failed", extra={"fields": {"status": status, "message": message[:300]}})
        return WorkerCrashedError("vLLM failed on this request: ask again.")
    long = any(part in message for part in _CONTEXT)
    code = "context_length_exceeded" if long else "invalid_value"
    return ApiError(400 if status == 422 else status, message, param=error.get("param"), code=code)


def _gone() -> Refusal:
    return WorkerCrashedError("vLLM went away while it answered; it is started again: ask again in a moment.")


def _too_slow(timeout: float) -> Refusal:
    return AskTimeoutError(f"The request took longer than {timeout:g} s, the most here: ask for fewer tokens.")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
