"""Forks of drafters that run a model: all branches grow by a token in each of its forwards, as one tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foredraft.backends.base import Backend, KVCache, Query
from foredraft.proposers.drawing import DrawnChain
from foredraft.proposers.forks import Confidence, Fork, Outcome, Plan, drafted_below, fan_out
from foredraft.randomness import KeyedSource, RandomSource
from foredraft.tree import paths
from foredraft.types import Draft

Expand = Callable[[Sequence[int], Sequence[int]], Tensor]
"""Logits `[n, V]` after tokens that follow those at some places (-1: what is certain). They get the next places."""

Ranked = Callable[[Tensor, Sequence[int]], "Tensor | list[int] | None"]
"""From logits `[1, V]` after a text to the drafter's law `[V]` there, or to the likeliest tokens in order."""


class Branch(ABC):
    """The draft that grows for one outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.places: list[int] = []
        """Of the outcome's token, and then of the drafted ones, in the order in which the model read them."""

    @abstractmethod
    def wanted(self) -> tuple[int, int] | None:
        """What the model should read next: an index into `places` (-1: what the outcome follows), and a token."""

    @abstractmethod
    def take(self, logits: Tensor) -> None:
        """Logits `[1, V]` after what was wanted last."""

    @abstractmethod
    def draft(self) -> Draft:
        """What has grown."""


class ChainBranch(Branch):
    """A chain, drawn token by token.

    Args:
        outcome: What it is for.
        chain: Begins after its token.
    """

    def __init__(self, outcome: Outcome, chain: DrawnChain) -> None:
        super().__init__(outcome)
        self.chain = chain

    def wanted(self) -> tuple[int, int] | None:
        """See `Branch`: the outcome's token, then what was drawn last."""
        if not self.chain.open:
            return None
        return len(self.places) - 1, self.chain.tokens[-1] if self.chain.tokens else self.outcome.token

    def take(self, logits: Tensor) -> None:
        """See `Branch`."""
        self.chain.take(logits)

    def draft(self) -> Draft:
        """See `Branch`."""
        return self.chain.draft()


class ModelFork(Fork):
    """A fork of a proposer that runs a model.

    Args:
        tokens: All tokens up to the draft's root.
        draft: What is verified.
        plan: How much to draft.
        expand: The model.
        places: `[N+1]` where the model has read the root and the nodes; `None` where it has not.
        known: `[N+1]` what it said after each: the law `[V]`, tokens in order, or `None`.
        ranked: What to make of its logits.
        source: The request's.
        greedy: Whether laws only say by their largest entry which token has all mass.
        grow: Begins a branch for an outcome, after the tokens up to its own.
        settle: Told the outcome, the branch for it and `places`; returns the draft, if that is what the proposer goes
            on from.
        by_level: Whether what is above a token must have been read in an earlier step.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        draft: Draft,
        plan: Plan,
        *,
        expand: Expand,
        places: Sequence[int | None],
        known: Sequence[Tensor | list[int] | None],
        ranked: Ranked,
        source: RandomSource,
        greedy: bool,
        grow: Callable[[Outcome, list[int]], Branch],
        settle: Callable[[Outcome | None, Branch | None, Sequence[int | None]], Draft],
        next_place: int = 0,
        by_level: bool = False,
    ) -> None:
        self._tokens, self._draft, self._plan = tuple(tokens), draft, plan
        self._expand, self._places, self._known = expand, list(places), list(known)
        self._ranked, self._source, self._greedy = ranked, source, greedy
        self._grow, self._settle, self._by_level = grow, settle, by_level
        self._paths = [(), *paths(draft)]
        self._next = next_place
        self._steps = 0
        self._fan: list[int] | None = None
        self._drafted: list[set[int]] = []
        self._unread: list[int] = []
        self._branches: dict[Outcome, Branch] = {}

    def step(self) -> bool:
        """See `Fork`."""
        if self._fan is None:
            self._begin()
        reading = self._reading()
        if not reading:
            return False
        logits = self._expand([above for above, _, _ in reading], [token for _, token, _ in reading])
        self._steps += 1
        self.rows = len(reading)
        for (_, _, who), row in zip(reading, torch.split(logits, 1), strict=True):
            if isinstance(who, Branch):
                who.take(row)
            else:
                self._know(who, row)
        self.branches = sum(bool(branch.places) for branch in self._branches.values())
        return self._steps < self._plan.steps

    def expects(self, outcome: Outcome) -> bool:
        """See `Fork`."""
        return outcome in self._branches

    def settle(self, outcome: Outcome | None) -> Draft:
        """See `Fork`."""
        branch = self._branches.get(outcome) if outcome is not None else None
        return self._settle(outcome, branch, self._places)

    def _begin(self) -> None:
        """Decide for which outcomes to draft, as far as the model has said what they may be."""
        self.confidences = [self._confidence(node) for node in range(len(self._draft))]
        self._drafted = drafted_below(self._draft)
        self._fan = fan_out(self._plan.ends(self.confidences), self._plan.branches, self._plan.exponent)
        wanted = set[int]()
        for row, fan in enumerate(self._fan):
            at = row
            while fan and self._places[at] is None and at not in wanted:
                wanted.add(at)
                at = self._draft.parents[at - 1] + 1 if at else 0
            if fan and self._known[row] is not None:
                self._branch_off(row)
        self._unread = sorted(wanted)

    def _reading(self) -> list[tuple[int, int, Branch | int]]:
        """What the model reads in this step: after which place, the token, and who wants it."""
        found: list[tuple[int, int, Branch | int]] = []
        first = self._next if self._by_level else self._next + len(self._unread) + len(self._branches)
        for row in self._unread[:]:
            above = self._places[self._draft.parents[row - 1] + 1] if row else -1
            if above is not None and above < first:
                token = self._draft.tokens[row - 1] if row else self._tokens[-1]
                found.append((above, token, row))
                self._unread.remove(row)
                self._places[row] = self._take_place()
        for branch in self._branches.values():
            wanted = branch.wanted()
            if wanted is None:
                continue
            index, token = wanted
            above = branch.places[index] if index >= 0 else self._places[branch.outcome.node + 1]
            if above is not None and above < first:
                found.append((above, token, branch))
                branch.places.append(self._take_place())
        return found

    def _take_place(self) -> int:
        self._next += 1
        return self._next - 1

    def _know(self, row: int, logits: Tensor) -> None:
        """The model has read the root or a node."""
        if self._known[row] is None:
            self._known[row] = self._ranked(logits, [*self._tokens, *self._paths[row]])
            if self._known[row] is not None:
                self._branch_off(row)

    def _branch_off(self, row: int) -> None:
        """Begin to draft for the likeliest tokens after the root or a node, those of the draft itself left out."""
        assert self._fan is not None
        known, count, drafted = self._known[row], self._fan[row], self._drafted[row]
        if isinstance(known, Tensor):
            position = len(self._tokens) + len(self._paths[row])
            known = likeliest(known, self._source.at(position), self._greedy, count + len(drafted))
        assert known is not None
        for token in [token for token in known if token not in drafted][:count]:
            outcome = Outcome(row - 1, token)
            self._branches[outcome] = self._grow(outcome, [*self._tokens, *self._paths[row], token])

    def _confidence(self, node: int) -> Confidence | None:
        law = self._known[self._draft.parents[node] + 1]
        if not isinstance(law, Tensor):
            return None
        p = law.softmax(-1) if self._greedy else law
        return Confidence(float(p[self._draft.tokens[node]]), float(torch.special.entr(p).sum()))


def likeliest(law: Tensor, source: RandomSource, greedy: bool, count: int) -> list[int]:
    """The likeliest tokens of a law `[V]`, with the noise that the target will draw with, where that is known.

    Args:
        law: Of a greedy request any row with its argmax.
        source: The request's, at the position.
        greedy: Whether it is.
        count: Fewer if there are no more of any mass.
    """
    values = law
    if isinstance(source, KeyedSource) and not greedy:
        values = law.log() + source.noise(torch.arange(len(law), device=law.device))
    best = values.topk(min(count, len(values)))
    least = -torch.inf if greedy or values is not law else 0.0
    return [token for token, value in zip(best.indices.tolist(), best.values.tolist(), strict=True) if value > least]


class GrowingTree:
    """Tokens that the draft model reads below what its cache holds, in pieces, until it is said what of them is kept.

    Places: 0 is the root, place i + 1 node i.

    Args:
        backend: The draft model.
        cache: Holds a beginning of `tokens`, and not the last of them.
        tokens: All so far, the root last.
    """

    def __init__(self, backend: Backend, cache: KVCache, tokens: Sequence[int]) -> None:
        self._backend, self._cache, self._text = backend, cache, tuple(tokens)
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._known = 0

    def expand(self, places: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Logits `[n, V]` after these tokens below these places; the first one of all is the root, below -1."""
        if not self._known:
            missing = self._text[self._cache.length : -1]
            if missing:
                self._backend.prefill(self._cache, missing)
            places, tokens = places[1:], tokens[1:]
        self._tokens += tokens
        self._parents += [place - 1 for place in places]
        draft = Draft(tuple(self._tokens), tuple(self._parents))
        logits = self._backend.forward([Query(self._cache, self._text[-1], draft, self._known)])[0]
        self._known = 1 + len(draft)
        return logits

    def keep(self, path: Sequence[int]) -> None:
        """The root and these nodes stay in the cache; nothing does if nothing was read."""
        if self._known:
            self._backend.commit(self._cache, path)
