"""What drafting beside the target is steered by: how verifications end, which fallback pays, and whether it pays."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import NamedTuple

from foredraft.draft_cost import DraftCost
from foredraft.proposers.forks import Confidence, Plan
from foredraft.tree import children, depths
from foredraft.types import Draft, Verdict

MOST_BRANCHES = 32
_FIRST_BRANCHES = 6  # before a step was measured
_EXPONENT = 0.5  # of `fan_out`: what suits the traces of benchmarks/ssd.py best
_LASTS = 0.98  # what a round's acceptances count for in the next
_WINDOW = 32  # rounds


class Endings:
    """Where verifications end, from how often drafted tokens were accepted of late, or by a learned predictor.

    Args:
        learned: Whether to predict each token's acceptance by logistic regression, trained online, on the draft's own
            probability of it, its entropy, its depth and recent acceptance. Else all have the recent rate.
    """

    def __init__(self, learned: bool = False) -> None:
        self._accepted, self._judged = 1.0, 2.0
        self._weights = [0.0, 0.0, 0.0, 0.0, 1.0] if learned else None  # to begin with the recent rate
        self._squares = [1e-3] * 5

    @property
    def rate(self) -> float:
        """At which drafted tokens are accepted where all above them were."""
        return self._accepted / self._judged

    def expected(self, length: int) -> float:
        """Tokens that a round emits whose draft is so deep."""
        return float(sum(self.rate**depth for depth in range(length + 1)))

    def chances(self, draft: Draft, confidences: Sequence[Confidence | None]) -> list[float]:
        """`[N+1]` the chance that the verification ends at the root and at each node."""
        reach, deep = [1.0], depths(draft)
        for node, parent in enumerate(draft.parents):
            above = reach[parent + 1]
            if draft.scores:
                reach.append(min(draft.scores[node], above))
            else:
                reach.append(above * self._chance(deep[node + 1], confidences[node]))
        below = children(draft)
        return [max(0.0, reach[row] - sum(reach[node + 1] for node in below[row])) for row in range(len(reach))]

    def learn(self, draft: Draft, confidences: Sequence[Confidence | None], verdict: Verdict) -> None:
        """See which of the tokens that were judged were accepted."""
        deep, judged = depths(draft), list(verdict.path)
        if verdict.rejected:
            last = judged[-1] if judged else -1
            judged += [node for node, parent in enumerate(draft.parents) if parent == last][:1]
        for node in judged if self._weights is not None and len(confidences) == len(draft) else ():
            self._train(deep[node + 1], confidences[node], node in verdict.path)
        self._accepted = _LASTS * self._accepted + len(verdict.path)
        self._judged = _LASTS * self._judged + len(judged)

    def _chance(self, depth: int, confidence: Confidence | None) -> float:
        if self._weights is None or confidence is None:
            return self.rate
        features = self._features(depth, confidence)
        return _sigmoid(sum(w * x for w, x in zip(self._weights, features, strict=True)))

    def _features(self, depth: int, confidence: Confidence) -> list[float]:
        return [1.0, _logit(confidence.probability), confidence.entropy, depth / 4, _logit(self.rate)]

    def _train(self, depth: int, confidence: Confidence | None, accepted: bool) -> None:
        """A step of AdaGrad on the logistic loss."""
        if self._weights is None or confidence is None:
            return
        features = self._features(depth, confidence)
        surprise = self._chance(depth, confidence) - accepted
        for i, x in enumerate(features):
            self._squares[i] += (surprise * x) ** 2
            self._weights[i] -= 0.1 * surprise * x / math.sqrt(self._squares[i])


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-max(min(x, 30.0), -30.0)))


def _logit(p: float) -> float:
    p = min(max(p, 1e-4), 1 - 1e-4)
    return math.log(p / (1 - p))


class Planner:
    """How much can be drafted while the target verifies, from how long that and a step of drafting took of late."""

    def __init__(self) -> None:
        self._verify: deque[float] = deque(maxlen=_WINDOW)
        self._step = DraftCost()

    @property
    def verify_seconds(self) -> float:
        """Of a verification."""
        return median(self._verify) if self._verify else 0.0

    def note(self, verify_seconds: float, steps: Sequence[tuple[int, float]]) -> None:
        """Learn from a verification and the steps that were drafted meanwhile."""
        self._verify.append(verify_seconds)
        for rows, seconds in steps:
            self._step.note(rows, seconds)

    def plan(
        self, ends: Callable[[Sequence[Confidence | None]], list[float]], deepest: int, budget: int, model: bool
    ) -> Plan:
        """What to draft for while a draft `deepest` deep is verified.

        With a model each branch grows by a token a step, the deepest ones one step later, as the draft's last tokens
        must be read first. There are as many branches as let all steps end with the verification; where not even few
        do, there are less steps, and what is prepared is a shorter draft.
        """
        if not model:  # a step is a look at one place
            return Plan(ends, MOST_BRANCHES, budget, MOST_BRANCHES, _EXPONENT)
        steps, branches, least = budget + 1, _FIRST_BRANCHES, deepest + 2
        per_row, per_step = self._step.per_node, self._step.per_draft
        if self._verify and per_row + per_step > 0:
            while steps > 2 and steps * (per_step + per_row * least) > self.verify_seconds:
                steps -= 1
            room = self.verify_seconds / steps - per_step
            branches = max(least, min(MOST_BRANCHES, int(room / per_row) if per_row > 0 else MOST_BRANCHES))
        return Plan(ends, branches, budget, steps, _EXPONENT)


class Fallback:
    """What drafts when nothing was prepared: the drafter itself, or a look-up, by what each gave for its seconds."""

    _TRIES = 4
    _AGAIN = 32  # misses

    def __init__(self) -> None:
        self._noted: dict[bool, deque[tuple[int, float]]] = {cheap: deque(maxlen=_WINDOW) for cheap in (False, True)}
        self._misses = 0

    def cheap(self, verify_seconds: float) -> bool:
        """Whether the look-up should draft now."""
        self._misses += 1
        for cheap, noted in self._noted.items():
            if len(noted) < self._TRIES:
                return cheap
        best = self._rate(True, verify_seconds) > self._rate(False, verify_seconds)
        return not best if self._misses % self._AGAIN == 0 else best

    def note(self, cheap: bool, emitted: int, seconds: float) -> None:
        """What a round emitted whose draft took so long to make."""
        self._noted[cheap].append((emitted, seconds))

    def _rate(self, cheap: bool, verify_seconds: float) -> float:
        emitted, seconds = zip(*self._noted[cheap], strict=True)
        return float(fmean(emitted) / max(median(seconds) + verify_seconds, 1e-9))


class Phase(NamedTuple):
    """Rounds of one way of drafting: seconds of verification and in all, and how deep their drafts were."""

    verify: float
    seconds: float
    depth: float


class Trial:
    """Whether to draft beside the target: measured for some rounds each, then whatever was faster, and again rarely.

    Rounds are compared by the tokens that drafts of their depth promise, for what a few rounds happen to emit says
    little.

    Args:
        endings: Knows what depths promise.
        tries: Rounds of each.
        again: Rounds until it is tried again where it did not pay; after each time twice as many.
    """

    def __init__(self, endings: Endings, tries: int = 12, again: int = 256) -> None:
        self._endings, self._tries, self._again = endings, tries, again
        self._noted: dict[bool, list[Phase]] = {False: [], True: []}
        self._left: int | None = None  # rounds until the next trial, once there was one
        self._skip = 0  # rounds that still feel the other way
        self._on = True
        self._settled: tuple[Phase, Phase] | None = None
        self._hits, self._outcomes = 0, 0

    @property
    def on(self) -> bool:
        """Whether to draft beside the next verification."""
        return self._on

    def note_found(self, hit: bool) -> None:
        """Whether the outcome of a verification was prepared for."""
        self._hits, self._outcomes = self._hits + hit, self._outcomes + 1

    def note(self, verify: float, seconds: float, depth: int) -> None:
        """A round: seconds of verification, of all with the draft's, and the draft's depth."""
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                self._noted, self._left, self._skip, self._on = {False: [], True: []}, None, 2, True
            return
        if self._skip:
            self._skip -= 1
            return
        noted = self._noted[self._on]
        noted.append(Phase(verify, seconds, depth))
        if len(noted) == self._tries:
            if self._on:
                self._on, self._skip = False, 2
            else:
                self._decide()

    def _decide(self) -> None:
        off, on = (_mean(self._noted[way]) for way in (False, True))
        self._settled = off, on
        self._on = self._rate(on) >= self._rate(off)
        self._left = 8 * self._again if self._on else self._again
        self._again = self._again if self._on else min(2 * self._again, 2**14)

    def _rate(self, phase: Phase) -> float:
        low = int(phase.depth)
        share = phase.depth - low
        tokens = (1 - share) * self._endings.expected(low) + share * self._endings.expected(low + 1)
        return tokens / phase.seconds

    def remark(self, name: str) -> str | None:
        """Why it is turned off, with figures; `None` if it is not."""
        return self.explanation(name) if self._settled is not None and not self._on else None

    def explanation(self, name: str) -> str:
        """Whether it is on, and why, with figures."""
        if self._settled is None:
            return f"{name} is still being tried: {self._tries} rounds with drafting ahead and as many without decide."
        (off, on), seen = self._settled, self._hits / max(self._outcomes, 1)
        figures = (
            f"Drafting while the target verifies, a round took {1e3 * on.seconds:.1f} ms, {1e3 * on.verify:.1f} of "
            f"them verifying, with drafts {on.depth:.1f} deep and {seen:.0%} of the ends foreseen; drafting before it, "
            f"{1e3 * off.seconds:.1f} ms, {1e3 * off.verify:.1f} verifying, with drafts {off.depth:.1f} deep. The "
            f"first ran at {self._rate(on) / self._rate(off):.2f} x of the second"
        )
        if self._on:
            return f"{figures}, and is what {name} does."
        return (
            f"{figures}, so it did not pay, and {name} does the second. It needs a device or cores that the target "
            "leaves free (--draft-device, --threads and --draft-threads)."
        )


def _mean(phases: Sequence[Phase]) -> Phase:
    """Of all rounds, of which one that was interrupted counts as three usual ones."""
    return Phase(*(fmean(min(value, 3 * median(values)) for value in values) for values in zip(*phases, strict=True)))
