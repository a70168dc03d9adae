"""The compiled part of `recycling`: the likeliest tokens of each row of logits, in one pass over it.

Loops over the elements of a slice, counted from 0, become vector instructions; most others do not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foredraft.proposers.suffix_kernels import _compiled, entry

Floats = NDArray[np.float32]

_BLOCK = 256  # logits that are compared at once with the least of the likeliest so far
_SAMPLED = 4  # one block of so many stands for all when probabilities are added up


@_compiled
def _exp(x: np.float32) -> np.float32:
    """Of x <= 0, to 3 %, which is enough to rank by: the bits of a float are nearly linear in its logarithm.

    Schraudolph 1999, A Fast, Compact Approximation of the Exponential Function.
    """
    bits = np.int32(max(x, np.float32(-80)) * np.float32(12102203.2) + np.float32(1064866805))
    return bits.view(np.float32)  # type: ignore[no-any-return]


@_compiled
def _higher(block: Floats, least: np.float32) -> int:
    count = 0
    for i in range(len(block)):
        count += np.int32(block[i] > least)
    return count


@_compiled
def _mass(block: Floats, highest: np.float32) -> Any:
    total = np.float32(0)
    for i in range(len(block)):
        total += _exp(block[i] - highest)
    return total


@entry
def likeliest(logits: Floats, count: int) -> tuple[NDArray[np.int32], Floats]:
    """Ids and probabilities `[n, count]` of the largest logits of `[n, V]`, the largest first; of equals the first.

    What all the others hold together is estimated from every fourth block of them.
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
        others, top = np.float32(0), np.float32(0)
        for start in range(0, vocabulary, _SAMPLED * _BLOCK):
            others += _mass(line[start : start + _BLOCK], best[0])
        for at in range(count):
            shares[row, at] = _exp(best[at] - best[0])
            top += shares[row, at]
            if ids[row, at] // _BLOCK % _SAMPLED == 0:
                others -= shares[row, at]
        shares[row] /= top + _SAMPLED * max(others, np.float32(0))
    return ids, shares
