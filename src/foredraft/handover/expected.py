"""What speculation should gain there, by batch size: the acceptance measured here, and what forwards cost there.

    gain(b, k) = E[L](k) t(b) / (t(b (1 + drafted(k))) + b drafting)

with `t` the seconds of a forward by its rows. All sequences of a batch share the weights' reading, so rows of different
sequences count alike; their own keys and values are left out, as is all that an engine does between two forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from foredraft.bench.limits import Limits
from foredraft.checks import is_integer, require
from foredraft.costs import Costs
from foredraft.errors import InvalidInputError
from foredraft.handover.check import Parallel
from foredraft.handover.measured import Acceptance, Measured

BATCHES = (1, 2, 4, 8, 16, 32, 64)
MOST = 16
"""Most tokens of a draft that are looked at."""
_LEAST_GAIN = 1.02
"""Below this a batch is better left alone: what is left out above costs more."""

_BYTES = 2  # of a weight there

Seconds = Callable[[int, float], float]
"""Seconds of a forward, by sequences and by rows of all of them."""


class Card(NamedTuple):
    """A GPU by its maker's data sheet: bytes a second, dense 16-bit operations a second, and where that stands."""

    bandwidth: float
    arithmetic: float
    source: str


_NVIDIA, _AMD = "NVIDIA's data sheet, dense bfloat16", "AMD's data sheet, dense bfloat16"
CARDS = {
    "T4": Card(320e9, 65e12, "NVIDIA's data sheet, dense float16"),
    "L4": Card(300e9, 121e12, _NVIDIA),
    "A10G": Card(600e9, 70e12, "AWS's figures for G5, dense bfloat16"),
    "L40S": Card(864e9, 362e12, _NVIDIA),
    "A100-40G": Card(1555e9, 312e12, _NVIDIA),
    "A100-80G": Card(2039e9, 312e12, _NVIDIA),
    "H100": Card(3350e9, 989e12, f"{_NVIDIA}, SXM"),
    "H200": Card(4800e9, 989e12, f"{_NVIDIA}, SXM"),
    "B200": Card(8000e9, 2250e12, f"{_NVIDIA}, SXM"),
    "MI300X": Card(5300e9, 1307e12, _AMD),
}
"""The names are Ray's, where it has them."""


@dataclass(frozen=True)
class Machine:
    """What forwards cost where it will run, and where that is from."""

    seconds: Seconds
    source: str
    measured: bool


def measured_machine(costs: Costs, origin: str) -> Machine:
    """The machine of the record itself."""

    def seconds(sequences: int, rows: float) -> float:
        curve = costs.curve_of(sequences) if sequences in costs.curves else costs.curve
        low, share = int(rows), rows - int(rows)
        below = curve.seconds(max(low, 1))
        return below + share * (curve.seconds(low + 1) - below) if share else below

    return Machine(seconds, f"as {origin} measured forwards, on that machine", measured=True)


def card_machine(name: str, parameters: int, parallel: Parallel) -> Machine:
    """A named GPU at its best: a forward takes as long as reading the weights, or as multiplying by them.

    Args:
        name: One of `CARDS`.
        parameters: Weights that a row is multiplied with.
        parallel: Devices that share them.

    Raises:
        InvalidInputError: The card is not known.
    """
    card = CARDS.get(name)
    if card is None:
        raise InvalidInputError(f"There is no figure for the GPU '{name}'; known: {', '.join(CARDS)}.")
    devices = parallel.devices
    limits = Limits(
        bandwidth=card.bandwidth * devices,
        arithmetic=card.arithmetic * devices,
        bytes_per_token=float(parameters * _BYTES),
        parameters=float(parameters),
    )
    shared = f", {devices} of them without what they lose to each other" if devices > 1 else ""
    source = (
        f"{name}{shared}: reckoned from {card.bandwidth / 1e9:,.0f} GB/s and {card.arithmetic / 1e12:,.0f} TFLOPS "
        f"({card.source}), as the larger of reading {parameters / 1e6:,.0f} million weights of {_BYTES} bytes and "
        "of multiplying by them. No real forward is as quick, so this is a bound, not a measurement"
    )

    return Machine(lambda _, rows: limits.seconds(rows), source, measured=False)


class Gain(NamedTuple):
    """The best that one batch size should gain; 0 draft tokens and a gain of 1 where none should."""

    batch: int
    draft_tokens: int
    gain: float
    tokens_per_forward: float


def gain_of(measured: Measured, machine: Machine, batch: int, draft_tokens: int) -> float:
    """Tokens a second over those of plain decoding, in a batch of so many."""
    acceptance: Acceptance = measured.acceptance
    plain = machine.seconds(batch, batch)
    drafted = acceptance.drafted(draft_tokens)
    whole = acceptance.drafted(max(acceptance.deepest, 1))
    drafting = measured.draft_steps * plain * (drafted / whole if whole else 0.0)
    verifying = machine.seconds(batch, batch * (1.0 + drafted))
    return acceptance.tokens(draft_tokens) * plain / (verifying + drafting)


def gains(
    measured: Measured, machine: Machine, batches: Sequence[int] = BATCHES, draft_tokens: int | None = None
) -> list[Gain]:
    """The best number of draft tokens for each batch size, or the gain with a given one.

    Raises:
        InvalidInputError: A batch size is no integer from 1 on, or there is none.
    """
    require("batch", list(batches), bool(batches), "one size or more, with commas between")
    for batch in batches:
        require("batch", batch, is_integer(batch) and batch >= 1, "an integer >= 1")
    found = []
    for batch in sorted(set(batches)):
        tried = range(1, MOST + 1) if draft_tokens is None else (draft_tokens,)
        by_tokens = {k: gain_of(measured, machine, batch, k) for k in tried}
        best = max(by_tokens, key=lambda k: by_tokens[k])
        pays = by_tokens[best] >= _LEAST_GAIN or draft_tokens is not None
        length = measured.acceptance.tokens(best)
        found.append(Gain(batch, best, by_tokens[best], length) if pays else Gain(batch, 0, 1.0, 1.0))
    return found


def schedule_of(found: Sequence[Gain]) -> list[list[int]] | None:
    """`num_speculative_tokens_per_batch_size` for these: each number holds up to halfway to the next batch size.

    `None` where one number does for all.
    """
    if len({gain.draft_tokens for gain in found}) == 1:
        return None
    ranges: list[list[int]] = []
    first = 1
    for here, after in zip(found, [*found[1:], None], strict=True):
        last = 2 * here.batch if after is None else (here.batch + after.batch) // 2
        if ranges and ranges[-1][2] == here.draft_tokens:
            ranges[-1][1] = last
        else:
            ranges.append([first, last, here.draft_tokens])
        first = last + 1
    return ranges
