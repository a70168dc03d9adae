"""What a recurrent head says when it goes on from its own states, at many places of a text at once.

Training-time test (EAGLE-3, arXiv 2503.01840): at step j a place i has the head's own state of step j - 1, and sees
what drafting would see: the rows of step 0 up to i, which come from the target, then its own rows of steps 1 to j.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.heads.recurrent import RecurrentHead


class Rollout:
    """Steps of a head, first at all places, then at those that are worth going on from.

    Args:
        head: The head.
        features: `[B, n, layers, H]` of the target.
        embeddings: `[B, n, H]` of the same tokens.

    Attributes:
        places: `[B, S]` where it is.
        state: `[B, S, H]` after step j: at place i that after the tokens up to i + 1 + j, whose law is of token
            i + 2 + j. Of the last 1 + j places of a text it means nothing.
    """

    def __init__(self, head: RecurrentHead, features: Tensor, embeddings: Tensor) -> None:
        self._head = head
        self._embeddings = torch.nn.functional.pad(embeddings, (0, 0, 0, 1))  # the token after the last one is none
        self._step = 0
        batch, count = features.shape[:2]
        self.places = torch.arange(count, device=features.device).expand(batch, count)
        self.state = head.fuse(features)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._advance()

    def go_on(self, kept: Tensor) -> None:
        """One step further at `kept` `[B, S']`, which are indices into `places`."""
        self._step += 1
        self.places = self.places.gather(1, kept)
        self.state = self.state.gather(1, kept[..., None].expand(-1, -1, self.state.shape[-1]))
        for rows in (self._keys, self._values):  # those of step 0 stay whole
            for j, own in enumerate(rows[1:], start=1):
                rows[j] = own.gather(2, kept[:, None, :, None].expand(-1, own.shape[1], -1, own.shape[3]))
        self._advance()

    def _advance(self) -> None:
        after = (self.places + 1 + self._step).clamp(max=self._embeddings.shape[1] - 1)
        embedding = self._embeddings.gather(1, after[..., None].expand(-1, -1, self._embeddings.shape[-1]))
        joined = self._head.join(self.state, embedding.to(self.state.dtype))
        q, k, v = self._head.block.self_attn.project(joined.inputs, self.places + self._step)
        groups = self._head.shape.heads // self._head.shape.kv_heads
        self._keys.append(k.repeat_interleave(groups, dim=1))
        self._values.append(v.repeat_interleave(groups, dim=1))
        self.state = self._head.leave(joined.residual, self._mix(q))

    def _mix(self, q: Tensor) -> Tensor:
        """Attention of `q` `[B, heads, S, d]` to the rows of step 0 up to its place, and to its own later ones."""
        keys, values = self._keys, self._values
        if self._step == 0:
            return torch.nn.functional.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
        count = keys[0].shape[2]
        ahead = torch.arange(count, device=q.device) > self.places[:, None, :, None]
        first = (q @ keys[0].transpose(-1, -2)).masked_fill(ahead, -torch.inf)
        own = torch.stack([(q * k).sum(-1) for k in keys[1:]], dim=-1)  # [B, heads, S, steps]
        scores = torch.cat([first, own.to(first.dtype)], dim=-1) * q.shape[-1] ** -0.5
        weights = torch.softmax(scores, dim=-1).to(q.dtype)
        mixed = weights[..., :count] @ values[0]
        for j, v in enumerate(values[1:]):
            mixed = mixed + weights[..., count + j, None] * v
        return mixed
