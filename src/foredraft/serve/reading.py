"""From the bytes of a request to a checked body."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any, NoReturn

from pydantic import ValidationError
from starlette.requests import Request

from foredraft.serve.problems import ApiError, invalid_body
from foredraft.serve.wire import T

SLOWEST = 60.0
"""Seconds that a body may take to come."""

_DEEPEST = 64  # levels of lists and objects
_LONGEST_NUMBER = 40  # digits; what is longer is no setting, and slow to read
_EXACT = 2**53  # below this floats have all whole numbers
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_body(request: Request, model: type[T]) -> T:
    """The body as `model`.

    Raises:
        ApiError: 400: it is not sent as JSON, is no JSON, or not what the model allows; 408: it does not come.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(
            400,
            f"The Content-Type is {kind[:60]!r}, but must be application/json: send that header.",
            code="invalid_content_type",
        )
    try:
        raw = await asyncio.wait_for(request.body(), SLOWEST)
    except asyncio.TimeoutError:
        message = f"The body did not come within {SLOWEST:g} s."
        raise ApiError(408, message, code="body_timeout", headers={"Connection": "close"}) from None
    body = parse_json(raw)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise invalid_body(error, body) from None


def parse_json(raw: bytes) -> Any:
    """JSON as its standard has it: UTF-8, no NaN, no number or nesting beyond reason, no half characters.

    Raises:
        ApiError: 400.
    """
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_no_number, parse_int=_integer, parse_float=_float)
    except UnicodeDecodeError as error:
        raise _invalid(f"it is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise _invalid(f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise _too_deep() from None
    _check_depth(value)
    if _SURROGATE.search(raw):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise _invalid("a \\u escape is half of a character") from None
    return value


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, (list, dict))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (list, dict))
        ]
        if not level:
            return
    raise _too_deep()


def _integer(text: str) -> int:
    if len(text) > _LONGEST_NUMBER:
        raise _invalid(f"a number has {len(text)} digits")
    return int(text)


def _float(text: str) -> float:
    # JSON does not tell 2.0 from 2: what must be whole may be written so.
    value = float(text)
    if not math.isfinite(value):
        raise _invalid(f"the number {text[:_LONGEST_NUMBER]} is too large")
    return int(value) if value.is_integer() and abs(value) < _EXACT else value


def _no_number(text: str) -> NoReturn:
    raise _invalid(f"{text} is no JSON number")


def _too_deep() -> ApiError:
    return _invalid(f"it is nested more than {_DEEPEST} levels deep")


def _invalid(reason: str) -> ApiError:
    return ApiError(400, f"The body is not valid JSON: {reason}.", code="invalid_json")
