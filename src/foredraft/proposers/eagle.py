"""Heads that draft from the target's own states, a step a token: EAGLE-1, EAGLE-3, sequential MTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.backends.base import Backend
from foredraft.heads.recurrent import RecurrentHead
from foredraft.heads.runs import runs_of
from foredraft.proposers.base import Proposer
from foredraft.proposers.heads import HeadDrafter, HeadProposer, require_features
from foredraft.randomness import RandomSource
from foredraft.sampling import Law
from foredraft.types import Draft

WIDTH = 8
"""Nodes that are expanded at each level, and children that each gets (EAGLE-2 has 10)."""
DEEPEST = 8


class RecurrentDrafter(HeadDrafter):
    """Drafts with a recurrent head, trees by default.

    A tree is EAGLE-2's (Li et al. 2024, arXiv 2406.16858): the likeliest nodes of each level are expanded, and of all
    that were scored the likeliest are kept. Its nodes are a function of the context, so they count as point masses.
    Where the target draws with noise keyed by position, so does the tree: its children are those that come out on top
    with the very noise that the target will draw with.

    Args:
        head: A head for this target. The native engine runs a copy of it as it is now.
        target: What it drafts for.
        form: What the native engine holds its matrices in: `bf16`, `f32` or another format of `weights.FORMATS`.

    Raises:
        UnsupportedError: The target's backend does not hand out what its layers compute.
    """

    head: RecurrentHead

    def __init__(self, head: RecurrentHead, target: Backend, form: str = "bf16") -> None:
        require_features(target, head.kind)
        self.name = self.usage = head.kind
        self.head = head.eval()
        self.target = target
        self.new_run = runs_of(head, target, form)

    def proposer(self, law: Law, source: RandomSource) -> Proposer:
        """A proposer with an empty cache."""
        return TreeProposer(self, law, source) if self.trees else ChainProposer(self, law, source)


class _RecurrentProposer(HeadProposer):
    """One sequence's run of the head, kept in step with the target's."""

    def __init__(self, drafter: RecurrentDrafter, law: Law, source: RandomSource) -> None:
        super().__init__(drafter, law, source)
        self._run = drafter.new_run()

    def _catch_up(self, tokens: Sequence[int]) -> Tensor | None:
        """Read what was committed since the last draft; logits `[1, V_draft]` after the last token, if any."""
        start, rows = self._take_features()
        if rows is None:
            return None
        self.forwards += 1
        return self._run.commit(rows, tokens[start + 1 : start + 1 + len(rows)])


class Candidate(NamedTuple):
    """A node that was scored: where it hangs (a candidate, -1 for the root), its depth and path probability."""

    token: int
    parent: int
    depth: int
    score: float


class TreeProposer(_RecurrentProposer):
    """Point-mass trees."""

    @torch.inference_mode()
    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The likeliest nodes of a tree that grows while it can get better."""
        logits = self._catch_up(tokens) if budget else None
        if logits is None:
            return Draft()
        found = self._children(logits, [-1], [1.0], 1, len(tokens))
        fresh = list(range(len(found)))
        place = {-1: -1}  # of those that are expanded, in the order in which they are
        for depth in range(1, DEEPEST):
            chosen = self._worth_expanding(found, fresh, budget)
            if not chosen:
                break
            logits = self._run.expand([place[found[i].parent] for i in chosen], [found[i].token for i in chosen])
            self.forwards += 1
            place |= {i: row for row, i in enumerate(chosen, start=len(place) - 1)}
            first = len(found)
            found += self._children(logits, chosen, [found[i].score for i in chosen], depth + 1, len(tokens) + depth)
            fresh = list(range(first, len(found)))
        return _likeliest(found, budget)

    def _worth_expanding(self, found: Sequence[Candidate], fresh: Sequence[int], budget: int) -> list[int]:
        """Of the last level the likeliest of those that are among the best so far: below others no node gets in."""
        bar = sorted((node.score for node in found), reverse=True)[min(budget, len(found)) - 1]
        chosen = sorted((i for i in fresh if found[i].score >= bar), key=lambda i: -found[i].score)[:WIDTH]
        if len(found) >= budget and chosen and found[chosen[0]].score <= bar:
            return []
        return sorted(chosen)

    def _children(
        self, logits: Tensor, parents: Sequence[int], scores: Sequence[float], depth: int, position: int
    ) -> list[Candidate]:
        """The likeliest tokens below each of these nodes, at `position` in the text."""
        named, chances = self._likeliest_tokens(logits, position, WIDTH)
        return [
            Candidate(token, parent, depth, score * chance)
            for parent, score, row, odds in zip(parents, scores, named, chances, strict=True)
            for token, chance in zip(row, odds, strict=True)
        ]


def _likeliest(found: Sequence[Candidate], budget: int) -> Draft:
    """The draft of the best candidates; none is better than the one above it."""
    order = sorted(range(len(found)), key=lambda i: (-found[i].score, i))[:budget]
    order.sort()  # parents were found before their children
    place = {-1: -1, **{old: new for new, old in enumerate(order)}}
    return Draft(
        tokens=tuple(found[i].token for i in order),
        parents=tuple(place[found[i].parent] for i in order),
        scores=tuple(found[i].score for i in order),
    )


class ChainProposer(_RecurrentProposer):
    """Chains drawn from the head's own law."""

    @torch.inference_mode()
    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """A chain with the law that each token was drawn from (greedy requests: a point mass)."""
        logits = self._catch_up(tokens) if budget else None
        history, drafted = list(tokens), list[int]()
        rows: list[Tensor] = []
        while logits is not None and len(drafted) < budget:
            drawn = self._draw(logits, history)
            if drawn is None:
                break
            x, q = drawn
            drafted.append(x)
            rows.append(q)
            history.append(x)
            if len(drafted) < budget:
                logits = self._run.expand([len(drafted) - 2], [x])
                self.forwards += 1
        return self._chain(drafted, rows)
