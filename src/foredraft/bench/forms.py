"""How the report writes numbers. What is not known is a dash."""

from __future__ import annotations

from foredraft.bench.figures import Interval

NONE = "–"
_PERCENT = "\N{NO-BREAK SPACE}%"


def times(value: float | None) -> str:
    """A ratio."""
    return NONE if value is None else f"{value:.2f}×"


def limits(value: Interval | None) -> str:
    """From where to where an interval goes; nothing if a single answer gives none."""
    return "" if value is None or value.low == value.high else f"{value.low:.2f}–{value.high:.2f}"


def interval(value: Interval | None) -> str:
    """A ratio, and its interval in brackets."""
    return NONE if value is None else f"{times(value.value)} ({limits(value)})".replace(" ()", "")


def milliseconds(seconds: float | None) -> str:
    """A time with about three digits: `0.42 ms`, `12.3 ms`, `1,234 ms`."""
    if seconds is None:
        return NONE
    ms = 1e3 * seconds
    return f"{ms:,.0f} ms" if abs(ms) >= 99.95 else f"{ms:.1f} ms" if abs(ms) >= 9.995 else f"{ms:.2f} ms"


def percent(share: float | None) -> str:
    """A share: `41 %`."""
    return NONE if share is None else f"{share:.0%}".replace("%", _PERCENT)


def signed(share: float) -> str:
    """A share with its sign."""
    return f"{share:+.0%}".replace("%", _PERCENT).replace("-", "−")


def count(number: int | None) -> str:
    """A count: `12,345`."""
    return NONE if number is None else f"{number:,}"


def decimal(value: float | None, digits: int = 2) -> str:
    """A number with so many digits after the point."""
    return NONE if value is None else f"{value:,.{digits}f}"


def megabytes(amount: int | None) -> str:
    """Memory: `512 MB`."""
    return NONE if amount is None else f"{amount / 1e6:,.0f} MB"
