"""Chains that are drawn token by token from what a model says of each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from foredraft.errors import InvalidInputError
from foredraft.randomness import RandomSource
from foredraft.sampling import Law, finite_argmax
from foredraft.types import Draft


class DrawnChain:
    """A chain that grows, with the law that each token was drawn from (greedy requests: point masses).

    Whether there is a token never depends on a draw: to drop one that was drawn would bend the output.

    Args:
        history: All tokens before it.
        law_of: From the drafter's logits `[1, V_draft]` after a text to its law `[V]` there; `None` if it can draft
            nothing.
        law: The request's.
        source: Draws are those of its positions.
        budget: Tokens, at most.
        ends: Tokens after which there are none.
        reweigh: See `Drafter`.
    """

    def __init__(
        self,
        history: Sequence[int],
        law_of: Callable[[Tensor, Sequence[int]], Tensor | None],
        law: Law,
        source: RandomSource,
        budget: int,
        ends: Collection[int] = (),
        reweigh: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._history, self._law_of, self._law, self._source = list(history), law_of, law, source
        self._budget, self._ends, self._reweigh = budget, ends, reweigh
        self._q: list[Tensor] = []
        self.open = budget > 0
        """Whether a further token may come."""
        self.tokens: list[int] = []
        self.rows: list[Tensor] = []
        """The drafter's law before each token; what was drawn from is what `reweigh` makes of it."""

    def take(self, logits: Tensor) -> None:
        """Draw a token, of logits `[1, V_draft]` after what is there."""
        row = self._law_of(logits, self._history)
        if row is None:
            self.open = False
            return
        if self._law.greedy:
            x = finite_argmax(row)
        else:
            q = self._reweigh(row) if self._reweigh is not None else row
            x = self._source.at(len(self._history)).draw(q)
            self._q.append(q)
        self._history.append(x)
        self.tokens.append(x)
        self.rows.append(row)
        self.open = len(self.tokens) < self._budget and x not in self._ends

    def draft(self) -> Draft:
        """What was drawn."""
        return Draft.chain(self.tokens, self._q)


def law_after(history: Sequence[int], logits: Tensor, law: Law) -> Tensor | None:
    """A request's law `[V]` after `history` of a drafter's logits `[1, V]`; `None` if nothing has mass."""
    try:
        q = law(history, Draft(), logits)[0]
    except InvalidInputError:  # bad words or a grammar leave nothing here; of the target they may leave more
        return None
    nothing = -torch.inf if law.greedy else 0.0
    return q if q.amax() > nothing else None  # a caller's own law may make NaN of nothing
