"""Toy models and every way of drafting from them: what acceptance rules are enumerated on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from foredraft.acceptance import Draws, Rule
from foredraft.proof.enumeration import Propose, Tokens, ToyModel
from foredraft.randomness import RandomSource
from foredraft.types import Draft

Siblings = Literal["point", "single", "with replacement", "without replacement", "drawn and top", "side branches"]
"""How the children of a node come about: the likeliest tokens; one draw; several, each from the same law; several, each
from what the earlier ones left; one draw from what the likeliest leave, and those (Hu et al.); one draw, and the
likeliest others beside it on the trunk alone."""

DRAWS: dict[Siblings, Draws] = {
    "point": Draws.POINT,
    "single": Draws.ONE,
    "drawn and top": Draws.ONE,
    "side branches": Draws.ONE,
    "with replacement": Draws.ANY,
    "without replacement": Draws.ANY,
}

Child = tuple[int, "Tensor | None"]
"""A token and the law it was drawn from; `None` for a point mass."""

Children = Callable[[Tensor, int, RandomSource], list[Child]]
"""From the draft's law at a node, the number of children wanted, and chance: the children in order."""


def toy_model(vocabulary: int, seed: int, temperature: float = 1.0) -> ToyModel:
    """A random law for every context, seeded, at a temperature; at 0 the one-hot of its largest logit."""

    @cache
    def law(context: Tokens) -> Tensor:
        numbers = torch.Generator().manual_seed(hash((seed, *context)) % 2**63)
        logits = 1.5 * torch.randn(vocabulary, generator=numbers, dtype=torch.float64)
        if temperature == 0:
            return torch.nn.functional.one_hot(logits.argmax(), vocabulary).double()
        return (logits / temperature).softmax(-1)

    return law


def disjoint(model: ToyModel, tokens: Sequence[int]) -> ToyModel:
    """The model without these tokens: where p keeps only them, q and p never overlap."""

    def law(context: Tokens) -> Tensor:
        p = model(context).clone()
        p[list(tokens)] = 0.0
        return p / p.sum()

    return law


def drawn_tree(q: ToyModel, widths: Sequence[int], siblings: Siblings, children: Children | None = None) -> Propose:
    """Drafts trees with `widths[d]` children under every node of depth d, drawn from `q` in the way of `siblings`.

    Args:
        q: The draft model.
        widths: Children per node, one number a level.
        siblings: How they are drawn; `side branches` branches on the trunk only, into leaves.
        children: Replaces the way siblings are drawn (negative controls do).
    """
    make = children or _CHILDREN[siblings]

    def propose(source: RandomSource) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        laws: list[Tensor | None] = []

        def grow(parent: int, context: Tokens, level: int) -> None:
            if level == len(widths):
                return
            made = make(q(context), widths[level], source)
            first = len(tokens)
            for token, law in made:
                tokens.append(token)
                parents.append(parent)
                laws.append(law)
            for node, (token, law) in enumerate(made, start=first):
                if siblings != "side branches" or law is not None:
                    grow(node, (*context, token), level + 1)

        grow(-1, (), 0)
        return Draft(tuple(tokens), tuple(parents), tuple(laws))

    return propose


def _likeliest(law: Tensor, count: int) -> list[int]:
    alive = int((law > 0).sum())
    return [int(x) for x in law.topk(min(count, alive)).indices]


def _without(law: Tensor, tokens: Sequence[int]) -> Tensor:
    left = law.clone()
    left[list(tokens)] = 0.0
    return left / left.sum()


def _points(law: Tensor, width: int, source: RandomSource) -> list[Child]:
    return [(x, None) for x in _likeliest(law, width)]


def _replaced(law: Tensor, width: int, source: RandomSource) -> list[Child]:
    return [(source.draw(law), law) for _ in range(width)]


def _not_replaced(law: Tensor, width: int, source: RandomSource) -> list[Child]:
    children: list[Child] = []
    while len(children) < min(width, int((law > 0).sum()) + len(children)):
        x = source.draw(law)
        children.append((x, law))
        if int((law > 0).sum()) == 1:
            break
        law = _without(law, [x])
    return children


def _drawn_and_top(law: Tensor, width: int, source: RandomSource) -> list[Child]:
    top = _likeliest(law, min(width - 1, int((law > 0).sum()) - 1))
    rest = _without(law, top)
    return [(source.draw(rest), rest), *((x, None) for x in top)]


def _side_branches(law: Tensor, width: int, source: RandomSource) -> list[Child]:
    x = source.draw(law)
    others = [y for y in _likeliest(law, width) if y != x]
    return [(x, law), *((y, None) for y in others[: width - 1])]


_CHILDREN: dict[Siblings, Children] = {
    "point": _points,
    "single": _replaced,
    "with replacement": _replaced,
    "without replacement": _not_replaced,
    "drawn and top": _drawn_and_top,
    "side branches": _side_branches,
}

CHAINS = ((1,), (1, 1), (1, 1, 1))
TREES = ((2,), (3,), (2, 2), (2, 1, 1))
TEMPERATURES = (0.0, 0.4, 1.0, 2.0)


class Case(NamedTuple):
    """One toy target, one toy draft model, one way of drafting."""

    kind: str
    target: ToyModel
    draft: ToyModel
    widths: tuple[int, ...]
    siblings: Siblings

    @property
    def propose(self) -> Propose:
        """Makes the drafts of this case."""
        return drawn_tree(self.draft, self.widths, self.siblings)


def cases_for(rule: Rule, seed: int = 0) -> Iterator[Case]:
    """Every kind of draft that the rule accepts: chains of up to 3, trees of depth up to 3, vocabularies up to 4.

    Independent laws at several temperatures, identical laws, and laws that share no token.
    """
    for siblings in get_args(Siblings):
        if DRAWS[siblings] > rule.draws:
            continue
        branching = siblings not in ("point", "single")
        shapes = (TREES if branching else CHAINS) if siblings != "point" else (*CHAINS, *TREES)
        for widths in shapes:
            if max(widths) > 1 and not rule.trees:
                continue
            yield from _laws(rule, siblings, widths, seed)


def _laws(rule: Rule, siblings: Siblings, widths: tuple[int, ...], seed: int) -> Iterator[Case]:
    many = sum(widths) > 3 and DRAWS[siblings] is not Draws.POINT  # draws: their branches multiply
    vocabulary = 3 if many else 4
    shape = f"{'chains' if max(widths) == 1 else 'trees'}, {siblings}"
    for temperature in (0.0,) if rule.greedy else (1.0,) if many else TEMPERATURES:
        p, q = toy_model(vocabulary, seed, temperature), toy_model(vocabulary, seed + 1, temperature or 1.0)
        yield Case(shape, p, q, widths, siblings)
    if rule.greedy or many:
        return
    p, q = toy_model(vocabulary, seed + 2), toy_model(vocabulary, seed + 3)
    yield Case(shape, p, p, widths, siblings)
    yield Case(shape, disjoint(p, [0]), disjoint(q, range(1, vocabulary)), widths, siblings)
