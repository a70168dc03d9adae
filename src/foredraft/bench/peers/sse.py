"""HTTP to an OpenAI-compatible server: plain answers, and streams of server-sent events, with a deadline."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from foredraft.bench.peers.base import PeerError

_SHOWN = 300  # characters of an error's text that are shown


@dataclass(frozen=True)
class Server:
    """Where a server is: `http://host:port/v1`, with `#model` behind it if it serves several."""

    url: str
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        try:
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:  # the port is no number
            good = False
        if not good:
            raise PeerError(f"'{self.url}' is no URL of a server: give one such as http://localhost:8000/v1.")

    @property
    def model(self) -> str:
        """The model that the URL names; empty if it does not."""
        return urlsplit(self.url).fragment

    @property
    def base(self) -> str:
        """Path of the API, without a slash at its end."""
        return urlsplit(self.url).path.rstrip("/")

    def get(self, path: str, timeout: float) -> str:
        """The text of a page.

        Raises:
            PeerError: There is no such server or page, or it took too long.
        """
        with self._asked("GET", path, None, timeout) as response:
            return response.read().decode(errors="replace")

    def stream(self, path: str, body: dict[str, Any], timeout: float) -> Iterator[dict[str, Any]]:
        """The events of an answer as they come.

        Raises:
            PeerError: The server refuses, breaks off, sends what is no event, says nothing for `timeout` seconds, or
                still goes on then.
        """
        deadline = time.monotonic() + timeout
        with self._asked("POST", path, body, timeout) as response:
            while line := response.readline():
                name, _, data = line.decode(errors="replace").strip().partition(":")
                if name == "data" and data.strip() == "[DONE]":
                    return
                if name == "data":
                    yield self._event(data)
                if time.monotonic() > deadline:
                    raise TimeoutError

    def _event(self, data: str) -> dict[str, Any]:
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise PeerError(f"{self.url} sent an event that is no JSON object: {data.strip()[:_SHOWN]!r}.")
        if event.get("error"):
            raise PeerError(f"{self.url} broke off: {_message(data)}")
        return event

    @contextmanager
    def _asked(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float
    ) -> Iterator[http.client.HTTPResponse]:
        """The response to a request, if it is a good one."""
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        assert parts.hostname is not None
        connection = kind(parts.hostname, parts.port, timeout=timeout)
        headers = {"Accept": "*/*", "Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            connection.request(method, path, None if body is None else json.dumps(body).encode(), headers)
            with connection.getresponse() as response:
                if response.status != 200:
                    text = response.read().decode(errors="replace")
                    raise PeerError(f"{self.url} refused {path} with status {response.status}: {_message(text)}")
                yield response
        except TimeoutError as error:
            raise PeerError(f"{self.url} took longer than {timeout:g} s for {path}.") from error
        except (OSError, http.client.HTTPException) as error:
            raise PeerError(
                f"{self.url} cannot be reached ({error or type(error).__name__}): is it running?"
            ) from error
        finally:
            connection.close()


def _message(text: str) -> str:
    """What an error says, in OpenAI's form or any other."""
    try:
        error = json.loads(text)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        pass
    return " ".join(text.split())[:_SHOWN] or "it says nothing more"
