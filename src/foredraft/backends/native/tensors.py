"""Puts a decoder together from tensors that go by transformers' names, wherever they are stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, quants

from foredraft.backends.native import families
from foredraft.backends.native.weights import BLOCK, FORMATS, Bytes, Floats, Format, Layer, Linear, Matrix, Weights
from foredraft.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WEIGHTS = {"auto": None, "f32": "f32", "bf16": "bf16", "q8": "q8_0"}
"""What matrices can be converted to when they are read, by the name a user gives; `auto` leaves them as they are."""

_FORMAT_OF = {format_.ggml: format_ for format_ in FORMATS.values()}
_FLOATS = {GGMLQuantizationType.F32: 4, GGMLQuantizationType.F16: 2, GGMLQuantizationType.BF16: 2}  # bytes each
_CHUNK = 1 << 22  # weights that are converted at a time
_HEADLESS = ("lm_head.weight",)  # may be stored where it is tied


def has_kernel(kind: GGMLQuantizationType) -> bool:
    """Whether matrices of a type are used as they are."""
    return kind in _FORMAT_OF


class Stored(NamedTuple):
    """A tensor as it lies in memory or in a mapped file."""

    type: GGMLQuantizationType
    shape: tuple[int, ...]
    data: Bytes
    """`[rows, bytes of a row]`, C-contiguous; a vector is one row."""


class Tensors(ABC):
    """Tensors by transformers' names."""

    where: str
    """The file or folder, for errors."""
    free_biases = False
    """Whether biases are there or not as the tensors have it, and not as the config says."""
    norm_offset_included = False
    """Whether RMSNorms are stored as they are multiplied with."""

    @abstractmethod
    def names(self) -> Collection[str]:
        """All of them."""

    @abstractmethod
    def kind(self, name: str) -> tuple[GGMLQuantizationType, tuple[int, ...]]:
        """Type and shape of one, without reading it.

        Raises:
            NotNativeError: It is not of floating point, nor of a type of GGUF files.
        """

    @abstractmethod
    def get(self, name: str) -> Stored:
        """One of them, copied only if it must be."""

    def own_name(self, name: str) -> str:
        """What the tensor is called where it is stored, for errors."""
        return name

    def refine(self, frequencies: Floats) -> Floats:
        """Inverse frequencies, changed by what the file says of them beside the config."""
        return frequencies


def check(config: PreTrainedConfig, tensors: Tensors) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's tensors by name, all of which are there.

    Raises:
        ModelError: Some are missing, or of another shape.
        NotNativeError: There are more than a model of this kind has, so it is of another kind.
    """
    names = tensors.names()
    if config.num_hidden_layers > len(names):  # nobody should wait until all that is missing is listed
        raise ModelError(f"{tensors.where} has {len(names)} tensors, which are not {config.num_hidden_layers} layers.")
    shapes = families.layout(config)
    if tensors.free_biases:
        linears = {name: shape for name, shape in shapes.items() if len(shape) == 2}
        biases = {name.removesuffix("weight") + "bias": shape[:1] for name, shape in linears.items()}
        shapes |= {name: shape for name, shape in biases.items() if name in names}
    spare = (*_HEADLESS, *(name for name in names if name.endswith("rotary_emb.inv_freq")))
    unknown = [name for name in names if name not in shapes and name not in spare]
    if unknown:
        named = tensors.own_name(unknown[0])
        raise families.NotNativeError(
            tensors.where, f"it holds tensors that no model of type '{config.model_type}' has, such as '{named}'"
        )
    missing = [tensors.own_name(name) for name in shapes if name not in names]
    if missing:
        raise ModelError(
            f"{tensors.where} lacks {len(missing)} of its tensors, such as '{missing[0]}': it is incomplete."
        )
    for name, shape in shapes.items():
        _, found = tensors.kind(name)
        if found != shape:
            raise ModelError(
                f"Tensor '{tensors.own_name(name)}' of {tensors.where} has shape {list(found)}, but must have "
                f"{list(shape)} by its configuration: the file is damaged, or the configuration is another model's."
            )
    return shapes


def build(
    config: PreTrainedConfig,
    tensors: Tensors,
    *,
    weights: str = "auto",
    stop_tokens: frozenset[int] = frozenset(),
) -> Weights:
    """The decoder of a config and its tensors.

    Hidden size, MLP size and head size are padded to multiples of 32 wherever a matrix has them as columns, and the
    vectors with them; rows of q, k and v have zeros behind each head. Nothing else is padded.

    Args:
        config: What the model is; see `families.refuses`.
        tensors: All that `families.layout` names.
        weights: One of `WEIGHTS`.
        stop_tokens: Ids that end an answer.

    Raises:
        NotNativeError: The engine does not run such a model.
        ModelError: Tensors are missing or of a wrong shape.
    """
    builder = _Builder(config, tensors, WEIGHTS[weights])
    embedding = builder.matrix("model.embed_tokens.weight")
    frequencies, rotary_scale = families.rotation(config)
    return Weights(
        measures=families.measures(config),
        embedding=embedding,
        layers=tuple(builder.layer(layer) for layer in range(config.num_hidden_layers)),
        norm=builder.norm("model.norm"),
        head=embedding if config.tie_word_embeddings else builder.matrix("lm_head.weight"),
        inverse_frequencies=tensors.refine(frequencies),
        rotary_scale=rotary_scale,
        stop_tokens=stop_tokens,
        config=config,
    )


def bytes_when_read(config: PreTrainedConfig, tensors: Tensors, weights: str = "auto") -> int:
    """Bytes of weights that a forward will read of a model once `build` has read it; see `Weights.bytes_per_token`.

    Zeros between heads whose size is no multiple of 32 are not counted.
    """
    total = 0
    for name, shape in check(config, tensors).items():
        if len(shape) == 2 and (config.tie_word_embeddings or name != "model.embed_tokens.weight"):
            total += shape[0] * -(-shape[1] // BLOCK) * _format_when_read(tensors.kind(name)[0], weights).block_bytes
    return total


def _format_when_read(kind: GGMLQuantizationType, weights: str) -> Format:
    name = WEIGHTS[weights] or ("f32" if kind == GGMLQuantizationType.F64 else "bf16")
    return FORMATS[name] if WEIGHTS[weights] else _FORMAT_OF.get(kind, FORMATS[name])


class _Builder:
    def __init__(self, config: PreTrainedConfig, tensors: Tensors, to: str | None) -> None:
        self._shapes = check(config, tensors)
        self._config, self._tensors, self._to = config, tensors, to
        self._measures = families.measures(config)

    def vector(self, name: str) -> Floats:
        return np.array(_floats(self._tensors.get(name), slice(None))).reshape(-1)  # copied, so that it is aligned

    def norm(self, name: str) -> Floats:
        """An RMSNorm's weights as they are multiplied with, padded."""
        offset = 0.0 if self._tensors.norm_offset_included else families.norm_offset(self._config)
        return _padded(self.vector(f"{name}.weight") + np.float32(offset))

    def matrix(self, name: str, heads: int | None = None) -> Matrix:
        """A matrix with its columns padded: all together at their end, or behind each of `heads`."""
        stored = self._tensors.get(name)
        if heads is not None and self._measures.head_dim % BLOCK:
            stored = _spread_columns(_as_floats(stored), heads)
        return as_matrix(stored, self._to)

    def linear(self, name: str, heads: int | None = None) -> Linear:
        bias = self.vector(f"{name}.bias") if f"{name}.bias" in self._shapes else None
        return Linear(self.matrix(f"{name}.weight", heads), bias)

    def layer(self, index: int) -> Layer:
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        m = self._measures
        q, k, v = self._together(attention, "qkv_proj", {"q_proj": m.heads, "k_proj": m.kv_heads, "v_proj": m.kv_heads})
        gate, up = self._together(mlp, "gate_up_proj", {"gate_proj": None, "up_proj": None})
        normed = f"{attention}.q_norm.weight" in self._shapes
        return Layer(
            attention_norm=self.norm(f"{prefix}.input_layernorm"),
            q=q,
            k=k,
            v=v,
            o=self.linear(f"{attention}.o_proj", m.heads),
            mlp_norm=self.norm(f"{prefix}.post_attention_layernorm"),
            gate=gate,
            up=up,
            down=self.linear(f"{mlp}.down_proj"),
            q_norm=self.norm(f"{attention}.q_norm") if normed else None,
            k_norm=self.norm(f"{attention}.k_norm") if normed else None,
            rotates=families.rotates(self._config, index),
        )

    def _together(self, prefix: str, fused: str, parts: dict[str, int | None]) -> list[Linear]:
        """Linear layers that read the same, stored apart or as one; rows of those with heads are spread."""
        m = self._measures
        if f"{prefix}.{fused}.weight" in self._shapes:
            whole, start, linears = self.linear(f"{prefix}.{fused}"), 0, []
            for heads in parts.values():
                stop = start + (m.mlp if heads is None else heads * m.head_dim)
                bias = None if whole.bias is None else whole.bias[start:stop]
                linears.append(Linear(whole.weight[start:stop], bias))
                start = stop
        else:
            linears = [self.linear(f"{prefix}.{part}") for part in parts]
        pairs = zip(linears, parts.values(), strict=True)
        return [linear if heads is None else _spread_rows(linear, heads) for linear, heads in pairs]


def _padded(vector: Floats) -> Floats:
    return np.pad(vector, (0, -len(vector) % BLOCK))


def as_matrix(stored: Stored, to: str | None = None) -> Matrix:
    """The matrix in the format `to`; without one, in its own and without a copy if that has a kernel, else in f32."""
    form = _FORMAT_OF.get(stored.type)
    if form is None:
        return _by_rows(len(stored.data), stored.shape[1], to or "f32", lambda rows: _floats(stored, rows))
    data, missing = stored.data, -stored.shape[1] % BLOCK
    if missing:  # only in types that store each weight by itself, where zero bytes are zeros
        data = np.pad(data, ((0, 0), (0, missing * _FLOATS[stored.type])))
    matrix = Matrix(form.name, data)
    if to in (None, form.name):
        return matrix
    return _by_rows(matrix.rows, matrix.columns, to, lambda rows: matrix[rows].floats())


def _by_rows(rows: int, columns: int, name: str, floats: Callable[[slice], Floats]) -> Matrix:
    """A matrix of another format, made a part at a time: all of it as floats may not fit beside it."""
    blocks = -(-columns // BLOCK)
    data = np.empty((rows, blocks * FORMATS[name].block_bytes), dtype=np.uint8)
    step = max(1, _CHUNK // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        data[part] = Matrix.from_floats(floats(part), name).data
    return Matrix(name, data)


def _floats(stored: Stored, rows: slice) -> Floats:
    part = stored.data[rows]
    if stored.type == GGMLQuantizationType.F64:
        return part.view(np.float64).astype(np.float32)
    return np.asarray(quants.dequantize(part, stored.type), dtype=np.float32).reshape(len(part), -1)


def _as_floats(stored: Stored) -> Stored:
    """The same weights each by itself, so that columns can be moved apart; blocks would straddle heads."""
    if stored.type in _FLOATS:
        return stored
    return Stored(GGMLQuantizationType.F32, stored.shape, as_matrix(stored, "f32").data)


def _spread_columns(stored: Stored, heads: int) -> Stored:
    rows, columns = stored.shape
    head_dim = columns // heads
    missing = -head_dim % BLOCK
    apart = stored.data.reshape(rows, heads, -1)
    data = np.pad(apart, ((0, 0), (0, 0), (0, missing * _FLOATS[stored.type]))).reshape(rows, -1)
    return Stored(stored.type, (rows, heads * (head_dim + missing)), data)


def _spread_rows(linear: Linear, heads: int) -> Linear:
    """Zeros behind the rows of each head, so that it fills blocks: zero bytes are zero weights in every format."""
    head_dim = linear.weight.rows // heads
    missing = -head_dim % BLOCK
    if not missing:
        return linear
    row_bytes = linear.weight.data.shape[1]
    data = np.pad(linear.weight.data.reshape(heads, head_dim, row_bytes), ((0, 0), (0, missing), (0, 0)))
    bias = linear.bias
    if bias is not None:
        bias = np.pad(bias.reshape(heads, head_dim), ((0, 0), (0, missing))).reshape(-1)
    return Linear(Matrix(linear.weight.format, data.reshape(-1, row_bytes)), bias)
