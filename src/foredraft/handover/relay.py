"""One request on its way to vLLM and back: sent, streamed on as it comes, figures put in, cancelled if nobody reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

import httpx
from starlette.requests import Request
from starlette.responses import Response

from foredraft.handover.edge import Drafting, usage_of
from foredraft.serve.asks import AskTimeoutError, Refusal, WorkerCrashedError
from foredraft.serve.logs import Record, logger
from foredraft.serve.problems import ApiError
from foredraft.serve.responses import Stream, whole
from foredraft.serve.settings import ServerSettings

_CONTEXT = ("maximum context length", "max_model_len", "longer than the maximum model length")

T = TypeVar("T")


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

    async def respond(self, request: Request) -> Response:
        """The response; an error of vLLM's before it began is raised in our own shape."""
        if self.body.get("stream"):
            upstream = await self._opened()

            async def closed() -> None:  # vLLM stops when nobody reads it
                self.ended(self.record.outcome)
                await upstream.aclose()

            return Stream(self._events(upstream), self.record, self.settings, closed)
        response = await whole(self._whole(), request, self.record)
        self.ended(self.record.outcome)
        return response

    async def _whole(self) -> dict[str, Any]:
        response = await self._within(self.timeout, self.client.post(self.path, json=self.body))
        answer = _answer(response.status_code, response.content)
        choices = answer.get("choices") or [{}]
        answer["usage"] = self._figures(answer.get("usage") or {}, answer.pop("metrics", None), len(choices))
        self.record.outcome = choices[0].get("finish_reason")
        return answer

    async def _opened(self) -> httpx.Response:
        """The response to a stream, its headers read."""
        asked = self.client.build_request("POST", self.path, json=self.body)
        response = await self._within(self.timeout, self.client.send(asked, stream=True))
        if response.status_code != 200:
            content = await response.aread()
            await response.aclose()
            _answer(response.status_code, content)
        return response

    async def _events(self, upstream: httpx.Response) -> AsyncGenerator[dict[str, Any], None]:
        """vLLM's events with foredraft's figures, until its own end."""
        choices: set[int] = set()
        finish: str | None = None
        lines = upstream.aiter_lines()
        while True:
            line = await self._line(lines)
            if line is None:
                raise _gone()
            name, _, data = line.partition(":")
            if name != "data":
                continue
            if data.strip() == "[DONE]":
                self.record.outcome = finish
                return
            event = _event(data)
            for choice in event.get("choices") or ():
                choices.add(int(choice.get("index") or 0))
                finish = choice.get("finish_reason") or finish
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
        return await self._within(max(left, 0.0), anext(lines, None))

    async def _within(self, seconds: float, told: Awaitable[T]) -> T:
        """What vLLM tells, if it does so within these seconds."""
        try:
            return await asyncio.wait_for(told, seconds)
        except asyncio.TimeoutError:
            raise _too_slow(self.timeout) from None
        except httpx.HTTPError as error:
            raise _gone() from error

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
        self.record.answered(found)
        return found


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
