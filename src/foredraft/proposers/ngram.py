"""Prompt lookup: what followed the same few tokens last time may follow them now."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.proposers.base import Drafter, Proposer
from foredraft.proposers.forks import Fork, PeekFork, Plan
from foredraft.randomness import RandomSource
from foredraft.sampling import Law
from foredraft.types import Draft

LONGEST, SHORTEST = 4, 2  # tokens of a match; single tokens recur too often to mean anything


class NGram(Drafter):
    """Copies the continuation of the longest recent match in prompt and output (Saxena 2023, prompt lookup)."""

    name = usage = "ngram"
    draft_tokens = 7
    forks = True
    when_nothing_is_accepted = "the answer does not repeat anything from its prompt or from itself"

    def proposer(self, law: Law, source: RandomSource) -> NGramProposer:
        """A proposer with an empty index; it needs neither the law nor randomness."""
        return NGramProposer()


class NGramProposer(Proposer):
    """An index from every short run of tokens to where its newest occurrence went on."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The tokens that followed the newest occurrence of the longest end of `tokens` seen before."""
        self._index(tokens)
        return self.peek(tokens, budget)

    def peek(self, tokens: Sequence[int], budget: int) -> Draft:
        """The same out of what is in the index already."""
        for length in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
            start = self._next.get(tuple(tokens[-length:]))
            if start is not None:
                return Draft.chain(_copy(tokens, start, budget))
        return Draft()

    def fork(self, tokens: Sequence[int], draft: Draft, plan: Plan) -> Fork:
        """See `Proposer`."""
        return PeekFork(self, tokens, draft, plan)

    def _index(self, tokens: Sequence[int]) -> None:
        """Note for each new position which runs end before it; the end of `tokens` itself has no continuation yet."""
        for position in range(self._indexed, len(tokens)):
            for length in range(SHORTEST, min(LONGEST, position) + 1):
                self._next[tuple(tokens[position - length : position])] = position
        self._indexed = len(tokens)


def _copy(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """`count` tokens from `start` on, reading on into the copy itself: a short period is continued."""
    copied: list[int] = []
    for position in range(start, start + count):
        copied.append(tokens[position] if position < len(tokens) else copied[position - len(tokens)])
    return copied
