"""What rounds cost on this machine: seconds of a target forward by its rows and context, and of each drafter's drafts.

`calibration` measures a curve once; the rounds themselves refine it from then on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from foredraft.checks import is_integer, is_number, require
from foredraft.draft_cost import DraftCost
from foredraft.errors import InvalidInputError

Floats = NDArray[np.float64]

VERSION = 1
T = TypeVar("T")

# What is believed of log(seconds) before any round, and how it wanders: one level for the whole machine, and of each
# measured point its own deviation, which it shares with points of nearly as many rows.
_LEVEL, _LEVEL_GUESSED, _OWN = 0.3, 1.0, 0.1
_LEVEL_DRIFT, _OWN_DRIFT = 0.015, 0.003  # each round
_NOISE = 0.1  # of one forward
_TOGETHER = 16  # forwards that are taken in at once, at most
_CLIP = 3.0  # standard deviations: a round that stalled counts as one that was somewhat slow
_PER_CONTEXT = 1024.0  # tokens that the slope over contexts is for
_SLOPE_KNOWN, _SLOPE_UNKNOWN = 0.05, 0.3
_SHORTEST, _LONGEST, _FURTHEST = 1e-9, 1e9, 50.0  # seconds, and the logarithm of how wrong they may be
_BISECTIONS = 50


class CostCurve:
    """Seconds of a target forward by rows (the roots and all drafted nodes of a batch) and context (tokens cached).

    Piecewise linear between measured points in both, linear beyond them; below the smallest measured context it is as
    there. More rows never cost less: measured points that say so are levelled (isotonic regression).

    `note` learns from rounds with a Kalman filter over the logarithms at the measured rows, one deviation for each and
    one slope over contexts. Points that rounds visit go where the rounds are, the others move as far as the whole
    machine seems to have become slower, so each round teaches something about every point.

    Args:
        rows: `[R]` measured numbers of rows, at least two, increasing.
        contexts: `[C]` measured contexts, increasing.
        seconds: `[C, R]` what was measured.
        sequences: How many sequences the batch has; a plain step has as many rows.
        deviations: `[R]` what rounds have taught of the logarithms of these seconds; none is all 0.
        slope: How much more a forward costs with each 1024 tokens of context beyond what `seconds` says, as a share.
        guessed: Whether the level is a guess, which rounds should overrule quickly.

    Raises:
        InvalidInputError: These are no measurements.
    """

    def __init__(
        self,
        rows: Sequence[int],
        contexts: Sequence[int],
        seconds: Sequence[Sequence[float]],
        *,
        sequences: int = 1,
        deviations: Sequence[float] = (),
        slope: float = 0.0,
        guessed: bool = False,
    ) -> None:
        good = _increasing(rows) and rows[0] >= 1 and len(rows) >= 2
        require("rows", rows, good, "two or more increasing integers >= 1")
        require("contexts", contexts, _increasing(contexts) and contexts[0] >= 0, "increasing integers >= 0")
        good = len(seconds) == len(contexts) and all(len(times) == len(rows) for times in seconds)
        good = good and all(is_number(time) and _SHORTEST <= time <= _LONGEST for times in seconds for time in times)
        require("seconds", seconds, good, "positive times, one for each number of rows in a list for each context")
        require("sequences", sequences, is_integer(sequences) and sequences >= 1, "an integer >= 1")
        good = len(deviations) in (0, len(rows)) and all(is_number(d) and abs(d) <= _FURTHEST for d in deviations)
        require("deviations", deviations, good, "one small number for each number of rows, or none")
        require("slope", slope, is_number(slope) and 0 <= slope <= _FURTHEST, "a number >= 0")
        self.rows, self.contexts, self.sequences = tuple(rows), tuple(contexts), sequences
        self._rows = np.array(rows, dtype=np.float64)
        self._contexts = np.array(contexts, dtype=np.float64)
        # Levelled over rows and then over contexts: the larger of two increasing rows is increasing, too.
        levelled = [isotonic(np.array(s, dtype=np.float64)) for s in seconds]
        self._base: Floats = np.maximum.accumulate(np.stack(levelled), axis=0)  # [C, R]
        self._state = np.array([*(deviations or [0.0] * len(rows)), slope], dtype=np.float64)
        apart = np.abs(np.subtract.outer(np.log2(self._rows), np.log2(self._rows)))
        self._covariance = np.zeros((len(rows) + 1, len(rows) + 1))
        self._covariance[:-1, :-1] = (_LEVEL_GUESSED if guessed else _LEVEL) ** 2 + _OWN**2 * np.exp(-apart)
        self._covariance[-1, -1] = (_SLOPE_KNOWN if len(contexts) > 1 else _SLOPE_UNKNOWN) ** 2
        self._noted: list[tuple[int, int, float]] = []  # forwards to learn from: rows, context, seconds
        self._drift = np.zeros_like(self._covariance)
        self._drift[:-1, :-1] = _LEVEL_DRIFT**2 + _OWN_DRIFT**2 * np.eye(len(rows))

    def seconds(self, rows: int, context: int | None = None) -> float:
        """Seconds of a forward; `None` is the smallest measured context."""
        return float(self._at(np.array([rows]), context)[0])

    def all_seconds(self, most: int, context: int | None = None) -> Floats:
        """Seconds of 1 to `most` rows at once, `[most]`: what a round's decisions need."""
        return self._at(np.arange(1, most + 1), context)

    def v(self, rows: int, context: int | None = None) -> float:
        """Cost of a forward in plain steps of the same batch: 1 for a row in each sequence."""
        one, several = self._at(np.array([self.sequences, rows]), context)
        return float(several / one)

    def break_even(self, rows: int, context: int | None = None, *, draft_step: float = 0.0) -> float | None:
        """The acceptance rate at which drafting a chain of `rows - 1` tokens each round is as fast as plain decoding.

        Solves `E[L] = v(rows) + (rows - 1) c` for one sequence, `E[L] = (1 - a^rows) / (1 - a)`.

        Args:
            rows: The root and the chain, at least 2.
            context: Tokens cached.
            draft_step: `c`, seconds of drafting one token in units of a plain step.

        Returns:
            A rate in [0, 1]; `None` if even a chain that is always accepted does not pay.
        """
        cost = self.v(rows, context) + (rows - 1) * draft_step
        if cost > rows:
            return None
        low, high = 0.0, 1.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            gained = sum(middle**depth for depth in range(rows))
            low, high = (middle, high) if gained < cost else (low, middle)
        return high

    def note(self, rows: int, context: int, seconds: float) -> None:
        """Learn from a forward that took so long. What cannot be a time is passed over."""
        if _SHORTEST <= seconds <= _LONGEST:
            self._noted.append((rows, context, seconds))
            if len(self._noted) == _TOGETHER:
                self._learn()

    def _learn(self) -> None:
        """Take in what was noted since the last time: forwards of as many rows together, which takes less time."""
        if not self._noted:
            return
        by_rows: dict[int, list[tuple[int, float]]] = {}
        for rows, context, seconds in self._noted:
            by_rows.setdefault(rows, []).append((context, seconds))
        self._covariance += len(self._noted) * self._drift
        self._noted.clear()
        for rows, forwards in by_rows.items():
            contexts, times = zip(*forwards, strict=True)
            self._learn_from(rows, round(fmean(contexts)), median(times), len(forwards))

    def _learn_from(self, rows: int, context: int, seconds: float, forwards: int) -> None:
        raw, away = self._raw(context), self._away(context)
        weights = self._weights(rows)
        predicted = float(weights @ raw) if rows <= self._rows[-1] else float(self._at(np.array([rows]), context)[0])
        sight = np.append(weights * raw / (weights @ raw), away / (1.0 + self._state[-1] * away))
        toward = self._covariance @ sight
        believed = float(sight @ toward)
        most = _CLIP * math.sqrt(believed + _NOISE**2)
        spread = believed + _NOISE**2 / forwards
        surprise = min(max(math.log(seconds / predicted), -most), most)
        self._state += toward * (surprise / spread)
        self._state[-1] = max(self._state[-1], 0.0)
        self._covariance -= np.outer(toward, toward) / spread

    def to_json(self) -> dict[str, Any]:
        """A plain dict, with what the rounds have taught; `from_json` takes it."""
        self._learn()
        return {
            "sequences": self.sequences,
            "rows": list(self.rows),
            "contexts": list(self.contexts),
            "seconds": self._base.tolist(),
            "deviations": self._state[:-1].tolist(),
            "slope": float(self._state[-1]),
        }

    @classmethod
    def from_json(cls, found: Any) -> CostCurve:
        """The curve of such a dict.

        Raises:
            InvalidInputError: It is none.
        """
        return _built(cls, found, ("rows", "contexts", "seconds", "sequences", "deviations", "slope"))

    def _at(self, rows: NDArray[Any], context: int | None) -> Floats:
        self._learn()
        values = isotonic(self._raw(self.contexts[0] if context is None else context))
        found: Floats = np.interp(rows, self._rows, values)
        last = self._rows[-1]
        # The slope beyond the last point is that of the last doubling: of two neighbours it would be mostly noise.
        middle = max(last / 2, self._rows[0])
        slope = (values[-1] - np.interp(middle, self._rows, values)) / (last - middle)
        found += slope * np.maximum(rows - last, 0.0)
        return found

    def _raw(self, context: int) -> Floats:
        """Seconds at the measured rows `[R]` in this context, before they are levelled."""
        if len(self.contexts) == 1 or context <= self.contexts[0]:
            base = self._base[0]
        else:
            right = min(max(int(np.searchsorted(self._contexts, context)), 1), len(self.contexts) - 1)
            share = (context - self._contexts[right - 1]) / (self._contexts[right] - self._contexts[right - 1])
            base = self._base[right - 1] + share * (self._base[right] - self._base[right - 1])
        raw: Floats = base * np.exp(self._state[:-1]) * (1.0 + self._state[-1] * self._away(context))
        return raw

    def _away(self, context: int) -> float:
        return max(context - self.contexts[0], 0) / _PER_CONTEXT

    def _weights(self, rows: int) -> Floats:
        """How much each measured point counts for so many rows, `[R]`; only the last one for more than it has."""
        weights = np.zeros(len(self._rows))
        at = min(max(rows, self._rows[0]), self._rows[-1])
        right = max(int(np.searchsorted(self._rows, at)), 1)
        weights[right] = (at - self._rows[right - 1]) / (self._rows[right] - self._rows[right - 1])
        weights[right - 1] = 1.0 - weights[right]
        return weights


@dataclass
class Costs:
    """All that is measured about one model as one backend runs it on one machine.

    `about` tells which (see `calibration.key_of`), `measured` when, in ISO 8601. `acceptance` has the share of drafted
    tokens that `tune` saw accepted, by drafter.
    """

    curves: dict[int, CostCurve]
    """By sequences of the batch; 1 is always there."""
    about: Mapping[str, str] = field(default_factory=dict)
    measured: str = ""
    drafts: dict[str, DraftCost] = field(default_factory=dict)
    acceptance: dict[str, float] = field(default_factory=dict)
    _guessed: dict[int, CostCurve] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        good = 1 in self.curves and all(curve.sequences == size for size, curve in self.curves.items())
        require("curves", self.curves, good, "by their sequences, a curve of one sequence among them")

    @property
    def curve(self) -> CostCurve:
        """The curve of a single sequence."""
        return self.curves[1]

    def curve_of(self, sequences: int) -> CostCurve:
        """The curve of a batch. If none was measured, it is that of the nearest batch until rounds tell better."""
        if sequences in self.curves:
            return self.curves[sequences]
        if sequences not in self._guessed:
            near = min(self.curves.values(), key=lambda curve: abs(math.log(curve.sequences / sequences)))
            rows = [sequences * n // near.sequences for n in near.rows]
            rows = sorted({max(n, sequences) for n in rows} | {sequences, 2 * sequences})
            seconds = [near.all_seconds(rows[-1], context)[np.array(rows) - 1].tolist() for context in near.contexts]
            self._guessed[sequences] = CostCurve(rows, near.contexts, seconds, sequences=sequences, guessed=True)
        return self._guessed[sequences]

    def seconds(self, rows: int, context: int | None = None, sequences: int = 1) -> float:
        """Seconds of a forward over `rows` rows in all, each sequence with about `context` tokens cached."""
        return self.curve_of(sequences).seconds(rows, context)

    def note(self, rows: int, context: int, seconds: float, sequences: int = 1) -> None:
        """Learn from a forward; see `CostCurve.note`."""
        self.curve_of(sequences).note(rows, context, seconds)

    def note_draft(self, name: str, nodes: int, seconds: float) -> None:
        """Learn from a draft of the drafter `name`."""
        self.drafts.setdefault(name, DraftCost()).note(nodes, seconds)

    def draft_seconds(self, name: str, nodes: float | None = None) -> float:
        """Seconds of a draft, of its usual size if none is given; 0 of a drafter that nothing was noted of."""
        known = self.drafts.get(name)
        return known.seconds(nodes) if known is not None else 0.0

    def to_json(self) -> dict[str, Any]:
        """A plain dict; `from_json` takes it."""
        return {
            "foredraft": "costs",
            "version": VERSION,
            "about": dict(self.about),
            "measured": self.measured,
            "curves": [curve.to_json() for curve in self.curves.values()],
            "drafts": {name: cost.to_json() for name, cost in self.drafts.items()},
            "acceptance": dict(self.acceptance),
        }

    @classmethod
    def from_json(cls, found: Any) -> Costs:
        """The costs of such a dict.

        Raises:
            InvalidInputError: It is none, or of another version.
        """
        if not isinstance(found, dict) or found.get("foredraft") != "costs":
            raise InvalidInputError("These are no costs.")
        require("version", found.get("version"), found.get("version") == VERSION, str(VERSION))

        def costs(curves: Any, about: Any, measured: Any, drafts: Any, acceptance: Any) -> Costs:
            built = [CostCurve.from_json(curve) for curve in curves]
            require("about", about, all(isinstance(x, str) for x in (*about, *about.values())), "texts by name")
            require("measured", measured, isinstance(measured, str), "a date")
            good = all(is_number(rate) and 0 <= rate <= 1 for rate in acceptance.values())
            require("acceptance", acceptance, good, "rates in [0, 1] by drafter")
            noted = {name: DraftCost(window) for name, window in drafts.items()}
            return Costs({curve.sequences: curve for curve in built}, about, measured, noted, dict(acceptance))

        return _built(costs, found, ("curves", "about", "measured", "drafts", "acceptance"))


def isotonic(values: Floats) -> Floats:
    """The nearest values, by squares, that never decrease: pools adjacent violators."""
    if (values[1:] >= values[:-1]).all():
        return values
    pools: list[tuple[float, int]] = []
    for value in values.tolist():
        pool = (value, 1)
        while pools and pools[-1][0] > pool[0]:
            (before, count), (after, more) = pools.pop(), pool
            pool = ((before * count + after * more) / (count + more), count + more)
        pools.append(pool)
    return np.repeat(np.array([mean for mean, _ in pools]), [count for _, count in pools])


def _increasing(values: Any) -> bool:
    good = isinstance(values, Sequence) and len(values) > 0 and all(is_integer(value) for value in values)
    return good and all(a < b for a, b in pairwise(values))


def _built(make: Callable[..., T], found: Any, names: Sequence[str]) -> T:
    """`make` with the values of these names in `found`; whatever is wrong with them is an `InvalidInputError`."""
    try:
        return make(**{name: found[name] for name in names})
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise InvalidInputError(f"These are no costs: {type(error).__name__}: {error}.") from error
