"""The tensors of a GGUF file by transformers' names, and those without kernels converted once."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGMLQuantizationType

from foredraft.backends.native.gguf_file import GgufFile
from foredraft.backends.native.tensors import Stored, Tensors
from foredraft.backends.native.weights import Floats
from foredraft.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_PERMUTED = ("llama", "smollm3")  # what llama.cpp's converter does to files of these architectures
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_SEPARATE = {own: name for name, own in _NAMES.items() if name != "mlp.gate_up_proj"}
_FUSED = {own: name for name, own in _NAMES.items() if name != "mlp.up_proj"}
_FREQUENCIES = "rope_freqs.weight"


class GgufTensors(Tensors):
    """The tensors of a GGUF file. Rows of q and k are copied where the file has them in the other rotary order."""

    free_biases = True
    norm_offset_included = True

    def __init__(self, file: GgufFile, config: PreTrainedConfig) -> None:
        self.where = str(file.path)
        self._file = file
        permuted = file.metadata["general.architecture"] in _PERMUTED
        self._heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if permuted else {}
        fused = config.model_type == "phi3"
        self._own = {_our_name(own, fused): own for own in file.places if own != _FREQUENCIES}

    def names(self) -> Collection[str]:
        """See `Tensors`."""
        return self._own.keys()

    def own_name(self, name: str) -> str:
        """See `Tensors`."""
        return self._own.get(name) or _gguf_name(name)

    def kind(self, name: str) -> tuple[GGMLQuantizationType, tuple[int, ...]]:
        """See `Tensors`."""
        place = self._file.places[self._own[name]]
        return place.type, place.shape

    def get(self, name: str) -> Stored:
        """See `Tensors`."""
        kind, shape = self.kind(name)
        data = self._file.bytes_of(self._own[name])
        heads = self._heads.get(name.split(".")[-2])
        if heads is not None:
            # In the file the halves of a head alternate; transformers has one behind the other.
            order = np.arange(shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
            data = data.reshape(shape[0], -1)[order].reshape(data.shape)
            self._file.let_go(self._own[name])
        return Stored(kind, shape, data)

    def refine(self, frequencies: Floats) -> Floats:
        """Divided by the factors that Llama 3.1's files carry."""
        place = self._file.places.get(_FREQUENCIES)
        if place is None:
            return frequencies
        if place.shape != frequencies.shape or place.type != GGMLQuantizationType.F32:
            raise ModelError(f"Tensor '{_FREQUENCIES}' of {self.where} is damaged: it has shape {list(place.shape)}.")
        factors: Floats = self._file.bytes_of(_FREQUENCIES).view(np.float32).reshape(-1)
        return frequencies / factors


def _gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` is `blk.3.ffn_up.weight`."""
    stem, _, suffix = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{suffix}"


def _our_name(own: str, fused: bool) -> str:
    """The other way round; what has no name in transformers keeps its own."""
    stem, _, suffix = own.rpartition(".")
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    names = _FUSED if fused else _SEPARATE
    if block == "blk" and part in names:
        return f"model.layers.{layer}.{names[part]}.{suffix}"
    return f"{names[stem]}.{suffix}" if stem in names else own
