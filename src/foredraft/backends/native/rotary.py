"""Tables of the rotary embedding."""

from __future__ import annotations

import torch

from foredraft.backends.native.weights import Floats

_FIRST_POSITIONS = 256


class Rotary:
    """Cosines and sines of positions, for as many as were asked for.

    Args:
        frequencies: `[half]`, radians a token.
        scale: They are multiplied by this.
    """

    def __init__(self, frequencies: Floats, scale: float = 1.0) -> None:
        self._frequencies, self._scale = torch.from_numpy(frequencies), scale
        self._cos = self._sin = torch.empty(0, len(frequencies)).numpy()

    def until(self, positions: int) -> tuple[Floats, Floats]:
        """Cosines and sines `[at least positions, half]`."""
        have = len(self._cos)
        if positions > have:
            grown = torch.arange(max(positions, 2 * have, _FIRST_POSITIONS), dtype=torch.float32)
            angles = grown[:, None] * self._frequencies
            self._cos, self._sin = (angles.cos() * self._scale).numpy(), (angles.sin() * self._scale).numpy()
        return self._cos, self._sin
