"""Who may ask: API keys from options and files, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from foredraft.errors import InvalidInputError

_OPEN = frozenset({"/", "/health"})


class Keys:
    """The keys of a server. With none, everybody may ask."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._hashes = [_hash(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def number(self, authorization: str | None) -> int | None:
        """Which key, from 0, an `Authorization` header has; `None` if it has none of them.

        All keys are compared, so that the time taken does not tell which one, or how much of it, was right.
        """
        scheme, _, given = (authorization or "").strip().partition(" ")
        wanted = _hash(given.strip() if scheme.lower() == "bearer" else "")
        same = [hmac.compare_digest(wanted, known) for known in self._hashes]
        return same.index(True) if any(same) else None


def is_open(path: str, open_metrics: bool) -> bool:
    """Whether a path needs no key."""
    return path in _OPEN or (open_metrics and path == "/metrics")


def read_keys(keys: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """The keys given and those of a file, one a line; empty lines and those that begin with # do not count.

    Raises:
        InvalidInputError: The file cannot be read or has no key, or a key has white space or is no ASCII.
    """
    found = list(keys)
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInputError(f"Cannot read the API keys in {file} ({error}): give a text file.") from error
        listed = [line for line in lines if line and not line.startswith("#")]
        if not listed:
            raise InvalidInputError(f"{file} has no API key: write one a line.")
        found += listed
    if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in found):
        raise InvalidInputError("An API key is empty, or has white space or other than ASCII characters in it.")
    return tuple(dict.fromkeys(found))


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
