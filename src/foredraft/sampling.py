"""From logits to the law that speculation sees, and the randomness that draws from it.

The order is transformers' own: temperature, top-k, top-p, min-p. Everything after this module is about `p` and `q`,
distributions that went through the whole pipeline; raw logits never reach an acceptance rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from foredraft.errors import ModelError
from foredraft.types import Draft, SamplingParams


class RandomSource(Protocol):
    """The coin flips and draws of one request. Rules take no other randomness, so a proof can replay every branch."""

    def coin(self, probability: float) -> bool:
        """True with `probability`."""
        ...

    def draw(self, weights: Tensor) -> int:
        """An index drawn in proportion to `weights`, `[V]`, non-negative with a positive sum."""
        ...


class TorchSource:
    """A `RandomSource` over a torch generator, or over torch's global one when none is given.

    Uniform numbers are float64 and are inverted through the cumulative weights, so the draws depend on the generator
    and the weights alone, not on the device the weights live on.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self._generator = generator
        self._device = generator.device if generator is not None else torch.device("cpu")

    def _uniform(self) -> float:
        return torch.rand((), dtype=torch.float64, generator=self._generator, device=self._device).item()

    def coin(self, probability: float) -> bool:
        """True with `probability`; 0 never and 1 always, exactly."""
        return self._uniform() < probability

    def draw(self, weights: Tensor) -> int:
        """An index drawn in proportion to `weights`, `[V]`; never one whose weight is 0."""
        cumulative = weights.double().cumsum(0)
        # The first index whose cumulative weight exceeds the point: its own weight cannot be 0.
        point = cumulative[-1] * self._uniform()
        index = int(torch.searchsorted(cumulative, point, right=True))
        while index < len(weights) and weights[index] == 0:  # but a GPU's parallel sums rise by a rounding there
            index += 1
        return index if index < len(weights) else int(weights.nonzero()[-1])  # u * total can round up to total


class Law(Protocol):
    """The sampling law of one request, for the target and for whatever drafts for it."""

    @property
    def greedy(self) -> bool:
        """Whether every row is the one-hot of an argmax."""
        ...

    def __call__(self, history: Sequence[int], draft: Draft, logits: Tensor) -> Tensor:
        """Distributions `[N+1, V]`, float64, from `logits` `[N+1, V]`.

        Row 0 follows `history` (all tokens so far, the root last); row i + 1 follows `history`, the ancestors of node
        i of `draft`, and node i.
        """
        ...


class SamplingLaw:
    """The `Law` of `SamplingParams`."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params

    @property
    def greedy(self) -> bool:
        """Whether the temperature is 0."""
        return self._params.greedy

    def __call__(self, history: Sequence[int], draft: Draft, logits: Tensor) -> Tensor:
        """See `Law`; these settings do not look at the history."""
        return probabilities(logits, self._params)


def one_hot_argmax(logits: Tensor) -> Tensor:
    """The greedy law: `[n, V]` float64 rows with all mass on the largest logit (the first, where several tie)."""
    return torch.zeros_like(logits, dtype=torch.float64).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Distributions of `logits` under the settings.

    Args:
        logits: `[n, V]`, any floating dtype and device.
        params: Temperature, top-k, top-p and min-p are used, in that order.

    Returns:
        `[n, V]` float64. In this precision rows of p and q sum to one closely enough that a rejection always leaves
        residual mass, even where p and q are almost equal.

    Raises:
        ModelError: A logit is NaN or plus infinity, or a whole row is minus infinity.
    """
    if not torch.isfinite(logits.amax(-1)).all():  # NaN spreads to the maximum
        raise ModelError("The model returned NaN or infinite logits. Half precision may overflow: try dtype float32.")
    if logits.device.type == "mps":  # no float64 there
        logits = logits.cpu()
    if params.greedy:
        return one_hot_argmax(logits)
    scores = logits.double() / params.temperature
    vocabulary = scores.shape[-1]
    if 0 < params.top_k < vocabulary:
        kth = scores.topk(params.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if params.top_p < 1.0:
        scores = _keep_top_p(scores, params.top_p)
    p = scores.softmax(-1)
    if params.min_p > 0.0:
        p = p.masked_fill(p < params.min_p * p.amax(-1, keepdim=True), 0.0)
        p = p / p.sum(-1, keepdim=True)
    return p


def _keep_top_p(scores: Tensor, top_p: float) -> Tensor:
    """Mask the unlikely tail whose mass, added up from the least likely, stays within 1 - top_p."""
    ascending, order = scores.sort(-1)
    tail = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    tail[:, -1] = False  # the likeliest token always stays
    return scores.masked_fill(torch.zeros_like(tail).scatter(-1, order, tail), -torch.inf)
