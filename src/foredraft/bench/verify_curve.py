"""Reads what verifying costs, by rows, from whatever file tells it."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from foredraft.costs import CostCurve, Costs
from foredraft.errors import InvalidInputError

_ROWS = ("rows", "n")
_COSTS = ("seconds", "ms", "v")
_KINDS = "a file of foredraft's costs, what `foredraft tune --json` prints, or CSV or JSON of rows with v or ms"


def read_verify_curve(path: Path) -> CostCurve:
    """The curve of a file; its `v` is what `theory` takes.

    It may be costs as they are kept in the cache, the JSON object of `foredraft tune` or the settings of a benchmark,
    or points as CSV or JSON: `rows` (or `n`) with `v`, `ms` or `seconds`. Without names, the first column has the rows
    and the second one costs. All are divided by that of one row, which only a column `v` may leave out. Between points
    the curve is linear, and points that say that more rows cost less are levelled.

    Raises:
        InvalidInputError: The file cannot be read, or is none of these.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        return _of_text(text)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"Cannot read {path} ({error}): give {_KINDS}.") from error
    except InvalidInputError as error:
        raise InvalidInputError(f"{path} is no verify curve: {error}") from error


def _of_text(text: str) -> CostCurve:
    if not text.lstrip().startswith(("{", "[")):
        return _of_points(csv.reader(text.splitlines()))
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"it is no whole JSON ({error}). Give {_KINDS}.") from error
    if isinstance(found, dict) and found.get("foredraft") == "costs":
        return Costs.from_json(found).curve
    found = found.get("curve", found) if isinstance(found, dict) else found
    if isinstance(found, dict) and "contexts" in found:
        return CostCurve.from_json(found)
    if isinstance(found, dict):
        return _of_points(found.items())
    points = found if isinstance(found, list) else []
    if points and all(isinstance(point, dict) for point in points):
        return _of_named(points)
    return _of_points(points)


def _of_named(points: list[Mapping[str, Any]]) -> CostCurve:
    rows = next((name for name in _ROWS if all(name in point for point in points)), None)
    cost = next((name for name in _COSTS if all(name in point for point in points)), None)
    if rows is None or cost is None:
        raise InvalidInputError(f"each point must have {' or '.join(_ROWS)}, and {', '.join(_COSTS[:-1])} or v.")
    return _curve([(point[rows], point[cost]) for point in points], relative=cost == "v")


def _of_points(lines: Iterable[Any]) -> CostCurve:
    """Of pairs, or of lists under a list of names."""
    listed = [line for line in lines if line]  # a CSV may have empty lines
    if not listed or not all(isinstance(line, (list, tuple)) and len(line) >= 2 for line in listed):
        raise InvalidInputError(f"it must be pairs of rows and costs. Give {_KINDS}.")
    names = [str(name).strip().lower() for name in listed[0]]
    if any(name in names for name in _ROWS):
        return _of_named([dict(zip(names, line, strict=False)) for line in listed[1:]])
    return _curve([(line[0], line[1]) for line in listed])


def _curve(points: Iterable[tuple[Any, Any]], *, relative: bool = False) -> CostCurve:
    """Of rows and times, or of rows and `v`, where that of one row is 1 even if nobody says so."""
    costs: dict[int, float] = {}
    for rows, cost in points:
        try:
            number, value = float(rows), float(cost)
        except (TypeError, ValueError):
            raise InvalidInputError(f"{rows!r} and {cost!r} must be a number of rows and its cost.") from None
        if not (number.is_integer() and number >= 1 and 0 < value < math.inf):
            raise InvalidInputError(f"{rows!r} and {cost!r} must be a whole number of rows >= 1 and a cost > 0.")
        if int(number) in costs:
            raise InvalidInputError(f"it has {int(number)} rows twice: give one cost for each number of rows.")
        costs[int(number)] = value
    if relative:
        costs.setdefault(1, 1.0)
    if 1 not in costs or len(costs) < 2:
        raise InvalidInputError("the cost of one row and of some more must be there: v(n) = t(n) / t(1).")
    rows_in_order = sorted(costs)
    return CostCurve(rows_in_order, (0,), [[costs[n] for n in rows_in_order]])
