"""What else can draft out of a decoder's weights: less of its sublayers, or a copy in 8 bits."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from foredraft.backends.base import USE_INSTEAD
from foredraft.backends.native.weights import FORMATS, Layer, Linear, Matrix, Weights
from foredraft.backends.sublayers import Sublayers, fingerprint, sample_places
from foredraft.errors import UnsupportedError

logger = logging.getLogger(__name__)

_EIGHT_BITS = FORMATS["q8_0"]


def sublayers(weights: Weights) -> Sublayers:
    """See `Backend.sublayers`."""
    m = weights.measures
    sampled = [((m.vocabulary, m.hidden), weights.embedding)]
    sampled += [((m.hidden, m.mlp), layer.down.weight) for layer in weights.layers]  # only their last columns are added
    return Sublayers(
        fingerprint(m.architecture, [(shape, _some(matrix, *shape)) for shape, matrix in sampled]),
        attention=tuple(_bytes(layer.q, layer.k, layer.v, layer.o) for layer in weights.layers),
        mlp=tuple(_bytes(layer.gate, layer.up, layer.down) for layer in weights.layers),
        head=weights.head.data.nbytes,
    )


def _some(matrix: Matrix, rows: int, columns: int) -> torch.Tensor:
    """The weights at `sample_places`; only their rows are read."""
    row, column = (places.numpy() for places in sample_places(rows, columns))
    return torch.from_numpy(matrix[row].floats()[np.arange(len(row)), column])


def _bytes(*linears: Linear) -> int:
    return sum(linear.weight.data.nbytes for linear in linears)


def in_8_bits(weights: Weights) -> Weights:
    """All matrices that a forward reads whole in 8 bits, those as they are that have no more; all else is shared.

    What the copy takes is logged.

    Raises:
        UnsupportedError: None has more.
    """
    layers = tuple(_layer_in_8_bits(layer) for layer in weights.layers)
    small = weights._replace(layers=layers, head=_matrix_in_8_bits(weights.head))
    pairs = [(new, old) for new, old in zip(small.matrices, weights.matrices, strict=True) if new is not old]
    if not pairs:
        raise UnsupportedError(
            "Drafter 'self_quant' would gain nothing: the weights of this model are in 8 bits or less already "
            f"({', '.join(sorted(weights.formats))}). {USE_INSTEAD}"
        )
    logger.info(
        "The 8-bit copy of the target takes %.1f MB more: %d matrices that take %.1f MB in %s",
        sum(new.data.nbytes for new, _ in pairs) / 1e6,
        len(pairs),
        sum(old.data.nbytes for _, old in pairs) / 1e6,
        ", ".join(sorted({old.format for _, old in pairs})),
    )
    return small


def _layer_in_8_bits(layer: Layer) -> Layer:
    parts: dict[str, Any] = {
        name: Linear(_matrix_in_8_bits(part.weight), part.bias)
        for name, part in layer._asdict().items()
        if isinstance(part, Linear)
    }
    return layer._replace(**parts)


def _matrix_in_8_bits(matrix: Matrix) -> Matrix:
    small = FORMATS[matrix.format].block_bytes <= _EIGHT_BITS.block_bytes
    return matrix if small else matrix.to(_EIGHT_BITS.name)
