"""Which models the native engine runs, and what their transformers configs say about sizes, rotation and tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from foredraft.backends.native.weights import Floats, Measures
from foredraft.errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "gemma")
"""Model types that have the decoder's shape."""

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")


def refuses(config: PreTrainedConfig) -> str | None:
    """Why the native engine does not run a model of this config, as a clause; `None` if it does."""
    kind = config.model_type
    if kind not in FAMILIES:
        return f"it does not know model type '{kind}', only {', '.join(FAMILIES)}"
    for check in (_quantized, _windowed, _rotated_oddly):
        reason = check(config)
        if reason is not None:
            return reason
    if config.hidden_act not in _ACTIVATIONS:
        return f"it has no activation '{config.hidden_act}', only SiLU and GELU by tanh"
    if getattr(config, "use_bidirectional_attention", None):
        return "the model's attention is bidirectional"
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        return f"the model's {heads} heads do not share {kv_heads} KV heads evenly"
    return None


class NotNativeError(UnsupportedError):
    """A model that the native engine does not run; `reason` is a clause."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(
            f"The native backend does not run {what}: {reason}. Use --backend transformers (backend='transformers')."
        )
        self.reason = reason


def require_supported(config: PreTrainedConfig) -> None:
    """Raise `NotNativeError` with the reason of `refuses`."""
    reason = refuses(config)
    if reason is not None:
        raise NotNativeError("this model", reason)


def _quantized(config: Any) -> str | None:
    settings = getattr(config, "quantization_config", None)
    if not settings:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    method = getattr(method, "value", method)  # an enumeration, once transformers has read it
    if method == "gguf":  # transformers made plain tensors of those
        return None
    return f"its weights are quantised by '{method or 'unknown'}', which only GGUF files can be"


def _windowed(config: Any) -> str | None:
    """Windows as wide as the context are none."""
    window = getattr(config, "sliding_window", None)
    if config.model_type in ("mistral", "phi3"):
        windowed = window is not None
    else:
        kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
        if kinds - {"sliding_attention"}:
            return f"the model has layers of {', '.join(sorted(kinds))}"
        windowed = bool(kinds)
    if not windowed or (window is not None and window >= config.max_position_embeddings):
        return None
    context = config.max_position_embeddings
    return f"the model has layers of sliding-window attention ({window} of {context} tokens)"


def _rotated_oddly(config: Any) -> str | None:
    parameters = config.rope_parameters
    kind = parameters.get("rope_type")
    if kind in _FIXED_ROTATIONS:
        return None
    if kind not in ("longrope", "dynamic"):
        return f"the model has a rotary embedding of kind '{kind or 'one for each kind of layer'}'"
    # Both change with the length of the sequence, but not before the original context is full.
    original = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
    if config.max_position_embeddings <= original:
        return None
    context = config.max_position_embeddings
    return f"the model's rotary embedding '{kind}' changes past {original} tokens, and its context is {context}"


def measures(config: PreTrainedConfig) -> Measures:
    """Sizes and constants of a model that the engine runs.

    Raises:
        NotNativeError: It does not; see `refuses`.
    """
    require_supported(config)
    gemma = config.model_type == "gemma"
    head_dim = _head_dim(config)
    return Measures(
        architecture=config.model_type,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        mlp=config.intermediate_size,
        vocabulary=config.vocab_size,
        context=config.max_position_embeddings,
        epsilon=config.rms_norm_eps,
        activation=_ACTIVATIONS[config.hidden_act],
        attention_scale=head_dim**-0.5,
        embedding_scale=config.hidden_size**0.5 if gemma else 1.0,
    )


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rotation(config: PreTrainedConfig) -> tuple[Floats, float]:
    """Inverse frequencies `[rotated dims / 2]`, radians a token, and what cosines and sines are multiplied by.

    They are the very bits that transformers computes.
    """
    parameters: Any = config.rope_parameters
    if parameters["rope_type"] == "default":
        # The default kind is part of each model's own code, and of these only Phi3's rotates a part of a head.
        part = parameters.get("partial_rotary_factor", 1.0) if config.model_type == "phi3" else 1.0
        rotated = int(_head_dim(config) * part)
        exponents = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
        frequencies, scale = 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    return np.asarray(frequencies.numpy(), dtype=np.float32), float(scale)


def rotates(config: PreTrainedConfig, layer: int) -> bool:
    """Whether a layer gives positions to q and k. SmolLM3's list of those that do not has 0 for them."""
    if config.model_type != "smollm3":
        return True
    return bool(config.no_rope_layers[layer]) if config.no_rope_layers else (layer + 1) % 4 != 0


def norm_offset(config: PreTrainedConfig) -> float:
    """What transformers adds to the weights of RMSNorms before it multiplies by them."""
    return 1.0 if config.model_type == "gemma" else 0.0


def layout(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model of this config by transformers' name, with its shape; tied heads have none."""
    m = measures(config)
    shapes = {"model.embed_tokens.weight": (m.vocabulary, m.hidden), "model.norm.weight": (m.hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (m.vocabulary, m.hidden)
    biased = _biased(config)
    for layer in range(m.layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{norm}.weight": (m.hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
        if config.model_type == "qwen3":
            shapes |= {f"{prefix}self_attn.{norm}.weight": (m.head_dim,) for norm in ("q_norm", "k_norm")}
        for name, shape in _linears(m, fused=config.model_type == "phi3").items():
            shapes[f"{prefix}{name}.weight"] = shape
            if name.rpartition(".")[2] in biased:
                shapes[f"{prefix}{name}.bias"] = shape[:1]
    return shapes


def _linears(m: Measures, *, fused: bool) -> dict[str, tuple[int, int]]:
    q, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    shared = {"self_attn.o_proj": (m.hidden, q), "mlp.down_proj": (m.hidden, m.mlp)}
    if fused:
        return shared | {"self_attn.qkv_proj": (q + 2 * kv, m.hidden), "mlp.gate_up_proj": (2 * m.mlp, m.hidden)}
    return shared | {
        "self_attn.q_proj": (q, m.hidden),
        "self_attn.k_proj": (kv, m.hidden),
        "self_attn.v_proj": (kv, m.hidden),
        "mlp.gate_proj": (m.mlp, m.hidden),
        "mlp.up_proj": (m.mlp, m.hidden),
    }


def _biased(config: PreTrainedConfig) -> set[str]:
    """Linear layers that have a bias."""
    if config.model_type == "qwen2":
        return {"q_proj", "k_proj", "v_proj"}
    if config.model_type in ("mistral", "phi3"):
        return set()
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"} if config.attention_bias else set()
    mlp = {"gate_proj", "up_proj", "down_proj"} if getattr(config, "mlp_bias", False) else set()
    return attention | mlp
