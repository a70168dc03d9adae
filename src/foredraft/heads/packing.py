"""The weights of recurrent heads as the native engine's kernels read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.backends.native.backend import NativeBackend
from foredraft.backends.native.head import HeadWeights
from foredraft.backends.native.weights import BLOCK, Floats, Layer, Linear, Matrix, Measures, Weights
from foredraft.heads.block import Block, frequencies
from foredraft.heads.recurrent import Eagle3Head, EagleHead, RecurrentHead, SequentialMTPHead


def packed(head: RecurrentHead, target: NativeBackend, form: str) -> HeadWeights:
    """A copy of a head's weights; embedding, and output matrix if it has none, are the target's.

    Args:
        head: An EAGLE-3, EAGLE-1 or sequential MTP head.
        target: What it drafts for.
        form: Of its matrices, a name of `weights.FORMATS`.
    """
    decoder, layers = _decoder(head, target, form), len(head.feature_layers)
    if isinstance(head, Eagle3Head):
        norms = head.norms
        return HeadWeights(
            decoder,
            layers,
            fuse=_linear(head.fc, form, groups=layers),
            features_norm=_vector(head.input_norm.weight, layers) if norms.norm_before_fc else None,
            layer_norms=np.stack([_norm(norm) for norm in head.fc_norm]) if norms.fc_norm else None,
            embedding_norm=_norm(head.input_layernorm),
            state_norm=_norm(head.hidden_norm),
            norm=_norm(head.norm),
            normed_residual=norms.norm_before_residual,
            norm_output=norms.norm_output,
            own_head=True,
        )
    if isinstance(head, EagleHead):
        return HeadWeights(decoder, layers, join=_linear(head.fc, form, groups=2))
    assert isinstance(head, SequentialMTPHead)
    return HeadWeights(
        decoder,
        layers,
        join=_linear(head.eh_proj, form, groups=2),
        embedding_norm=_norm(head.enorm),
        state_norm=_norm(head.hnorm),
        input_norm=_norm(head.input_layernorm),
        norm=_norm(head.norm),
        norm_output=head.norm_output,
    )


def _decoder(head: RecurrentHead, target: NativeBackend, form: str) -> Weights:
    shape, weights = head.shape, target.weights
    matrix = weights.head if head.lm_head is None else _linear(head.lm_head, form).weight
    layer = _layer(head.block, form)
    return Weights(
        measures=Measures(
            architecture=head.kind,
            layers=1,
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            mlp=shape.mlp,
            vocabulary=matrix.rows,
            context=None,
            epsilon=shape.epsilon,
            activation="silu",
            attention_scale=shape.head_dim**-0.5,
            embedding_scale=weights.measures.embedding_scale,
        ),
        embedding=weights.embedding,
        layers=(layer,),
        norm=layer.attention_norm,
        head=matrix,
        inverse_frequencies=frequencies(shape).numpy(),
        rotary_scale=1.0,
        stop_tokens=frozenset(),
        config=None,
    )


def _layer(block: Block, form: str) -> Layer:
    own, shape, mlp = block.self_attn, block.shape, block.mlp
    groups = own.q_proj.in_features // shape.hidden
    return Layer(
        attention_norm=np.zeros(0, dtype=np.float32),
        q=_linear(own.q_proj, form, groups, shape.heads),
        k=_linear(own.k_proj, form, groups, shape.kv_heads),
        v=_linear(own.v_proj, form, groups, shape.kv_heads),
        o=_linear(own.o_proj, form, shape.heads),
        mlp_norm=_norm(block.post_attention_layernorm),
        gate=_linear(mlp.gate_proj, form),
        up=_linear(mlp.up_proj, form),
        down=_linear(mlp.down_proj, form),
        q_norm=_norm(own.q_norm) if shape.qk_norm else None,
        k_norm=_norm(own.k_norm) if shape.qk_norm else None,
    )


def _linear(layer: Any, form: str, groups: int = 1, heads: int = 0) -> Linear:
    """A linear layer whose columns are padded in each of some groups, and its rows in each of some heads."""
    weight = _padded(_floats(layer.weight), 1, groups)
    if heads:
        weight = _padded(weight, 0, heads)
    return Linear(Matrix.from_floats(weight, form), None if layer.bias is None else _floats(layer.bias))


def _norm(norm: Any) -> Floats:
    return _vector(norm.weight)


def _vector(weight: Tensor, groups: int = 1) -> Floats:
    return _padded(_floats(weight), 0, groups)


def _floats(weight: Tensor) -> Floats:
    """A copy: heads go on being trained."""
    return weight.detach().to("cpu", torch.float32, copy=True).numpy()


def _padded(array: Floats, axis: int, groups: int) -> Floats:
    """Zeros behind each of `groups` equal parts of an axis, up to a multiple of 32."""
    before, size, after = array.shape[:axis], array.shape[axis] // groups, array.shape[axis + 1 :]
    parts = array.reshape(*before, groups, size, *after)
    room = [(0, 0)] * parts.ndim
    room[axis + 1] = (0, -size % BLOCK)
    return np.ascontiguousarray(np.pad(parts, room).reshape(*before, -1, *after))
