"""One sequence's run of a recurrent head: its keys and values, what is certain and what is only drafted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from foredraft.backends.base import Backend
from foredraft.heads.recurrent import RecurrentHead

_FIRST_ROWS = 256


class Growth(NamedTuple):
    """How a path of likeliest tokens grows."""

    width: int
    """Tokens that are compared at each place."""
    beside: int
    """Of these so many are offered, that with which the path goes on among them."""
    deepest: int
    """Places, at most."""
    least: float
    """Below a node whose path has a lower probability nothing is looked for."""
    temperature: float
    """Logits are divided by it."""
    keys: NDArray[np.uint64]
    """`[deepest]` of the noise that the target will draw with (`KeyedSource.keys`), or `[0]`. With it tokens are
    ranked, and chances are those of coming out on top of the ones that are compared."""


class HeadRun(ABC):
    """What drafting asks of a head. Drafted nodes are numbered as they are expanded, from 0 on after each commit."""

    committed: int = 0
    """Tokens whose features were read."""

    def __init__(self) -> None:
        self._paths: list[list[int]] = []

    @property
    def expanded(self) -> int:
        """Nodes that were expanded since the last commit."""
        return len(self._paths)

    def depth(self, node: int) -> int:
        """Tokens from the last committed one down to a node."""
        return len(self._paths[node]) if node >= 0 else 0

    @property
    @abstractmethod
    def states(self) -> Tensor:
        """`[1 + expanded, H]`: after the last committed token, then after each node."""

    @abstractmethod
    def commit(self, features: Tensor, tokens: Sequence[int]) -> Tensor:
        """Read the target's features `[n, layers, H]` and the tokens after them. All drafted nodes are forgotten.

        Returns:
            Logits `[1, V_draft]` of the token after the last of them.
        """

    @abstractmethod
    def expand(self, parents: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Draft a token further at any number of places.

        Args:
            parents: Of the nodes: nodes expanded before, or -1 for the last committed token.
            tokens: Of the nodes.

        Returns:
            Logits `[n, V_draft]` of the tokens below the nodes.
        """

    def path(
        self, features: Tensor, tokens: Sequence[int], growth: Growth, offers: NDArray[Any]
    ) -> tuple[int, int] | None:
        """`commit`, and from there on by the likeliest token after the likeliest token, where that is one call.

        Args:
            features: See `commit`.
            tokens: See `commit`.
            growth: Where the path goes, and how far.
            offers: Room for nodes, rows of `proposers.base.OFFER`.

        Returns:
            The nodes offered, and the steps taken; `None`, with nothing done, if it takes a call for each step.
        """
        return None

    def _paths_to(self, parents: Sequence[int]) -> tuple[list[list[int]], list[int]]:
        """`[n, deepest]` the nodes down to each new one, itself last and up to the end; and their depths `[n]`."""
        first = len(self._paths)
        fresh = [[*(self._paths[p] if p >= 0 else ()), first + i] for i, p in enumerate(parents)]
        self._paths += fresh
        depths = [len(path) for path in fresh]
        return [path + path[-1:] * (max(depths) - len(path)) for path in fresh], depths


class TorchRun(HeadRun):
    """A run by torch.

    Args:
        head: For this target.
        target: Whose embedding is read, and whose output matrix if the head has none.
        like: A weight of its layer, for type and device.
    """

    def __init__(self, head: RecurrentHead, target: Backend, like: Tensor) -> None:
        super().__init__()
        self._head, self._target, self._like = head, target, like
        self._states = torch.empty(0, 0)
        self._rows = 0

    @property
    def states(self) -> Tensor:
        """See `HeadRun`."""
        return self._states

    @torch.inference_mode()
    def commit(self, features: Tensor, tokens: Sequence[int]) -> Tensor:
        """See `HeadRun`."""
        count = len(features)
        self._rows, self._paths = self.committed, []
        weight = self._like
        state = self._head.fuse(features[None].to(weight))
        seen = torch.ones(count, self.committed + count, dtype=torch.bool, device=weight.device).tril(self.committed)
        positions = torch.arange(count, device=weight.device) + self.committed
        self._states = self._step(state, tokens, positions, seen if count > 1 else None)[-1:]
        self.committed = self._rows
        return self._logits(self._states)

    @torch.inference_mode()
    def expand(self, parents: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """See `HeadRun`."""
        padded, depths = self._paths_to(parents)
        paths = torch.tensor(padded)  # [n, deepest]
        above = self._states[[parent + 1 for parent in parents]]
        seen = torch.zeros(len(tokens), self._rows + len(tokens), dtype=torch.bool)
        seen[:, : self.committed] = True
        seen.scatter_(1, self.committed + paths, True)
        positions = torch.tensor(depths, device=above.device) + (self.committed - 1)
        states = self._step(above[None], tokens, positions, seen.to(above.device))
        self._states = torch.cat([self._states, states])
        return self._logits(states)

    def _logits(self, states: Tensor) -> Tensor:
        read = self._head.readout(states[None])[0]
        if self._head.lm_head is None:
            return self._target.head(read.float())
        own: Tensor = self._head.lm_head(read)
        return own.float()

    @abstractmethod
    def _step(self, state: Tensor, tokens: Sequence[int], positions: Tensor, seen: Tensor | None) -> Tensor:
        """States `[n, H]` after the tokens, of those above them `[1, n, H]`; `seen` is `[n, rows]`, `None` for all."""


class HeadCache(TorchRun):
    """With keys and values `[1, kv_heads, capacity, d]`: committed rows, then those of drafted nodes."""

    def __init__(self, head: RecurrentHead, target: Backend) -> None:
        super().__init__(head, target, head.block.self_attn.k_proj.weight)
        shape = (1, head.shape.kv_heads, 0, head.shape.head_dim)
        self._keys = torch.empty(shape, dtype=self._like.dtype, device=self._like.device)
        self._values = torch.empty_like(self._keys)

    def _step(self, state: Tensor, tokens: Sequence[int], positions: Tensor, seen: Tensor | None) -> Tensor:
        head, count = self._head, state.shape[1]
        joined = head.join(state, self._target.embed(tokens)[None].to(state))
        q, k, v = head.block.self_attn.project(joined.inputs, positions)
        self._reserve(self._rows + count)
        self._keys[:, :, self._rows : self._rows + count] = k
        self._values[:, :, self._rows : self._rows + count] = v
        self._rows += count
        keys, values = self._keys[:, :, : self._rows], self._values[:, :, : self._rows]
        mixed = scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)
        return head.leave(joined.residual, mixed)[0]

    def _reserve(self, rows: int) -> None:
        if rows > self._keys.shape[2]:
            more = max(rows, 2 * self._keys.shape[2], _FIRST_ROWS) - self._keys.shape[2]
            room = self._keys.new_zeros(1, self._keys.shape[1], more, self._keys.shape[3])
            self._keys, self._values = (torch.cat([part, room], dim=2) for part in (self._keys, self._values))
