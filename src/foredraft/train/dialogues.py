"""Dialogues: what a target was asked and what it answered, as token ids, and the files that hold them."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.checks import is_integer, is_number
from foredraft.errors import InvalidInputError
from foredraft.pages import whole_file

_GZIP = b"\x1f\x8b"
_FORM = '{"n_prompt": 71, "temperature": 0.0, "ids": [1, 9690, …]}'


@dataclass(frozen=True)
class Dialogue:
    """A prompt and the target's answer to it.

    Args:
        ids: Token ids of the prompt, template included, then of the answer; a stop token that ended it is the last.
        n_prompt: How many of them are the prompt; the answer has at least one.
        temperature: At which the answer was drawn; 0 is greedy.

    Raises:
        InvalidInputError: A value cannot be that.
    """

    ids: tuple[int, ...]
    n_prompt: int
    temperature: float

    def __post_init__(self) -> None:
        if not all(is_integer(token) and token >= 0 for token in self.ids):
            raise InvalidInputError("ids must be token ids, which are integers >= 0")
        if not (is_integer(self.n_prompt) and 1 <= self.n_prompt < len(self.ids)):
            raise InvalidInputError(
                f"n_prompt is {self.n_prompt!r}, but of {len(self.ids)} ids at least the first must be the prompt, and "
                "at least the last the answer"
            )
        if not (is_number(self.temperature) and self.temperature >= 0):
            raise InvalidInputError(f"temperature is {self.temperature!r}, but must be a number >= 0")

    @property
    def prompt(self) -> tuple[int, ...]:
        """The ids that were asked."""
        return self.ids[: self.n_prompt]

    @property
    def answer(self) -> tuple[int, ...]:
        """The ids that the target wrote."""
        return self.ids[self.n_prompt :]


def write_dialogues(file: Path, dialogues: Iterable[Dialogue]) -> None:
    """Write a file of dialogues, one a line, whole or not at all.

    Raises:
        InvalidInputError: It cannot be written.
    """
    with whole_file(file) as write:
        write("".join(f"{_line(dialogue)}\n" for dialogue in dialogues))


def read_dialogues(paths: Iterable[Path], vocab_size: int | None = None) -> list[Dialogue]:
    """The dialogues of files, in their order; the `.jsonl` and `.jsonl.gz` of a folder in that of their names.

    Args:
        paths: Files as `write_dialogues` makes them, gzipped or not, or folders of such.
        vocab_size: Of the target, whose ids are below it; `None` does not check.

    Raises:
        InvalidInputError: A file cannot be read, a line is no dialogue, an id is outside the vocabulary, or there is
            none at all. The message names the file and the line.
    """
    paths = [Path(path) for path in paths]
    found = [dialogue for path in paths for file in _files(path) for dialogue in _read(file, vocab_size)]
    if not found:
        names = ", ".join(map(str, paths)) or "no file"
        raise InvalidInputError(f"There are no dialogues in {names}: make some with foredraft train-data.")
    return found


def _line(dialogue: Dialogue) -> str:
    about = {"n_prompt": dialogue.n_prompt, "temperature": dialogue.temperature}
    return json.dumps({**about, "ids": dialogue.ids}, allow_nan=False)


def _files(path: Path) -> list[Path]:
    return sorted([*path.glob("*.jsonl"), *path.glob("*.jsonl.gz")]) if path.is_dir() else [path]


def _read(file: Path, vocab_size: int | None) -> Iterator[Dialogue]:
    for number, line in enumerate(_text(file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield _dialogue(line, vocab_size)
        except InvalidInputError as error:
            raise InvalidInputError(f"{file}, line {number}: {error}. A line must be {_FORM}.") from error


def _text(file: Path) -> str:
    try:
        data = file.read_bytes()
        return (gzip.decompress(data) if data.startswith(_GZIP) else data).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidInputError(f"Cannot read {file} ({why}): give a file of dialogues, as JSON lines.") from error


def _dialogue(line: str, vocab_size: int | None) -> Dialogue:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"broken JSON ({error})") from error
    names = ("ids", "n_prompt", "temperature")
    if not isinstance(record, dict) or not isinstance(record.get("ids"), list):
        raise InvalidInputError("it has no list of ids")
    if missing := [name for name in names if name not in record]:
        raise InvalidInputError(f"it has no {' and no '.join(missing)}")
    dialogue = Dialogue(tuple(record["ids"]), record["n_prompt"], record["temperature"])
    if vocab_size is not None and max(dialogue.ids) >= vocab_size:
        raise InvalidInputError(
            f"token id {max(dialogue.ids)} is outside the target's vocabulary, whose ids are 0 to {vocab_size - 1}: "
            "give dialogues of this very model"
        )
    return dialogue
