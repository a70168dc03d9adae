"""The compiled part of `recycling`: the likeliest tokens of each row of logits in one pass, and drafts from the table.

Loops over the elements of a slice, counted from 0, become vector instructions; most others do not.
"""

from __future__ import annotations

from math import log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foredraft.compiled import entry, inner

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Nodes = Any
"""Rows of `proposers.base.OFFER`."""

BINS = 8  # of the probability that the target gave a candidate, each half of the one before
_PRIOR_TRIES = 4.0  # how many tries the target's own probability is worth before acceptances are seen
_BLOCK = 64  # logits that are compared at once with the least of the likeliest so far
_PIECE, _STRIDE = 32, 256  # so many logits of so many stand for all when probabilities are added up


@inner
def _exp(x: np.float32) -> np.float32:
    """Of x <= 0, to 3 %, which is enough to rank by: the bits of a float are nearly linear in its logarithm.

    Schraudolph 1999, A Fast, Compact Approximation of the Exponential Function.
    """
    bits = np.int32(max(x, np.float32(-80)) * np.float32(12102203.2) + np.float32(1064866805))
    return bits.view(np.float32)  # type: ignore[no-any-return]


@inner
def _higher(block: Floats, least: np.float32) -> int:
    count = 0
    for i in range(len(block)):
        count += np.int32(block[i] > least)
    return count


@inner
def _mass(block: Floats, highest: np.float32) -> Any:
    total = np.float32(0)
    for i in range(len(block)):
        total += _exp(block[i] - highest)
    return total


@entry
def likeliest(logits: Floats, count: int) -> tuple[NDArray[np.int32], Floats]:
    """Ids and probabilities `[n, count]` of the largest logits of `[n, V]`, the largest first; of equals the first.

    What all the others hold together is estimated from an eighth of them, to about 8 %.
    """
    rows, vocabulary = logits.shape
    ids = np.zeros((rows, count), dtype=np.int32)
    shares = np.empty((rows, count), dtype=np.float32)
    best = np.empty(count, dtype=np.float32)
    for row in range(rows):
        line, best[:] = logits[row], -np.inf
        for start in range(0, vocabulary, _BLOCK):
            block = line[start : start + _BLOCK]
            if _higher(block, best[count - 1]):
                for i in range(len(block)):
                    at = count
                    while at > 0 and block[i] > best[at - 1]:
                        at -= 1
                        if at + 1 < count:
                            best[at + 1], ids[row, at + 1] = best[at], ids[row, at]
                    if at < count:
                        best[at], ids[row, at] = block[i], start + i
        others, top, seen = np.float32(0), np.float32(0), 0
        for start in range(0, vocabulary, _STRIDE):
            piece = line[start : start + _PIECE]
            others += _mass(piece, best[0])
            seen += len(piece)
        for at in range(count):
            shares[row, at] = _exp(best[at] - best[0])
            top += shares[row, at]
            if ids[row, at] % _STRIDE < _PIECE:
                others -= shares[row, at]
        shares[row] /= top + np.float32(vocabulary / seen) * max(others, np.float32(0))
    return ids, shares


@inner
def _bin(likelihood: float) -> int:
    """Bin 0 holds likelihoods above 1/2, bin 1 those above 1/4, and so on."""
    return min(int(-log2(max(likelihood, 1e-9))), BINS - 1)


@inner
def _insert(nodes: Nodes, size: int, token: int, parent: int, score: float) -> int:
    """Put a node behind all that are as likely; a full list loses its last, or takes none. Returns the list's size."""
    if size == len(nodes):
        if nodes[size - 1].score >= score:
            return size
        size -= 1
    row = size
    while row > 0 and nodes[row - 1].score < score:
        nodes[row] = nodes[row - 1]
        row -= 1
    nodes[row].token, nodes[row].parent, nodes[row].score = token, parent, score
    return size + 1


@entry
def grow(candidates: Ints, likelihoods: Floats, hits: Floats, tries: Floats, root: int, nodes: Nodes) -> int:
    """Fill `nodes` with the likeliest of the tree that the table `[V, 8]` spans, as far as it goes; returns how many.

    A candidate is as likely as its like, by rank and bin, have come true. The list holds what is drafted, up to `at`,
    and then what may be: a child is never likelier than its parent.
    """
    token, score, size = root, 1.0, 0
    for at in range(len(nodes)):
        for rank in range(candidates.shape[1]):
            if candidates[token, rank] < 0:
                break
            likelihood = likelihoods[token, rank]
            of = _bin(likelihood)
            rate = (hits[rank, of] + likelihood * _PRIOR_TRIES) / (tries[rank, of] + _PRIOR_TRIES)
            size = _insert(nodes, size, candidates[token, rank], at - 1, score * rate)
        if at == size:
            break
        token, score = nodes[at].token, nodes[at].score
    return size


@entry
def learn(
    candidates: Ints, likelihoods: Floats, hits: Floats, tries: Floats,
    tokens: Ints, path: Ints, successors: Ints, ids: Ints, shares: Floats,
) -> None:  # fmt: skip
    """Count which candidates came true on the way, and take up the likeliest after every row.

    `tokens` `[N+1]` are the root and the nodes, `path` the accepted nodes, `successors` what was emitted. Where a token
    stands twice, the accepted row is kept.
    """
    for step in range(min(len(path) + 1, len(successors))):
        token = tokens[path[step - 1] + 1] if step else tokens[0]
        if candidates[token, 0] >= 0:
            for rank in range(candidates.shape[1]):
                of = _bin(likelihoods[token, rank])
                tries[rank, of] += 1
                hits[rank, of] += candidates[token, rank] == successors[step]
    for row in range(len(tokens)):
        _write(candidates[tokens[row]], likelihoods[tokens[row]], ids[row], shares[row])
    _write(candidates[tokens[0]], likelihoods[tokens[0]], ids[0], shares[0])
    for node in path:
        _write(candidates[tokens[node + 1]], likelihoods[tokens[node + 1]], ids[node + 1], shares[node + 1])


@inner
def _write(candidates: Ints, likelihoods: Floats, ids: Ints, shares: Floats) -> None:
    for rank in range(len(ids)):
        candidates[rank], likelihoods[rank] = ids[rank], shares[rank]
