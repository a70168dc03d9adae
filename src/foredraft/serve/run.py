"""The server's life: an address, requests until a signal comes, and an end that finishes what was begun."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI
from sse_starlette.sse import AppStatus

from foredraft.errors import InvalidInputError
from foredraft.serve.interfaces import Worker

logger = logging.getLogger("foredraft.serve")

_LAST_WORDS = 10  # seconds for what has been answered to reach its readers


def bind(host: str, port: int) -> socket.socket:
    """A socket at this address: nobody can connect before `serve` runs. Port 0 takes a free one.

    Raises:
        InvalidInputError: There is no such address here, or another program has it.
    """
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise InvalidInputError(f"There is no host '{host}' to serve at ({error}): try --host 127.0.0.1.") from error
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        found.close()
        raise _taken(host, port, error) from error
    return found


def address(listener: socket.socket) -> str:
    """Where a browser on this machine finds the server."""
    host, port = listener.getsockname()[:2]
    found = ipaddress.ip_address(host.partition("%")[0])
    if found.is_unspecified:
        found = ipaddress.ip_address("::1" if found.version == 6 else "127.0.0.1")
    return f"http://[{found}]:{port}" if found.version == 6 else f"http://{found}:{port}"


def is_local(listener: socket.socket) -> bool:
    """Whether only this machine can connect."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def serve(
    app: FastAPI, worker: Worker, listener: socket.socket, *, grace: float, ready: Callable[[], None] = lambda: None
) -> None:
    """Serve until SIGTERM or SIGINT.

    The first signal refuses new requests, and lets those that run finish for `grace` seconds, after which they end with
    an error; the second ends all at once.

    Args:
        app: What `create_app` made.
        worker: The one that `app` asks; it has been started.
        listener: From `bind`; it is closed at the end.
        grace: Seconds.
        ready: Called when requests are taken.

    Raises:
        InvalidInputError: Another program took the address since it was bound.
    """
    AppStatus.enable_automatic_graceful_drain = False  # streams end when their answers do
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=_LAST_WORDS,
    )
    server = _Server(config, worker, grace, ready)
    host, port = listener.getsockname()[:2]
    try:
        asyncio.run(server.serve(sockets=[listener]))
    except OSError as error:
        raise _taken(host, port, error) from error
    finally:
        listener.close()


class _Server(uvicorn.Server):
    """uvicorn with another idea of how to end: it must not raise the signal again, nor wait without a limit."""

    def __init__(self, config: uvicorn.Config, worker: Worker, grace: float, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._worker, self._grace, self._ready = worker, grace, ready
        self._signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        self._signals += 1
        if self._signals > 1 or self._loop is None:
            self.should_exit = self.force_exit = True
        else:
            self._loop.call_soon_threadsafe(self._begin_end)

    def _begin_end(self) -> None:
        logger.info("stopping: running requests may finish for %g s; a second signal stops at once", self._grace)
        self._end = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        try:
            await asyncio.wait_for(self._worker.drain(self._grace), self._grace + _LAST_WORDS)
        except Exception:  # whatever the worker does, the server ends
            logger.exception("the worker did not end as it should")
        self.should_exit = True


def _taken(host: str, port: int, error: OSError) -> InvalidInputError:
    return InvalidInputError(
        f"Cannot serve at {host}, port {port} ({error.strerror or error}): choose another with --port or --host."
    )
