"""The cost curve as a picture: milliseconds of a forward by its rows, a line for each context."""

from __future__ import annotations

import math
from typing import NamedTuple

from foredraft import pages
from foredraft.costs import Costs

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 60, 110, 46, 44  # margins


class Line(NamedTuple):
    """A line of the picture: its name, its points, and where its name stands."""

    name: str
    points: str
    end: tuple[float, float]


class Tick(NamedTuple):
    """A mark on an axis."""

    at: float
    label: str


def draw(costs: Costs, title: str) -> str:
    """The curve of one sequence as SVG, with what as many plain steps would cost; `title` is escaped."""
    curve = costs.curve
    most = curve.rows[-1]
    top = max(1e3 * curve.seconds(most, context) for context in curve.contexts)
    step = _nice(top / 5)
    highest = step * math.ceil(top / step)

    def x(rows: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (rows - 1) / (most - 1), 1)

    def y(ms: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * ms / highest, 1)

    def line(name: str, measured: list[tuple[float, float]]) -> Line:
        places = [(x(rows), y(ms)) for rows, ms in measured]
        return Line(name, " ".join(f"{a},{b}" for a, b in places), places[-1])

    lines = [line(f"after {c} tokens", [(n, 1e3 * curve.seconds(n, c)) for n in curve.rows]) for c in curve.contexts]
    one = 1e3 * curve.seconds(1)
    until = min(most, highest / one)
    return pages.render(
        "curve_plot.svg",
        title=title,
        measured=costs.measured[:10],
        width=WIDTH,
        height=HEIGHT,
        frame=(LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM),
        lines=_apart(lines),
        plain=line("n plain steps", [(1, one), (until, until * one)]),
        x=[Tick(x(n), str(n)) for n in curve.rows if n in (1, 4, 8, 16, 24) or n == most],
        y=[Tick(y(i * step), f"{i * step:g}") for i in range(round(highest / step) + 1)],
    )


def _nice(value: float) -> float:
    """The smallest of 1, 2, 5, 10, … (or their tenths) that is no less."""
    scale: float = 10.0 ** math.floor(math.log10(value))
    return next(round(scale * factor, 12) for factor in (1, 2, 5, 10) if scale * factor >= value)


def _apart(lines: list[Line]) -> list[Line]:
    """The lines with their names moved so that none covers another, from the lowest up."""
    placed: list[Line] = []
    for each in sorted(lines, key=lambda line: -line.end[1]):
        below = placed[-1].end[1] if placed else math.inf
        placed.append(each._replace(end=(each.end[0], min(each.end[1], below - 15))))
    return placed
