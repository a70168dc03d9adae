"""Drafting for what may come of a verification that is still going on: for which outcomes, and what without a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace
from itertools import count
from typing import NamedTuple

from foredraft.proposers.base import Proposer
from foredraft.tree import children, first, paths
from foredraft.types import Draft

_MOST_PEEKED = 64  # nodes


class Outcome(NamedTuple):
    """How a verification may end: the last accepted node of the draft (-1 for none), and the token after it."""

    node: int
    token: int


class Confidence(NamedTuple):
    """What a drafter's own law said where it drafted a node."""

    probability: float
    """Of the drafted token."""
    entropy: float
    """In nats."""


class Plan(NamedTuple):
    """How much is to be drafted while a draft is verified."""

    ends: Callable[[Sequence[Confidence | None]], list[float]]
    """From the confidence in each node of the draft, as far as it is known, to the chance `[N+1]` that the verification
    ends at the root or at that node."""
    branches: int
    """Outcomes to draft for, at most."""
    budget: int
    """Nodes to draft for each, at most."""
    steps: int
    """Forwards of a model, at most: it decides before anything is drawn."""
    exponent: float
    """See `fan_out`."""


def fan_out(ends: Sequence[float], branches: int, exponent: float) -> list[int]:
    """How many tokens to draft for at each place where a verification may end, `branches` in all.

    If F tokens after a place miss the one that comes with a chance that falls like `F^-r`, the fewest misses in all
    have `F_k ~ chance_k^(1 / (1 + r))`. On a chain of K tokens that are accepted with probability a that is the capped
    geometric rule of speculative speculative decoding (Kumar, Dao and May 2026, arXiv 2603.03251): `F_k ~
    a^(k / (1 + r))`, the last one times `(1 - a)^(-1 / (1 + r))`. In whole numbers, each token goes where the share
    that is due to it has been given least, so a larger budget never takes any away.

    Args:
        ends: `[N+1]` the chances.
        branches: Tokens in all.
        exponent: r.
    """
    found = [0] * len(ends)
    order = count()
    # By places that are given none before those that have one: the divisors of Sainte-Lague's rule.
    line = [(-(chance ** (1 / (1 + exponent))), next(order), k) for k, chance in enumerate(ends) if chance > 0]
    shares = {k: share for share, _, k in line}
    heapify(line)
    for _ in range(branches if line else 0):
        k = line[0][2]
        found[k] += 1
        heapreplace(line, (shares[k] / (2 * found[k] + 1), next(order), k))
    return found


def drafted_below(draft: Draft) -> list[set[int]]:
    """`[N+1]` the tokens that the draft itself has after the root and after each node."""
    return [{draft.tokens[node] for node in nodes} for nodes in children(draft)]


class Fork(ABC):
    """The drafts for several outcomes of one verification. `step` is for a thread beside the target, one at a time."""

    branches: int = 0
    """Outcomes that something is drafted for."""
    rows: int = 0
    """Nodes that the last step took a model's forward for."""
    confidences: Sequence[Confidence | None] = ()
    """In each node of the draft that is verified, once a step has told."""

    @abstractmethod
    def step(self) -> bool:
        """Draft one step further for all outcomes; returns whether there is more to do."""

    @abstractmethod
    def expects(self, outcome: Outcome) -> bool:
        """Whether this outcome was among those to draft for."""

    @abstractmethod
    def settle(self, outcome: Outcome | None) -> Draft:
        """The verification ended so: what was drafted for it by now, if anything. `None`: the answer has ended.

        How much that is was decided by how many steps were made, never by what was drawn in them.
        """


class PeekFork(Fork):
    """Of a proposer that drafts without a model: one look a step at the text as it may be, likely ends first.

    The draft of a text that may be says itself which tokens may come first, and what may follow each.

    Args:
        proposer: Can `peek`.
        tokens: All tokens up to the draft's root.
        draft: What is verified.
        plan: How much to draft.
    """

    def __init__(self, proposer: Proposer, tokens: Sequence[int], draft: Draft, plan: Plan) -> None:
        self._proposer, self._tokens, self._plan = proposer, tuple(tokens), plan
        self._paths = [(), *paths(draft)]
        self._drafted = drafted_below(draft)
        ends = plan.ends([None] * len(draft))
        self._fan = fan_out(ends, plan.branches, plan.exponent)
        wanted = [place for place, fan in enumerate(self._fan) if fan]
        self._left = sorted(wanted, key=lambda place: ends[place])  # the likeliest last
        self._found: dict[Outcome, Draft] = {}

    def step(self) -> bool:
        """See `Fork`."""
        if self._left:
            place = self._left.pop()
            size = min(_MOST_PEEKED, self._plan.budget + 2 * self._fan[place] + len(self._drafted[place]))
            whole = self._proposer.peek([*self._tokens, *self._paths[place]], size)
            tops = children(whole)[0]
            others = [node for node in tops if whole.tokens[node] not in self._drafted[place]]
            for node in others[: self._fan[place]]:
                rest = _subtree(whole, node)
                self._found[Outcome(place - 1, whole.tokens[node])] = first(rest, min(len(rest), self._plan.budget))
            self.branches = len(self._found)
        return bool(self._left)

    def expects(self, outcome: Outcome) -> bool:
        """See `Fork`."""
        return outcome in self._found

    def settle(self, outcome: Outcome | None) -> Draft:
        """See `Fork`."""
        return self._found.get(outcome, Draft()) if outcome is not None else Draft()


def _subtree(draft: Draft, top: int) -> Draft:
    """What hangs below a node, as a draft below it; scores are those of getting there from that node."""
    place = {top: -1}
    for node in range(top + 1, len(draft)):
        if draft.parents[node] in place:
            place[node] = len(place) - 1
    nodes = list(place)[1:]
    above = draft.scores[top] if draft.scores else 1.0
    return Draft(
        tokens=tuple(draft.tokens[node] for node in nodes),
        parents=tuple(place[draft.parents[node]] for node in nodes),
        scores=tuple(min(draft.scores[node] / above, 1.0) for node in nodes) if draft.scores and above > 0 else (),
        proposers=tuple(draft.proposers[node] for node in nodes) if draft.proposers else (),
    )
