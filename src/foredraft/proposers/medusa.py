"""Heads that draft several tokens from one state of the target: Medusa, MTP with independent or cascaded heads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from heapq import heappop, heappush

import torch
from torch import Tensor

from foredraft.backends.base import Backend
from foredraft.heads.parallel import ParallelHead
from foredraft.proposers.base import Proposer
from foredraft.proposers.heads import HeadDrafter, HeadProposer
from foredraft.randomness import RandomSource
from foredraft.sampling import Law
from foredraft.types import Draft

CANDIDATES = 16
"""Most tokens of a depth (Medusa's trees have 10)."""


class ParallelDrafter(HeadDrafter):
    """Drafts with a parallel head, trees by default.

    The heads do not see each other's tokens, so the children of all nodes of a depth are the same, and a path is as
    likely as the product of its tokens. The tree is the likeliest nodes by that (Cai et al. 2024, arXiv 2401.10774,
    take a fixed shape that was best on average). Where the target draws with noise keyed by position, so do the heads.

    Args:
        head: A head for this target.
        target: What it drafts for.
    """

    head: ParallelHead

    def __init__(self, head: ParallelHead, target: Backend) -> None:
        self.name = self.usage = head.kind
        self.head = head.eval()
        self.target = target
        ids = head.draft_ids
        self._rows = target.head_rows(ids.tolist()) if ids is not None and head.lm_heads is None else None

    def proposer(self, law: Law, source: RandomSource) -> Proposer:
        """A proposer for a new sequence."""
        return ProductTreeProposer(self, law, source) if self.trees else ParallelChainProposer(self, law, source)

    def logits(self, features: Tensor) -> Tensor:
        """`[K, V_draft]` of the target's features `[1, 1, H]` of the last committed token."""
        weight = next(self.head.parameters())
        return self.head.logits(self.head.states(features.to(weight)), self._shared)[:, 0].float()

    def _shared(self, states: Tensor) -> Tensor:
        if self._rows is not None:
            return torch.nn.functional.linear(states.float(), self._rows)
        return self.target.head(states.flatten(0, -2).float()).reshape(*states.shape[:-1], -1)


class _ParallelProposer(HeadProposer):
    """One sequence's drafts: nothing is kept from one to the next."""

    def __init__(self, drafter: ParallelDrafter, law: Law, source: RandomSource) -> None:
        super().__init__(drafter, law, source)
        self._drafter = drafter

    @torch.inference_mode()
    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """A draft of what the heads say from the last committed token on, whose successor is the last of `tokens`."""
        start, rows = self._take_features()
        if rows is None or not budget:
            return Draft()
        assert start + len(rows) == len(tokens) - 1
        self.forwards += 1
        return self._draft(tokens, self._drafter.logits(rows[-1:]), budget)

    @abstractmethod
    def _draft(self, tokens: Sequence[int], logits: Tensor, budget: int) -> Draft:
        """Of `logits` `[K, V_draft]` of the tokens after the last of `tokens`."""


class ProductTreeProposer(_ParallelProposer):
    """Point-mass trees."""

    def _draft(self, tokens: Sequence[int], logits: Tensor, budget: int) -> Draft:
        candidates: list[list[int]] = []
        chances: list[list[float]] = []
        for depth, row in enumerate(logits):
            named, odds = self._likeliest_tokens(row[None], len(tokens) + depth, min(budget, CANDIDATES))
            candidates += named
            chances += odds
        return likeliest_product(candidates, chances, budget)


def likeliest_product(candidates: Sequence[Sequence[int]], chances: Sequence[Sequence[float]], budget: int) -> Draft:
    """The tree of the likeliest paths out of one token for each depth.

    Args:
        candidates: Tokens of each depth, the likeliest first.
        chances: Of these.
        budget: Most nodes.

    Returns:
        Nodes from the likeliest to the least likely; the score of each is its path probability.
    """
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    # Next in line: minus path probability, parent, depth, rank among its siblings. A sibling or child enters after the
    # node before it, which is at least as likely, so nodes leave in the order of their probabilities.
    line = [(-chances[0][0], -1, 0, 0)]
    while line and len(tokens) < budget:
        negative, parent, depth, rank = heappop(line)
        tokens.append(candidates[depth][rank])
        parents.append(parent)
        scores.append(-negative)
        above = scores[parent] if parent >= 0 else 1.0
        if rank + 1 < len(candidates[depth]):
            heappush(line, (-above * chances[depth][rank + 1], parent, depth, rank + 1))
        if depth + 1 < len(candidates):
            heappush(line, (negative * chances[depth + 1][0], len(tokens) - 1, depth + 1, 0))
    return Draft(tuple(tokens), tuple(parents), scores=tuple(scores))


class ParallelChainProposer(_ParallelProposer):
    """Chains drawn from the heads' own laws."""

    def _draft(self, tokens: Sequence[int], logits: Tensor, budget: int) -> Draft:
        chain = self._chain(tokens, budget, self._source)
        for row in logits:
            if not chain.open:
                break
            chain.take(row[None])
        return chain.draft()
