"""A smaller model drafts a chain, one forward a token; where its vocabulary is another, of the tokens it shares."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from foredraft.acceptance import Draws
from foredraft.backends.base import Backend, Query
from foredraft.proposers.base import Drafter, Proposer, Verification
from foredraft.proposers.drawing import DrawnChain, law_after
from foredraft.proposers.forks import Fork, Outcome, Plan
from foredraft.proposers.growing import Branch, ChainBranch, GrowingTree, ModelFork
from foredraft.proposers.translation import Reading, Translation
from foredraft.randomness import RandomSource
from foredraft.sampling import Law
from foredraft.tree import depths
from foredraft.types import Draft, Verdict

_LONGEST_CATCH_UP = 16  # tokens that join the scoring forward instead of a prefill of their own


class DraftModel(Drafter):
    """Drafts with a second model (Leviathan et al. 2023, arXiv 2211.17192).

    Args:
        backend: The draft model; without a translation its ids must mean what the target's mean.
        vocab_size: The target's; ids that only the draft model has are never drawn, ids it lacks get q = 0.
        stop_tokens: Drafting ends after one of these.
        translation: Between the vocabularies, if they differ: the draft is drawn from the law restricted to the tokens
            that both have, `q' = norm(q restricted)`, and verified with it (TLI, Timor et al. 2025, arXiv 2502.05202).
        device: Where the target's laws are, and so should be the draft's; `None` leaves them where the model is.
    """

    name = "draft"
    usage = "draft:REF"
    draws = Draws.ONE
    draft_tokens = 4
    when_nothing_is_accepted = "the draft model may be broken, or made for another chat template or kind of text"

    def __init__(
        self,
        backend: Backend,
        vocab_size: int,
        stop_tokens: Collection[int] = (),
        translation: Translation | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.backend = backend
        self.device = device
        self.vocab_size = vocab_size
        self.stop_tokens = frozenset(stop_tokens)
        self.translation = translation
        self.forks = translation is None

    def apart(self, threads: int | None) -> None:
        """See `Drafter`."""
        self.backend.apart(threads)

    def proposer(self, law: Law, source: RandomSource) -> DraftModelProposer:
        """A proposer with an empty KV cache, which samples as the request does."""
        if self.translation is not None:
            return TranslatingProposer(self, law, source, self.translation)
        return DraftModelProposer(self, law, source)


class DraftModelProposer(Proposer):
    """One sequence's drafts: its own KV cache, kept in step with the target's."""

    def __init__(self, drafter: DraftModel, law: Law, source: RandomSource) -> None:
        self._backend = drafter.backend
        self._vocab_size = drafter.vocab_size
        self._stop_tokens = drafter.stop_tokens
        self._law = law
        self._source = source
        self._device = drafter.device
        self._reweigh = drafter.reweigh
        self._cache = self._backend.new_cache()
        self._fed: list[int] = []  # drafted tokens in the cache
        self._last: tuple[int, list[int], list[Tensor]] = 0, [], []  # where what was drafted, and the model's laws

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """A chain drawn from the draft model's own law, with that law as q (greedy requests: a point mass)."""
        own = self._own_ids(tokens)
        if self._backend.context is not None:
            budget = min(budget, self._backend.context - len(own))
        if budget < 1 or not own:
            return Draft()
        chain, unseen = self._chain(tokens, budget, self._source), self._catch_up(own)
        while unseen:
            logits = self._score(unseen)
            self._fed = chain.tokens[:]
            chain.take(logits)
            unseen = self._own_ids_of(chain.tokens[-1]) if chain.open else []  # the last is drawn, but not fed
        self._last = len(tokens), chain.tokens, chain.rows
        return chain.draft()

    def _chain(self, history: Sequence[int], budget: int, source: RandomSource) -> DrawnChain:
        """A chain that is to be drawn after `history` from the model's laws."""
        return DrawnChain(history, self._law_of, self._law, source, budget, self._stop_tokens, self._reweigh)

    def fork(self, tokens: Sequence[int], draft: Draft, plan: Plan) -> Fork | None:
        """See `Proposer`. The cache forgets the root and all after it: these the model reads again, as a tree."""
        budget = plan.budget
        if self._backend.context is not None:
            budget = min(budget, self._backend.context - len(tokens) - max(depths(draft)) - 1)
        if budget < 1:
            return None
        self._fed = []
        self._backend.truncate(self._cache, min(self._cache.length, len(tokens) - 1))
        position, drafted, rows = self._last
        own = position == len(tokens) and drafted[: len(draft)] == list(draft.tokens) and draft.is_chain
        known = rows[: len(draft)] if own else []
        tree = GrowingTree(self._backend, self._cache, tokens)

        def grow(outcome: Outcome, history: list[int]) -> Branch:
            source = self._source.below(len(history), history[-1])
            return ChainBranch(outcome, self._chain(history, budget, source))

        def settle(outcome: Outcome | None, branch: Branch | None, places: Sequence[int | None]) -> Draft:
            return self._go_on(tree, tokens, draft, outcome, branch, places)

        return ModelFork(
            tokens,
            draft,
            plan,
            expand=self._counted(tree.expand),
            places=[None] * (1 + len(draft)),
            known=[*known, *[None] * (1 + len(draft) - len(known))],
            ranked=self._law_of,
            source=self._source,
            greedy=self._law.greedy,
            grow=grow,
            settle=settle,
        )

    def _counted(self, expand: Callable[[Sequence[int], Sequence[int]], Tensor]) -> Callable[..., Tensor]:
        def counted(places: Sequence[int], tokens: Sequence[int]) -> Tensor:
            self.forwards += 1
            return expand(places, tokens)

        return counted

    def _go_on(
        self,
        tree: GrowingTree,
        tokens: Sequence[int],
        draft: Draft,
        outcome: Outcome | None,
        branch: Branch | None,
        places: Sequence[int | None],
    ) -> Draft:
        """Keep in the cache what came true of a tree, and what was drafted for that."""
        node, path = outcome.node if outcome is not None else -1, list[int]()
        while node >= 0:
            place = places[node + 1]
            path = [place - 1, *path] if place is not None else []
            node = draft.parents[node]
        if not isinstance(branch, ChainBranch) or not branch.chain.tokens:
            tree.keep(path)
            return Draft()
        tree.keep([*path, *(place - 1 for place in branch.places)])
        self._fed = branch.chain.tokens[: len(branch.places) - 1]
        accepted = depths(draft)[branch.outcome.node + 1]
        self._last = len(tokens) + accepted + 1, branch.chain.tokens, branch.chain.rows
        return branch.draft()

    def observe(self, verification: Verification, verdict: Verdict) -> None:
        """Forget the own tokens that did not come true, whoever's draft was verified."""
        fed, self._fed = self._fed, []
        right, most = 0, min(len(fed), len(verdict.tokens) - 1)  # the last is the next root, which is fed again
        while right < most and fed[right] == verdict.tokens[right]:
            right += 1
        if right < len(fed):
            self._backend.truncate(self._cache, self._cache.length - (len(fed) - right))

    def _own_ids(self, tokens: Sequence[int]) -> Sequence[int]:
        """All tokens so far in the draft model's ids; none if they cannot be read yet."""
        return tokens

    def _own_ids_of(self, token: int) -> list[int]:
        """One drafted token in the draft model's ids; none if it does not have it."""
        return [token]

    def _to_target(self, logits: Tensor) -> Tensor:
        """Logits `[1, V]` of the target's ids: minus infinity for those that the draft model does not have."""
        missing = self._vocab_size - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)  # a negative pad cuts

    def _catch_up(self, own: Sequence[int]) -> list[int]:
        """The tokens that the draft model has not seen, after a prefill if they are many."""
        unseen = list(own[self._cache.length :])
        if len(unseen) > _LONGEST_CATCH_UP:
            self._backend.prefill(self._cache, unseen[:-1])
            unseen = unseen[-1:]
        return unseen

    def _law_of(self, scored: Tensor, history: Sequence[int]) -> Tensor | None:
        """The request's law `[V]` after `history`; `None` if no token of the model has mass."""
        if self._device is not None:
            scored = scored.to(self._device)
        logits = self._to_target(scored)
        if logits.amax() == -torch.inf < scored.amax():  # all its mass is on tokens that the target does not have
            return None
        return law_after(history, logits, self._law)

    def _score(self, unseen: Sequence[int]) -> Tensor:
        """Feed ids that are certain; return the logits `[1, V_draft]` after the last of them."""
        chain = Draft.chain(unseen[1:])
        logits = self._backend.forward([Query(self._cache, unseen[0], chain)])[0]
        self._backend.commit(self._cache, range(len(chain)))
        self.forwards += 1
        return logits[-1:]


class TranslatingProposer(DraftModelProposer):
    """The same for a draft model of another vocabulary, which reads the text in tokens of its own.

    What it has read may turn out to be tokenised otherwise once more text is there, so before each draft the cache is
    rolled back to where it agrees with the text as it is now; that forgets rejected tokens too.
    """

    def __init__(self, drafter: DraftModel, law: Law, source: RandomSource, translation: Translation) -> None:
        super().__init__(drafter, law, source)
        self._translation = translation
        self._reading = Reading(translation)
        self._cached: list[int] = []  # the draft model's ids in its cache
        self._certain = 0  # so many of them were settled when they were fed

    def observe(self, verification: Verification, verdict: Verdict) -> None:
        """Nothing is to do before the next draft."""

    def _own_ids(self, tokens: Sequence[int]) -> Sequence[int]:
        return self._reading.extend(tokens)

    def _own_ids_of(self, token: int) -> list[int]:
        own = self._translation.shared.target_to_draft.get(token)
        return [] if own is None else [own]

    def _to_target(self, logits: Tensor) -> Tensor:
        return self._translation.logits(logits)

    def _catch_up(self, own: Sequence[int]) -> list[int]:
        most = min(len(self._cached), len(own) - 1)  # the last is fed in any case, for its logits
        agreed = min(self._certain, most)
        while agreed < most and self._cached[agreed] == own[agreed]:
            agreed += 1
        self._backend.truncate(self._cache, agreed)
        self._cached = list(own)
        self._certain = len(self._reading.settled)
        return super()._catch_up(own)

    def _score(self, unseen: Sequence[int]) -> Tensor:
        self._cached[self._cache.length :] = unseen
        return super()._score(unseen)
