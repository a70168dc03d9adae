"""A drawing of matplotlib's as a piece of a page: pixels, colours that the page decides, and text that stays text."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Align = Literal["left", "center", "right"]
# What matplotlib draws with in place of each colour; the page has the real ones, of light and of dark, as --chart-NAME.
_COLOURS = ("text", "muted", "line", "page", "plain", "best", "own", "peer", "worse", "1", "2", "3", "4", "5", "6")
_CODES = {name: f"#0001{number:02x}" for number, name in enumerate(_COLOURS)}
MARKERS = ("o", "s", "D", "^", "v", "P")
"""Of the colours "1" to "6", so that no colour has to be told from another."""
WIDE, NARROW = 920, 340
"""Widths of the drawings for large and for small pages."""
_LETTER = 0.56  # of the font's size: how wide a letter is, about


def available() -> bool:
    """Whether there is what draws."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


class Canvas:
    """A drawing of `width` times `height` pixels; y runs downwards. `draw` in it and take its `svg`."""

    def __init__(self, width: int, height: int) -> None:
        from matplotlib.figure import Figure

        self.width, self.height = width, height
        self._figure = Figure(figsize=(width / 72, height / 72), dpi=72)  # a point is a pixel then
        self._axes: Axes = self._figure.add_axes((0, 0, 1, 1))
        self._axes.set(xlim=(0, width), ylim=(height, 0))
        self._axes.set_axis_off()
        self._order = 0

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 13,
        colour: str = "text",
        align: Align = "left",
        bold: bool = False,
    ) -> None:
        """Text whose baseline is at y and which is to the `left`, `center` or `right` of x."""
        self._axes.text(
            x, y, printable(text), fontsize=size, color=_CODES[colour], ha=align, weight="bold" if bold else "normal",
            parse_math=False, zorder=self._next(),
        )  # fmt: skip

    def line(self, xs: Sequence[float], ys: Sequence[float], colour: str, width: float = 1) -> None:
        """A line through these points."""
        self._axes.plot(
            xs, ys, color=_CODES[colour], linewidth=width, zorder=self._next(), solid_capstyle="butt", clip_on=False
        )

    def mark(self, x: float, y: float, colour: str, marker: str = "o", size: float = 8, hollow: bool = False) -> None:
        """A marker, parted from what is below it by a thin rim in the colour of the page."""
        fill, rim = ("page", colour) if hollow else (colour, "page")
        self._axes.plot(
            [x], [y], marker, markersize=size, markerfacecolor=_CODES[fill], markeredgecolor=_CODES[rim],
            markeredgewidth=2 if hollow else 1, clip_on=False, zorder=self._next(),
        )  # fmt: skip

    def box(self, x: float, y: float, width: float, height: float, colour: str, opacity: float = 1.0) -> None:
        """A filled rectangle from its upper left corner."""
        from matplotlib.patches import Rectangle

        shape = Rectangle(
            (x, y), width, height, facecolor=_CODES[colour], edgecolor="none", alpha=opacity, zorder=self._next()
        )
        shape.set_clip_on(False)
        self._axes.add_patch(shape)

    def _next(self) -> int:
        """What is drawn later lies above."""
        self._order += 1
        return self._order

    def svg(self, label: str, name: str) -> str:
        """The drawing as an `svg` element that a screen reader calls `label`; `name` is unlike that of any other."""
        from matplotlib import rc_context

        written = StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # letters that matplotlib's font lacks: the page's has them
            self._figure.savefig(written, format="svg", metadata=nothing, transparent=True)
        size = f'viewBox="0 0 {self.width} {self.height}" style="max-width: {self.width}px"'
        return f'<svg {size} role="img" aria-label="{escape(label)}">{_inner(written.getvalue())}</svg>'


def _inner(svg: str) -> str:
    """What is in a file of matplotlib's, without fonts and names, its colours left to the page."""
    _, _, inner = svg[svg.index("<svg") :].partition(">")
    inner = inner.rpartition("</svg>")[0]
    inner = re.sub(r"<style.*?</style>", "", inner, count=1, flags=re.DOTALL)
    inner = re.sub(r" ?font-family: [^;\"]*;", "", inner).replace("font-weight: 700", "font-weight: 600")
    inner = re.sub(r'<g id="[^"]*">', "<g>", inner).replace("xlink:href", "href")
    inner = re.sub(r' transform="rotate\(-0[^"]*"', "", inner)
    inner = re.sub(r"\s*\n\s*", " ", inner)
    for name, code in _CODES.items():
        inner = inner.replace(code, f"var(--chart-{name})")
    return inner


def printable(text: str) -> str:
    """The text without what moves or hides other text."""
    kept = "\N{NO-BREAK SPACE}"
    return "".join(c if c.isprintable() or c == kept else "\N{REPLACEMENT CHARACTER}" for c in text)


def fitted(text: str, width: float, size: float = 13) -> str:
    """The text, or its beginning and its end, in about so many pixels."""
    most = max(int(width / (size * _LETTER)), 5)
    if len(text) <= most:
        return text
    end = (most - 1) // 3
    return f"{text[: most - 1 - end]}…{text[-end:]}"


def scale(low: float, high: float, left: float, right: float) -> tuple[Callable[[float], float], list[float]]:
    """Pixels by value on an axis from `low` to `high` or a little further, and where its ticks are."""
    from matplotlib.ticker import MaxNLocator

    ticks = [float(tick) for tick in MaxNLocator(max(int((right - left) / 90), 2)).tick_values(low, high)]
    first, last = min(ticks[0], low), max(ticks[-1], high)
    size = (right - left) / ((last - first) or 1.0)
    return lambda value: left + size * (min(max(value, first), last) - first), ticks


class Rows:
    """Rows of `height` below `top`, with a name each: beside them where there is room, else above them."""

    def __init__(self, names: Sequence[str], width: int, height: int, value_width: int, top: int = 26) -> None:
        self.beside = width == WIDE
        self._names = names
        widest = max((len(name) for name in names), default=0)
        self.left = min(26 + 7.3 * widest, 260) if self.beside else 18.0
        self.right = float(width - value_width)
        self.top, self.above, self.height = top, 0 if self.beside else 18, height
        self.bottom = top + len(names) * (height + self.above)
        self.canvas = Canvas(width, round(self.bottom + 30))

    def y(self, index: int) -> float:
        """The middle of what is drawn in a row."""
        return self.top + index * (self.height + self.above) + self.above + self.height / 2

    def axis(
        self, low: float, high: float, form: Callable[[float], str], base: float | None = None
    ) -> Callable[[float], float]:
        """Draw the names, and the grid of an axis that has these values on it, with a line at `base`.

        Returns:
            Where a value is; one beyond the axis is at its end.
        """
        x, ticks = scale(low, high, self.left, self.right)
        for tick in ticks:
            self.canvas.line([x(tick), x(tick)], [self.top - 6, self.bottom], "line")
            self.canvas.text(x(tick), self.bottom + 18, form(tick), size=12, colour="muted", align="center")
        if base is not None:
            self.canvas.line([x(base), x(base)], [self.top - 6, self.bottom], "muted", 1.5)
        for index, name in enumerate(self._names):
            if self.beside:
                self.canvas.text(self.left - 16, self.y(index) + 4.5, fitted(name, self.left - 16), align="right")
            else:
                shown, y = fitted(name, self.right), self.y(index) - self.height / 2 - 3
                self.canvas.box(0, y - 12, 7.3 * len(shown) + 4, 16, "page")  # no line runs through the name
                self.canvas.text(0, y, shown)
        return x


class Legend:
    """Names behind their markers, in as many lines as they need; `height` is what they take."""

    def __init__(self, names: Sequence[str], width: int, markers: Sequence[tuple[str, str]] = ()) -> None:
        self._markers = markers or [(marker, str(index + 1)) for index, marker in enumerate(MARKERS)]
        self._places: list[tuple[float, float, str]] = []
        x, y = 0.0, 12.0
        for name in names:
            shown = fitted(name, width - 24)
            needed = 26 + 7.3 * len(shown)
            if x and x + needed > width:
                x, y = 0.0, y + 22
            self._places.append((x, y, shown))
            x += needed + 12
        self.height = round(y + 12)

    def draw(self, canvas: Canvas) -> None:
        """Draw it at the top."""
        for (x, y, name), (marker, colour) in zip(self._places, self._markers, strict=False):
            canvas.mark(x + 6, y, colour.lstrip("-"), marker, 9, hollow=colour.startswith("-"))
            canvas.text(x + 18, y + 4.5, name)
