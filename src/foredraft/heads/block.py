"""A decoder layer of the Llama shape as heads use it: its input may be wider than the residual that it adds to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.checks import is_integer, is_number, require


@dataclass(frozen=True)
class BlockShape:
    """Sizes and constants of a block.

    Args:
        qk_norm: Whether queries and keys have a norm for each head, as in Qwen3.
        frequencies: `head_dim / 2` angles by which pairs turn from one position to the next, where they are not those
            of `rope_theta` (scaled for long contexts).

    Raises:
        InvalidInputError: One of them is out of range.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    epsilon: float = 1e-5
    rope_theta: float = 10000.0
    qk_norm: bool = False
    frequencies: tuple[float, ...] = ()

    @classmethod
    def of(cls, config: Any) -> BlockShape:
        """That of the decoder layers of a transformers config; positions are plain."""
        heads, rope = config.num_attention_heads, getattr(config, "rope_parameters", None) or {}
        return cls(
            hidden=config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            mlp=config.intermediate_size,
            epsilon=float(getattr(config, "rms_norm_eps", 1e-5)),
            rope_theta=float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0),
        )

    def __post_init__(self) -> None:
        for name in ("hidden", "heads", "kv_heads", "head_dim", "mlp"):
            value = getattr(self, name)
            require(name, value, is_integer(value) and value >= 1, "an integer >= 1")
        require("kv_heads", self.kv_heads, self.heads % self.kv_heads == 0, f"a divisor of heads = {self.heads}")
        require("head_dim", self.head_dim, self.head_dim % 2 == 0, "even, for it is rotated in pairs")
        for name in ("epsilon", "rope_theta"):
            value = getattr(self, name)
            require(name, value, is_number(value) and value > 0, "a number > 0")
        given, wanted = len(self.frequencies), self.head_dim // 2
        require("frequencies", given, given in (0, wanted), f"none or as many as head_dim / 2 = {wanted}")


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]` to the same, at a mean square of 1 times the weights."""
        return nn.functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.epsilon)


class Attention(nn.Module):
    """The projections of one attention sublayer. Who sees whom is for the caller to say."""

    def __init__(self, shape: BlockShape, inputs: int) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(inputs, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        if shape.qk_norm:
            self.q_norm = Norm(shape.head_dim, shape.epsilon)
            self.k_norm = Norm(shape.head_dim, shape.epsilon)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q `[B, heads, n, d]` and k, and v, both `[B, kv_heads, n, d]`, of x `[B, n, inputs]` at positions
        `[n]` or `[B, n]`."""
        d = self.shape.head_dim
        q, k, v = (p(x).unflatten(-1, (-1, d)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.shape.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = rotary(positions, self.shape)
        if positions.ndim == 2:
            cos, sin = cos[:, None], sin[:, None]
        return rotate(q, cos, sin), rotate(k, cos, sin), v


class GatedMLP(nn.Module):
    """`down(silu(gate x) * up x)`."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` to the same."""
        down: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Block(nn.Module):
    """One decoder layer, in the two halves between which the caller mixes values by attention.

    Args:
        shape: Its sizes.
        inputs: Width of what attention reads; the residual always has `shape.hidden`.
    """

    def __init__(self, shape: BlockShape, inputs: int) -> None:
        super().__init__()
        self.shape = shape
        self.self_attn = Attention(shape, inputs)
        self.post_attention_layernorm = Norm(shape.hidden, shape.epsilon)
        self.mlp = GatedMLP(shape.hidden, shape.mlp)

    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output `[B, n, hidden]` from its residual and the mixed values `[B, heads, n, d]`."""
        x = residual + self.self_attn.o_proj(mixed.transpose(1, 2).flatten(-2))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def frequencies(shape: BlockShape) -> Tensor:
    """`[head_dim / 2]` angles by which pairs turn from one position to the next."""
    if shape.frequencies:
        return torch.tensor(shape.frequencies)
    pairs = torch.arange(0, shape.head_dim, 2, dtype=torch.float32)
    found: Tensor = shape.rope_theta ** (-pairs / shape.head_dim)
    return found


def rotary(positions: Tensor, shape: BlockShape) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[…, head_dim / 2]` of the angles by which pairs are turned."""
    angles = positions[..., None].float() * frequencies(shape).to(positions.device)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + d/2) of `[..., n, d]`."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
