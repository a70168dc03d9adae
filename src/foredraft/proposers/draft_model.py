"""A smaller model of the same vocabulary drafts a chain, one forward a token."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from foredraft.acceptance import Draws
from foredraft.backends.base import Backend, Query
from foredraft.errors import UnsupportedError
from foredraft.proposers.base import Drafter, Proposer, Verification
from foredraft.randomness import RandomSource
from foredraft.sampling import Law
from foredraft.types import Draft, Verdict

_LONGEST_CATCH_UP = 16  # tokens that join the scoring forward instead of a prefill of their own


class DraftModel(Drafter):
    """Drafts with a second model (Leviathan et al. 2023, arXiv 2211.17192).

    Args:
        backend: The draft model; its ids must mean what the target's mean (`refuse_other_vocabulary`).
        vocab_size: The target's; ids that only the draft model has are never drawn, ids it lacks get q = 0.
        stop_tokens: Drafting ends after one of these.
    """

    name = "draft"
    draws = Draws.ONE
    draft_tokens = 4
    when_nothing_is_accepted = "the draft model may be broken, or made for another chat template or kind of text"

    def __init__(self, backend: Backend, vocab_size: int, stop_tokens: Collection[int] = ()) -> None:
        self.backend = backend
        self.vocab_size = vocab_size
        self.stop_tokens = frozenset(stop_tokens)

    def proposer(self, law: Law, source: RandomSource) -> DraftModelProposer:
        """A proposer with an empty KV cache, which samples as the request does."""
        return DraftModelProposer(self, law, source)


class DraftModelProposer(Proposer):
    """One sequence's drafts: its own KV cache, kept in step with the target's."""

    def __init__(self, drafter: DraftModel, law: Law, source: RandomSource) -> None:
        self._backend = drafter.backend
        self._vocab_size = drafter.vocab_size
        self._stop_tokens = drafter.stop_tokens
        self._law = law
        self._source = source
        self._cache = self._backend.new_cache()

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """A chain drawn from the draft model's own law, with that law as q (greedy requests: a point mass)."""
        if self._backend.context is not None:
            budget = min(budget, self._backend.context - len(tokens))
        if budget < 1:
            return Draft()
        history = list(tokens)
        drafted: list[int] = []
        rows: list[torch.Tensor] = []
        unseen = self._catch_up(tokens)
        while True:
            q = self._law(history, Draft(), self._score(unseen))[0]
            x = int(q.argmax()) if self._law.greedy else self._source.at(len(history)).draw(q)
            drafted.append(x)
            rows.append(q)
            if len(drafted) == budget or x in self._stop_tokens:
                break
            history.append(x)
            unseen = [x]
        return Draft.chain(drafted, () if self._law.greedy else rows)

    def observe(self, verification: Verification, verdict: Verdict) -> None:
        """Forget the rejected end of the draft. Its last token was never fed to the draft model."""
        rejected = len(verification.draft) - len(verdict.path)
        if rejected > 1:
            self._backend.truncate(self._cache, self._cache.length - (rejected - 1))

    def _catch_up(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that the draft model has not seen, after a prefill if they are many."""
        unseen = list(tokens[self._cache.length :])
        if len(unseen) > _LONGEST_CATCH_UP:
            self._backend.prefill(self._cache, unseen[:-1])
            unseen = unseen[-1:]
        return unseen

    def _score(self, unseen: Sequence[int]) -> torch.Tensor:
        """Feed tokens that are certain; return the logits `[1, V]` after the last of them."""
        chain = Draft.chain(unseen[1:])
        logits = self._backend.forward([Query(self._cache, unseen[0], chain)])[0]
        self._backend.commit(self._cache, range(len(chain)))
        self.forwards += 1
        missing = self._vocab_size - logits.shape[1]
        return torch.nn.functional.pad(logits[-1:], (0, missing), value=-torch.inf)  # a negative pad cuts


def refuse_other_vocabulary(target: Mapping[str, int], draft: Mapping[str, int], draft_rows: int) -> None:
    """Raise unless every id means the same token to both models. Sizes may differ by padding and by extra tokens.

    Args:
        target: The target's tokens, string to id.
        draft: The draft model's.
        draft_rows: Rows of the draft model's embedding: it must be able to read every id of the target.

    Raises:
        UnsupportedError: The first id that means two things, or the first that the draft model cannot read.
    """
    meaning = {i: token for token, i in draft.items()}
    for token, i in sorted(target.items(), key=lambda item: item[1]):
        if meaning.get(i, token) != token:
            raise UnsupportedError(
                f"The draft model has another vocabulary: id {i} is {token!r} to the target and {meaning[i]!r} to the "
                "draft model. Use a draft model with the target's tokenizer."
            )
        if i >= draft_rows:
            raise UnsupportedError(
                f"The draft model has another vocabulary: it reads ids below {draft_rows}, and id {i} is {token!r} "
                "to the target. Use a draft model with the target's tokenizer."
            )
