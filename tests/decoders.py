"""Tiny seeded models of every family that the native engine runs, and what its weights must hold of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from foredraft.backends.native.weights import BLOCK, Floats, Linear, Matrix, Weights
from tiny import seeded

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
NARROW: dict[str, Any] = SIZES | {
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""Nothing in it is a multiple of 32: heads have 10 weights."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "phi3": ("Phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "gemma": ("Gemma", {"head_dim": 32}),
}
FAMILY = pytest.mark.parametrize("family", MODELS)
SHAPE = pytest.mark.parametrize("sizes", [SIZES, NARROW], ids=["full blocks", "padded"])


def config_of(family: str, sizes: dict[str, Any], **other: Any) -> Any:
    name, own = MODELS[family]
    settings = sizes | own | other
    if "head_dim" in own and sizes is NARROW:
        settings["head_dim"] = 10
    return getattr(transformers, f"{name}Config")(**settings)


def model_of(family: str, sizes: dict[str, Any] = SIZES, **other: Any) -> Any:
    """A seeded model in which biases and norms are random too."""
    model = seeded(getattr(transformers, f"{MODELS[family][0]}ForCausalLM"), config_of(family, sizes, **other))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight += 0.1 * torch.randn(weight.shape, generator=generator)
            assert weight.abs().max() > 0, name
    return model


def spread(weights: Floats, heads: int, axis: int) -> Floats:
    """Zeros behind each head's part of an axis, up to a multiple of 32."""
    parts = np.split(weights, heads, axis)
    missing = [(0, 0)] * weights.ndim
    missing[axis] = (0, -parts[0].shape[axis] % BLOCK)
    return np.concatenate([np.pad(part, missing) for part in parts], axis)


def padded(weights: Floats) -> Floats:
    return np.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, -weights.shape[-1] % BLOCK)])


def parts_of(model: Any) -> dict[str, Floats]:
    """A model's tensors by name as float32; Phi3's taken apart, norms as they are multiplied with."""
    config, tensors = model.config, {}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    q, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    for name, tensor in model.state_dict().items():
        weights = tensor.float().numpy()
        if "qkv_proj" in name:
            for part, rows in zip("qkv", np.split(weights, [q, q + kv]), strict=True):
                tensors[name.replace("qkv_proj", f"{part}_proj")] = rows
        elif "gate_up_proj" in name:
            for part, rows in zip(("gate", "up"), np.split(weights, 2), strict=True):
                tensors[name.replace("gate_up_proj", f"{part}_proj")] = rows
        else:
            tensors[name] = 1 + weights if config.model_type == "gemma" and weights.ndim == 1 else weights
    return tensors


def assert_holds(read: Weights, model: Any, close: Callable[[Any, Any], None] = np.testing.assert_array_equal) -> None:
    """Every matrix and vector is the model's, padded as it must be, and nothing is left over."""
    tensors, config, m = parts_of(model), model.config, read.measures
    assert len(read.layers) == config.num_hidden_layers

    def same(found: Linear | Floats | None, name: str, axis: int | None = None, heads: int = 0) -> None:
        if isinstance(found, Linear):
            wanted = tensors.pop(f"{name}.weight")
            close(found.weight.floats(), padded(wanted if axis is None else spread(wanted, heads, axis)))
            assert (found.bias is None) == (f"{name}.bias" not in tensors)
            if found.bias is not None:
                bias = tensors.pop(f"{name}.bias")
                close(found.bias, spread(bias, heads, 0) if axis == 0 else bias)
        elif found is not None:
            close(found, padded(tensors.pop(f"{name}.weight")))

    same(Linear(read.embedding), "model.embed_tokens")
    same(read.norm, "model.norm")
    if config.tie_word_embeddings:
        assert read.head is read.embedding
        tensors.pop("lm_head.weight", None)
    else:
        same(Linear(read.head), "lm_head")
    for i, layer in enumerate(read.layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        same(layer.attention_norm, f"model.layers.{i}.input_layernorm")
        same(layer.mlp_norm, f"model.layers.{i}.post_attention_layernorm")
        same(layer.q, f"{attention}.q_proj", 0, m.heads)
        same(layer.k, f"{attention}.k_proj", 0, m.kv_heads)
        same(layer.v, f"{attention}.v_proj", 0, m.kv_heads)
        same(layer.o, f"{attention}.o_proj", 1, m.heads)
        same(layer.q_norm, f"{attention}.q_norm")
        same(layer.k_norm, f"{attention}.k_norm")
        same(layer.gate, f"{mlp}.gate_proj")
        same(layer.up, f"{mlp}.up_proj")
        same(layer.down, f"{mlp}.down_proj")
    assert not tensors


def matrices(read: Weights) -> list[Matrix]:
    layers = [part.weight for layer in read.layers for part in layer if isinstance(part, Linear)]
    return [read.embedding, *layers, read.head]


ROTATIONS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "dynamic": {"factor": 4.0},
    "longrope": {
        "short_factor": [1.0 + i / 8 for i in range(16)],
        "long_factor": [2.0] * 16,
        "original_max_position_embeddings": 128,
    },
}
