"""Heads that draft from the target's own states, a step a token: EAGLE-1, EAGLE-3, sequential MTP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.acceptance import Draws, Rule
from foredraft.backends.base import USE_INSTEAD, Backend, Features, KVCache
from foredraft.errors import InvalidInputError, UnsupportedError
from foredraft.heads.model_layer import run_of
from foredraft.heads.recurrent import RecurrentHead
from foredraft.proposers.base import Drafter, Proposer
from foredraft.randomness import KeyedSource, RandomSource
from foredraft.sampling import Law, finite_argmax
from foredraft.types import Draft

WIDTH = 8
"""Nodes that are expanded at each level, and children that each gets (EAGLE-2 has 10)."""
DEEPEST = 8


def require_features(target: Backend, drafter: str) -> None:
    """Raise `UnsupportedError` unless the target hands out what its layers compute."""
    if not target.capabilities.features:
        raise UnsupportedError(
            f"Drafter '{drafter}' needs what the target's layers compute, which backend '{target.name}' does not hand "
            f"out for this model. {USE_INSTEAD}"
        )


class RecurrentDrafter(Drafter):
    """Drafts with a recurrent head, trees by default.

    A tree is EAGLE-2's (Li et al. 2024, arXiv 2406.16858): the likeliest nodes of each level are expanded, and of all
    that were scored the likeliest are kept. Its nodes are a function of the context, so they count as point masses.
    Where the target draws with noise keyed by position, so does the tree: its children are those that come out on top
    with the very noise that the target will draw with. Rules that want one drawn token a place (`token`, `block`, `hu`)
    get a chain drawn from the head's law under the request's own settings, with that law as q.

    Args:
        head: A head for this target.
        target: What it drafts for.

    Raises:
        UnsupportedError: The target's backend does not hand out what its layers compute.
    """

    trees = True
    draft_tokens = 16
    when_nothing_is_accepted = "the head may have been trained for another target, or for another kind of text"

    def __init__(self, head: RecurrentHead, target: Backend) -> None:
        require_features(target, head.kind)
        self.name = self.usage = head.kind
        self.head = head.eval()
        self.target = target

    @property
    def runs_model(self) -> bool:
        """A forward of the head for each level of a tree."""
        return True

    def fit(self, *, trees: bool, rule: Rule | None) -> None:
        """Trees of point masses or chains of drawn tokens, as the rule wants it."""
        self.trees = trees and (rule is None or rule.draws is not Draws.ONE)
        self.draws = Draws.POINT if self.trees else Draws.ONE

    def proposer(self, law: Law, source: RandomSource) -> Proposer:
        """A proposer with an empty cache."""
        return TreeProposer(self, law, source) if self.trees else ChainProposer(self, law, source)

    def logits(self, states: Tensor) -> Tensor:
        """Of the head's states `[n, H]`: `[n, V_draft]`."""
        read = self.head.readout(states[None])[0]
        if self.head.lm_head is None:
            return self.target.head(read.float())
        own: Tensor = self.head.lm_head(read)
        return own.float()


class _RecurrentProposer(Proposer):
    """One sequence's run of the head, kept in step with the target's."""

    def __init__(self, drafter: RecurrentDrafter, law: Law, source: RandomSource) -> None:
        self._drafter, self._law, self._source = drafter, law, source
        self._run = run_of(drafter.head)
        self._features: Features | None = None

    def attach(self, cache: KVCache) -> None:
        """Have the target keep what the head reads."""
        self._features = cache.keep_features(self._drafter.head.feature_layers)

    def _catch_up(self, tokens: Sequence[int]) -> Tensor | None:
        """Read what was committed since the last draft; the head's state `[1, H]` after the last token, if any."""
        assert self._features is not None
        start, rows = self._features.take()
        if rows is None:
            return None
        after = tokens[start + 1 : start + 1 + len(rows)]
        self.forwards += 1
        return self._run.commit(rows, self._drafter.target.embed(after))


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
        state = self._catch_up(tokens)
        if state is None or budget < 1:
            return Draft()
        found = self._children(state, [-1], [1.0], 1, len(tokens))
        fresh = list(range(len(found)))
        rows: dict[int, tuple[Tensor, list[int]]] = {
            -1: (state, [])
        }  # expanded: state after it, expanded nodes above it
        place: dict[int, int] = {}
        for depth in range(1, DEEPEST):
            chosen = self._worth_expanding(found, fresh, budget)
            if not chosen:
                break
            states = torch.cat([rows[found[i].parent][0] for i in chosen])
            above = torch.zeros(len(chosen), len(place), dtype=torch.bool)
            for row, i in enumerate(chosen):
                above[row, [place[j] for j in rows[found[i].parent][1]]] = True
            embeddings = self._drafter.target.embed([found[i].token for i in chosen])
            out = self._run.expand(states, embeddings, depth, above)
            self.forwards += 1
            for row, i in enumerate(chosen):
                place[i] = len(place)
                rows[i] = (out[row : row + 1], [*rows[found[i].parent][1], i])
            first = len(found)
            found += self._children(out, chosen, [found[i].score for i in chosen], depth + 1, len(tokens) + depth)
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
        self, states: Tensor, parents: Sequence[int], scores: Sequence[float], depth: int, position: int
    ) -> list[Candidate]:
        """The likeliest tokens after each of these states, at `position` in the text."""
        logits = self._drafter.logits(states)
        temperature = 1.0 if self._law.greedy else getattr(self._law, "temperature", 1.0)
        log_q = torch.log_softmax(logits / temperature, dim=-1)
        ids = self._drafter.head.draft_ids
        if isinstance(self._source, KeyedSource) and not self._law.greedy:
            every = ids if ids is not None else torch.arange(log_q.shape[1], device=log_q.device)
            log_q = log_q + self._source.at(position).noise(every)
            best = log_q.topk(min(WIDTH, log_q.shape[1]), dim=-1)
            chances = torch.softmax(best.values, dim=-1)
        else:
            best = log_q.topk(min(WIDTH, log_q.shape[1]), dim=-1)
            chances = best.values.exp()
        named = best.indices if ids is None else ids[best.indices]
        return [
            Candidate(token, parent, depth, score * chance)
            for parent, score, row, odds in zip(parents, scores, named.tolist(), chances.tolist(), strict=True)
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
        state = self._catch_up(tokens)
        history, drafted = list(tokens), list[int]()
        rows: list[Tensor] = []
        while state is not None and len(drafted) < budget:
            q = self._law_after(history, state)
            if q is None:
                break
            x = finite_argmax(q) if self._law.greedy else self._source.at(len(history)).draw(q)
            drafted.append(x)
            rows.append(q)
            history.append(x)
            if len(drafted) < budget:
                above = torch.ones(1, len(drafted) - 1, dtype=torch.bool)
                state = self._run.expand(state, self._drafter.target.embed([x]), len(drafted), above)
                self.forwards += 1
        return Draft.chain(drafted, () if self._law.greedy else rows)

    def _law_after(self, history: Sequence[int], state: Tensor) -> Tensor | None:
        """The request's law `[V]` over what the head can draft; `None` if nothing of that has mass."""
        logits = self._drafter.logits(state)
        ids = self._drafter.head.draft_ids
        if ids is not None:
            every = logits.new_full((1, self._drafter.target.vocab_size), -math.inf)
            logits = every.index_copy_(1, ids, logits)
        try:
            q = self._law(history, Draft(), logits)[0]
        except InvalidInputError:  # bad words or a grammar leave nothing here; of the target they may leave more
            return None
        return q if q.amax() > (-math.inf if self._law.greedy else 0.0) else None
