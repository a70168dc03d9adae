"""What a decoder of the Llama shape consists of, as the kernels read it: matrices in blocks of 32, and its measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

BLOCK = 32
"""Weights that are stored together. The columns of every matrix are padded to a multiple of it, with zeros."""

_CHUNK = 1 << 22  # weights that are converted at a time

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class Format(NamedTuple):
    """How 32 weights are stored; `code` is the format's row in the table of kernels."""

    name: str
    code: int
    block_bytes: int
    ggml: GGMLQuantizationType


FORMATS = {
    format_.name: format_
    for format_ in (
        Format("f32", 0, 128, GGMLQuantizationType.F32),
        Format("bf16", 1, 64, GGMLQuantizationType.BF16),
        Format("f16", 2, 64, GGMLQuantizationType.F16),
        Format("q8_0", 3, 34, GGMLQuantizationType.Q8_0),
        Format("q4_0", 4, 18, GGMLQuantizationType.Q4_0),
        Format("q4_1", 5, 20, GGMLQuantizationType.Q4_1),
    )
}
"""Formats that have kernels, by name. The blocks are those of GGUF files."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """Weights `[rows, columns]` of one linear layer.

    Args:
        format: A name of `FORMATS`.
        data: `[rows, bytes of a row]`, C-contiguous; it may lie in a file that is mapped into memory.
    """

    format: str
    data: Bytes

    def __post_init__(self) -> None:
        size = FORMATS[self.format].block_bytes
        assert self.data.dtype == np.uint8 and self.data.ndim == 2 and self.data.flags.c_contiguous
        assert self.data.shape[1] % size == 0

    @property
    def rows(self) -> int:
        """Number of outputs."""
        return len(self.data)

    @property
    def columns(self) -> int:
        """Number of inputs, a multiple of 32."""
        return int(self.data.shape[1]) // FORMATS[self.format].block_bytes * BLOCK

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> Matrix:
        """Some of the rows: a slice shares the memory, indices copy."""
        return Matrix(self.format, self.data[rows])

    def floats(self) -> Floats:
        """The weights as float32 `[rows, columns]`."""
        weights: Floats = np.asarray(quants.dequantize(self.data, FORMATS[self.format].ggml), dtype=np.float32)
        return weights.reshape(self.rows, self.columns)

    def to(self, name: str) -> Matrix:
        """The same weights in another format, as near as it allows."""
        if name == self.format:
            return self
        data = np.empty((self.rows, self.columns // BLOCK * FORMATS[name].block_bytes), dtype=np.uint8)
        step = max(1, _CHUNK // self.columns)
        for start in range(0, self.rows, step):  # all of it as floats may not fit beside it
            part = slice(start, start + step)
            data[part] = Matrix.from_floats(self[part].floats(), name).data
        return Matrix(name, data)

    @classmethod
    def from_floats(cls, weights: Floats, name: str = "f32") -> Matrix:
        """From `[rows, columns]`; columns are padded with zeros to a multiple of 32."""
        missing = -weights.shape[1] % BLOCK
        if missing:
            weights = np.pad(weights, ((0, 0), (0, missing)))
        packed = quants.quantize(np.ascontiguousarray(weights, dtype=np.float32), FORMATS[name].ggml)
        return cls(name, np.ascontiguousarray(packed).view(np.uint8).reshape(len(weights), -1))


class Linear(NamedTuple):
    """`y = weight x + bias`, the bias `[rows]`."""

    weight: Matrix
    bias: Floats | None = None


class Layer(NamedTuple):
    """One decoder layer. Vectors are float32; rows of `q`, `k`, `v` are head after head."""

    attention_norm: Floats
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    mlp_norm: Floats
    gate: Linear
    up: Linear
    down: Linear
    q_norm: Floats | None = None
    """`[head_dim]`; RMSNorm of each head of q before it is rotated (Qwen3)."""
    k_norm: Floats | None = None
    rotates: bool = True
    """Whether q and k are given positions (SmolLM3 leaves some layers without)."""


class Measures(NamedTuple):
    """Sizes and constants of a decoder."""

    architecture: str
    """The `model_type` of its transformers config."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    """Rows of the head."""
    context: int | None
    epsilon: float
    """Of the RMSNorms."""
    activation: str
    """`silu` or `gelu_tanh`."""
    attention_scale: float
    """Scores are `q k` times this."""
    embedding_scale: float
    """Embeddings are multiplied by this (Gemma); 1 for others."""


class Weights(NamedTuple):
    """A whole decoder."""

    measures: Measures
    embedding: Matrix
    layers: tuple[Layer, ...]
    norm: Floats
    head: Matrix
    """The embedding itself where it is tied."""
    inverse_frequencies: Floats
    """`[rotated dims / 2]` of the rotary embedding, radians a token."""
    rotary_scale: float
    """Cosines and sines are multiplied by this (YaRN)."""
    stop_tokens: frozenset[int]
    config: Any
    """The transformers config that it was read with."""

    @property
    def matrices(self) -> list[Matrix]:
        """All that a forward reads whole: it reads a row of the embedding."""
        parts = [part.weight for layer in self.layers for part in layer if isinstance(part, Linear)]
        return [*parts, self.head]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weights that a forward reads, but for a row of the embedding and the vectors."""
        return sum(matrix.data.nbytes for matrix in self.matrices)

    @property
    def formats(self) -> set[str]:
        """Of all its matrices."""
        return {self.embedding.format, *(matrix.format for matrix in self.matrices)}
