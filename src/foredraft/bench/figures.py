"""From a benchmark's records to its figures. Nothing is measured here: everything follows from the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foredraft.bench.records import OWN, Cell, Measurement, Position, Rounds, Turn, by_position
from foredraft.metrics import joined_foresight
from foredraft.terminal import SAME_TEXT
from foredraft.types import ForesightStats

if TYPE_CHECKING:
    from foredraft.bench.theory import Prediction
    from foredraft.costs import CostCurve

Floats = NDArray[np.float64]
Answers = Mapping[tuple[str, int], Measurement]
"""What one cell answered, by item and repetition."""

_RESAMPLES = 2000
_LEVEL = (2.5, 97.5)  # percentiles


class Interval(NamedTuple):
    """A figure and its 95 % interval, from a bootstrap over items (see `interval`)."""

    value: float
    low: float
    high: float


class Spread(NamedTuple):
    """How the seconds of single answers are spread."""

    median: float
    p90: float
    mean: float


class Split(NamedTuple):
    """Where the end-to-end seconds of all answers went. They sum up to these.

    `prefill` is what the time to first token has beyond the first round's own seconds. `other` is all that is in no
    round: what the proposer learns from one, text, and the loop itself.
    """

    prefill: float
    draft: float
    verify: float
    accept: float
    other: float


@dataclass(frozen=True)
class CellFigures:
    """The figures of one cell on one category of items; "" is all of them."""

    cell: Cell
    category: str
    items: int
    """Different items that were answered; intervals of a single one are over its repetitions."""
    answers: int
    tokens: int
    rounds: int
    target_forwards: int | None
    draft_forwards: int | None
    drafted: int | None
    accepted: int | None
    mean_accepted_length: float | None
    acceptance_rate: float | None
    by_position: tuple[Position, ...]
    """By depth from 1: of rounds whose draft was so deep, in which all before was accepted and the answer went on."""
    lengths: tuple[int, ...]
    """`lengths[i]`: rounds that emitted i + 1 tokens."""
    ttft: Spread
    tpot: Spread | None
    """`None` if no answer has more than one token."""
    throughput: float
    """Tokens per end-to-end second."""
    speedup: Interval | None
    """Throughput over that of `cell.plain` on the items and repetitions that both have; `None` if there are none, and
    for plain decoding itself."""
    decode_speedup: Interval | None
    """The same of the tokens after the first, over the seconds after it."""
    split: Split | None
    equal: int
    """Answers with the ids of those of `cell.plain` to the same item, turn and repetition."""
    different: int
    peak_memory: int | None
    prediction: Prediction | None
    foresight: ForesightStats | None = None
    """Of drafters that draft while the target verifies."""


def figures_of(
    measurements: Sequence[Measurement], cells: Sequence[Cell], curve: CostCurve | None
) -> list[CellFigures]:
    """The figures of every cell that has answers: of all items, and then of each category in the alphabet's order.

    Args:
        measurements: Of these cells, in any order; no two with the same `key`.
        cells: Those of the run, in the order in which they are wanted.
        curve: What the target's forwards cost when the run was made; without it nothing is predicted.
    """
    answers = {cell: answers_of(measurements, cell) for cell in {*cells, *(cell.plain for cell in cells)}}
    categories = sorted({m.category for m in measurements} - {""})
    found = []
    for cell in cells:
        for category in ("", *categories):
            mine, plain = (
                {key: m for key, m in answers[each].items() if category in ("", m.category)}
                for each in (cell, cell.plain)
            )
            if mine:
                found.append(_figures(cell, category, mine, plain if cell != cell.plain else {}, curve))
    return found


def answers_of(measurements: Sequence[Measurement], cell: Cell) -> dict[tuple[str, int], Measurement]:
    """What a cell answered, in the order of items and repetitions, so that no figure depends on when it did."""
    mine = (m for m in measurements if m.cell == cell.name)
    return {(m.item, m.repetition): m for m in sorted(mine, key=lambda m: (m.item, m.repetition))}


def promises_same_text(cell: Cell) -> bool:
    """Whether the cell's answers must be those of plain decoding, id for id: not only their law must be the same.

    It must be so at temperature 0 and under `seed-exact`. Other engines compute and draw in their own ways.
    """
    return cell.engine == OWN and (cell.temperature == 0 or (cell.rule or _usual_rule(cell.drafter)) in SAME_TEXT)


def _usual_rule(drafter: str) -> str:
    """The rule that a drafter has at temperatures above 0 if none is asked for; "" if it is not known here."""
    from foredraft.acceptance import Draws, default_rule  # only sampled cells need to load torch for this
    from foredraft.loading import DRAFTER_KINDS as kinds  # noqa: N811 (a table like a variable)

    name = drafter.partition(":")[0]
    if name == "none":
        return default_rule(Draws.POINT, trees=False).name
    if name in kinds and kinds[name].races:
        return "seed-exact"
    return default_rule(kinds[name].draws, kinds[name].trees).name if name in kinds else ""


# Intervals


def interval(
    groups: Sequence[Answers],
    numbers: Callable[[Measurement], Sequence[float | None]],
    statistic: Callable[[Floats], Floats],
) -> Interval | None:
    """A figure over the items and repetitions that all of `groups` have, with a 95 % percentile bootstrap interval.

    An item with all its repetitions and turns is one unit of it: answers to the same question are no independent
    observations. Of a single item the repetitions are the units; of a single answer the interval is the value alone.

    Args:
        groups: `G` times what a cell answered.
        numbers: `N` numbers of a measurement, of which sums are taken; `None` is one that is not known.
        statistic: The figure, from sums `[..., G, N]` to `[...]`.

    Returns:
        `None` if they have nothing in common or the figure is not a number.
    """
    shared = sorted(set(groups[0]).intersection(*groups[1:]))
    if not shared:
        return None
    single = len({item for item, _ in shared}) == 1
    units: dict[object, Floats] = {}
    for key in shared:
        row = np.array([numbers(group[key]) for group in groups], dtype=np.float64)
        unit = key if single else key[0]
        units[unit] = units[unit] + row if unit in units else row
    sums = np.stack(list(units.values()))  # [units, G, N]
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(sums.sum(0)))
        resampled = statistic(np.tensordot(_weights(len(sums)), sums, axes=1))
    if not np.isfinite(value):
        return None
    spread = resampled[np.isfinite(resampled)]
    low, high = np.percentile(spread, _LEVEL) if len(sums) > 1 and len(spread) else (value, value)
    return Interval(value, min(float(low), value), max(float(high), value))


@lru_cache(maxsize=64)
def _weights(units: int) -> Floats:
    """How often each unit is drawn in each resample, `[resamples, units]`; always the same."""
    chance = np.random.default_rng(0)
    return chance.multinomial(units, [1 / units] * units, size=_RESAMPLES).astype(np.float64)


def throughput_parts(m: Measurement) -> tuple[float, float]:
    """Tokens and end-to-end seconds."""
    return sum(turn.tokens for turn in m.turns), sum(turn.seconds for turn in m.turns)


def decode_parts(m: Measurement) -> tuple[float, float]:
    """Tokens after the first, and the seconds after it."""
    later = [turn for turn in m.turns if turn.tokens > 1]
    return sum(turn.tokens - 1 for turn in later), sum(max(turn.seconds - turn.ttft, 0.0) for turn in later)


def ratio(sums: Floats) -> Floats:
    """First number over second in the first group, over the same in the second group."""
    return np.asarray(sums[..., 0, 0] / sums[..., 0, 1] / (sums[..., 1, 0] / sums[..., 1, 1]))


def ratio_of_ratios(sums: Floats) -> Floats:
    """The ratio of the first two groups over that of the last two."""
    return np.asarray(ratio(sums[..., :2, :]) / ratio(sums[..., 2:, :]))


# One cell


def _figures(cell: Cell, category: str, mine: Answers, plain: Answers, curve: CostCurve | None) -> CellFigures:
    turns = [turn for m in mine.values() for turn in m.turns]
    rounds = [turn.rounds for turn in turns if turn.rounds is not None]
    tokens = sum(turn.tokens for turn in turns)
    names = ("target_forwards", "draft_forwards", "drafted", "accepted")
    forwards, draft_forwards, drafted, accepted = (total([getattr(turn, name) for turn in turns]) for name in names)
    equal, different = equal_answers(mine, plain)
    tpots = [turn.tpot for turn in turns if turn.tpot is not None]
    memory = [m.peak_memory for m in mine.values() if m.peak_memory is not None]
    return CellFigures(
        cell=cell,
        category=category,
        items=len({item for item, _ in mine}),
        answers=len(turns),
        tokens=tokens,
        rounds=sum(len(r) for r in rounds),
        target_forwards=forwards,
        draft_forwards=draft_forwards,
        drafted=drafted,
        accepted=accepted,
        mean_accepted_length=tokens / forwards if forwards else None,
        acceptance_rate=accepted / drafted if accepted is not None and drafted else None,
        by_position=by_position(rounds),
        lengths=_lengths(rounds),
        ttft=_spread([turn.ttft for turn in turns]),
        tpot=_spread(tpots) if tpots else None,
        throughput=tokens / sum(turn.seconds for turn in turns),
        speedup=interval((mine, plain), throughput_parts, ratio),
        decode_speedup=interval((mine, plain), decode_parts, ratio),
        split=_split(turns) if len(rounds) == len(turns) else None,
        equal=equal,
        different=different,
        peak_memory=max(memory, default=None),
        prediction=_prediction(mine, plain, curve) if curve is not None else None,
        foresight=joined_foresight([turn.foresight for turn in turns if turn.foresight is not None]),
    )


def total(counts: Sequence[int | None]) -> int | None:
    """The sum of counts, if all of them are known."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _spread(seconds: Sequence[float]) -> Spread:
    return Spread(median(seconds), float(np.percentile(seconds, 90)), fmean(seconds))


def equal_answers(mine: Answers, other: Answers) -> tuple[int, int]:
    """How many answers to the same item, turn and repetition have the same ids, and how many have not."""
    shared = [(turns.turns, other[key].turns) for key, turns in mine.items() if key in other]
    same = [a.ids == b.ids for turns, others in shared for a, b in zip(turns, others, strict=False)]
    return sum(same), len(same) - sum(same)


def _lengths(rounds: Sequence[Rounds]) -> tuple[int, ...]:
    emitted = np.array([n for r in rounds for n in r.emitted], dtype=np.int64)
    return tuple(int(count) for count in np.bincount(emitted)[1:])


def _split(turns: Sequence[Turn]) -> Split:
    prefill = draft = verify = accept = 0.0
    for turn in turns:
        r = turn.rounds
        assert r is not None
        first = r.draft_seconds[:1] + r.verify_seconds[:1] + r.accept_seconds[:1]
        prefill += turn.ttft - sum(first)
        draft += sum(r.draft_seconds)
        verify += sum(r.verify_seconds)
        accept += sum(r.accept_seconds)
    other = sum(turn.seconds for turn in turns) - (prefill + draft + verify + accept)
    return Split(prefill, draft, verify, accept, other)


def _prediction(mine: Answers, plain: Answers, curve: CostCurve) -> Prediction | None:
    """What theory says of a cell of our own, beside what was measured on the items that plain decoding has as well."""
    from foredraft.bench.theory import predict

    shared = [key for key in mine if key in plain]
    turns, plain_turns = ([turn for key in shared for turn in each[key].turns] for each in (mine, plain))
    rounds, plain_rounds = ([turn.rounds for turn in each if turn.rounds is not None] for each in (turns, plain_turns))
    (tokens, seconds), (plain_tokens, plain_seconds) = (
        np.sum([decode_parts(each[key]) for key in shared] or [(0, 0)], axis=0) for each in (mine, plain)
    )
    if len(rounds) < len(turns) or len(plain_rounds) < len(plain_turns) or not (seconds > 0 and plain_seconds > 0):
        return None
    return predict(
        rounds,
        [turn.prompt_tokens for turn in turns],
        curve,
        plain=plain_rounds,
        plain_contexts=[turn.prompt_tokens for turn in plain_turns],
        decode_seconds=float(seconds),
        plain_tpot=float(plain_seconds / plain_tokens),
        tokens=int(tokens),
    )
