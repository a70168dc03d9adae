"""MTP layers that a model's own checkpoint has (DeepSeek-V3, GLM-4 MoE, Qwen3-Next), which transformers does not load.

Where the layer has the shape of a Llama's, it becomes a `SequentialMTPHead`. Else the model's own class of decoder
layers is run, whatever is in it: latent attention, experts, gates.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import DynamicCache

from foredraft.backends.base import Backend
from foredraft.backends.transformers import TransformersBackend
from foredraft.errors import ModelError, UnsupportedError
from foredraft.heads.checkpoints import CONFIG, Checkpoint, block_shape, filled, require_shared
from foredraft.heads.layouts import renamed
from foredraft.heads.recurrent import Joined, RecurrentHead, SequentialMTPHead
from foredraft.heads.running import TorchRun

_LLAMA_NORMS = ("llama", "mistral", "qwen3")
"""Model types whose norms and layers are as in `heads.block`."""
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
# What begins a tensor's name in the files, after what all have, and what it is called here.
_DEEPSEEK = (
    *((name, name) for name in ("enorm.", "hnorm.", "eh_proj.", "embed_tokens.")),
    ("shared_head.norm.", "norm."),
    ("shared_head.head.", "lm_head."),
    ("", "layer."),
)
_QWEN = (
    ("pre_fc_norm_embedding.", "enorm."),
    ("pre_fc_norm_hidden.", "hnorm."),
    ("fc.", "eh_proj."),
    ("norm.", "norm."),
    ("layers.0.", "layer."),
    ("", "more."),
)
_SHARED = ("lm_head.weight", "embed_tokens.weight")


class ModelLayerHead(RecurrentHead):
    """An MTP module around a decoder layer of the target's own class.

    Args:
        model: The target's; its configuration and rotary embedding are used.
        norm_output: Whether the next step starts from the normed state.
    """

    kind = "mtp"
    draft_ids = None
    lm_head = None

    def __init__(self, model: Any, *, norm_output: bool) -> None:
        super().__init__()
        config, body = model.config.get_text_config(decoder=True), model.base_model
        self.feature_layers = (config.num_hidden_layers,)
        self.norm_output = norm_output
        index = max(i for i, layer in enumerate(body.layers) if hasattr(layer, "self_attn"))
        size, epsilon, norm = config.hidden_size, config.rms_norm_eps, type(body.norm)
        self.enorm, self.hnorm, self.norm = (norm(size, eps=epsilon) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer: Any = type(body.layers[index])(config, index)
        self.layer.self_attn.layer_idx = 0  # in a cache of its own
        self.rotary = body.rotary_emb

    def fuse(self, features: Tensor) -> Tensor:
        """See `RecurrentHead`."""
        return features.flatten(-2)

    def join(self, state: Tensor, embedding: Tensor) -> Joined:
        """See `RecurrentHead`. The layer has its own norm before attention."""
        x: Tensor = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(state)], dim=-1))
        return Joined(x, x)

    def readout(self, state: Tensor) -> Tensor:
        """See `RecurrentHead`."""
        return state if self.norm_output else self.norm(state)


class ModelLayerCache(TorchRun):
    """One sequence's run of such a head, in a cache of transformers."""

    def __init__(self, head: ModelLayerHead, target: Backend) -> None:
        super().__init__(head, target, head.eh_proj.weight)
        self._layer_head = head
        self._kv = DynamicCache()
        takes = inspect.signature(type(head.layer).forward).parameters
        self._keyword = "cache" if "cache" in takes else "past_key_values"

    def _step(self, state: Tensor, tokens: Sequence[int], positions: Tensor, seen: Tensor | None) -> Tensor:
        head = self._layer_head
        forgotten = self._kv.get_seq_length() - self._rows
        if forgotten:
            self._kv.crop(-forgotten)
        x = head.join(state, self._target.embed(tokens)[None].to(state)).residual
        mask = None
        if seen is not None:
            mask = torch.zeros(seen.shape, dtype=x.dtype, device=x.device)
            mask = mask.masked_fill_(~seen, torch.finfo(x.dtype).min)[None, None]
        where = positions[None]
        found = head.layer(
            x,
            attention_mask=mask,
            position_ids=where,
            position_embeddings=head.rotary(x, where),
            use_cache=True,
            **{self._keyword: self._kv},
        )
        self._rows += x.shape[1]
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return (head.norm(out) if head.norm_output else out)[0]


def own_head(folder: Path, target: Backend) -> RecurrentHead:
    """The MTP module that lies beside the target's own weights.

    Raises:
        UnsupportedError: There is none, or none that can be run on this backend; the message says what to do.
        ModelError: It cannot be read, or its tensors are not as they should be.
    """
    checkpoint, norm_output = _read(folder, target)
    kind = checkpoint.config.get("model_type")
    own_class = kind not in _LLAMA_NORMS
    _refuse_quantized(checkpoint)
    if own_class and not isinstance(target, TransformersBackend):
        raise UnsupportedError(
            f"The MTP layer in {folder} is one of '{kind}', which only backend 'transformers' runs: load the model "
            "with backend='transformers', or draft with another head."
        )
    require_shared(checkpoint, "embed_tokens.weight", target.embed, "an embedding")
    require_shared(checkpoint, "lm_head.weight", target.head_rows, "an output matrix")
    if own_class:
        return _of_own_class(checkpoint, target, norm_output)
    shape = block_shape(checkpoint, qk_norm="layer.self_attn.q_norm.weight" in checkpoint.tensors)
    return filled(
        lambda: SequentialMTPHead(shape, target.layers, norm_output=norm_output),
        checkpoint,
        renamed((("block.", "layer."), ("input_layernorm.", "layer.input_layernorm."))),
        target,
        ignored=_SHARED,
    )


def _of_own_class(checkpoint: Checkpoint, target: Backend, norm_output: bool) -> ModelLayerHead:
    assert isinstance(target, TransformersBackend)
    fused = checkpoint._replace(tensors=_fused_experts(checkpoint))
    return filled(lambda: ModelLayerHead(target.model, norm_output=norm_output), fused, str, target, ignored=_SHARED)


def _read(folder: Path, target: Backend) -> tuple[Checkpoint, bool]:
    """The MTP module's tensors by the names of `ModelLayerHead`, and whether its steps start from the normed state."""
    files = _files_of_tensors(folder)
    deepseek, qwen = f"model.layers.{target.layers}.", "mtp."
    if f"{deepseek}eh_proj.weight" in files:
        prefix, pairs, norm_output = deepseek, _DEEPSEEK, False
    elif f"{qwen}fc.weight" in files:
        prefix, pairs, norm_output = qwen, _QWEN, True
    else:
        raise UnsupportedError(
            f"The model in {folder} has no MTP layers of its own (neither {deepseek}eh_proj nor {qwen}fc). Give a "
            "head, mtp:REF, or train one: foredraft train mtp MODEL."
        )
    wanted = defaultdict(list)
    for name, file in files.items():
        if name.startswith(prefix):
            wanted[file].append(name)
    tensors: dict[str, Tensor] = {}
    for file, names in wanted.items():
        with _opened(file) as stored:
            tensors |= {_canonical(name.removeprefix(prefix), pairs): stored.get_tensor(name) for name in names}
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"Cannot read {folder / CONFIG} ({error}).") from error
    return Checkpoint(folder, config, tensors), norm_output


def _canonical(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    return next(ours + name.removeprefix(theirs) for theirs, ours in pairs if name.startswith(theirs))


def _files_of_tensors(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with _opened(file) as stored:
            found |= dict.fromkeys(stored.keys(), file)
    return found


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"Cannot read {file} ({error}): it may be cut short or damaged.") from error


def _refuse_quantized(checkpoint: Checkpoint) -> None:
    scales = [name for name in checkpoint.tensors if name.endswith(("_scale", "_scale_inv"))]
    if scales:
        raise checkpoint.refused(
            f"its MTP layer is quantised (tensor '{scales[0]}')", "Take a checkpoint in bfloat16, or another drafter."
        )


def _fused_experts(checkpoint: Checkpoint) -> Mapping[str, Tensor]:
    """Experts' matrices stacked, `gate_up_proj` `[E, 2I, H]` and `down_proj` `[E, H, I]`, as transformers has them."""
    parts: dict[tuple[str, str], dict[int, Tensor]] = defaultdict(dict)
    others: dict[str, Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        match = _EXPERT.fullmatch(name)
        if match:
            parts[match[1], match[3]][int(match[2])] = tensor
        else:
            others[name] = tensor
    for layer in {layer for layer, _ in parts}:
        gate, up, down = (parts[layer, part] for part in ("gate", "up", "down"))
        if not sorted(gate) == sorted(up) == sorted(down) == list(range(len(gate))):
            raise checkpoint.refused(f"the experts of its MTP layer ('{layer}') are not all there")
        others[f"{layer}.gate_up_proj"] = torch.stack([torch.cat([gate[i], up[i]]) for i in range(len(gate))])
        others[f"{layer}.down_proj"] = torch.stack([down[i] for i in range(len(down))])
    return others
