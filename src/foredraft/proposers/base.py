"""What drafts: a drafter is loaded once and shared; its proposer drafts for one sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from foredraft.acceptance import Draws
from foredraft.randomness import RandomSource
from foredraft.sampling import Law
from foredraft.types import Draft, Verdict


class Verification(NamedTuple):
    """What the target said about a draft: `logits` and `p` are `[N+1, V]`, row 0 after the root."""

    draft: Draft
    logits: Tensor
    p: Tensor


class Proposer(ABC):
    """Drafts for one sequence and learns from what happened to its drafts."""

    forwards: int = 0
    """Forwards of a draft model so far."""

    @abstractmethod
    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """A draft of at most `budget` nodes below the last of `tokens`, all tokens so far. May be empty."""

    def observe(self, verification: Verification, verdict: Verdict) -> None:  # noqa: B027  (learning is optional)
        """See what the target made of the last draft."""


class Drafter(ABC):
    """A way of drafting: what is shared between the sequences it drafts for."""

    name: str
    draws: Draws = Draws.POINT
    """How chance enters its drafts, at temperatures above 0."""
    trees: bool = False
    """Whether its drafts may branch."""
    draft_tokens: int
    """Nodes of a draft when the user does not say."""
    when_nothing_is_accepted: str
    """Likely causes of zero acceptance, for a warning."""

    @abstractmethod
    def proposer(self, law: Law, source: RandomSource) -> Proposer:
        """A proposer for a new sequence, which is sampled with `law` and draws from `source`."""
