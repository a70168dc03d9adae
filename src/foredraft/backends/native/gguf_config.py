"""The transformers config that a GGUF file's metadata amounts to."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from transformers import PreTrainedConfig

from foredraft.backends.native import families
from foredraft.backends.native.gguf_file import GgufFile
from foredraft.checks import is_number
from foredraft.errors import ModelError

_SETTINGS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding"}
_TWISTS = (
    "expert_count",
    "attention.scale",
    "attention.temperature_scale",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
"""Settings that change what a model computes in ways that the engine does not know."""


def gguf_config(file: GgufFile) -> PreTrainedConfig:
    """The config of a GGUF file; what transformers reads itself lacks how rotation is scaled, and some sizes.

    Raises:
        NotNativeError: The engine does not run such a model.
        ModelError: The file does not say what it must.
    """
    kind = file.metadata.get("general.architecture")
    if kind not in families.FAMILIES:
        _refuse(file, f"its architecture is '{kind}', and the backend knows only {', '.join(families.FAMILIES)}")
    keys = _Keys(file)
    for twist in _TWISTS:
        if keys.get(twist):
            _refuse(file, f"its '{kind}.{twist}' is {keys.get(twist)}")
    embedding = file.places.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.path} lacks the matrix 'token_embd.weight': it is incomplete.")
    settings = {name: keys.number(key) for name, key in _SETTINGS.items()}
    settings["num_key_value_heads"] = keys.number("attention.head_count_kv", settings["num_attention_heads"])
    settings |= {
        f"{name}_token_id": file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKENS.items()
    }
    settings |= {"vocab_size": embedding.shape[0], "tie_word_embeddings": "output.weight" not in file.places}
    settings |= _of_family(kind) | _attention(keys, settings)
    return _config(kind, settings)


def stop_tokens(file: GgufFile) -> frozenset[int]:
    """The ids that end an answer, a turn or a message."""
    ids = (file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    return frozenset(int(token) for token in ids if token is not None)


def _refuse(file: GgufFile, why: str) -> NoReturn:
    raise families.NotNativeError(str(file.path), why)


class _Keys:
    """What the metadata says under the name of the architecture."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.kind = file.metadata["general.architecture"]

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.kind}.{key}")

    def number(self, key: str, default: Any = None) -> Any:
        """A number above 0; without a default it must be there."""
        value = self.get(key)
        if value is None:
            if default is not None:
                return default
            raise ModelError(f"{self.file.path} does not say '{self.kind}.{key}': it is damaged, or no language model.")
        if isinstance(value, list):
            _refuse(self.file, f"its '{self.kind}.{key}' differs from layer to layer")
        if not is_number(value) or value <= 0:
            raise ModelError(f"{self.file.path} is damaged: its '{self.kind}.{key}' is {value!r}.")
        return value


def _attention(keys: _Keys, settings: dict[str, Any]) -> dict[str, Any]:
    """Size of a head, and how it is rotated."""
    context, window = settings["max_position_embeddings"], keys.get("attention.sliding_window")
    if window and window < context:
        _refuse(keys.file, f"it has layers of sliding-window attention ({window} of {context} tokens)")
    usual = settings["hidden_size"] // settings["num_attention_heads"]
    if keys.kind == "llama":  # older files have no other word on it
        usual = keys.number("rope.dimension_count", usual)
    head_dim = keys.number("attention.key_length", usual)
    if keys.number("attention.value_length", head_dim) != head_dim:
        _refuse(keys.file, "its keys and values differ in length")
    rotated = keys.number("rope.dimension_count", head_dim)
    rotation = {"rope_theta": keys.number("rope.freq_base", 10000.0), **_scaling(keys)}
    if keys.kind == "phi3":
        rotation["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        _refuse(keys.file, f"only {rotated} of {head_dim} weights of its heads are rotated")
    return {"head_dim": head_dim, "rope_parameters": rotation}


def _scaling(keys: _Keys) -> dict[str, Any]:
    kind = keys.get("rope.scaling.type") or "none"
    factor = keys.number("rope.scaling.factor", 1.0)
    if kind not in ("none", "linear", "yarn"):
        _refuse(keys.file, f"its rotary embedding is scaled by '{kind}'")
    if kind == "none" or factor == 1.0:
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    scaling = {
        "original_max_position_embeddings": keys.get("rope.scaling.original_context_length"),
        "attention_factor": keys.number("rope.scaling.attn_factor", 1.0) * (0.1 * math.log(factor) + 1.0),
        "beta_fast": keys.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys.get("rope.scaling.yarn_beta_slow"),
    }
    given = {name: value for name, value in scaling.items() if value is not None}
    return {"rope_type": "yarn", "factor": factor, **given}


def _of_family(kind: str) -> dict[str, Any]:
    """What is the same in all models of an architecture, and so not in their files."""
    return {
        "hidden_act": "gelu_pytorch_tanh" if kind == "gemma" else "silu",
        "attention_bias": False,
        "sliding_window": None,
        "no_rope_layers": None,
    }


def _config(kind: str, settings: dict[str, Any]) -> PreTrainedConfig:
    """A config that is complete without the defaults of its class, whose module takes half a second to import."""
    config: Any = PreTrainedConfig()
    config.model_type = kind
    for name, value in settings.items():
        setattr(config, name, value)
    config.standardize_rope_params()
    assert isinstance(config, PreTrainedConfig)
    return config
