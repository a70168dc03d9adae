"""What a model has that its drafts may leave out, and how a backend tells one model from another."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_HASHED = 16  # weights of each matrix that go into a fingerprint


class Sublayers(NamedTuple):
    """The sublayers of a model; all sizes are bytes of weights, as a forward reads them."""

    fingerprint: str
    """See `fingerprint`."""
    attention: tuple[int, ...]
    """Of each layer's attention."""
    mlp: tuple[int, ...]
    """Of each layer's MLP."""
    head: int

    @property
    def layers(self) -> int:
        """How many there are."""
        return len(self.attention)

    def share_without(self, attention: Collection[int], mlp: Collection[int]) -> float:
        """What a forward without these sublayers reads, as a share of what a whole one does, in (0, 1]."""
        whole = sum(self.attention) + sum(self.mlp) + self.head
        return 1 - (sum(self.attention[i] for i in attention) + sum(self.mlp[i] for i in mlp)) / whole


def sample_places(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Rows and columns, each `[16]`, of the weights of a matrix that go into a fingerprint."""
    steps = torch.arange(_HASHED)
    return steps * rows // _HASHED, steps * columns // _HASHED


def fingerprint(architecture: str, matrices: Sequence[tuple[tuple[int, ...], Tensor]]) -> str:
    """16 hex digits that tell models apart.

    They are the same on every backend and device: nothing is sampled that a backend stores in another order. Weights
    are compared as bfloat16, so they are the same in float32 and bfloat16, and for GGUF files whether their blocks are
    read as they are or as floats. A model that was converted to fewer bits when it was loaded is another one.

    Args:
        architecture: The `model_type` of its transformers config.
        matrices: Shapes, and weights at `sample_places`, of the embedding and of each layer's down projection.
    """
    digest = hashlib.sha256(architecture.encode())
    for shape, some in matrices:
        digest.update(str(shape).encode())
        digest.update(some.detach().float().cpu().to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
