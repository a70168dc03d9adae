"""Acceptance rules: which drafted tokens the target keeps, and the one token it adds.

A rule is a pure function; `RULES` says by name what each is for. Losslessness is proved rule by rule in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

from foredraft.acceptance import chain, tree
from foredraft.randomness import RandomSource
from foredraft.types import Draft, Verdict


class Draws(IntEnum):
    """How chance enters a draft. A rule that accepts one of these accepts those before it as well."""

    POINT = 0
    """Not at all: tokens are a deterministic function of the context."""
    ONE = 1
    """At most one child of a node was drawn, and stands first; the others are point masses."""
    ANY = 2
    """Any number of siblings were drawn, each from its own q."""


class Rule(NamedTuple):
    """An acceptance rule and the drafts it is right for."""

    name: str
    decide: Callable[[Draft, Tensor, RandomSource], Verdict]
    summary: str
    draws: Draws
    trees: bool
    greedy: bool = False
    """Right only where every row is one-hot."""
    keyed: bool = False
    """Draws from noise keyed by position, so that the output does not depend on the drafts, whatever drew them."""
    lossy: bool = False
    """Does not keep the output law. Never a default."""


RULES = {
    rule.name: rule
    for rule in (
        Rule("greedy", tree.greedy, "follow the argmax; temperature 0 only", Draws.POINT, trees=True, greedy=True),
        Rule("token", chain.token, "accept each token with min(1, p/q)", Draws.ONE, trees=False),
        Rule("block", tree.block, "accept the longest block that keeps the law", Draws.ONE, trees=True),
        Rule(
            "seed-exact",
            tree.walk,
            "the same tokens as plain decoding with the seed",
            Draws.ANY,
            trees=True,
            keyed=True,
        ),
        Rule("walk", tree.walk, "draw from the target, follow while a node has it", Draws.POINT, trees=True),
        Rule("recursive", tree.recursive, "try siblings in turn against what is left", Draws.ANY, trees=True),
        Rule("hu", tree.hu, "one drawn child, then the residual among the others", Draws.ONE, trees=True),
        Rule("traversal", tree.traversal, "leaves first; block verification of a tree", Draws.ANY, trees=True),
        Rule("lossy-typical", chain.typical, "accept what is likely enough", Draws.ONE, trees=False, lossy=True),
    )
}


def default_rule(draws: Draws, trees: bool) -> Rule:
    """The lossless rule that fits a drafter, at temperatures above 0 (at 0 it is always `greedy`).

    For point masses `seed-exact`: it accepts as often as any rule can, and gives the same text with and without
    speculation. Where tokens are drawn it would accept less than rules that use q: there it is `block` for chains and
    `traversal` for trees.
    """
    if draws is Draws.POINT:
        return RULES["seed-exact"]
    return RULES["traversal" if trees else "block"]
