"""What settings check when they are built."""

from __future__ import annotations

import math

from foredraft.errors import InvalidInputError


def require(name: str, value: object, ok: bool, allowed: str) -> None:
    """Raise `InvalidInputError` unless `ok`, with the setting's name, its value and what is allowed."""
    if not ok:
        raise InvalidInputError(f"{name} is {value!r}, but must be {allowed}.", field=name)


def is_integer(value: object) -> bool:
    """Whether a value is a whole number; truth values are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a finite number; truth values are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
