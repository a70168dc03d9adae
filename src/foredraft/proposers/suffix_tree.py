"""A suffix tree over token sequences: what followed each run of tokens, how often, and how recently."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foredraft.proposers import suffix_kernels as kernels
from foredraft.proposers.suffix_kernels import Arrays, Floats, Ints, Limits

_ROW_BYTES = 4 * (kernels.COLUMNS + 2 + 1)  # a node, its two slots in the table, one token of text
_LEAST_ROWS = 512


class SuffixTree:
    """Counts every run of up to `max_depth` tokens of the sequences it has read (SuffixDecoding, arXiv 2411.04975).

    A sequence is read with `extend`, any number of tokens at a time, each at a cost of O(max_depth), and ended with
    `close`. Memory is at most two nodes of 40 bytes for each token, whatever the depth.

    Args:
        max_depth: Tokens of the longest run.
        most_bytes: Bound of the arrays (while they grow, old and new ones are there together); `None` for no bound.
            A bounded tree is to be fed with `add`, which makes room by forgetting the oldest sequences.
    """

    def __init__(self, max_depth: int, most_bytes: int | None = None) -> None:
        self.max_depth = max_depth
        live = np.zeros((max_depth, 3), dtype=np.int32)
        live[:, kernels.NODE] = kernels.NOBODY
        header = np.zeros(5, dtype=np.int64)
        header[kernels.TOP] = header[kernels.USED] = 1
        fixed = live.nbytes + header.nbytes
        self._most_rows = None if most_bytes is None else (most_bytes - fixed) // _ROW_BYTES
        rows = _LEAST_ROWS if self._most_rows is None else max(1, min(_LEAST_ROWS, self._most_rows))
        self._arrays = Arrays(_zeros(rows, kernels.COLUMNS), _zeros(2 * rows), _zeros(rows), live, header)
        self._lengths: deque[int] = deque()
        self._first = 0  # where the oldest sequence starts in the text

    @property
    def nbytes(self) -> int:
        """Memory of all arrays."""
        return sum(array.nbytes for array in self._arrays)

    @property
    def nodes(self) -> int:
        """Nodes in use, the root among them."""
        return int(self._arrays.header[kernels.USED])

    @property
    def sequences(self) -> list[Ints]:
        """Copies of the closed sequences, the oldest first."""
        ends = np.cumsum([self._first, *self._lengths])
        return [self._arrays.text[start:stop].copy() for start, stop in pairwise(ends)]

    def extend(self, tokens: Sequence[int]) -> None:
        """Read more tokens of the open sequence."""
        if len(tokens):
            self._make_room(len(tokens))
            kernels.extend(self._arrays, np.array(tokens, dtype=np.int32))

    def close(self) -> None:
        """End the open sequence; the next token read begins another one."""
        header = self._arrays.header
        self._lengths.append(int(header[kernels.END] - header[kernels.OPEN]))
        kernels.close(self._arrays)

    def add(self, sequence: Sequence[int]) -> bool:
        """Read a whole sequence, after forgetting as many of the oldest as it takes to stay within the bound.

        Returns whether it was read: one that could be too much for the empty tree is left out.
        """
        if self._most_rows is not None:
            needed = self._worst_case(len(sequence))
            if needed >= self._most_rows:
                return False
            while self.nodes + needed > self._most_rows or self._tokens + len(sequence) > self._most_rows:
                self.forget_oldest()
        self.extend(sequence)
        self.close()
        return True

    def forget_oldest(self) -> None:
        """Take the oldest closed sequence off all counts, as if it had never been read."""
        start = self._first
        self._first += self._lengths.popleft()
        kernels.forget(self._arrays, start, self._first)

    def count(self, tokens: Sequence[int]) -> int:
        """How often a run of 1 to `max_depth` tokens occurs."""
        return int(kernels.count(self._arrays, np.array(tokens, dtype=np.int32)))

    def tail(self, longest: int) -> Ints:
        """At most so many of the last tokens of the open sequence, until more are read."""
        end = int(self._arrays.header[kernels.END])
        return self._arrays.text[max(int(self._arrays.header[kernels.OPEN]), end - longest) : end]

    def propose(
        self, tail: Ints, limits: Limits, nodes: NDArray[Any], costs: Floats, least: float = 0.0
    ) -> tuple[int, float]:
        """The best candidate among those that follow the occurrences of each end of `tail`.

        For every length of a match a tree grows by its likeliest node, up to `factor * length + offset` nodes; the
        best is worth most, and has the longest match of equals. A forward with the first n nodes of a tree emits so
        many times the tokens of a plain one, in as many seconds; for the best n that, less one, is the worth. Where
        nodes cost nothing, it is the sum of all path probabilities. Tokens equally likely stand in the order in which
        their parents do, and of siblings the most recent one first.

        Args:
            tail: `[n]` int32, the last tokens, at most `max_depth`; the open sequence, if there is one, ends in them.
            limits: What a candidate may be.
            nodes: Rows of `proposers.base.OFFER`, as many as the candidate may have nodes: the first ones become these,
                the likeliest first and parents before their children, with their path probabilities.
            costs: `[1 + len(nodes)]` what so many nodes add to the seconds of a forward, in plain ones.
            least: What a candidate must be worth more than.

        Returns how many nodes it has, and what it is worth; no nodes and `least` if there is none.
        """
        given: Any = (*self._arrays, tail, *limits, nodes, costs, least)
        count, total = kernels.propose(*given)
        return int(count), float(total)

    def follow(
        self, tokens: Sequence[int], longest: int, limits: Limits, nodes: NDArray[Any], costs: Floats
    ) -> tuple[int, float]:
        """`extend` and `propose` in one: what may come after the last `longest` tokens of the open sequence."""
        self._make_room(len(tokens))
        given: Any = (*self._arrays, np.array(tokens, dtype=np.int32), longest, *limits, nodes, costs)
        count, total = kernels.follow(*given)
        return int(count), float(total)

    @property
    def _tokens(self) -> int:
        """Tokens of the text that are not forgotten."""
        return int(self._arrays.header[kernels.END]) - self._first

    def _worst_case(self, tokens: int) -> int:
        """Most new nodes for so many tokens: each suffix, those now being read too, adds a leaf and splits an edge."""
        return 2 * (tokens + self.max_depth)

    def _make_room(self, tokens: int) -> None:
        nodes, table, text, live, header = self._arrays
        if header[kernels.END] + tokens > len(text):
            text = self._moved_text(tokens)
        needed = self.nodes + self._worst_case(tokens)
        if needed > len(nodes):
            rows = self._grown(len(nodes), needed)
            nodes, table = np.concatenate([nodes, _zeros(rows - len(nodes), kernels.COLUMNS)]), _zeros(2 * rows)
            kernels.rehash(Arrays(nodes, table, text, live, header))
        if nodes is not self._arrays.nodes or text is not self._arrays.text:
            self._arrays = Arrays(nodes, table, text, live, header)

    def _moved_text(self, tokens: int) -> Ints:
        """The text without what is forgotten, in an array with room for more tokens; nodes are told where it went."""
        nodes, _, text, _, header = self._arrays
        kept = text[self._first : self._first + self._tokens]
        if len(kept) + tokens > len(text):
            text = _zeros(self._grown(len(text), len(kept) + tokens))
        text[: len(kept)] = kept
        nodes[:, kernels.START] -= self._first
        header[[kernels.END, kernels.OPEN]] -= self._first
        self._first = 0
        return text

    def _grown(self, size: int, needed: int) -> int:
        """A size with room to grow further, within the bound."""
        size = max(needed, size + size // 2)
        return size if self._most_rows is None else min(size, self._most_rows)


def _zeros(*shape: int) -> Ints:
    return np.zeros(shape, dtype=np.int32)
