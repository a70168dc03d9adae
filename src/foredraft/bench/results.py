"""A run of the benchmark as a folder: its settings, an answer a line as they come, and the figures at the end."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cached_property
from io import SEEK_END
from pathlib import Path
from typing import Any, BinaryIO

from foredraft.bench.figures import CellFigures, figures_of
from foredraft.bench.records import Cell, Measurement
from foredraft.checks import is_integer, is_number
from foredraft.costs import CostCurve
from foredraft.errors import InvalidInputError
from foredraft.pages import make_folder, whole_file

VERSION = 1
_ROUNDED = 1 + 1e-9  # times that are the same may have been rounded apart
SETTINGS, ANSWERS, SUMMARY = "settings.json", "answers.jsonl", "summary.json"


@dataclass(frozen=True)
class Results:
    """A run: what was asked for, what it was made with, and every answer so far."""

    name: str
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]
    """Versions, machine, hashes: what another run should have alike to be comparable."""
    cells: tuple[Cell, ...]
    measurements: tuple[Measurement, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)
    """Peers that were asked for and could not run, each with the reason."""
    curve: CostCurve | None = None
    """What the target's forwards cost when the run was made."""

    @cached_property
    def figures(self) -> list[CellFigures]:
        """Those of every cell that has answers: of all items, then of each category."""
        return figures_of(self.measurements, self.cells, self.curve)

    def summary(self) -> dict[str, Any]:
        """What `summary.json` holds: settings, provenance and all figures, in plain values."""
        head = {"foredraft": "bench summary", "version": VERSION, "name": self.name}
        return {**head, **self._about(), "figures": [_plain(figures) for figures in self.figures]}

    def write_settings(self, folder: Path) -> None:
        """Begin a run's folder, or say again what it is: write `settings.json`.

        Raises:
            InvalidInputError: It cannot be written there.
        """
        make_folder(folder)
        curve = self.curve.to_json() if self.curve is not None else None
        _write_json(folder / SETTINGS, {"foredraft": "bench", "version": VERSION, **self._about(), "curve": curve})

    def write_summary(self, folder: Path) -> Path:
        """Write `summary.json` into the run's folder; return its path."""
        _write_json(folder / SUMMARY, self.summary())
        return folder / SUMMARY

    def _about(self) -> dict[str, Any]:
        return {
            "settings": dict(self.settings),
            "provenance": dict(self.provenance),
            "cells": [asdict(cell) for cell in self.cells],
            "absent": dict(self.absent),
        }

    @classmethod
    def read(cls, folder: Path) -> Results:
        """The run in a folder, finished or not.

        Raises:
            InvalidInputError: The folder holds none, or one of a newer version, or files that are damaged: the message
                names the file, and the line.
        """
        file = folder / SETTINGS
        found = _read_settings(file)
        try:
            cells = tuple(Cell(**cell) for cell in found["cells"])
            curve = CostCurve.from_json(found["curve"]) if found["curve"] is not None else None
            about = {name: dict(found[name]) for name in ("settings", "provenance", "absent")}
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(str(file), f"{type(error).__name__}: {error}") from error
        measurements = tuple(_read_answers(folder / ANSWERS, {cell.name for cell in cells}))
        return cls(folder.resolve().name, cells=cells, measurements=measurements, curve=curve, **about)


def append_answer(folder: Path, measurement: Measurement) -> None:
    """Write one more line of `answers.jsonl`; a torn one, left by a run that was killed, is cut off before.

    Raises:
        InvalidInputError: It cannot be written.
    """
    file = folder / ANSWERS
    try:
        with file.open("ab+") as stream:
            stream.truncate(_whole_bytes(stream))
            stream.write(json.dumps(measurement.to_json(), allow_nan=False).encode() + b"\n")
    except OSError as error:
        raise InvalidInputError(f"Cannot write {file} ({error.strerror}): it needs a folder with room.") from error


def _whole_bytes(stream: BinaryIO) -> int:
    """How long a file is up to the end of its last whole line."""
    end = stream.seek(0, SEEK_END)
    if not end:
        return 0
    stream.seek(end - 1)
    if stream.read(1) == b"\n":
        return end
    stream.seek(0)
    return stream.read().rfind(b"\n") + 1


def _read_settings(file: Path) -> dict[str, Any]:
    run = "give a folder that foredraft bench wrote"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInputError(f"There is no run in {file.parent} ({file.name}: {error.strerror}): {run}.") from error
    except ValueError as error:  # of the text or of the JSON
        raise _damaged(str(file), str(error)) from error
    if not isinstance(found, dict) or found.get("foredraft") != "bench":
        raise InvalidInputError(f"{file} is not that of a benchmark: {run}.")
    if found.get("version") != VERSION:
        raise InvalidInputError(
            f"{file} is of version {found.get('version')!r}, and this foredraft reads version {VERSION}: use the one "
            "that wrote it, or a newer one."
        )
    return found


def _read_answers(file: Path, cells: Collection[str]) -> Iterator[Measurement]:
    """Every whole line; the last one, if it has no end, was torn when the run was killed, and does not count."""
    try:
        lines = file.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return
    except OSError as error:
        raise InvalidInputError(f"Cannot read {file} ({error.strerror}).") from error
    seen = set()
    for number, line in enumerate(lines, 1):
        place = f"{file}, line {number},"
        try:
            found = Measurement.from_json(json.loads(line))
        except ValueError as error:  # of the text, of the JSON or of the record
            raise _damaged(place, str(error)) from error
        if (wrong := _wrong(found)) is not None:
            raise _damaged(place, wrong)
        if found.cell not in cells:
            raise _damaged(place, f"{SETTINGS} has no cell {found.cell!r}")
        if found.key in seen:
            raise _damaged(place, "an earlier line has the same cell, repetition and item")
        seen.add(found.key)
        yield found


def _wrong(found: Measurement) -> str | None:
    """What of a record cannot be, so that no figure could be made of it."""
    if not (isinstance(found.item, str) and isinstance(found.category, str) and is_integer(found.repetition)):
        return "item and category must be texts, repetition an integer"
    for turn in found.turns:
        if not all(is_integer(token) for token in turn.ids):
            return "ids must be integers"
        times = is_number(turn.ttft) and is_number(turn.seconds) and turn.seconds > 0
        if not (times and 0 <= turn.ttft <= turn.seconds * _ROUNDED):
            return f"ttft is {turn.ttft!r} and seconds {turn.seconds!r}, but must be times, the second one no shorter"
        if turn.rounds is not None and sum(turn.rounds.emitted) != turn.tokens:
            return f"its rounds emitted {sum(turn.rounds.emitted)} tokens, and there are {turn.tokens}"
    return None if found.turns else "it has no turns"


def _damaged(place: str, why: str) -> InvalidInputError:
    return InvalidInputError(f"{place} is damaged ({why}): restore the file, or make the run again.")


def _write_json(file: Path, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    with whole_file(file) as write:
        write(f"{text}\n")


def _plain(value: Any) -> Any:
    """The value as JSON has it: records of any kind as objects, their derived figures among them."""
    if isinstance(value, Cell):
        return {"name": value.name, **asdict(value)}
    if is_dataclass(value):
        names = [each.name for each in fields(value)]
    elif hasattr(value, "_fields"):
        names = list(value._fields)
    else:
        return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
    derived = [name for name, member in vars(type(value)).items() if isinstance(member, property)]
    return {name: _plain(getattr(value, name)) for name in (*names, *derived)}
