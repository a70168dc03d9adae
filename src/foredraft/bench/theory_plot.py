"""The formula as a picture: speedup over drafted tokens, and the acceptance at which drafting begins to pay."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from foredraft.bench.theory import Verify, best_k, break_even, free, speedup
from foredraft.errors import UnsupportedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = 16
"""Drafted tokens that are shown at least."""
_TEXT, _SMALL, _GRID, _MAIN, _OTHER, _GOOD = "#1b2127", "#5a6470", "#d8dde3", "#2463b0", "#9bb6d6", "#2f9b58"
_STYLE: Any = {
    "font.size": 11,
    "text.color": _TEXT,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _SMALL,
    "axes.titlecolor": _TEXT,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 12,
    "axes.titlepad": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.7,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _TEXT,
    "ytick.labelcolor": _TEXT,
    "lines.solid_capstyle": "round",
    "svg.hashsalt": "foredraft",  # so that the same picture is the same file
}
_LABEL_APART = 0.055  # of the height of the axes


def draw(alpha: float, k: int, draft_cost: float = 0.0, v: Verify = free, *, most: int = 64) -> str:
    """Two pictures side by side as SVG, on a light ground of their own; the arguments are those of `theory`.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise UnsupportedError("Plots need matplotlib: pip install 'foredraft[bench]'") from error

    widest = max(SHOWN, k, min(best_k(alpha, draft_cost, v, most) + 2, most))
    with mpl.rc_context(_STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12)
        figure = Figure(figsize=(10.4, 4.4), layout=layout, facecolor="white")
        FigureCanvasSVG(figure)
        left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
        _speedups(left, alpha, k, draft_cost, v, widest)
        _break_evens(right, alpha, draft_cost, v, widest)
        for axes in (left, right):
            axes.set_xlabel("drafted tokens K")
            axes.tick_params(length=0)
            axes.set_xlim(0, widest)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        out = io.StringIO()
        title = f"Speculative decoding in theory: acceptance {percent(alpha)}, draft cost {draft_cost:g}"
        figure.savefig(out, format="svg", metadata={"Title": title, "Date": None})
    return out.getvalue()


def percent(rate: float) -> str:
    """A rate as people write it: 80%, 82.5%."""
    return f"{100 * rate:.4g}%"


def neighbours(alpha: float) -> list[float]:
    """Rates around this one, itself among them, in order."""
    near = {round(alpha + step, 6) for step in (-0.2, -0.1, 0.1)}
    return sorted({alpha, *(rate for rate in near if 0 < rate <= 1)})


def _speedups(axes: Axes, alpha: float, k: int, draft_cost: float, v: Verify, widest: int) -> None:
    """A line for this acceptance and for those near it, each with its best K."""
    ends = [(1.0, "plain", _SMALL)]
    for rate in neighbours(alpha):
        line = [speedup(rate, n, draft_cost, v) for n in range(widest + 1)]
        best = max(range(widest + 1), key=line.__getitem__)
        colour, width, size = (_MAIN, 2.4, 7) if rate == alpha else (_OTHER, 1.4, 5)
        axes.plot(range(widest + 1), line, color=colour, linewidth=width, zorder=2 + width)
        if best < widest or rate == alpha:  # else it may lie beyond
            axes.plot(best, line[best], "o", color=colour, markersize=size, zorder=2 + width, clip_on=False)
        ends.append((line[-1], percent(rate), _MAIN if rate == alpha else _SMALL))
        if rate == alpha:
            side = "left" if best < widest / 4 else "right" if best > 3 * widest / 4 else "center"
            what = f"best K = {best}: {line[best]:.2f}x" if best else "best: do not draft"
            _note(axes, what, (best, line[best]), (0, 9), ha=side, weight="bold")
            if k != best:
                axes.plot(k, line[k], "o", color=_MAIN, mfc="white", markersize=7, zorder=6, clip_on=False)
                left = k > best and k >= widest / 2
                away = (-7, -14) if left else (7, -14 if k < best else 8)  # away from the line
                _note(axes, f"K = {k}: {line[k]:.2f}x", (k, line[k]), away, ha="right" if left else "left")
    axes.axhline(1, color=_SMALL, linewidth=1, linestyle=(0, (5, 4)))
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, 0), high + 0.1 * (high - low))
    _label_ends(axes, ends)
    axes.set_title("Speedup over plain decoding, by acceptance")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")


def _break_evens(axes: Axes, alpha: float, draft_cost: float, v: Verify, widest: int) -> None:
    """The acceptance above which a chain of K pays, and where this one lies."""
    ends = [(alpha, percent(alpha), _MAIN)]
    rates = [(n, rate) for n in range(1, widest + 1) if (rate := break_even(n, draft_cost, v)) is not None]
    if rates:
        x, y = zip(*rates, strict=True)
        axes.plot(x, y, color=_GOOD, linewidth=2.4)
        axes.fill_between(x, y, 1, color=_GOOD, alpha=0.12, linewidth=0)
        ends.append((y[-1] if x[-1] == widest else 1.0, "break-even", _GOOD))
    else:
        axes.text(0.5, 0.5, "drafting never pays", transform=axes.transAxes, ha="center", color=_SMALL)
    axes.axhline(alpha, color=_MAIN, linewidth=1.4, linestyle=(0, (5, 4)))
    axes.set_ylim(0, 1)
    axes.set_title("Acceptance above which drafting pays")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _label_ends(axes, ends)


def _note(axes: Axes, text: str, at: tuple[float, float], away: tuple[float, float], **style: Any) -> None:
    """A word at a point, readable over lines."""
    from matplotlib.patheffects import withStroke

    ground = [withStroke(linewidth=3, foreground="white")]
    axes.annotate(text, at, away, textcoords="offset points", color=_MAIN, zorder=7, path_effects=ground, **style)


def _label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Names beside the ends of lines, moved up where they would cover each other."""
    low, high = axes.get_ylim()
    least = 0.0
    for value, name, colour in sorted(ends):
        place = max((value - low) / (high - low), least)
        where = {"xycoords": "axes fraction", "textcoords": "offset points"}
        axes.annotate(name, (1, place), (6, 0), va="center", color=colour, **where)  # type: ignore[arg-type]
        least = place + _LABEL_APART
