"""One sequence's run of a recurrent head: its keys and values, what is certain and what is only drafted."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from foredraft.heads.recurrent import RecurrentHead

_FIRST_ROWS = 256


class HeadCache:
    """Keys and values `[1, kv_heads, capacity, d]` of a head's block: committed rows, then those of drafted nodes."""

    def __init__(self, head: RecurrentHead) -> None:
        self._head = head
        weight = self._like = head.block.self_attn.k_proj.weight
        shape = (1, head.shape.kv_heads, 0, head.shape.head_dim)
        self._keys = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        self._values = torch.empty_like(self._keys)
        self.committed = 0
        self._rows = 0

    @torch.inference_mode()
    def commit(self, features: Tensor, embeddings: Tensor) -> Tensor:
        """Read the target's features `[n, layers, H]` and embeddings `[n, H]` of the tokens after them.

        All drafted nodes are forgotten.

        Returns:
            The head's state `[1, H]` after the last of them.
        """
        count = len(features)
        self._rows = self.committed
        weight = self._like
        state = self._head.fuse(features[None].to(weight))
        seen = torch.ones(count, self.committed + count, dtype=torch.bool, device=weight.device).tril(self.committed)
        positions = torch.arange(count, device=weight.device) + self.committed
        out = self._step(state, embeddings, positions, seen if count > 1 else None)
        self.committed = self._rows
        return out[-1:]

    @torch.inference_mode()
    def expand(self, states: Tensor, embeddings: Tensor, depth: int, above: Tensor) -> Tensor:
        """Draft one level further.

        Args:
            states: The head's own states `[n, H]` above the nodes.
            embeddings: `[n, H]` of the nodes' tokens.
            depth: Of the nodes, from 1 on.
            above: `[n, drafted]` bool: which of the nodes that were expanded before are above each of these.

        Returns:
            The states `[n, H]` after the nodes, whose law is of the tokens below them.
        """
        count, device = len(states), states.device
        own = torch.eye(count, dtype=torch.bool, device=device)
        certain = torch.ones(count, self.committed, dtype=torch.bool, device=device)
        positions = torch.full((count,), self.committed + depth - 1, device=device)
        return self._step(states[None], embeddings, positions, torch.cat([certain, above.to(device), own], dim=1))

    def _step(self, state: Tensor, embeddings: Tensor, positions: Tensor, seen: Tensor | None) -> Tensor:
        head, count = self._head, state.shape[1]
        joined = head.join(state, embeddings[None].to(state))
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
