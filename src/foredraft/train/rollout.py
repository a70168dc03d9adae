"""What a recurrent head says when it goes on from its own states, for all places of a text at once.

Training-time test (EAGLE-3, arXiv 2503.01840): at step j every place i has the head's own state of step j - 1, and sees
what drafting would see: the rows of step 0 up to i, which come from the target, then its own rows of steps 1 to j.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from foredraft.heads.recurrent import RecurrentHead


def rollout(head: RecurrentHead, features: Tensor, embeddings: Tensor, steps: int) -> Iterator[Tensor]:
    """States `[B, n, H]` of each step.

    Args:
        head: The head.
        features: `[B, n, layers, H]` of the target.
        embeddings: `[B, n, H]` of the same tokens.
        steps: How far to go.

    Yields:
        At step j, at place i: the state after the tokens up to i + 1 + j, whose law is of token i + 2 + j. Of the last
        1 + j places it means nothing.
    """
    state = head.fuse(features)
    count = state.shape[1]
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for step in range(steps):
        after = torch.nn.functional.pad(embeddings[:, 1 + step :], (0, 0, 0, 1 + step))
        joined = head.join(state, after.to(state.dtype))
        q, k, v = head.block.self_attn.project(joined.inputs, torch.arange(count, device=state.device) + step)
        groups = head.shape.heads // head.shape.kv_heads
        keys.append(k.repeat_interleave(groups, dim=1))
        values.append(v.repeat_interleave(groups, dim=1))
        state = head.leave(joined.residual, _mix(q, keys, values))
        yield state


def _mix(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of `q` `[B, heads, n, d]` to the first rows causally, and to its own place of the later ones."""
    if len(keys) == 1:
        return torch.nn.functional.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
    scale = q.shape[-1] ** -0.5
    count = q.shape[2]
    ahead = torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1)
    first = (q @ keys[0].transpose(-1, -2)).masked_fill(ahead, -torch.inf)
    own = torch.stack([(q * k).sum(-1) for k in keys[1:]], dim=-1)  # [B, heads, n, steps]
    weights = torch.softmax(torch.cat([first, own.to(first.dtype)], dim=-1) * scale, dim=-1).to(q.dtype)
    mixed = weights[..., :count] @ values[0]
    for index, v in enumerate(values[1:]):
        mixed = mixed + weights[..., count + index, None] * v
    return mixed
