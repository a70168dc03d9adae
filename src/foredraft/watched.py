"""A drafter with its rounds noted: when it drafted how much, what was accepted of it, and how long it took."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

from foredraft.backends.base import KVCache
from foredraft.proposers.base import Drafter, Proposer, Verification
from foredraft.randomness import RandomSource
from foredraft.sampling import Law
from foredraft.types import Draft, Verdict


class Round(NamedTuple):
    """A round as the drafter had it: `ranks` are those of the accepted nodes among all of the draft."""

    context: int
    nodes: int
    ranks: tuple[int, ...]
    seconds: float
    """Of drafting and of learning."""


class Watched(Drafter):
    """A drafter, with all its rounds noted."""

    def __init__(self, drafter: Drafter) -> None:
        self.name, self.usage, self.draft_tokens = drafter.name, drafter.usage, drafter.draft_tokens
        self.draws, self.trees = drafter.draws, drafter.trees
        self.when_nothing_is_accepted = drafter.when_nothing_is_accepted
        self.rounds: list[Round] = []
        self._drafter = drafter

    def proposer(self, law: Law, source: RandomSource) -> Proposer:
        """The drafter's own, watched."""
        return _WatchedProposer(self._drafter.proposer(law, source), self.rounds)


class _WatchedProposer(Proposer):
    def __init__(self, proposer: Proposer, rounds: list[Round]) -> None:
        self._proposer, self._rounds = proposer, rounds
        self._seconds, self._context = 0.0, 0

    def attach(self, cache: KVCache) -> None:
        self._proposer.attach(cache)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        started = perf_counter()
        draft = self._proposer.propose(tokens, budget)
        self._seconds, self._context = perf_counter() - started, len(tokens) - 1
        return draft

    def verifying(self, tokens: Sequence[int], draft: Draft) -> None:
        self._proposer.verifying(tokens, draft)

    def close(self) -> None:
        self._proposer.close()

    def observe(self, verification: Verification, verdict: Verdict) -> None:
        started = perf_counter()
        self._proposer.observe(verification, verdict)
        draft, seconds = verification.draft, self._seconds + perf_counter() - started
        ranks = tuple(rank for rank, node in enumerate(likeliest_first(draft)) if node in verdict.path)
        self._rounds.append(Round(self._context, len(draft), ranks, seconds))

    def finish(self, tokens: Sequence[int]) -> None:
        self._proposer.finish(tokens)


def likeliest_first(draft: Draft) -> Sequence[int]:
    """The nodes as a smaller draft would have them; parents stand before their children, which are no likelier."""
    return sorted(range(len(draft)), key=lambda node: -draft.scores[node]) if draft.scores else range(len(draft))
