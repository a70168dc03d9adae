"""What the compiled forward reads: tables of addresses and sizes, and the memory that it works in."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foredraft.backends.native.cache import FIRST_ROWS
from foredraft.backends.native.kernels import Kernels, most_mixed
from foredraft.backends.native.weights import BLOCK, FORMATS, Floats, Linear, Weights

SLACK = 64
"""Floats behind the scores that their kernel may overwrite."""

LINEAR = np.dtype([(name, np.int64) for name in ("format", "address", "row_bytes", "rows", "blocks", "bias")])
LAYER = np.dtype(
    [
        *((name, LINEAR) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, np.int64) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")),  # addresses, 0 for none
        *((name, np.bool_) for name in ("rotates", "has_attention", "has_mlp")),
    ],
    align=True,
)
DECODER = np.dtype(
    [
        ("embedding", LINEAR),
        ("head", LINEAR),
        *(
            (name, np.int64)
            for name in (
                "norm",  # address
                "hidden",
                "width",  # hidden, padded to a multiple of 32
                "heads",
                "kv_heads",
                "head_dim",
                "head_width",
                "half",  # of the dimensions that are rotated
                "mlp",
                "kv_bytes",  # of one number
                "lanes",  # rows of a block of keys
                "mixed_at_once",  # most nodes of the kernel `weighted`
                "softmax",  # addresses of kernels
                "norm_kernel",
                "gate",
            )
        ),
        *((name, np.float32) for name in ("epsilon", "attention_scale", "embedding_scale")),
    ],
    align=True,
)
NODE = np.dtype([(name, np.int64) for name in ("token", "sequence", "row", "position", "ancestors", "straight")])
"""`row` is its own in the cache; `ancestors` counts the uncommitted rows that it sees, itself among them; `straight` is
how many of the first of these follow one another behind the committed rows, as those of a chain do."""
SEQUENCE = np.dtype([(name, np.int64) for name in ("first", "last", "committed", "rows", "keys", "values", "capacity")])
"""Its nodes, its committed rows, all rows that its nodes may see, the addresses of its cache and rows of that."""

Table = NDArray[np.void]


def padded(size: int) -> int:
    """The next multiple of 32."""
    return -(-size // BLOCK) * BLOCK


class Tables(NamedTuple):
    """A decoder as the compiled forward takes it. Weights and kernels must outlive it.

    Whatever may change between versions stands here: the compiled forward is cached on disk, where constants of other
    files would be frozen.
    """

    decoder: Table
    layers: Table
    kernels: NDArray[np.int64]
    """`Kernels.matrices`; its first row is float32's."""
    attention: NDArray[np.int64]
    """`Kernels.attention`"""


def tables_of(
    weights: Weights,
    kernels: Kernels,
    kv_format: str,
    without_attention: Collection[int] = (),
    without_mlp: Collection[int] = (),
) -> Tables:
    """The tables of these weights, less some sublayers."""
    layers = np.zeros(len(weights.layers), dtype=LAYER)
    for i, layer in enumerate(weights.layers):
        for name, part in layer._asdict().items():
            layers[name][i] = (
                linear_row(part) if isinstance(part, Linear) else part if name == "rotates" else address(part)
            )
        layers["has_attention"][i] = i not in without_attention
        layers["has_mlp"][i] = i not in without_mlp
    measures = weights.measures
    decoder = np.zeros(1, dtype=DECODER)
    head_width = padded(measures.head_dim)
    values: dict[str, Any] = {
        "embedding": linear_row(Linear(weights.embedding)),
        "head": linear_row(Linear(weights.head)),
        "norm": address(weights.norm),
        "hidden": measures.hidden,
        "width": padded(measures.hidden),
        "heads": measures.heads,
        "kv_heads": measures.kv_heads,
        "head_dim": measures.head_dim,
        "head_width": head_width,
        "half": len(weights.inverse_frequencies),
        "mlp": measures.mlp,
        "kv_bytes": FORMATS[kv_format].block_bytes // BLOCK,
        "lanes": kernels.cpu.lanes,
        "mixed_at_once": most_mixed(kernels.cpu),
        "softmax": kernels.address("softmax"),
        "norm_kernel": kernels.address("norm"),
        "gate": kernels.address(measures.activation),
        "epsilon": measures.epsilon,
        "attention_scale": measures.attention_scale,
        "embedding_scale": measures.embedding_scale,
    }
    for name, value in values.items():
        decoder[name] = value
    return Tables(decoder, layers, kernels.matrices, kernels.attention)


def linear_row(linear: Linear) -> tuple[int, ...]:
    """A row of LINEAR."""
    matrix = linear.weight
    code, columns = FORMATS[matrix.format].code, matrix.columns
    return (code, matrix.data.ctypes.data, matrix.data.strides[0], matrix.rows, columns // BLOCK, address(linear.bias))


def address(vector: Floats | None) -> int:
    """Where its numbers lie; 0 for none."""
    return 0 if vector is None else vector.ctypes.data


class Workspace(NamedTuple):
    """Rows of all nodes between the stages, padded with zeros, and each thread's scores."""

    x: Floats
    """`[n, width]`: the residual stream."""
    normed: Floats
    """`[n, width]`"""
    q: Floats
    """`[n, heads * head_width]`"""
    k: Floats
    v: Floats
    """`[n, kv_heads * head_width]`"""
    mixed: Floats
    """`[n, heads * head_width]`: what attention gives."""
    gate: Floats
    up: Floats
    """`[n, padded mlp]`"""
    added: Floats
    """`[n, width]`: what a sublayer adds to the residual stream."""
    scores: Floats
    """`[threads, most nodes of a kernel, rows + SLACK]`"""


def workspace_for(tables: Tables, nodes: int, rows: int, threads: int) -> Workspace:
    """Memory for so many nodes, and for caches of so many rows."""
    decoder = tables.decoder[0]
    width, heads, kv_heads = int(decoder["width"]), int(decoder["heads"]), int(decoder["kv_heads"])
    head, mlp = int(decoder["head_width"]), padded(int(decoder["mlp"]))

    def zeros(*shape: int) -> Floats:
        return np.zeros(shape, dtype=np.float32)

    return Workspace(
        x=zeros(nodes, width),
        normed=zeros(nodes, width),
        q=zeros(nodes, heads * head),
        k=zeros(nodes, kv_heads * head),
        v=zeros(nodes, kv_heads * head),
        mixed=zeros(nodes, heads * head),
        gate=zeros(nodes, mlp),
        up=zeros(nodes, mlp),
        added=zeros(nodes, width),
        scores=zeros(threads, tables.kernels.shape[1] - 1, rows + SLACK),
    )


def grown_workspace(have: Workspace | None, tables: Tables, nodes: int, rows: int, threads: int) -> Workspace:
    """`have` if it has room for so many nodes, and for caches of so many rows; else a larger one."""
    if have is not None and len(have.x) >= nodes and have.scores.shape[2] >= rows + SLACK:
        return have
    most = max(nodes, len(have.x) if have is not None else 0)
    return workspace_for(tables, most, max(2 * rows, FIRST_ROWS), threads)


class Batch(NamedTuple):
    """What one forward is about."""

    nodes: Table
    """`[n]` of NODE, sequence after sequence."""
    ancestors: NDArray[np.int64]
    """`[n, width]`: the uncommitted rows that each node sees, in order, itself last."""
    sequences: Table
    cos: Floats
    sin: Floats
    """`[positions, half]`"""
