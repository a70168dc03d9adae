"""What drafting beside the target should gain: rounds as events in time, from what steps and forwards cost.

A round is drafted and then verified, one after the other, or, with `ssd`, drafted while the last one was verified. What
is gained is the time of drafting, for those rounds whose beginning was foreseen: never more than
`(T_draft + T_verify) / T_verify`, and less than nothing where both wait for the same cores or memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Times:
    """Seconds, as measured."""

    draft: float
    """Of drafting a token when nothing else is done."""
    step: float
    """Of drafting a token further for all outcomes."""
    verify: Callable[[int], float]
    """Of a forward over so many rows."""
    shared: bool = False
    """Whether drafter and target take each other's time: each goes at half its speed while both run."""


@dataclass(frozen=True)
class Text:
    """Where drafts are right: for each position of an answer whether its token would be drafted, and be foreseen."""

    drafted: Sequence[bool]
    foreseen: Sequence[bool]
    """Whether the token that a verification adds there was prepared for."""

    @classmethod
    def of(cls, tokens: int, acceptance: float, hit_rate: float, seed: int = 0) -> Text:
        """A random one."""
        dice = random.Random(seed)
        return cls(*([dice.random() < chance for _ in range(tokens)] for chance in (acceptance, hit_rate)))

    def accepted(self, position: int, length: int) -> int:
        """Tokens of a draft of this length that would be accepted."""
        count = 0
        while count < length and self.drafted[position + count]:
            count += 1
        return count


class Simulated(NamedTuple):
    """An answer's figures."""

    tokens: int
    seconds: float
    rounds: int
    hits: int

    @property
    def tokens_per_second(self) -> float:
        """Over all."""
        return self.tokens / self.seconds


def simulate(times: Times, text: Text, length: int, *, ahead: bool) -> Simulated:
    """Write a text by rounds of drafts of `length` tokens.

    Args:
        times: What things take.
        text: Where drafts are right.
        length: Tokens of a draft; what is prepared may be fewer, if that is how far the preparation came.
        ahead: Whether the next draft is prepared while one is verified.
    """
    position, seconds, rounds, hits = 0, 0.0, 0, 0
    prepared = 0
    while position + length < len(text.drafted):
        drafted = prepared or length
        seconds += 0.0 if prepared else length * times.draft
        passed, steps = _verify(times, drafted, length + 1 if ahead else 0)
        seconds, rounds = seconds + passed, rounds + 1
        accepted = text.accepted(position, drafted)
        position += accepted + 1
        # What follows the whole draft is known only once its last token was read, in the first step.
        ready = min(length, steps - 1 if accepted == drafted else steps)
        prepared = max(ready, 0) if text.foreseen[position - 1] else 0
        hits += prepared > 0
    return Simulated(position, seconds, rounds, hits)


def _verify(times: Times, drafted: int, most: int) -> tuple[float, int]:
    """Seconds until a draft is verified and the step in flight then is over, and the steps that were made meanwhile."""
    passed, left, steps, of_step = 0.0, times.verify(drafted + 1), 0, times.step
    while left > 0:
        drafting = steps < most
        speed = 0.5 if times.shared and drafting else 1.0
        until = min(left, of_step) if drafting else left
        passed += until / speed
        left -= until
        if drafting:
            of_step -= until
            if of_step <= 0:
                steps, of_step = steps + 1, times.step
                if left < times.step / 2:  # most of another one would come too late
                    most = steps
    if steps < most and of_step < times.step:  # it was begun, and cannot be broken off
        passed, steps = passed + of_step, steps + 1
    return passed, steps


def gain(times: Times, text: Text, lengths: Sequence[int]) -> float:
    """Speed of the best length with preparation over that of the best length without."""
    fastest = [
        max(simulate(times, text, length, ahead=ahead).tokens_per_second for length in lengths)
        for ahead in (True, False)
    ]
    return fastest[0] / fastest[1]
