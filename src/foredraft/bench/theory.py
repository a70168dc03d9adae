"""What speculation should gain by the formula, and the gain it foretells for a method that was measured.

Leviathan et al. 2023, arXiv 2211.17192: each drafted token is accepted with the same probability, whatever came before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foredraft.bench.records import Rounds, by_position
from foredraft.checks import is_integer, is_number, require
from foredraft.costs import CostCurve, Floats

Verify = Callable[[int], float]
"""`v(n) = t(n) / t(1)`: what a forward over `n` rows costs, in plain steps."""

MOST = 1024
"""Most drafted tokens that are reckoned with."""
_BISECTIONS = 60
OFF = 0.10
"""An error of which the explanation names the cause."""


def free(_: int) -> float:
    """The verify cost of a target that scores any number of rows as quickly as one."""
    return 1.0


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens that a round of `k` drafted ones emits: `E[L] = (1 - alpha^(k+1)) / (1 - alpha)`, and `k + 1` at 1.

    Args:
        alpha: Probability that a drafted token is accepted, in [0, 1].
        k: Drafted tokens of a chain, at least 0.

    Raises:
        InvalidInputError: An argument is out of range.
    """
    _require_rate("alpha", alpha)
    _require_count("k", k, least=0)
    return math.fsum(alpha**i for i in range(k + 1))  # the same sum, and exact where the fraction is 0 / 0


def expected_by_position(rates: Sequence[float]) -> float:
    """The same where each position has a rate of its own: `1 + a_1 + a_1 a_2 + …`.

    `a_i` is the share accepted of the tokens at position i, of rounds in which all before it were accepted.
    """
    for rate in rates:
        _require_rate("rate", rate)
    return math.fsum([1.0, *accumulate(rates, mul)])


def speedup(alpha: float, k: int, draft_cost: float = 0.0, v: Verify = free) -> float:
    """How many times as fast as plain decoding: `E[L] / (k c + v(k + 1))`.

    Args:
        alpha: As in `expected_tokens`.
        k: As there.
        draft_cost: `c`, what drafting one token costs in plain steps.
        v: What verifying costs, by rows.

    Raises:
        InvalidInputError: An argument, or what `v` returns, is out of range.
    """
    return expected_tokens(alpha, k) / round_cost(k, draft_cost, v)


def round_cost(k: int, draft_cost: float = 0.0, v: Verify = free) -> float:
    """Plain steps that a round of `k` drafted tokens takes: `k c + v(k + 1)`."""
    _require_count("k", k, least=0)
    require("draft_cost", draft_cost, is_number(draft_cost) and draft_cost >= 0, "a number of plain steps >= 0")
    verify = v(k + 1)
    require(f"v({k + 1})", verify, is_number(verify) and verify > 0, "a number > 0")
    return k * draft_cost + verify


def best_k(alpha: float, draft_cost: float = 0.0, v: Verify = free, most: int = 64) -> int:
    """The number of drafted tokens, 0 to `most`, with the highest speedup; the smallest of several. 0: do not draft."""
    _require_count("most", most, least=0)
    return max(range(most + 1), key=lambda k: speedup(alpha, k, draft_cost, v))


def break_even(k: int, draft_cost: float = 0.0, v: Verify = free) -> float | None:
    """The acceptance at which drafting `k` tokens each round is as fast as plain decoding: `E[L] = k c + v(k + 1)`.

    Returns:
        A rate in [0, 1]; `None` if even a chain that is always accepted does not pay.
    """
    _require_count("k", k, least=1)
    return acceptance_for(round_cost(k, draft_cost, v), k)


def acceptance_for(tokens: float, k: int) -> float | None:
    """The acceptance at which chains of `k` tokens emit so many a round, `E[L] = tokens`.

    Returns:
        A rate in [0, 1]; `None` if even a chain that is always accepted emits fewer.
    """
    _require_count("k", k, least=1)
    if tokens > k + 1:
        return None
    if tokens <= 1:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, k) < tokens else (low, middle)
    return high


def _require_rate(name: str, value: float) -> None:
    require(name, value, is_number(value) and 0 <= value <= 1, "a number in [0, 1]")


def _require_count(name: str, value: int, least: int) -> None:
    require(name, value, is_integer(value) and least <= value <= MOST, f"an integer in [{least}, {MOST}]")


@dataclass(frozen=True)
class Prediction:
    """What theory says of a method, beside what was measured. Times are of what follows each answer's first token.

    Drafting, and all that is neither draft nor forward, enter as measured, so only tokens and forwards can be off. The
    tokens are where acceptance depends on how long a draft is: at a position, rounds of all lengths count alike.
    """

    rounds: int
    """Those that the tokens are of: all."""
    tokens_per_round: float
    """By the acceptance at each position and the depths of the drafts."""
    measured_tokens_per_round: float
    draft_seconds: float
    """Of a round, measured."""
    verify_seconds: float
    """Of a round, by the curve."""
    measured_verify_seconds: float
    other_seconds: float
    """Of a round, measured: accepting, learning, and all the rest."""
    plain_seconds: float
    """Of a token of plain decoding: the forward by the curve, the rest as measured."""
    measured_plain_seconds: float
    speedup: float
    measured: float
    """The measured speedup."""

    @property
    def error(self) -> float:
        """How much too high the prediction is, as a share of what was measured."""
        return self.speedup / self.measured - 1

    @property
    def explanation(self) -> str:
        """Prediction and measurement in a sentence, and what is off most where they are more than 10 % apart."""
        both = f"predicted {self.speedup:.2f}x, measured {self.measured:.2f}x ({self.error:+.0%})"
        if abs(self.error) <= OFF:
            return both
        other = self.draft_seconds + self.other_seconds
        forwards = math.log((other + self.measured_verify_seconds) / (other + self.verify_seconds))
        forwards += math.log(self.plain_seconds / self.measured_plain_seconds)
        whole = math.log1p(self.error)
        if (whole - forwards) / whole >= forwards / whole:
            readily = "less" if self.tokens_per_round > self.measured_tokens_per_round else "more"
            return (
                f"{both}: the tokens are off most, {self.tokens_per_round:.2f} a round by the acceptance at each "
                f"position and {self.measured_tokens_per_round:.2f} measured, as long drafts are accepted {readily} "
                "readily than short ones"
            )
        return (
            f"{both}: the forwards are off most, {1e3 * self.verify_seconds:.2f} ms a round by the curve and "
            f"{1e3 * self.measured_verify_seconds:.2f} measured, in plain decoding {1e3 * self.plain_seconds:.2f} ms a "
            f"token and {1e3 * self.measured_plain_seconds:.2f} measured"
        )


def predict(
    rounds: Sequence[Rounds],
    contexts: Sequence[int],
    curve: CostCurve,
    *,
    plain: Sequence[Rounds],
    plain_contexts: Sequence[int],
    decode_seconds: float,
    plain_tpot: float,
    tokens: int,
) -> Prediction | None:
    """The speedup that theory foretells for a method, and the measured one, both of decoding after the first token.

    TTFT ends with the first token, which is there with all others of the first round. So each answer's first round
    has no part in the seconds, but its further tokens count, as they do in TPOT: of all that the rounds should emit,
    one token for each answer is taken off. Nor does a round count tokens beyond the end of the answer.

    Args:
        rounds: Those of each answer of the method.
        contexts: Tokens of each answer's prompt.
        curve: What forwards of one sequence cost, measured apart from these answers.
        plain: The same of plain decoding, for the answers that it is compared with.
        plain_contexts: Likewise.
        decode_seconds: Measured from the first to the last token, over all answers of the method.
        plain_tpot: Seconds of plain decoding for each token after the first, over all its answers.
        tokens: Those after each answer's first, over all answers of the method.

    Returns:
        `None` where there is nothing to foretell: all answers of one of the two had a single round.

    Raises:
        InvalidInputError: The figures do not fit the rounds.
    """
    all_rounds, plain_rounds = _Columns(rounds, contexts), _Columns(plain, plain_contexts)
    own, plain_own = all_rounds.later, plain_rounds.later
    if not (own.any() and plain_own.any()):
        return None
    emitted = int(all_rounds.emitted.sum())
    fits = is_integer(tokens) and tokens == emitted - len(rounds)
    require("tokens", tokens, fits, f"{emitted - len(rounds)}: those after each answer's first")
    for name, value in (("decode_seconds", decode_seconds), ("plain_tpot", plain_tpot)):
        require(name, value, is_number(value) and value > 0, "a number of seconds > 0")

    rates = _rates(rounds, int(all_rounds.depth.max()))
    count, expected = len(all_rounds), float(_expected(all_rounds, rates).sum())
    verify, by_curve = all_rounds.verify_seconds[own].sum(), all_rounds.forwards(curve).sum()
    draft = all_rounds.draft_seconds[own].sum()
    other = max(decode_seconds - draft - verify, 0.0)
    plain_verify, plain_by_curve = plain_rounds.verify_seconds[plain_own].sum(), plain_rounds.forwards(curve).sum()
    plain_tokens = int(plain_rounds.emitted.sum()) - len(plain)
    plain_other = max(plain_tpot - plain_verify / plain_tokens, 0.0)
    plain_seconds = plain_by_curve / plain_tokens + plain_other
    timed = int(own.sum())
    return Prediction(
        rounds=count,
        tokens_per_round=expected / count,
        measured_tokens_per_round=emitted / count,
        draft_seconds=float(draft / timed),
        verify_seconds=float(by_curve / timed),
        measured_verify_seconds=float(verify / timed),
        other_seconds=float(other / timed),
        plain_seconds=float(plain_seconds),
        measured_plain_seconds=plain_tpot,
        speedup=float((expected - len(rounds)) / (draft + by_curve + other) * plain_seconds),
        measured=tokens / decode_seconds * plain_tpot,
    )


class _Columns:
    """The rounds of all answers in arrays, `[R]` each."""

    def __init__(self, rounds: Sequence[Rounds], contexts: Sequence[int]) -> None:
        good = len(contexts) == len(rounds) and all(is_integer(c) and c >= 1 for c in contexts)
        require("contexts", contexts, good, f"{len(rounds)} numbers of tokens >= 1, one for each answer")

        def joined(name: str) -> NDArray[Any]:
            return np.array([value for each in rounds for value in getattr(each, name)])

        lengths = [len(each) for each in rounds]
        self.depth, self.accepted, self.emitted = joined("depth"), joined("accepted"), joined("emitted")
        self.draft_seconds, self.verify_seconds = joined("draft_seconds"), joined("verify_seconds")
        self._rows = 1 + joined("drafted")
        before = [np.cumsum(each.emitted) - each.emitted for each in rounds]
        cached = [np.asarray(b) + c - 1 for b, c in zip(before, contexts, strict=True)]  # the root is not cached yet
        self._context = np.concatenate(cached) if cached else np.zeros(0, dtype=int)
        self.later = np.array([i > 0 for length in lengths for i in range(length)], dtype=bool)
        """All but the first round of each answer."""
        assert (self.accepted <= self.depth).all()

    def __len__(self) -> int:
        return len(self.depth)

    def forwards(self, curve: CostCurve) -> Floats:
        """Seconds by the curve of the forward of each round but the first ones."""
        rows = self._rows[self.later]
        contexts, which = np.unique(self._context[self.later], return_inverse=True)
        table = np.stack([curve.all_seconds(int(rows.max()), int(context)) for context in contexts])
        found: Floats = table[which, rows - 1]
        return found


def _expected(rounds: _Columns, rates: Sequence[float]) -> Floats:
    """Tokens that each round should emit, `[R]`, by the acceptance rate at each position and the depth of its draft.

    Where the answer ended within a draft, what would have been emitted beyond is taken off: so, by Wald's identity, the
    sum is right on average for answers that end wherever they do.
    """
    reached = np.concatenate([[1.0], np.cumprod(rates)])  # that all up to this position are accepted
    until = np.cumsum(reached)
    expected: Floats = until[rounds.depth]
    cut = np.flatnonzero(rounds.emitted == rounds.accepted)  # it ended with an accepted token: nothing was drawn
    accepted = rounds.accepted[cut]
    expected[cut] -= (expected[cut] - until[accepted - 1]) / reached[accepted]
    return expected


def _rates(rounds: Sequence[Rounds], deepest: int) -> list[float]:
    """The share accepted at each position, of the rounds that came so far: of unknown ones that of the last known."""
    rates = [position.rate for position in by_position(rounds)]
    return rates + (rates[-1:] or [0.0]) * (deepest - len(rates))
