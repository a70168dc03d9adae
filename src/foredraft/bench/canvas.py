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
    return lambda value: left + (right - left) * (value - first) / ((last - first) or 1.0), ticks
