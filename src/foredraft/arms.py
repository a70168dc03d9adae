"""Who drafts: what is known of each proposer, across requests and on this text, and whether to ask it this round."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import product

from foredraft.estimates import UNSCORED

_ASKS = 16.0  # over which a proposer's worth is a mean
_TRIAL_SHARE, _COSTLY_SHARE = 0.006, 0.01  # of a plain step that re-trying a proposer may take; one that runs a model
_FIRST_VALUES = 4
_TRIALS_ALIKE = 8  # useless trials after which they come half as often
_RAREST = 4  # times as seldom as their cost alone would have it
_RUNS = (0, 2, 7)  # tokens in a row that a proposer had right, at most, for each context but the last
_ALL, _CONTEXTS = "all", ("run0", "run1", "run2", "run3")
_FADES = 60.0  # rounds after which what a proposer had right has lost most of its weight
_USUAL_TOKENS = 8.0  # tokens that a wider record is worth: of all contexts, of other requests


@dataclass
class Arm:
    """What is known of one proposer across requests."""

    name: str
    costly: bool
    """Whether it runs a model: then it is asked for as many tokens as pay, if any."""
    usual: float = UNSCORED
    """Acceptance of its tokens before anything was seen here: what `tune` found, if it did."""
    asking: float = 0.0
    watching: float = 0.0
    """Seconds of a draft, and of learning from a verification; robust to interruptions."""
    worth: float = 0.3
    """Tokens that it gains a round, verification paid; the first guess of a new request."""
    record: dict[str, Record] = field(default_factory=dict)
    """By context; see `Turn.context`."""
    asked: int = 0
    watched: int = 0
    spent: float = 0.0
    verified: float = 0.0
    accepted: float = 0.0
    """Nodes, each counted in part where several proposed it."""
    foreseen: int = 0
    """Tokens of the text that it had right, whether or not they were verified."""

    @property
    def seconds(self) -> float:
        """What it takes to have it in a round."""
        return self.asking + self.watching

    def note_ask(self, seconds: float) -> None:
        """It drafted in so long."""
        self.asked += 1
        self.spent += seconds
        self.asking = robust_mean(self.asking, seconds, self.asked)

    def note_watch(self, seconds: float) -> None:
        """It learned from a verification."""
        self.watched += 1
        self.spent += seconds
        self.watching = robust_mean(self.watching, seconds, self.watched)


@dataclass
class Record:
    """Tokens that were right and wrong; old ones fade."""

    right: float = 0.0
    tokens: float = 0.0
    _at: int = 0

    def note(self, right: int, missed: bool, now: int) -> None:
        """So many were right, and one was wrong, in round `now`."""
        fade = math.exp(-max(now - self._at, 0) / _FADES)
        self.right, self.tokens = self.right * fade + right, self.tokens * fade + right + missed
        self._at = now

    def share(self, usual: float, weight: float) -> float:
        """The share of tokens that were right, starting from the usual one, which counts as `weight` tokens."""
        return (self.right + weight * usual) / (self.tokens + weight)


@dataclass
class Turn:
    """Whether one request asks an arm this round: always while it is worth its time, else now and then.

    Re-trials take `_TRIAL_SHARE` of a plain step in the mean, and less while they stay useless.
    """

    arm: Arm
    worth: float = field(default=-1.0)
    run: int = 0
    """Tokens in a row that it has had right."""
    _idle: int = 0
    _wait: int = 0
    _rounds: int = 0
    _asks: int = 0
    _record: dict[str, Record] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.worth < 0:
            self.worth = self.arm.worth

    @property
    def context(self) -> str:
        """What its last tokens say about its next ones."""
        return _CONTEXTS[bisect_left(_RUNS, self.run)]

    @property
    def per_token(self) -> float:
        """The chance of each token that it would draft now, by what it had right lately after runs like this one."""
        estimate = self.arm.usual
        for records, key in product((self.arm.record, self._record), (_ALL, self.context)):
            if key in records:
                estimate = records[key].share(estimate, _USUAL_TOKENS)
        return estimate

    def note_text(self, foreseen: int, missed: bool) -> None:
        """The text went on: it had so many tokens right, and then was wrong, or its draft ended."""
        self.arm.foreseen += foreseen
        for records, key in product((self.arm.record, self._record), (_ALL, self.context)):
            records.setdefault(key, Record()).note(foreseen, missed, self._rounds)
        self.run = 0 if missed else self.run + foreseen
        if not missed:
            self._wait = 0  # if this was a trial, try again at once

    def due(self, rate: float, plain_seconds: float, deciding: float) -> bool:
        """Whether to ask now, at this running rate and length of a plain step.

        `deciding` is what it takes to make use of a draft, in seconds; it is part of the price.
        """
        cost = self.arm.seconds + deciding
        return self.worth >= rate * cost or self.trial(plain_seconds, cost)

    def count_round(self) -> None:
        """A round of this request begins."""
        self._rounds += 1

    def trial(self, plain_seconds: float, cost: float) -> bool:
        """Whether it is time to try again what does not pay at the moment."""
        if self._wait > 0:
            self._wait -= 1
            return False
        share = _COSTLY_SHARE if self.arm.costly else _TRIAL_SHARE
        often = max(1.0, cost / (share * plain_seconds))
        self._wait = round(often * min(_RAREST, 2.0 ** (self._idle // _TRIALS_ALIKE))) - 1
        self._idle += 1
        return True

    def watches(self, plain_seconds: float) -> bool:
        """Whether to learn from a verification of others' drafts now: as often as it takes a small share of a step."""
        return self._rounds % max(1, round(self.arm.watching / (_COSTLY_SHARE * plain_seconds))) == 0

    def note_worth(self, gained: float, rate: float) -> None:
        """It was asked, and gained so many tokens, verification paid."""
        self._asks += 1
        self.worth += (gained - self.worth) / min(_ASKS, self._asks + 2)
        self.arm.worth += (gained - self.arm.worth) / (4 * _ASKS)
        if gained >= rate * self.arm.seconds:
            self._idle = self._wait = 0


def robust_mean(mean: float, value: float, count: int) -> float:
    """The running mean with one more value; one that is far off, by an interruption, counts as three times the mean.

    Of the first values it is the smallest: these may have waited for something to be compiled.
    """
    if count <= _FIRST_VALUES:
        return min(mean, value) if mean > 0 else value
    return mean + (min(value, 3 * mean) - mean) / min(_ASKS, count)
