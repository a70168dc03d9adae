"""Everything a request can be answered with that is not what it asked for, in OpenAI's shape."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from foredraft.errors import InvalidInputError, UnsupportedError
from foredraft.serve.asks import Refusal

_SHOWN = 60  # characters of a wrong value

_FIELDS = {
    "draft_tokens": "foredraft.budget",
    "drafter": "foredraft.drafter",
    "rule": "foredraft.rule",
    "timeout": "foredraft.timeout",
}
"""Where the body has what the worker knows by another name."""

_NAMED = re.compile(r"([a-z]+(?:_[a-z]+)*) (?:is|names) ")
"""How messages about a setting begin, whoever raised them."""


class ApiError(Exception):
    """An answer with an error status.

    Args:
        status: HTTP's.
        message: For people: what was given, what is allowed, what to do.
        param: Path of the field at fault, such as `messages[0].content`.
        code: For programs.
        retry_after: Seconds after which it may be worth asking again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(retry_after)

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def bad(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """A 400: the field at fault, and why."""
    return ApiError(400, message, param=param, code=code)


def no_such_model(asked: str, name: str) -> ApiError:
    """A 404: the server has another model."""
    message = f"There is no model '{asked[:80]}' here: this server has '{name}'."
    return ApiError(404, message, param="model", code="model_not_found")


def internal(request_id: str) -> ApiError:
    """What a client is told of a fault that is ours: nothing but where to look it up."""
    return ApiError(500, f"Something went wrong on the server. Its log tells more at {request_id}.", code="internal")


def problem(error: Exception, request_id: str) -> ApiError:
    """How a failure is answered. What nobody foresaw says nothing of itself."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Refusal):
        return ApiError(error.status, str(error), code=error.code, retry_after=error.retry_after)
    if isinstance(error, (InvalidInputError, UnsupportedError)):
        named = _NAMED.match(str(error))
        field = getattr(error, "field", None) or (named[1] if named else None)
        return ApiError(400, str(error), param=_FIELDS.get(field, field) if field else None, code="invalid_value")
    if isinstance(error, RecursionError):
        return ApiError(400, "The request is nested too deeply.", code="invalid_value")
    return internal(request_id)


def invalid_body(error: ValidationError, body: object) -> ApiError:
    """The first thing that is wrong with a body; alternatives of one place are told together."""
    found = error.errors(include_url=False)
    first = found[0]
    kind, context = first["type"], first.get("ctx", {})
    path, value = locate(first["loc"], body, missing=kind == "missing")
    if kind == "unknown_field":
        path = f"{path}.{context['name']}" if path else str(context["name"])
        return bad(path, f"{path} {first['msg']}", "unknown_parameter")
    if kind == "missing" or kind == "union_tag_not_found":
        path = path if kind == "missing" else f"{path}.{_tag(context)}"
        return bad(path, f"{path} is missing.", "missing_required_parameter")
    if kind == "refused":
        return bad(path, f"{path} {first['msg']}", "unsupported_parameter")
    if kind == "union_tag_invalid":
        path, shown = f"{path}.{_tag(context)}", _shown(context["tag"])
        return bad(path, f"{path} is {shown}, but must be one of {context['expected_tags']}.")
    rules = [_rule(each) for each in found if locate(each["loc"], body)[0] == path]
    message = f"{path or 'The body'} is {_shown(value)}, but must {' or '.join(dict.fromkeys(rules))}."
    return bad(path or None, message)


def _tag(context: Mapping[str, Any]) -> str:
    return str(context["discriminator"]).strip("'")


def locate(location: Sequence[int | str], body: object, *, missing: bool = False) -> tuple[str, object]:
    """The path of a place in the body, as clients write it, and what is there.

    pydantic's own paths also name the alternative that it tried; only what the body has counts, and with `missing` the
    last name, which it has not.
    """
    path, value = "", body
    for number, key in enumerate(location):
        if isinstance(value, Mapping) and (key in value or (missing and number == len(location) - 1)):
            path, value = (f"{path}.{key}" if path else str(key)), value.get(key)
        elif isinstance(value, list) and isinstance(key, int) and 0 <= key < len(value):
            path, value = f"{path}[{key}]", value[key]
    return path, value


def nearest(name: str, known: Sequence[str]) -> str:
    """A hint at the known name that is most like this one, or nothing."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


def _rule(error: Mapping[str, Any]) -> str:
    """What a value must do, by pydantic's finding."""
    context = error.get("ctx", {})
    if error["type"] in ("model_type", "dict_type"):
        return "be an object"
    if error["type"] == "too_short":
        return f"have at least {context['min_length']} of them"
    if error["type"] == "too_long":
        return f"have at most {context['max_length']} of them"
    if error["type"] == "string_pattern_mismatch":
        return f"match {context['pattern']}"
    message: str = error["msg"]
    return message.removeprefix("Value error, ").removeprefix("Input should ")


def _shown(value: object) -> str:
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} ({len(value)} entries)"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
