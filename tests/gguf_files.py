"""Writes models as GGUF files, as llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

_INTERLEAVED = ("llama", "smollm3")  # architectures whose q and k are rotated in pairs of neighbours


def write_gguf(
    file: Path,
    model: Any,
    tokenizer: Any,
    kinds: dict[str, str] | None = None,
    extra: dict[str, Any] | None = None,
    **changes: Any,
) -> None:
    """A model and its byte-level BPE tokenizer.

    Args:
        file: Where to write.
        model: A transformers model of a family that GGUF files have.
        tokenizer: Its tokenizer.
        kinds: Type of the matrices whose GGUF name has the key in it; others are F32.
        extra: Metadata and tensors by their whole names.
        changes: Metadata to add or to replace, by `architecture.`-less key with `__` for `.`; `None` leaves it out.
    """
    config = model.config
    architecture = {"mistral": "llama"}.get(config.model_type, config.model_type)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    settings: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": head_dim,
        "rope.dimension_count": int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "vocab_size": config.vocab_size,
    }
    settings |= {key.replace("__", "."): value for key, value in changes.items()}
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in settings.items():
        if value is not None:
            _add(writer, f"{architecture}.{key}", value)
    _add_tokenizer(writer, tokenizer)
    _add_tensors(writer, model, architecture, kinds or {})
    for key, value in (extra or {}).items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
        else:
            _add(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_uint32(key, value)


def _add_tensors(writer: Any, model: Any, architecture: str, kinds: dict[str, str]) -> None:
    config = model.config
    codes = {name: code for code, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(codes[architecture], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weights = tensor.float().numpy()
        if architecture == "gemma" and weights.ndim == 1:
            weights = weights + np.float32(1)
        if architecture in _INTERLEAVED and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            weights = _interleaved(weights, heads)
        own = str(names.get_name(name, try_suffixes=(".weight", ".bias")))
        kind = next((kind for part, kind in kinds.items() if part in own), "F32") if weights.ndim == 2 else "F32"
        code = GGMLQuantizationType[kind]
        writer.add_tensor(own, _packed(weights, code), raw_dtype=code)


def _packed(weights: NDArray[np.float32], code: GGMLQuantizationType) -> NDArray[Any]:
    """The weights in a type; in those that the gguf package cannot make, random ones of about the same size."""
    try:
        return np.ascontiguousarray(quants.quantize(weights, code))
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[code]
        blocks = np.random.default_rng(0).integers(0, 256, (weights.size // block, size), dtype=np.uint8)
        blocks.view(np.float16)[:, _SCALES[code.name]] = np.float16(1e-4)
        return blocks.reshape(len(weights), -1)


_SCALES = {
    "Q2_K": [40, 41],
    "Q3_K": [54],
    "Q4_K": [0, 1],
    "Q5_K": [0, 1],
    "Q6_K": [104],
}  # where float16s lie in blocks


def _interleaved(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """The row order of rotary weights in GGUF files: the two halves of each head in turn."""
    taken: NDArray[np.float32] = weights[np.arange(len(weights)).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)]
    return taken


def _add_tokenizer(writer: Any, tokenizer: Any) -> None:
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    special = set(tokenizer.all_special_tokens)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in special else normal for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
