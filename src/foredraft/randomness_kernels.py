"""The compiled part of `randomness`: the noise of a whole vocabulary and the largest weight over it, in one pass."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foredraft.compiled import entry, inner

Floats = NDArray[np.float64]

_BLOCK = 256  # tokens whose noise is made at once
NEARLY = 1.0 - 1e-9  # rounding must not rule a token out
_LEAST = 1e-300  # of the noise, where the uniform number was rounded to 1


@inner
def uniform_of(key: np.uint64, token: int) -> Any:
    """The uniform number of a token; see `randomness.exponential`."""
    bits = key + np.uint64(token) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return (np.float64(bits >> np.uint64(11)) + 0.5) * 2.0**-53


@inner
def noised(weight: float, uniform: float) -> Any:
    """The weight over the exponential noise that is made of a uniform number."""
    return weight / max(-math.log(uniform), _LEAST)


@entry
def largest(weights: Floats, key: np.uint64) -> int:
    """The token of the largest weight over exponential noise, the first of several; see `randomness.exponential`.

    `-log(u)` is no less than `1 - u`, so most tokens are ruled out without a logarithm.

    Args:
        weights: `[V]`, none negative.
        key: 64 bits made of seed and position.
    """
    uniform = np.empty(_BLOCK, dtype=np.float64)
    best, at = 0.0, 0
    for start in range(0, len(weights), _BLOCK):
        block = weights[start : start + _BLOCK]
        for i in range(len(block)):
            uniform[i] = uniform_of(key, start + i)
        possible = 0
        for i in range(len(block)):
            possible += np.int32(block[i] > best * (1.0 - uniform[i]) * NEARLY)
        if possible:
            for i in range(len(block)):
                if block[i] > best * (1.0 - uniform[i]) * NEARLY:
                    score = noised(block[i], uniform[i])
                    if score > best:
                        best, at = score, start + i
    return at
