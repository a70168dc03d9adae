"""The target's own first layers draft, with its final norm and head; what they compute is not computed again."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from foredraft.acceptance import Draws
from foredraft.backends.base import Backend, KVCache, Query
from foredraft.errors import InvalidInputError
from foredraft.proposers.base import Drafter, Proposer
from foredraft.proposers.drawing import DrawnChain
from foredraft.randomness import RandomSource
from foredraft.sampling import Law
from foredraft.types import Draft


class EarlyExit(Drafter):
    """Drafts a chain with the first layers of the target (LayerSkip, Elhoushi et al. 2024, arXiv 2404.16710).

    Drafting writes the first layers' rows of the target's own KV cache and keeps their hidden states; verification runs
    the other layers on them. Targets that were not trained for early exits agree with theirs only late.

    Args:
        target: The backend of the target.
        layers: How many of its layers draft.
        stop_tokens: Drafting ends after one of these.

    Raises:
        UnsupportedError: The backend cannot stop between layers, or not with this model; the message says which can.
        InvalidInputError: The model does not have more layers than that.
    """

    name = "early_exit"
    usage = "early_exit:L"
    draws = Draws.ONE
    draft_tokens = 3
    when_nothing_is_accepted = "the model was not trained for early exits: try more layers"

    def __init__(self, target: Backend, layers: int, stop_tokens: Collection[int] = ()) -> None:
        target.refuse_early_exit(layers)
        self.target = target
        self.layers = layers
        self.stop_tokens = frozenset(stop_tokens)

    @classmethod
    def for_target(cls, target: Backend, argument: str = "") -> EarlyExit:
        """With as many layers as the argument says."""
        if not argument.isdecimal():
            raise InvalidInputError(f"Drafter 'early_exit:{argument}' must be early_exit:L with a number of layers L.")
        return cls(target, int(argument), target.stop_tokens)

    def proposer(self, law: Law, source: RandomSource) -> EarlyExitProposer:
        """A proposer that samples as the request does. It needs the sequence's cache (`attach`)."""
        return EarlyExitProposer(self, law, source)


class EarlyExitProposer(Proposer):
    """One sequence's drafts, made in the target's own cache."""

    def __init__(self, drafter: EarlyExit, law: Law, source: RandomSource) -> None:
        self._drafter = drafter
        self._law = law
        self._source = source
        self._cache: KVCache | None = None

    def attach(self, cache: KVCache) -> None:
        """Take the target's cache."""
        self._cache = cache

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """A chain drawn from the early exit's own law, with that law as q (greedy requests: a point mass)."""
        assert self._cache is not None
        chain = DrawnChain(tokens, self._law_of, self._law, self._source, budget, self._drafter.stop_tokens)
        while chain.open:
            query = Query(self._cache, tokens[-1], Draft.chain(chain.tokens))
            logits = self._drafter.target.early_logits(query, self._drafter.layers)
            self.forwards += 1
            chain.take(logits)
        return chain.draft()

    def _law_of(self, logits: Tensor, history: Sequence[int]) -> Tensor:
        return self._law(history, Draft(), logits)[0]
