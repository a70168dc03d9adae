"""Lookahead decoding: the target's own guesses several tokens ahead, refined in the same forwards that verify."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.checks import is_integer, require
from foredraft.proposers.base import Drafter, Proposer, Verification
from foredraft.randomness import RandomSource
from foredraft.sampling import Law, argmax
from foredraft.tree import paths
from foredraft.types import Draft, Verdict

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class LookaheadSettings:
    """The paper's W, N and G.

    Args:
        window: W, columns of the Jacobi window: how many tokens ahead are guessed.
        ngram: N, length of the n-grams that the guesses make up, root token included.
        candidates: G, most n-grams kept and verified for one root token.

    Raises:
        InvalidInputError: A number is out of range.
    """

    window: int = 5
    ngram: int = 4
    candidates: int = 5

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("ngram", 2), ("candidates", 1)):
            value = getattr(self, name)
            require(f"{name} of lookahead", value, is_integer(value) and value >= least, f"an integer >= {least}")


class Lookahead(Drafter):
    """Jacobi window and n-gram pool (Fu et al. 2024, arXiv 2402.02057), both as branches of one draft.

    The window's first row is a chain of guesses below the root; below each of them hangs its column, the guess of the
    next round and of those after it. The target's argmax after a column's end extends it; a full column is an n-gram
    for the pool. N-grams that begin with the root are verified beside the window.
    """

    name = usage = "lookahead"
    trees = True
    draft_tokens = 24
    when_nothing_is_accepted = "the guesses do not settle: a larger window or another drafter may fit this text better"

    def __init__(self, settings: LookaheadSettings | None = None) -> None:
        self.settings = settings or LookaheadSettings()

    def proposer(self, law: Law, source: RandomSource) -> LookaheadProposer:
        """A proposer with an empty window and pool."""
        return LookaheadProposer(self.settings)


class LookaheadProposer(Proposer):
    """One sequence's window and pool."""

    def __init__(self, settings: LookaheadSettings) -> None:
        self._settings = settings
        self._rows: list[list[int]] = []  # the window, oldest row first; all rows have the window's width
        self._pool: defaultdict[int, OrderedDict[Tokens, None]] = defaultdict(OrderedDict)
        self._columns: list[Tokens] = []  # path below the root of each column's end in the draft at hand

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """N-grams of the pool first, newest first, and as much of the window as the budget leaves room for."""
        if not self._rows:
            self._rows = [self._first_row(tokens)]
        tree = _PathTree(budget)
        for tail in reversed(self._pool[tokens[-1]]):
            tree.add(tail)
        self._columns = []
        for column in range(self._settings.window):
            first = tuple(self._rows[0][: column + 1])
            path = (*first, *(row[column] for row in self._rows[1:]))
            if not tree.add(path):
                break
            self._columns.append(path)
        return tree.draft()

    def observe(self, verification: Verification, verdict: Verdict) -> None:
        """Extend every column by the target's argmax after it, and pool the n-grams that became whole."""
        rows = {path: row for row, path in enumerate([(), *paths(verification.draft)])}
        best = argmax(verification.logits).tolist()
        guesses = [best[rows[path]] if path in rows else path[-1] for path in self._columns]
        if not guesses:
            return
        guesses += self._rows[-1][len(guesses) :]  # columns that the budget left out stay as they were
        self._rows.append(guesses)
        if len(self._rows) == self._settings.ngram:
            for column in range(self._settings.window):
                root, *tail = (row[column] for row in self._rows)
                self._keep(root, tuple(tail))
            self._rows.pop(0)

    def _keep(self, root: int, tail: Tokens) -> None:
        known = self._pool[root]
        known.pop(tail, None)
        known[tail] = None
        if len(known) > self._settings.candidates:
            known.popitem(last=False)

    def _first_row(self, tokens: Sequence[int]) -> list[int]:
        """Anything may begin the window; the prompt's last tokens are at least of the text's kind."""
        width = self._settings.window
        return (list(tokens[-width:]) * width)[:width]


class _PathTree:
    """Paths merged by prefix into a draft of at most `budget` nodes."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._nodes: dict[Tokens, int] = {}

    def add(self, path: Tokens) -> bool:
        """Add a path whole, or not at all if the budget does not allow it."""
        fresh = [path[:end] for end in range(1, len(path) + 1) if path[:end] not in self._nodes]
        if len(self._nodes) + len(fresh) > self._budget:
            return False
        for prefix in fresh:
            self._nodes[prefix] = len(self._nodes)
        return True

    def draft(self) -> Draft:
        """The tree, in the order in which the nodes were added."""
        tokens = tuple(path[-1] for path in self._nodes)
        parents = tuple(self._nodes[path[:-1]] if len(path) > 1 else -1 for path in self._nodes)
        return Draft(tokens, parents)
