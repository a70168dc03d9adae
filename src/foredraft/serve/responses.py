"""How answers go out, whoever gives them: one object, or server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from sse_starlette.sse import EventSourceResponse, SendTimeoutError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from foredraft.serve.logs import Record, logger
from foredraft.serve.problems import problem
from foredraft.serve.settings import ServerSettings

_CLIENT_GONE = 499  # nobody reads it; the log has it as others do


async def whole(answer: Coroutine[Any, Any, dict[str, Any]], request: Request, record: Record) -> Response:
    """What `answer` returns; if the client goes away first, it is cancelled."""
    work = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            record.outcome = "cancelled"
            return Response(status_code=_CLIENT_GONE)
        return JSONResponse(work.result())
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


class Stream(EventSourceResponse):
    """Server-sent events of one answer.

    Args:
        chunks: Its parts. What fails after they began is the last event but one.
        record: Where its end is noted.
        settings: Of the server.
        ended: Called when the response is over, however it ended, and whether or not `chunks` was begun.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[dict[str, Any], None],
        record: Record,
        settings: ServerSettings,
        ended: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(_lines(chunks, record), ping=settings.ping, sep="\n", send_timeout=settings.send_timeout)
        self._record, self._ended = record, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            self._record.outcome = "slow_reader"
            logger.warning("dropped a client that reads nothing", extra={"fields": {"id": self._record.id}})
        finally:
            await self._ended()


async def _lines(chunks: AsyncGenerator[dict[str, Any], None], record: Record) -> AsyncIterator[str]:
    """The data of each event."""
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                yield _line(chunk)
    except (asyncio.CancelledError, GeneratorExit):
        record.outcome = record.outcome or "cancelled"
        raise
    except Exception as error:
        found = problem(error, record.id)
        if found.code == "internal":
            logger.exception("stream failed", extra={"fields": {"id": record.id}})
        record.outcome = found.code
        yield _line(found.body)
    yield "[DONE]"


def _line(chunk: dict[str, Any]) -> str:
    """JSON in one line of ASCII: some clients take other characters for line ends."""
    return json.dumps(chunk, separators=(",", ":"))


async def _disconnected(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
