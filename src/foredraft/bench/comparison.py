"""Two runs side by side: how many times as much each figure of a method is in the other one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from foredraft.bench.figures import (
    Interval,
    answers_of,
    decode_parts,
    equal_answers,
    interval,
    promises_same_text,
    ratio,
    ratio_of_ratios,
    throughput_parts,
    total,
)
from foredraft.bench.records import Cell, Measurement
from foredraft.bench.results import Results


class Measure(NamedTuple):
    """A figure that runs are compared by: the ratio of two sums over the answers."""

    title: str
    parts: Callable[[Measurement], Sequence[float | None]]
    better: int
    """1 if more is better, -1 if less is."""
    over_plain: bool = False
    """Whether it is the figure over that of plain decoding in the same run."""


def _ttft(m: Measurement) -> tuple[float, float]:
    return sum(turn.ttft for turn in m.turns), len(m.turns)


def _tpot(m: Measurement) -> tuple[float, float]:
    tokens, seconds = decode_parts(m)
    return seconds, tokens


def _length(m: Measurement) -> tuple[float, float | None]:
    return sum(turn.tokens for turn in m.turns), total([turn.target_forwards for turn in m.turns])


def _accepted(m: Measurement) -> tuple[float | None, float | None]:
    return total([turn.accepted for turn in m.turns]), total([turn.drafted for turn in m.turns])


MEASURES = (
    Measure("tokens/s", throughput_parts, 1),
    Measure("speedup over plain", throughput_parts, 1, over_plain=True),
    Measure("mean TPOT", _tpot, -1),
    Measure("mean TTFT", _ttft, -1),
    Measure("tokens per forward", _length, 1),
    Measure("acceptance rate", _accepted, 1),
)


@dataclass(frozen=True)
class Change:
    """What became of one cell: the second run's figures over the first's, on what both were asked."""

    cell: Cell
    answers: int
    ratios: Mapping[Measure, Interval | None]
    equal: int
    different: int
    """Answers with other ids than in the first run."""

    @property
    def must_be_equal(self) -> bool:
        """Whether the same model gives the same text in both."""
        return promises_same_text(self.cell)


def changes(first: Results, second: Results) -> list[Change]:
    """Those of all cells that both runs have answers of to the same items, in the order of the first run."""
    found = []
    for cell in first.cells:
        before, after = answers_of(first.measurements, cell), answers_of(second.measurements, cell)
        shared = before.keys() & after.keys()
        if not shared:
            continue
        plain = [answers_of(run.measurements, cell.plain) for run in (second, first)]
        ratios = {}
        for measure in MEASURES:
            if not measure.over_plain:
                ratios[measure] = interval((after, before), measure.parts, ratio)
            elif cell != cell.plain:
                groups = (after, plain[0], before, plain[1])
                ratios[measure] = interval(groups, measure.parts, ratio_of_ratios)
        equal, different = equal_answers(after, before)
        answers = sum(len(after[key].turns) for key in shared)
        found.append(Change(cell, answers, ratios, equal, different))
    return found


def clear(value: Interval | None, better: int) -> str:
    """What an interval of a ratio says: `better`, `worse`, or nothing if it has 1 in it."""
    if value is None or value.low <= 1 <= value.high:
        return ""
    return "better" if (value.low > 1) == (better > 0) else "worse"
