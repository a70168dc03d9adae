"""Prompt lookup: what followed the same few tokens last time may follow them now."""

from __future__ import annotations

import re
from collections.abc import Sequence

from foredraft.backends.base import Backend
from foredraft.checks import is_integer, require
from foredraft.errors import InvalidInputError
from foredraft.proposers.base import Drafter, Proposer
from foredraft.proposers.forks import Fork, PeekFork, Plan
from foredraft.randomness import RandomSource
from foredraft.sampling import Law
from foredraft.types import Draft

LONGEST, SHORTEST = 4, 2  # tokens of a match; single tokens recur too often to mean anything
MOST = 64
"""Most tokens of a match: each length up to the longest is indexed."""
_LENGTHS = re.compile(r"(\d{1,9})-(\d{1,9})")


class NGram(Drafter):
    """Copies the continuation of the longest recent match in prompt and output (Saxena 2023, prompt lookup).

    Args:
        shortest: Tokens that must match at least.
        longest: Tokens that are looked up at most.

    Raises:
        InvalidInputError: The lengths are out of range, or the wrong way round.
    """

    name = "ngram"
    usage = "ngram[:MIN-MAX]"
    draft_tokens = 7
    forks = True
    when_nothing_is_accepted = "the answer does not repeat anything from its prompt or from itself"

    def __init__(self, shortest: int = SHORTEST, longest: int = LONGEST) -> None:
        require("longest", longest, is_integer(longest) and 1 <= longest <= MOST, f"an integer in [1, {MOST}]")
        good = is_integer(shortest) and 1 <= shortest <= longest
        require("shortest", shortest, good, f"an integer in [1, longest = {longest}]")
        self.shortest, self.longest = shortest, longest

    @classmethod
    def check_argument(cls, argument: str) -> None:
        """See `Drafter`."""
        cls.parse(argument)

    @classmethod
    def parse(cls, argument: str) -> NGram:
        """With the lengths of matches that the argument says, `MIN-MAX`."""
        if not argument:
            return cls()
        lengths = _LENGTHS.fullmatch(argument)
        if lengths is None:
            raise InvalidInputError(f"Drafter 'ngram:{argument}' must be ngram:MIN-MAX, tokens of a match: ngram:2-4.")
        return cls(int(lengths[1]), int(lengths[2]))

    @classmethod
    def for_target(cls, target: Backend, argument: str = "") -> NGram:
        """See `parse`: it needs nothing of the target."""
        return cls.parse(argument)

    def proposer(self, law: Law, source: RandomSource) -> NGramProposer:
        """A proposer with an empty index; it needs neither the law nor randomness."""
        return NGramProposer(self.shortest, self.longest)


class NGramProposer(Proposer):
    """An index from every short run of tokens to where its newest occurrence went on."""

    def __init__(self, shortest: int = SHORTEST, longest: int = LONGEST) -> None:
        self._shortest, self._longest = shortest, longest
        self._next: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The tokens that followed the newest occurrence of the longest end of `tokens` seen before."""
        self._index(tokens)
        return self.peek(tokens, budget)

    def peek(self, tokens: Sequence[int], budget: int) -> Draft:
        """The same out of what is in the index already."""
        for length in range(min(self._longest, len(tokens) - 1), self._shortest - 1, -1):
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
            for length in range(self._shortest, min(self._longest, position) + 1):
                self._next[tuple(tokens[position - length : position])] = position
        self._indexed = len(tokens)


def _copy(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """`count` tokens from `start` on, reading on into the copy itself: a short period is continued."""
    copied: list[int] = []
    for position in range(start, start + count):
        copied.append(tokens[position] if position < len(tokens) else copied[position - len(tokens)])
    return copied
