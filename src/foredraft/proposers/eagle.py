"""Heads that draft from the target's own states, a step a token: EAGLE-1, EAGLE-3, sequential MTP."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.backends.base import Backend
from foredraft.heads.recurrent import RecurrentHead
from foredraft.heads.running import Growth
from foredraft.heads.runs import runs_of
from foredraft.proposers.base import OFFER, Proposer
from foredraft.proposers.forks import Fork, Outcome, Plan
from foredraft.proposers.growing import Branch, ChainBranch, ModelFork
from foredraft.proposers.head_trees import BESIDE, DEEPEST, WIDTH, Candidate, TreeBranch, likeliest_nodes
from foredraft.proposers.heads import HeadDrafter, HeadProposer, require_features, temperature_of
from foredraft.randomness import KeyedSource, RandomSource
from foredraft.sampling import Law
from foredraft.tree import depths
from foredraft.types import Draft

_NO_KEYS = np.zeros(0, dtype=np.uint64)


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
    forks = True

    def __init__(self, head: RecurrentHead, target: Backend, form: str = "q8_0") -> None:
        require_features(target, head.kind)
        self.name = self.usage = head.kind
        self.head = head.eval()
        self.target = target
        self.new_run = runs_of(head, target, form)
        self._form = form

    def apart(self, threads: int | None) -> None:
        """See `Drafter`; `None` takes one."""
        self.new_run = runs_of(self.head, self.target, self._form, threads or 1)

    def at_times(self) -> None:
        """See `Drafter`. What must be compiled for it is compiled now."""
        super().at_times()
        features = torch.zeros(1, len(self.head.feature_layers), self.head.shape.hidden)
        self.new_run().path(features, [0], Growth(1, 1, 1, 1.0, 1.0, _NO_KEYS), np.zeros(1, dtype=OFFER))

    def proposer(self, law: Law, source: RandomSource) -> Proposer:
        """A proposer with an empty cache."""
        return TreeProposer(self, law, source) if self.trees else ChainProposer(self, law, source)


class _RecurrentProposer(HeadProposer):
    """One sequence's run of the head, kept in step with the target's."""

    def __init__(self, drafter: RecurrentDrafter, law: Law, source: RandomSource) -> None:
        super().__init__(drafter, law, source)
        self._drafter = drafter
        self._run = drafter.new_run()
        self._next: int | None = None  # token whose features the run has not read
        self._places: list[int | None] = []  # [N+1] of the last draft's root and nodes in the run; none: no draft
        self._known: list[Tensor | list[int] | None] = []  # [N+1] what the head said after each
        self._position = 0  # of the token after that root

    def fork(self, tokens: Sequence[int], draft: Draft, plan: Plan) -> Fork | None:
        """See `Proposer`. The head's own states stand for the target's, as deep as it drafts otherwise."""
        places = self._places
        own = self._position == len(tokens) and len(places) == 1 + len(draft)
        if not own or self._run.depth(places[0] or 0) > DEEPEST:
            return None

        def settle(outcome: Outcome | None, branch: Branch | None, places: Sequence[int | None]) -> Draft:
            found = self._go_on(branch)
            if outcome is not None:
                self._position = len(tokens) + depths(draft)[outcome.node + 1] + 1
            return found

        return ModelFork(
            tokens,
            draft,
            plan,
            expand=self._expand,
            places=places,
            known=self._known,
            ranked=self._rank,
            source=self._source,
            greedy=self._law.greedy,
            grow=lambda outcome, history: self._branch(outcome, history, plan.budget),
            settle=settle,
            next_place=self._run.expanded,
            by_level=True,
        )

    @torch.inference_mode()
    def _expand(self, places: Sequence[int], tokens: Sequence[int]) -> Tensor:
        self.forwards += 1
        return self._run.expand(places, tokens)

    @abstractmethod
    def _rank(self, logits: Tensor, history: Sequence[int]) -> Tensor | list[int] | None:
        """What may come after `history`, of logits `[1, V_draft]`: see `growing.Ranked`."""

    @abstractmethod
    def _branch(self, outcome: Outcome, history: list[int], budget: int) -> Branch:
        """A draft that is to grow after `history`."""

    @abstractmethod
    def _go_on(self, branch: Branch | None) -> Draft:
        """The branch that came true is the last draft now; without one there is none."""

    def _catch_up(self, tokens: Sequence[int]) -> Tensor | None:
        """Read what was committed since the last draft; logits `[1, V_draft]` after the last token, if any."""
        rows, fresh = self._news(tokens)
        if rows is None:
            return None
        self.forwards += 1
        return self._run.commit(rows, fresh)

    def _news(self, tokens: Sequence[int]) -> tuple[Tensor | None, Sequence[int]]:
        """The features of what was committed since the last draft, and the tokens after each; and there is no draft.

        Where some have been forgotten meanwhile the run begins anew behind them.
        """
        self._places, self._known, self._position = [], [], len(tokens)
        start, rows = self._take_features()
        if rows is None:
            return None, ()
        if self._next is not None and start != self._next:
            self._run = self._drafter.new_run()
        self._next = start + len(rows)
        return rows, tokens[start + 1 : start + 1 + len(rows)]


class TreeProposer(_RecurrentProposer):
    """Point-mass trees."""

    stops = True

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
        return self._note(found, place, budget)

    def offer(
        self, tokens: Sequence[int], budget: int, nodes: NDArray[Any], costs: NDArray[np.float64], least: float = 0.0
    ) -> int:
        """Where steps cost something, the likeliest path, and beside each of its nodes what was likely there, too."""
        if not least:
            return super().offer(tokens, budget, nodes, costs)
        rows, fresh = self._news(tokens) if budget else (None, ())
        if rows is None:
            return 0
        keys, room = self._keys(len(tokens)), nodes[:budget]
        growth = Growth(WIDTH, BESIDE, DEEPEST, least, temperature_of(self._law), keys)
        found = self._run.path(rows, fresh, growth, room)
        if found is None:
            found = self._grow_path(self._run.commit(rows, fresh), len(tokens), least, room)
        count, steps = found
        self.forwards += steps
        return count

    def _keys(self, position: int) -> NDArray[np.uint64]:
        """Of the noise that the target will draw with from a position on, if it does: see `Growth`."""
        source = self._source.at(position)
        return source.keys(DEEPEST) if isinstance(source, KeyedSource) and not self._law.greedy else _NO_KEYS

    @torch.inference_mode()
    def _grow_path(self, logits: Tensor, position: int, least: float, nodes: NDArray[Any]) -> tuple[int, int]:
        """What `HeadRun.path` does, a step at a time."""
        count, depth, end, above = 0, 0, -1, 1.0
        while True:
            [named], [chances] = self._likeliest_tokens(logits, position + depth, WIDTH)
            offers = [(token, end, above * chance) for token, chance in zip(named[:BESIDE], chances, strict=False)]
            first, count, depth = count, min(count + len(offers), len(nodes)), depth + 1
            nodes[first:count] = offers[: count - first]
            end, above = first, above * chances[0]
            if count == len(nodes) or depth == DEEPEST or above < least:
                return count, depth
            logits = self._run.expand([depth - 2], named[:1])

    def _rank(self, logits: Tensor, history: Sequence[int]) -> list[int]:
        return self._likeliest_tokens(logits, len(history), WIDTH)[0][0]

    def _branch(self, outcome: Outcome, history: list[int], budget: int) -> Branch:
        return TreeBranch(outcome, len(history), self._likeliest_tokens, budget)

    def _go_on(self, branch: Branch | None) -> Draft:
        if not isinstance(branch, TreeBranch) or not branch.found:
            self._places, self._known = [], []
            return Draft()
        place = {-1: branch.places[0], **dict(zip(branch.expanded, branch.places[1:], strict=True))}
        return self._note(branch.found, place, branch.budget)

    def _note(self, found: Sequence[Candidate], place: dict[int, int], budget: int) -> Draft:
        """The draft of the best candidates, with where the run has those that were expanded, and what came after."""
        draft, chosen = likeliest_nodes(found, budget)
        self._places = [place.get(i) for i in (-1, *chosen)]
        below: dict[int, list[int]] = {i: [] for i in place}
        for node in found:
            below[node.parent].append(node.token)  # siblings stand in order
        self._known = [below.get(i) for i in (-1, *chosen)]
        return draft

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


class ChainProposer(_RecurrentProposer):
    """Chains drawn from the head's own law."""

    @torch.inference_mode()
    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """A chain with the law that each token was drawn from (greedy requests: a point mass)."""
        logits = self._catch_up(tokens) if budget else None
        if logits is None:
            return Draft()
        chain = self._chain(tokens, budget, self._source)
        chain.take(logits)
        while chain.open:
            logits = self._run.expand([len(chain.tokens) - 2], chain.tokens[-1:])
            self.forwards += 1
            chain.take(logits)
        if chain.tokens:
            self._note(chain.rows, [-1, *range(self._run.expanded)])
        return chain.draft()

    def _rank(self, logits: Tensor, history: Sequence[int]) -> Tensor | None:
        return self._law_of(logits, history)

    def _branch(self, outcome: Outcome, history: list[int], budget: int) -> Branch:
        source = self._source.below(len(history), history[-1])
        return ChainBranch(outcome, self._chain(history, budget, source))

    def _go_on(self, branch: Branch | None) -> Draft:
        if not isinstance(branch, ChainBranch) or not branch.chain.tokens:
            self._places, self._known = [], []
            return Draft()
        self._note(branch.chain.rows, branch.places)
        return branch.draft()

    def _note(self, rows: Sequence[Tensor], places: Sequence[int]) -> None:
        """The last draft has a token for each of these laws; the run has read the root and the first of them."""
        self._places = [*places, *[None] * (1 + len(rows) - len(places))]
        self._known = [*rows, None]
