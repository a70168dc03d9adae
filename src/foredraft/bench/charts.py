"""The charts of the report. Each is drawn twice, for wide and for narrow pages, and says in words what it shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from foredraft.bench import forms
from foredraft.bench.canvas import MARKERS, NARROW, WIDE, Canvas, Legend, Rows, fitted
from foredraft.bench.figures import Interval, Split
from foredraft.bench.records import Position

SERIES = len(MARKERS)
"""Most methods that a chart tells apart."""
_PARTS = {"prefill": "5", "draft": "2", "verify": "1", "accept": "3", "other": "plain"}


class Row(NamedTuple):
    """A method in a chart: its name, a figure, and what colours it: `best`, `own`, `plain`, `peer` or `worse`."""

    name: str
    value: Interval
    kind: str


def _both(name: str, label: str, draw: Callable[[int], Canvas]) -> Markup:
    """The drawing at both widths; the page shows one of them."""
    pictures = (
        f'<div class="{size}">{draw(width).svg(label, f"{name} {size}")}</div>'
        for size, width in (("wide", WIDE), ("narrow", NARROW))
    )
    return Markup("".join(pictures))


def speedups(name: str, title: str, rows: Sequence[Row], base: str) -> Markup:
    """A dot with its interval for each method, and a line from 1, which is called `base`."""
    label = f"{title}: " + "; ".join(f"{row.name} {forms.interval(row.value)}" for row in rows)

    def draw(width: int) -> Canvas:
        space = Rows([row.name for row in rows], width, 30, 150 if width == WIDE else 60)
        x = space.axis(*_reach([row.value for row in rows]), lambda v: f"{v:g}×", base=1)
        canvas = space.canvas
        canvas.text(x(1), 12, base, size=12, colour="muted", align="center" if x(1) > 60 else "left")
        for index, (_, value, kind) in enumerate(rows):
            y, left = space.y(index), min(x(1), x(value.value))
            canvas.box(left, y - 5, abs(x(value.value) - x(1)), 10, kind, 0.28)
            canvas.line([x(value.low), x(value.high)], [y, y], kind, 2)
            canvas.mark(x(value.value), y, kind, "D" if kind == "peer" else "o", 9)
            canvas.text(space.right + 12, y + 4.5, forms.times(value.value), bold=kind == "best")
            if space.beside:
                canvas.text(width, y + 4.5, forms.limits(value), size=12, colour="muted", align="right")
        return canvas

    return _both(f"{name} speedups", label, draw)


def _reach(values: Sequence[Interval]) -> tuple[float, float]:
    """From where to where an axis of ratios goes: 1 and all values are on it, and of long intervals the most."""
    low, high = (pick(1.0, *(value.value for value in values)) for pick in (min, max))
    lowest, highest = min(1.0, *(value.low for value in values)), max(1.0, *(value.high for value in values))
    room = max((high - low) / 2, 0.05)
    return max(low - room, lowest), min(high + room, highest)


def by_category(name: str, methods: Mapping[str, Mapping[str, Interval]], categories: Sequence[str]) -> Markup:
    """For each category the speedup of each method (at most `SERIES` of them), each with its own marker and colour."""
    found = {c: {m: each[c].value for m, each in methods.items() if c in each} for c in categories}
    best = {c: max(each, key=each.__getitem__) for c, each in found.items() if each}
    texts = (f"{c}: {method} {forms.times(found[c][method])}" for c, method in best.items())
    label = "Speedup over plain decoding by category; the fastest in each: " + "; ".join(texts)
    values = [value for each in methods.values() for value in each.values()]

    def draw(width: int) -> Canvas:
        legend = Legend(list(methods), width)
        space = Rows(categories, width, 13 * len(methods) + 18, 20, legend.height + 10)
        legend.draw(space.canvas)
        x = space.axis(*_reach(values), lambda v: f"{v:g}×", base=1)
        for row, category in enumerate(categories):
            if row:
                edge = space.top + row * (space.height + space.above)
                space.canvas.line([0, space.right], [edge, edge], "line")
            for index, (marker, method) in enumerate(zip(MARKERS, methods, strict=False)):
                if (value := methods[method].get(category)) is not None:
                    y = space.y(row) + 13 * (index - (len(methods) - 1) / 2)
                    colour = str(index + 1)
                    space.canvas.line([x(value.low), x(value.high)], [y, y], colour, 1.5)
                    space.canvas.mark(x(value.value), y, colour, marker, 8)
        return space.canvas

    return _both(f"{name} by_category", label, draw)


def acceptance(name: str, methods: Mapping[str, Sequence[Position]]) -> Markup:
    """A line for each method: the share of drafted tokens that was accepted at each depth."""
    first = "; ".join(f"{method} {forms.percent(found[0].rate)} at the first" for method, found in methods.items())
    label = f"Acceptance rate by position in the draft: {first}"
    deepest = max(len(found) for found in methods.values())

    def draw(width: int) -> Canvas:
        legend = Legend(list(methods), width)
        left, right, top, height = 46.0, width - 14.0, legend.height + 16.0, 240.0 if width == WIDE else 200.0
        canvas = Canvas(width, round(top + height + 44))
        legend.draw(canvas)

        def x(position: float) -> float:
            return left + 14 + (right - left - 28) * (position - 1) / max(deepest - 1, 1)

        def y(share: float) -> float:
            return top + height * (1 - share)

        for share in (0, 0.25, 0.5, 0.75, 1):
            canvas.line([left, right], [y(share)] * 2, "line")
            canvas.text(left - 8, y(share) + 4, forms.percent(share), size=12, colour="muted", align="right")
        for position in range(1, deepest + 1):
            canvas.text(x(position), top + height + 18, str(position), size=12, colour="muted", align="center")
        canvas.text(
            (left + right) / 2, top + height + 38, "position in the draft", size=12, colour="muted", align="center"
        )
        for index, found in enumerate(methods.values()):
            xs, ys = [x(i + 1) for i in range(len(found))], [y(each.rate) for each in found]
            canvas.line(xs, ys, str(index + 1), 2)
            for a, b in zip(xs, ys, strict=True):
                canvas.mark(a, b, str(index + 1), MARKERS[index], 8)
        return canvas

    return _both(f"{name} acceptance", label, draw)


def histograms(name: str, methods: Mapping[str, Sequence[int]]) -> Markup:
    """A small histogram for each method: the share of its rounds that emitted so many tokens."""
    means = {m: sum((i + 1) * n for i, n in enumerate(counts)) / sum(counts) for m, counts in methods.items()}
    label = "Tokens emitted by a round, on average: " + "; ".join(f"{m} {mean:.2f}" for m, mean in means.items())
    most = min(max(len(counts) for counts in methods.values()), 8)
    shares = {m: [*counts[: most - 1], sum(counts[most - 1 :])] for m, counts in methods.items()}
    cut = any(len(counts) > most for counts in methods.values())

    def draw(width: int) -> Canvas:
        columns, gap, height = (4, 28.0, 96.0) if width == WIDE else (2, 20.0, 84.0)
        each = (width - gap * (columns - 1)) / columns
        block = height + 86
        canvas = Canvas(width, round(block * -(-len(methods) // columns)))
        for index, (method, counts) in enumerate(shares.items()):
            left, top = (index % columns) * (each + gap), (index // columns) * block + 50
            canvas.text(left, top - 34, fitted(method, each), bold=True)
            canvas.text(left, top - 16, f"{means[method]:.2f} a round", size=12, colour="muted")
            bar = each / most
            for i, count in enumerate(counts):
                share = count / sum(counts)
                canvas.box(left + i * bar + 1, top + height * (1 - share), bar - 2, height * share, "own")
                text = f"{i + 1}+" if cut and i == most - 1 else str(i + 1)
                canvas.text(left + (i + 0.5) * bar, top + height + 16, text, size=12, colour="muted", align="center")
                if share >= 0.005:
                    y = top + height * (1 - share) - 4
                    text = f"{100 * share:.0f}"
                    canvas.text(left + (i + 0.5) * bar, y, text, size=11, colour="muted", align="center")
            canvas.line([left, left + each], [top + height] * 2, "muted")
        return canvas

    return _both(f"{name} histograms", label, draw)


def spreads(name: str, title: str, methods: Mapping[str, Sequence[float]]) -> Markup:
    """How times (seconds) of single answers are spread: 5th to 95th percentile, quartiles, median."""
    label = f"{title}, median: " + "; ".join(f"{m} {forms.milliseconds(median(times))}" for m, times in methods.items())
    found = {m: [1e3 * float(t) for t in np.percentile(times, (5, 25, 50, 75, 95))] for m, times in methods.items()}

    def draw(width: int) -> Canvas:
        space = Rows(list(methods), width, 28, 80, 8)
        x = space.axis(0, max(each[-1] for each in found.values()), lambda v: f"{v:,g} ms")
        canvas = space.canvas
        for index, (least, lower, middle, upper, most) in enumerate(found.values()):
            y = space.y(index)
            canvas.line([x(least), x(most)], [y, y], "own", 1.5)
            canvas.box(x(lower), y - 6, x(upper) - x(lower), 12, "own", 0.35)
            canvas.line([x(middle), x(middle)], [y - 8, y + 8], "own", 3)
            canvas.text(space.right + 12, y + 4.5, forms.milliseconds(middle / 1e3))
        return canvas

    return _both(f"{name} spreads", label, draw)


def splits(name: str, methods: Mapping[str, tuple[Split, int]]) -> Markup:
    """A bar for each method: the milliseconds of a token by what they were spent on. Values are splits and tokens."""
    per_token = {m: [1e3 * max(part, 0.0) / tokens for part in split] for m, (split, tokens) in methods.items()}
    found = (
        f"{m} " + ", ".join(f"{p} {ms:.1f}" for p, ms in zip(_PARTS, each, strict=True))
        for m, each in per_token.items()
    )
    label = "Milliseconds of a token by what they were spent on: " + "; ".join(found)

    def draw(width: int) -> Canvas:
        legend = Legend(list(_PARTS), width, [("s", colour) for colour in _PARTS.values()])
        space = Rows(list(methods), width, 34, 80, legend.height + 10)
        canvas = space.canvas
        legend.draw(canvas)
        x = space.axis(0, max(sum(each) for each in per_token.values()), lambda v: f"{v:g} ms")
        for index, each in enumerate(per_token.values()):
            y, start = space.y(index), 0.0
            for colour, part in zip(_PARTS.values(), each, strict=True):
                left, right = x(start), x(start + part)
                canvas.box(left, y - 10, max(right - left - 1, 0.5), 20, colour)
                if right - left >= 34:
                    canvas.text((left + right) / 2, y + 4, f"{part:.1f}", size=12, colour="page", align="center")
                start += part
            canvas.text(space.right + 12, y + 4.5, forms.milliseconds(start / 1e3))
        return canvas

    return _both(f"{name} splits", label, draw)


def predictions(name: str, methods: Mapping[str, tuple[float, float]]) -> Markup:
    """Measured and predicted speedup of each method (in this order), and the 10 % around the measured one."""
    found = (f"{m} {measured:.2f} and {predicted:.2f}" for m, (measured, predicted) in methods.items())
    label = "Speedup after the first token, measured and predicted: " + "; ".join(found)
    values = [value for each in methods.values() for value in each]

    def draw(width: int) -> Canvas:
        keys = ["measured, with 10 % around it", "predicted"]
        legend = Legend(keys, width, [("o", "own"), ("D", "-2")])
        space = Rows(list(methods), width, 30, 80, legend.height + 10)
        canvas = space.canvas
        legend.draw(canvas)
        x = space.axis(min(1.0, 0.9 * min(values)), 1.1 * max(values), lambda v: f"{v:g}×")
        for index, (measured, predicted) in enumerate(methods.values()):
            y = space.y(index)
            canvas.box(x(0.9 * measured), y - 7, x(1.1 * measured) - x(0.9 * measured), 14, "own", 0.2)
            canvas.mark(x(measured), y, "own", "o", 9)
            canvas.mark(x(predicted), y, "2", "D", 7, hollow=True)
            canvas.text(space.right + 12, y + 4.5, forms.signed(predicted / measured - 1))
        return canvas

    return _both(f"{name} predictions", label, draw)
