"""Workloads: the prompts that a benchmark asks, from the files that people have, in one form."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.bench.formats import KNOWN, Item, items_of
from foredraft.checks import is_integer, require
from foredraft.errors import InvalidInputError

if TYPE_CHECKING:
    from foredraft.api import Model

__all__ = ["BUNDLED", "Item", "Workload", "load_workload", "prompt_ids"]

BUNDLED = "bundled"
"""The reference of the workload that comes with foredraft."""

_GZIP = b"\x1f\x8b"
_LINE_END = re.compile(r"\r\n?|\n")  # what else `splitlines` knows may stand within a string of JSON
# How a file begins that is a list of records or has one on each line; else its lines are prompts.
_JSON = re.compile(r"\s*(?:(\[)\s*[{\"\]]|\{\s*[\"}])")


@dataclass(frozen=True)
class Workload:
    """Items to be answered, each with an id of its own. `sha256` is that of the file's bytes."""

    name: str
    items: tuple[Item, ...]
    sha256: str

    @property
    def categories(self) -> tuple[str, ...]:
        """The kinds of text in it, in the order in which they first come."""
        return tuple(dict.fromkeys(item.category for item in self.items))

    def spread(self, limit: int | None, categories: Collection[str] = ()) -> Workload:
        """A part of this workload, in its order.

        Args:
            limit: Most items to keep, spread evenly over the categories. Of each category they are its first ones, so
                a smaller limit gives a part of what a larger one gives. `None` keeps all.
            categories: Those to keep; none given keeps all.

        Raises:
            InvalidInputError: A category is not there, or the limit is no number of items.
        """
        require("limit", limit, limit is None or (is_integer(limit) and limit >= 1), "an integer >= 1, or left out")
        for category in categories:
            if category not in self.categories:
                known = ", ".join(filter(None, self.categories))
                there = f"its categories are {known}" if known else "it has none, so name none"
                raise InvalidInputError(f"Workload {self.name} has no category '{category}': {there}.")
        kept = [item for item in self.items if not categories or item.category in categories]
        seen: Counter[str] = Counter()
        nth = []
        for item in kept:
            nth.append(seen[item.category])
            seen[item.category] += 1
        # The n-th of every category comes before the (n + 1)-th of any.
        chosen = sorted(range(len(kept)), key=lambda place: nth[place])[:limit]
        return replace(self, items=tuple(kept[place] for place in sorted(chosen)))


def load_workload(reference: str) -> Workload:
    """Read a workload: `bundled`, or a file in any of the formats of docs/workloads.md, gzipped or not.

    Raises:
        InvalidInputError: The file cannot be read, is in no known format, or a record lacks what its format needs. The
            message names the file and the line or, within a JSON list, the record.
    """
    if reference == BUNDLED:
        name, data = BUNDLED, resources.files("foredraft.bench").joinpath("bundled.jsonl").read_bytes()
    else:
        name, data = Path(reference).name, _read(reference)
    try:
        items = list(_items(_text(_unpacked(data))))
    except InvalidInputError as error:
        raise InvalidInputError(f"{name}, {error}") from error
    if not items:
        raise InvalidInputError(f"{name} has no prompts. Known formats: {KNOWN}.")
    return Workload(name, tuple(_with_own_ids(items)), hashlib.sha256(data).hexdigest())


def _read(reference: str) -> bytes:
    try:
        return Path(reference).read_bytes()
    except (OSError, ValueError) as error:  # the latter for what can be no path
        why = getattr(error, "strerror", None) or error
        raise InvalidInputError(f"Cannot read workload {reference} ({why}): give a file, or '{BUNDLED}'.") from error


def _unpacked(data: bytes) -> bytes:
    if not data.startswith(_GZIP):
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidInputError(f"a gzip file, is damaged ({error}): fetch or pack it again.") from error


def _text(data: bytes) -> str:
    """The text of a file in UTF-8, without a byte order mark. Zero bytes would mean UTF-16, or no text at all."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        bad, why = error.start, error.reason
    else:
        bad, why = data.find(b"\0"), "a zero byte"
        if bad < 0:
            return text
    line = data.count(b"\n", 0, bad) + 1
    raise InvalidInputError(f"line {line}: this is no text in UTF-8 ({why}). Save the file as UTF-8.")


def _items(text: str) -> Iterator[Item]:
    for number, (where, record) in enumerate(_records(text), 1):
        try:
            yield from items_of(record, number)
        except InvalidInputError as error:
            raise InvalidInputError(f"{where}: {error}") from error


def _records(text: str) -> Iterator[tuple[str, Any]]:
    """Each record, and where it is: those of a JSON list, the JSON of each line, or each line as a prompt."""
    as_json = _JSON.match(text)
    if as_json and as_json[1]:
        for number, record in enumerate(_parsed(text, 1), 1):
            yield f"record {number}", record
        return
    for number, line in enumerate(_LINE_END.split(text), 1):
        if line.strip():
            yield f"line {number}", _parsed(line, number) if as_json else {"turns": [line.strip()]}


def _parsed(text: str, line: int) -> Any:
    """The JSON value of a text that begins on this line of its file."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # a ValueError also for numbers of thousands of digits
        if isinstance(error, json.JSONDecodeError):
            line += error.lineno - 1
        raise InvalidInputError(
            f"line {line}: broken JSON ({error}). Put a whole JSON object on each line, or one list into the file; "
            "a file of plain prompts must not begin like either."
        ) from error


def _with_own_ids(items: Sequence[Item]) -> Iterator[Item]:
    """The items, with `-2` after the second that has the same id, and so on."""
    taken: set[str] = set()
    repeats: dict[str, Iterator[int]] = {}
    for item in items:
        own = item.id
        while own in taken:
            own = f"{item.id}-{next(repeats.setdefault(item.id, count(2)))}"
        taken.add(own)
        yield item if own == item.id else replace(item, id=own)


def prompt_ids(model: Model, messages: Sequence[Mapping[str, str]], *, raw: bool) -> tuple[int, ...]:
    """The ids of a prompt: by the chat template; of a raw text, or without a template, as the texts stand."""
    if raw or not model.tokenizer.chat_template:
        return tuple(model.encode("\n\n".join(message["content"] for message in messages), chat=False))
    return tuple(model.encode([dict(message) for message in messages]))
