"""Acceptance rules: which drafted tokens the target keeps, and the one token it adds.

A rule is a pure function; `RULES` says by name what each is for. Losslessness is proved rule by rule in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from foredraft.acceptance import chain
from foredraft.sampling import RandomSource
from foredraft.types import Draft, Verdict


class Rule(NamedTuple):
    """An acceptance rule and the drafts it is right for."""

    name: str
    decide: Callable[[Draft, Tensor, RandomSource], Verdict]
    summary: str
    sampled: bool  # accepts drafts that were drawn from a q, besides point masses
    trees: bool


RULES = {
    rule.name: rule
    for rule in (
        Rule("greedy", chain.greedy, "accept while the draft names the argmax", sampled=False, trees=False),
        Rule("token", chain.token, "accept each token with min(1, p/q)", sampled=True, trees=False),
    )
}


def default_rule(greedy: bool) -> Rule:
    """The rule that fits a request: `greedy` at temperature 0, `token` above."""
    return RULES["greedy" if greedy else "token"]
