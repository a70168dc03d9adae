"""What every request passes before it is read: an id and a line in the log, the keys, and the size of its body.

These are plain ASGI: wrappers that read responses would hold streams back.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.serve.access import Keys, is_open
from foredraft.serve.logs import Recent, Record, log_request, logger
from foredraft.serve.problems import ApiError, internal

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_ANSWERING = ("/v1/chat/completions", "/v1/completions")


async def send_error(error: ApiError, send: Send) -> None:
    """Answer with an error, where no response has begun."""
    body = json.dumps(error.body).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **error.headers}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


class Noted:
    """Gives each request an id and a `Record`, logs it when it ends, and turns what nobody caught into a 500."""

    def __init__(self, app: ASGIApp, recent: Recent) -> None:
        self._app, self._recent = app, recent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SANE_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        record = scope["foredraft"] = Record(request_id, scope["method"], scope["path"])

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except ClientDisconnect:  # before its body had come
            record.outcome = "cancelled"
        except Exception:
            logger.exception("request failed", extra={"fields": {"id": request_id}})
            record.outcome = "internal"
            if record.status is None:
                await send_error(internal(request_id), noted)
        finally:
            log_request(record)
            if record.endpoint in _ANSWERING and record.method == "POST":
                self._recent.add(record)


class Guarded:
    """Lets in who has a key, and notes which."""

    def __init__(self, app: ASGIApp, keys: Keys, open_metrics: bool) -> None:
        self._app, self._keys, self._open_metrics = app, keys, open_metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and self._keys and not is_open(scope["path"], self._open_metrics):
            number = self._keys.number(Headers(scope=scope).get("authorization"))
            if number is None:
                _note(scope, "invalid_api_key")
                message = "This server needs an API key: send 'Authorization: Bearer KEY' with one that it knows."
                challenge = {"WWW-Authenticate": "Bearer"}
                await send_error(ApiError(401, message, code="invalid_api_key", headers=challenge), send)
                return
            scope["foredraft_key"] = number
        await self._app(scope, receive, send)


class BodyTooLargeError(ApiError):
    """More than the server takes."""

    def __init__(self, limit: int) -> None:
        super().__init__(413, f"The body has more than {limit} bytes, which is the most here.", code="body_too_large")


class Bounded:
    """Refuses bodies that are too large: by their announced length, and those that announce none as they come."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isascii() and announced.isdigit() and (len(announced) > 18 or int(announced) > self._limit):
            _note(scope, "body_too_large")
            error = BodyTooLargeError(self._limit)
            error.headers["Connection"] = "close"  # the rest of the body is not read
            await send_error(error, send)
            return
        read = 0

        async def bounded() -> Message:
            nonlocal read
            message = await receive()
            if message["type"] == "http.request":
                read += len(message.get("body", b""))
                if read > self._limit:
                    raise BodyTooLargeError(self._limit)
            return message

        await self._app(scope, bounded, send)


def _note(scope: Mapping[str, Any], outcome: str) -> None:
    record = scope.get("foredraft")
    if isinstance(record, Record):
        record.outcome = outcome
