"""The exact output law of an acceptance rule, by taking every branch of the production code on toy models.

Chance reaches a rule through its `RandomSource` alone. `outcome_law` runs code again and again with a source that
scripts each coin and draw, until every possible course was taken once, and weighs each outcome with the probabilities
the code itself asked for. Nothing is sampled, so nothing is left to luck.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from foredraft.randomness import RandomSource
from foredraft.tree import paths
from foredraft.types import Draft, Verdict

Tokens = tuple[int, ...]
"""Token ids, the oldest first."""

JointLaw = dict[Tokens, float]
"""The probability of each sequence of tokens."""

ToyModel = Callable[[Tokens], Tensor]
"""From the tokens so far to the distribution of the next one: `[V]`, float64, after the whole sampling pipeline."""

Propose = Callable[[RandomSource], Draft]
"""Drafts from an empty context; draws from the source alone, if it draws at all."""

Decide = Callable[[Draft, Tensor, RandomSource], Verdict]
"""An acceptance rule, as in `acceptance.Rule`."""

Outcome = TypeVar("Outcome", bound=Hashable)

_ROUNDING = 1e-13  # an outcome less likely than this is possible only by float64's rounding


class ScriptedSource:
    """A `RandomSource` that replays a script, and past its end takes the first outcome that is possible.

    Args:
        script: Index of the outcome of each decision. A coin has the outcomes 0 and 1, a draw one for each weight.
    """

    def __init__(self, script: Tokens = ()) -> None:
        self._script = script
        self._taken: Tokens = ()
        self.probability = 1.0
        """Of the decisions so far, together."""
        self.untried: list[Tokens] = []
        """A script for each outcome that was possible past the end of this one, and not taken."""

    def at(self, position: int) -> ScriptedSource:
        """Itself: the script goes on."""
        return self

    def below(self, position: int, root: int) -> ScriptedSource:
        """Itself: draws below another root are decisions of their own, too."""
        return self

    def coin(self, probability: float) -> bool:
        """True or false, as the script says."""
        return self._decide([1.0 - probability, probability]) == 1

    def draw(self, weights: Tensor, depth: int = 0) -> int:
        """The index that the script says."""
        return self._decide((weights.double() / weights.double().sum()).tolist())

    def _decide(self, probabilities: list[float]) -> int:
        possible = [outcome for outcome, mass in enumerate(probabilities) if mass > _ROUNDING]
        if len(self._taken) < len(self._script):
            taken = self._script[len(self._taken)]
        else:
            taken = possible[0]
            self.untried += [(*self._taken, outcome) for outcome in possible[1:]]
        self._taken += (taken,)
        self.probability *= probabilities[taken]
        return taken


def outcome_law(run: Callable[[RandomSource], Outcome]) -> dict[Outcome, float]:
    """The exact law of what `run` returns, if all its randomness comes from the source it is given."""
    law: defaultdict[Outcome, float] = defaultdict(float)
    scripts: list[Tokens] = [()]
    while scripts:
        source = ScriptedSource(scripts.pop())
        law[run(source)] += source.probability
        scripts += source.untried
    return dict(law)


def joint_law(decide: Decide, propose: Propose, target: ToyModel, length: int) -> JointLaw:
    """The exact law of the first `length` tokens when one round of speculation begins the sequence.

    A round that emits fewer tokens is continued by ancestral sampling from the target. A rule is lossless if and only
    if this law equals `ancestral_law(target, length)` for every target and every law of drafts it accepts.

    Args:
        decide: The acceptance rule; every branch of it is taken.
        propose: Makes the draft, a chain or a tree; every branch of it is taken too.
        target: The target.
        length: Tokens to look at; K + 1 sees everything that a chain of K can emit.
    """

    def play(source: RandomSource) -> Tokens:
        draft = propose(source)
        return decide(draft, score(target, draft), source).tokens

    return continued(outcome_law(play), target, length)


def ancestral_law(target: ToyModel, length: int) -> JointLaw:
    """The law of `length` tokens drawn one after the other: what every lossless rule must reproduce."""
    return continued({(): 1.0}, target, length)


def drawn_chain(q: ToyModel, k: int) -> Propose:
    """Drafts of `k` tokens, each drawn from `q` after the ones before, with those rows as the draft's q."""

    def propose(source: RandomSource) -> Draft:
        tokens: Tokens = ()
        for _ in range(k):
            tokens += (source.draw(q(tokens)),)
        return Draft.chain(tokens, score(q, Draft.chain(tokens))[:k])

    return propose


def score(model: ToyModel, draft: Draft) -> Tensor:
    """Distributions `[N+1, V]` of a toy model: row 0 at the root, row i + 1 after node i and its ancestors."""
    return torch.stack([model(path) for path in [(), *paths(draft)]])


def total_variation(a: Mapping[Outcome, float], b: Mapping[Outcome, float]) -> float:
    """Half the L1 distance of two laws, in [0, 1]; 0 if and only if they are equal."""
    return sum(abs(a.get(outcome, 0.0) - b.get(outcome, 0.0)) for outcome in a.keys() | b.keys()) / 2


def continued(law: Mapping[Tokens, float], target: ToyModel, length: int) -> JointLaw:
    """The law of the first `length` tokens: longer sequences are cut, shorter ones continued from the target."""
    whole: defaultdict[Tokens, float] = defaultdict(float)
    open_ends = list(law.items())
    while open_ends:
        tokens, mass = open_ends.pop()
        if len(tokens) >= length:
            whole[tokens[:length]] += mass
        else:
            open_ends += [((*tokens, x), mass * p_x) for x, p_x in enumerate(target(tokens).tolist()) if p_x > 0]
    return dict(whole)
