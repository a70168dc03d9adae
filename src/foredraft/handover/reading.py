"""Reads vLLM's speculative config as people give it: JSON, or the name of a file that holds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foredraft.errors import InvalidInputError


def read_config(given: str) -> dict[str, Any]:
    """The object that stands behind `--speculative-config`: JSON as it is, or the name of a file that holds it.

    Raises:
        InvalidInputError: It is neither.
    """
    if given.lstrip().startswith(("{", "[")):
        return parse_config(given)
    try:
        text = Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInputError(
            f"The speculative config '{given[:80]}' is no JSON object, and no file can be read there ({reason}): give "
            "vLLM's JSON, or a file that holds it."
        ) from error
    return parse_config(text)


def parse_config(text: str) -> dict[str, Any]:
    """The same of JSON.

    Raises:
        InvalidInputError: It is no JSON object, or names a key twice.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise InvalidInputError(
                f"The speculative config names '{next(n for n in names if names.count(n) > 1)}' twice."
            )
        return found

    try:
        found = json.loads(text, object_pairs_hook=once)
    except InvalidInputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(
            f"The speculative config is no JSON ({error}): give vLLM's, such as "
            '\'{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}\'.'
        ) from error
    if not isinstance(found, dict):
        raise InvalidInputError(f"The speculative config is {text[:60]!r}, but must be a JSON object.")
    return found
