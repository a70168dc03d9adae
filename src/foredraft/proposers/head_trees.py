"""Trees that heads draft: of all nodes that were scored, the likeliest."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from foredraft.proposers.forks import Outcome
from foredraft.proposers.growing import Branch
from foredraft.types import Draft

WIDTH = 8
"""Nodes that are expanded at each level, and children that each gets (EAGLE-2 has 10)."""
DEEPEST = 8
BESIDE = 3
"""Children that each node of a path gets, the one that the path goes on with among them."""


class Candidate(NamedTuple):
    """A node that was scored: where it hangs (a candidate, -1 for the root), its depth and path probability."""

    token: int
    parent: int
    depth: int
    score: float


class TreeBranch(Branch):
    """A tree of point masses, of which the likeliest node is expanded in each step.

    Args:
        outcome: What it is for.
        position: Of the first token below, in the text.
        likeliest_tokens: From logits, a position and a width to tokens and their chances.
        budget: Nodes, at most.
    """

    def __init__(
        self,
        outcome: Outcome,
        position: int,
        likeliest_tokens: Callable[[Tensor, int, int], tuple[list[list[int]], list[list[float]]]],
        budget: int,
    ) -> None:
        super().__init__(outcome)
        self.found: list[Candidate] = []
        self.expanded: list[int] = []
        """Of `found`, in the order of `places`."""
        self.budget = budget
        self._position, self._likeliest_tokens = position, likeliest_tokens

    def wanted(self) -> tuple[int, int] | None:
        """See `Branch`."""
        if not self.places:
            return -1, self.outcome.token
        kept = heapq.nlargest(self.budget, range(len(self.found)), key=lambda i: (self.found[i].score, -i))
        best = next((i for i in kept if i not in self.expanded and self.found[i].depth < DEEPEST), None)
        if best is None:  # below others nothing gets in
            return None
        self.expanded.append(best)
        parent = self.found[best].parent
        return (1 + self.expanded.index(parent) if parent >= 0 else 0), self.found[best].token

    def take(self, logits: Tensor) -> None:
        """See `Branch`."""
        above = self.expanded[-1] if self.expanded else -1
        depth, score = (self.found[above].depth, self.found[above].score) if above >= 0 else (0, 1.0)
        [tokens], [chances] = self._likeliest_tokens(logits, self._position + depth, WIDTH)
        pairs = zip(tokens, chances, strict=True)
        self.found += [Candidate(token, above, depth + 1, score * chance) for token, chance in pairs]

    def draft(self) -> Draft:
        """The likeliest nodes so far."""
        return likeliest_nodes(self.found, self.budget)[0]


def likeliest_nodes(found: Sequence[Candidate], budget: int) -> tuple[Draft, list[int]]:
    """The draft of the best candidates, and which these are; none is better than the one above it."""
    order = sorted(range(len(found)), key=lambda i: (-found[i].score, i))[:budget]
    order.sort()  # parents were found before their children
    place = {-1: -1, **{old: new for new, old in enumerate(order)}}
    draft = Draft(
        tokens=tuple(found[i].token for i in order),
        parents=tuple(place[found[i].parent] for i in order),
        scores=tuple(found[i].score for i in order),
    )
    return draft, order
