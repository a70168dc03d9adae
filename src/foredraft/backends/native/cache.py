"""One sequence's keys and values in the native engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foredraft.backends.base import Features, KVCache, Query
from foredraft.backends.native.weights import Floats
from foredraft.tree import is_straight

FIRST_ROWS = 256  # of a cache; it doubles when it is full

KV = NDArray[Any]
"""float32, or bfloat16 as its 16 bits."""
KV_TYPES: dict[str, Any] = {"f32": np.float32, "bf16": np.uint16}


class Early(NamedTuple):
    """What the first layers made of a root and a chain: their residual streams `[n, width]`."""

    layers: int
    tokens: tuple[int, ...]
    hidden: Floats


class NativeCache(KVCache):
    """Keys `[layers, kv_heads, rows / lanes, head_width, lanes]`, values `[layers, kv_heads, rows, head_width]`.

    Behind the committed rows are the nodes of the last forward, in its order; after an early exit, in the first layers
    only.
    """

    def __init__(self, layers: int, kv_heads: int, head_width: int, lanes: int, kv_format: str) -> None:
        self.keys: KV = np.zeros((layers, kv_heads, 0, head_width, lanes), dtype=KV_TYPES[kv_format])
        self.values: KV = np.zeros((layers, kv_heads, 0, head_width), dtype=KV_TYPES[kv_format])
        self.where = 0, 0, 0
        """Addresses of keys and values, and the rows there is room for, as `tables.SEQUENCE` has them."""
        self.committed = 0
        self.early: Early | None = None
        self.features: list[Features] = []

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return self.committed

    @property
    def capacity(self) -> int:
        """Rows there is room for."""
        return int(self.values.shape[2])

    def reserve(self, rows: int) -> None:
        """Make room for so many rows in all."""
        if rows > self.capacity:
            blocks = self.blocks(max(rows, 2 * self.capacity))
            self.keys = _grown(self.keys, blocks)
            self.values = _grown(self.values, blocks * self.keys.shape[-1])
            self.where = self.keys.ctypes.data, self.values.ctypes.data, self.capacity

    def blocks(self, rows: int) -> int:
        """Blocks of keys that so many rows take at least."""
        return -(-max(rows, FIRST_ROWS) // int(self.keys.shape[-1]))

    def take(self, other: NativeCache, length: int) -> None:
        """Copy the first `length` rows of another cache, for which there is room, and forget all else."""
        blocks = -(-length // self.keys.shape[-1])
        self.keys[:, :, :blocks] = other.keys[:, :, :blocks]
        self.values[:, :, :length] = other.values[:, :, :length]
        self.committed = length

    def keep(self, path: Sequence[int]) -> None:
        """Commit the root and these nodes."""
        first = self.committed + 1
        if not is_straight(path):
            old, new = np.asarray(path) + first, np.arange(len(path)) + first
            lanes = self.keys.shape[-1]
            self.values[:, :, new] = self.values[:, :, old]
            self.keys[:, :, new // lanes, :, new % lanes] = self.keys[:, :, old // lanes, :, old % lanes]
        self.committed = first + len(path)
        self.early = None

    def rows(self) -> tuple[KV, KV]:
        """Committed keys and values, each `[layers, kv_heads, length, head_width]`."""
        keys = self.keys.swapaxes(3, 4).reshape(self.values.shape)
        return keys[:, :, : self.committed], self.values[:, :, : self.committed]

    def known(self, query: Query, layers: int | None = None) -> int:
        """How many of the query's first tokens, a chain, are in `early` (of as many layers). The rest is forgotten."""
        if self.early is None:
            return 0
        early = self.early
        same = query.begins_with(early.tokens) if layers in (None, early.layers) else 0
        self.early = Early(early.layers, early.tokens[:same], early.hidden[:same]) if same else None
        return same


def _grown(array: KV, size: int) -> KV:
    """A copy whose third axis is longer."""
    fresh = np.zeros((*array.shape[:2], size, *array.shape[3:]), dtype=array.dtype)
    fresh[:, :, : array.shape[2]] = array
    return fresh
