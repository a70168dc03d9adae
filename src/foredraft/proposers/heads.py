"""What all drafters with heads share: when they draft trees and when chains, and how they rank and draw tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.acceptance import Draws, Rule
from foredraft.backends.base import USE_INSTEAD, Backend, Features, KVCache
from foredraft.errors import UnsupportedError
from foredraft.heads.files import Head
from foredraft.proposers.base import Drafter, Proposer
from foredraft.proposers.drawing import DrawnChain, law_after
from foredraft.randomness import KeyedSource, RandomSource
from foredraft.sampling import Law

_REMEMBERED = 32
"""Tokens: with so many before it a head of a small model was right as often, within a hundredth, as with all."""


class HeadDrafter(Drafter):
    """Drafts with a head: trees by default, whose nodes are a function of the context and count as point masses.

    Rules that want one drawn token a place (`token`, `block`, `hu`) get a chain drawn from the head's law under the
    request's own settings, with that law as q.
    """

    head: Head
    target: Backend
    trees = True
    draft_tokens = 16
    remembers: int | None = None
    """So many of the last tokens it reads if it has not drafted for longer, or not at all; `None` is all of them."""
    when_nothing_is_accepted = "the head may have been trained for another target, or for another kind of text"

    @property
    def runs_model(self) -> bool:
        """A forward of the head for each level of a tree, or for all of it."""
        return True

    def at_times(self) -> None:
        """See `Drafter`."""
        self.remembers = _REMEMBERED

    def fit(self, *, trees: bool, rule: Rule | None) -> None:
        """Trees of point masses or chains of drawn tokens, as the rule wants it."""
        self.trees = trees and (rule is None or rule.draws is not Draws.ONE)
        self.draws = Draws.POINT if self.trees else Draws.ONE


class HeadProposer(Proposer):
    """One sequence's drafts by a head.

    Args:
        drafter: Has the head.
        law: The request's.
        source: The request's.
    """

    def __init__(self, drafter: HeadDrafter, law: Law, source: RandomSource) -> None:
        self._law, self._source, self._reweigh = law, source, drafter.reweigh
        self._head, self._vocab_size = drafter.head, drafter.target.vocab_size
        self._remembers = drafter.remembers
        self._features: Features | None = None

    def attach(self, cache: KVCache) -> None:
        """Have the target keep what the head reads."""
        self._features = cache.keep_features(self._head.feature_layers, self._remembers)

    def _take_features(self) -> tuple[int, Tensor | None]:
        """See `Features.take`."""
        assert self._features is not None
        return self._features.take()

    def _likeliest_tokens(self, logits: Tensor, position: int, width: int) -> tuple[list[list[int]], list[list[float]]]:
        """`likeliest_tokens` of `logits` `[n, V_draft]` at a position of the text."""
        return likeliest_tokens(logits, self._law, self._source.at(position), self._head.draft_ids, width)

    def _law_of(self, logits: Tensor, history: Sequence[int]) -> Tensor | None:
        """The head's law `[V]` after `history`, of `logits` `[1, V_draft]`; `None` if it can draft nothing there."""
        ids = self._head.draft_ids
        if ids is not None:
            logits = logits.new_full((1, self._vocab_size), -math.inf).index_copy_(1, ids, logits)
        return law_after(history, logits, self._law)

    def _chain(self, history: Sequence[int], budget: int, source: RandomSource) -> DrawnChain:
        """A chain that is to be drawn after `history` from the head's laws."""
        return DrawnChain(history, self._law_of, self._law, source, budget, reweigh=self._reweigh)


def require_features(target: Backend, drafter: str) -> None:
    """Raise `UnsupportedError` unless the target hands out what its layers compute."""
    if not target.capabilities.features:
        raise UnsupportedError(
            f"Drafter '{drafter}' needs what the target's layers compute, which backend '{target.name}' does not hand "
            f"out for this model. {USE_INSTEAD}"
        )


def temperature_of(law: Law) -> float:
    """By which logits are divided before tokens are ranked; 1 where it makes no difference or is not known."""
    return 1.0 if law.greedy else float(getattr(law, "temperature", 1.0))


def likeliest_tokens(
    logits: Tensor, law: Law, source: RandomSource, ids: Tensor | None, width: int
) -> tuple[list[list[int]], list[list[float]]]:
    """The tokens to draft after each state, and the chance of each.

    Where the target will draw with noise keyed by position, tokens are ranked with that noise, and chances are those of
    coming out on top.

    Args:
        logits: `[n, V_draft]`, of tokens that all stand at one position.
        law: The request's, for its temperature.
        source: The request's, at that position.
        ids: `[V_draft]` the target's ids of these columns; `None` if they are all.
        width: Most tokens a row.
    """
    values = logits / temperature_of(law)
    width = min(width, values.shape[1])
    if isinstance(source, KeyedSource) and not law.greedy:
        every = ids if ids is not None else torch.arange(values.shape[1], device=values.device)
        best, columns = _largest(values + source.noise(every), width)
        chances = torch.softmax(best, dim=-1)
    else:
        best, columns = _largest(torch.log_softmax(values, dim=-1), width)
        chances = best.exp()
    named = columns if ids is None else ids[columns]
    return named.tolist(), chances.tolist()


def _largest(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest numbers of each row and where they stand, `[n, count]`."""
    if rows.device.type != "cpu":
        best = rows.topk(count, dim=-1)
        return best.values, best.indices
    from foredraft.ranking_kernels import largest  # numba takes a while, and not all need it

    columns, values = largest(rows.contiguous().numpy(), count)
    return torch.from_numpy(values), torch.from_numpy(columns)
