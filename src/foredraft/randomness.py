"""The coins and draws of one request. Rules and drafters know no other chance, so a proof can replay every branch."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class RandomSource(Protocol):
    """Where chance comes from."""

    def at(self, position: int) -> RandomSource:
        """The source for drafting or verifying at `position`, the index of the next token in the whole sequence."""
        ...

    def below(self, position: int, root: int) -> RandomSource:
        """The source for drafting below token `root` at `position`, which a drafter may use from a thread of its own.

        Its draws are independent of this one's, unless noise is keyed by position: then they are the very same. For
        the same root at the same position it draws the same, whenever it is asked for.
        """
        ...

    def coin(self, probability: float) -> bool:
        """True with `probability`; 0 never and 1 always, exactly."""
        ...

    def draw(self, weights: Tensor, depth: int = 0) -> int:
        """An index drawn in proportion to `weights`, `[V]`, non-negative with a positive sum; never one of weight 0.

        `depth` counts positions from the source's own: sources keyed by position draw a token of the same position
        with the same noise, whoever asks.
        """
        ...


class TorchSource:
    """Fresh uniform numbers from a torch generator, or from torch's global one when none is given.

    They are float64 and are inverted through the cumulative weights, so the draws depend on the generator and the
    weights alone, not on the device the weights live on.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self._generator = generator
        self._device = generator.device if generator is not None else torch.device("cpu")
        self._drafting: int | None = None  # the key of all draws below a root

    def at(self, position: int) -> TorchSource:
        """Itself: fresh numbers do not depend on the position."""
        return self

    def below(self, position: int, root: int) -> DraftSource:
        """Noise keyed by a number that is drawn from the generator once, by position and by root. Has no state."""
        if self._drafting is None:
            self._drafting = int(self._uniform() * 2**53)
        return DraftSource(_key(_key(self._drafting, position), root))

    def coin(self, probability: float) -> bool:
        """See `RandomSource`."""
        return self._uniform() < probability

    def draw(self, weights: Tensor, depth: int = 0) -> int:
        """See `RandomSource`."""
        cumulative = weights.double().cumsum(0)
        # The first index whose cumulative weight exceeds the point: its own weight cannot be 0.
        point = cumulative[-1] * self._uniform()
        index = int(torch.searchsorted(cumulative, point, right=True))
        while index < len(weights) and weights[index] == 0:  # but a GPU's parallel sums rise by a rounding there
            index += 1
        return index if index < len(weights) else int(weights.nonzero()[-1])  # u * total can round up to total

    def _uniform(self) -> float:
        return torch.rand((), dtype=torch.float64, generator=self._generator, device=self._device).item()


class KeyedSource:
    """Noise that is a function of seed, position and token id, whoever asks and whatever was asked before.

    A draw is `argmax(log weights + Gumbel noise)`, which follows the weights. Target and drafter draw a position with
    the same noise, so they agree as often as their laws allow, and what is drawn from the target does not depend on
    what was drafted: the output is that of plain decoding with the same seed, token for token (Daliri, Musco and
    Suresh 2024, arXiv 2408.07978). No state, no dependence on other requests, the same numbers on every device.
    """

    def __init__(self, seed: int, position: int = 0) -> None:
        self._seed = seed
        self._position = position

    def at(self, position: int) -> KeyedSource:
        """The same noise, read from `position` on."""
        return KeyedSource(self._seed, position)

    def below(self, position: int, root: int) -> KeyedSource:
        """Itself: target and drafter draw a position with the same noise, whatever is before it."""
        return self

    def coin(self, probability: float) -> bool:
        """Not available: a rule that flips coins is not a function of the position's noise."""
        raise NotImplementedError("position-keyed noise has no coins")

    def keys(self, count: int) -> NDArray[np.uint64]:
        """`[count]` what the noise at its position and at the next ones is made of."""
        return np.array([_key(self._seed, self._position + i) for i in range(count)], dtype=np.uint64)

    def noise(self, tokens: Tensor) -> Tensor:
        """Gumbel noise of these tokens at its position, float64: what is likeliest with it added is drawn."""
        return gumbel(self._seed, self._position, tokens)

    def draw(self, weights: Tensor, depth: int = 0) -> int:
        """See `RandomSource`. Noise is made for the tokens of positive weight only."""
        if weights.device.type == "cpu":
            from foredraft.randomness_kernels import largest  # numba takes a while, and not all need it

            return int(largest(weights.double().numpy(), np.uint64(_key(self._seed, self._position + depth))))
        alive = weights.nonzero()[:, 0]
        if len(alive) == 1:
            return int(alive)
        # argmax of log w + Gumbel is argmax of w / exponential, which takes one logarithm a token and not three.
        noise = exponential(self._seed, self._position + depth, alive)
        return int(alive[(weights[alive].double() / noise).argmax()])


class DraftSource:
    """Draws of one draft, keyed by position within it. The target draws with other noise."""

    def __init__(self, seed: int, position: int = 0) -> None:
        self._seed = seed
        self._noise = KeyedSource(seed, position)

    def at(self, position: int) -> DraftSource:
        """The same noise, read from `position` on."""
        return DraftSource(self._seed, position)

    def below(self, position: int, root: int) -> DraftSource:
        """Not available: a draft has one root."""
        raise NotImplementedError("this source is that of one draft")

    def coin(self, probability: float) -> bool:
        """Not available: drafts flip no coins."""
        raise NotImplementedError("drafts flip no coins")

    def draw(self, weights: Tensor, depth: int = 0) -> int:
        """See `RandomSource`."""
        return self._noise.draw(weights, depth)


_STEP = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_WORD = (1 << 64) - 1


def gumbel(seed: int, position: int, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise, float64, one value for each of `tokens`: `-log(exponential(…))`."""
    return -exponential(seed, position, tokens).log()


def exponential(seed: int, position: int, tokens: Tensor) -> Tensor:
    """Standard exponential noise, float64, one value for each of `tokens` (ids, int64), on their device.

    The bits are SplitMix64's finaliser (Steele, Lea and Flood 2014) applied to seed, then position, then token id; the
    uniform number is `(bits >> 11 + 1/2) / 2**53`, the noise `-log(uniform)`.
    """
    bits = _mix(tokens * _signed(_STEP) + _signed(_key(seed, position)))
    uniform = (_shift(bits, 11).double() + 0.5) * 2.0**-53
    return -uniform.log()


def _key(seed: int, position: int) -> int:
    """The 64 bits that make the noise of one position."""
    return _mix_number(_mix_number(seed) + position)


def _mix_number(x: int) -> int:
    """SplitMix64's next output after state `x`."""
    x = (x + _STEP) & _WORD
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        x = ((x ^ (x >> shift)) * factor) & _WORD
    return x ^ (x >> _SHIFTS[-1])


def _mix(x: Tensor) -> Tensor:
    """The finaliser on int64 tensors, whose products wrap."""
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        x = (x ^ _shift(x, shift)) * _signed(factor)
    return x ^ _shift(x, _SHIFTS[-1])


def _shift(x: Tensor, places: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (x >> places) & ((1 << (64 - places)) - 1)


def _signed(x: int) -> int:
    """The int64 with the same bits."""
    return x - (1 << 64) if x >> 63 else x
