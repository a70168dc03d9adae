"""Folders of heads on disk: read safely, checked against the target, written whole or not at all."""

from __future__ import annotations

import json
import logging
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from foredraft.backends.base import Backend
from foredraft.errors import InvalidInputError, ModelError, UnsupportedError
from foredraft.heads.block import BlockShape

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS = "config.json", "model.safetensors"
TORCH_FILES = ("pytorch_model.bin", "*.pt")
"""Names that public heads have which are not in safetensors."""
_PLAIN_ROPE, _SCALED_ROPE = ("default",), ("linear", "llama3")
_SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("num_hidden_layers", "vocab_size", "max_position_embeddings"),
)
_WRITTEN = {
    "model_type": str,
    "hidden_act": str,
    **dict.fromkeys(_SIZES, int),
    **dict.fromkeys(("rms_norm_eps", "rope_theta"), float),
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings"), bool),
    "rope_parameters": dict,
}
"""What `save_head` writes of a layer, and of which type."""

HeadT = TypeVar("HeadT", bound=nn.Module)


class Checkpoint(NamedTuple):
    """A folder with a head: its `config.json`, and all tensors by the names they have there."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def layer(self) -> Mapping[str, Any]:
        """The part of the configuration that describes the decoder layer."""
        found = self.config.get("transformer_layer_config", self.config)
        if not isinstance(found, Mapping):
            raise self.refused("its transformer_layer_config is no table")
        return found

    def refused(self, why: str, remedy: str = "Take another head, or train one: foredraft train.") -> ModelError:
        """The error for a head that cannot be used, with a clause that says why."""
        return ModelError(f"The head in {self.folder} cannot be used: {why}. {remedy}")


@dataclass(frozen=True)
class TargetConfig:
    """What a head's files say of its target.

    Args:
        reference: Hub id or folder from which other programs load it.
        vocab_size: Ids that the model takes, padding included.
        layers: Of the model.
        context: Most tokens of a sequence; `None` if it is not limited.
        architectures: As in the target's own `config.json`.
    """

    reference: str
    vocab_size: int
    layers: int
    context: int | None = None
    architectures: tuple[str, ...] = ("LlamaForCausalLM",)

    @classmethod
    def of(cls, target: Backend, reference: str, architectures: Sequence[str] = ("LlamaForCausalLM",)) -> TargetConfig:
        """That of a loaded target."""
        return cls(reference, target.embedding_rows, target.layers, target.context, tuple(architectures))


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a head's folder: safetensors, else what `torch.save` wrote, of which only tensors are taken.

    Raises:
        ModelError: Something is missing or damaged.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"Cannot read {folder / CONFIG} ({error}), which must say what the head in it is.") from error
    if not isinstance(config, dict):
        raise ModelError(f"{folder / CONFIG} must hold a table of settings, but holds something else.")
    safe = sorted(folder.glob("*.safetensors"))
    files = safe or [file for name in TORCH_FILES for file in sorted(folder.glob(name))]
    if not files:
        raise ModelError(f"{folder} has no weights: neither .safetensors nor {' nor '.join(TORCH_FILES)}.")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _read_tensors(file)
    return Checkpoint(folder, config, tensors)


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ModelError(
            f"Cannot read {file} ({reason}). It may be cut short, or hold more than tensors, which is not loaded."
        ) from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ModelError(f"{file} must hold tensors by name, but holds something else.")
    return found


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    about: Mapping[str, str],
    weights: str = WEIGHTS,
) -> None:
    """Write a head's folder, whole or not at all; a head that is there already is replaced.

    Raises:
        InvalidInputError: The folder has other files, or is none.
        ModelError: It cannot be written.
    """
    names = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    others = [name for name in names if name != CONFIG and not name.endswith(".safetensors")]
    if others or (folder.exists() and not folder.is_dir()):
        what = f"also holds {others[0]}" if others else "is a file"
        raise InvalidInputError(
            f"{folder} {what}, but must be a new folder, or one that holds a head and nothing else."
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as staging:
            fresh, old = Path(staging) / "fresh", Path(staging) / "old"
            fresh.mkdir()
            (fresh / CONFIG).write_text(json.dumps(dict(config), indent=2, sort_keys=True) + "\n", encoding="utf-8")
            save_file(dict(tensors), fresh / weights, metadata={"format": "pt", **about})
            if folder.exists():
                folder.rename(old)
            try:
                fresh.rename(folder)
            except OSError:
                if old.exists():
                    old.rename(folder)
                raise
    except (OSError, SafetensorError) as error:
        raise ModelError(f"Cannot write {folder} ({error}): check the folder and the free space.") from error


def block_shape(checkpoint: Checkpoint, *, qk_norm: bool = False) -> BlockShape:
    """Sizes of the decoder layer that the configuration describes.

    Raises:
        ModelError: A size is missing, or the layer is of a kind that heads do not have here; the message names it.
    """
    layer = checkpoint.layer
    for name in ("hidden_size", "intermediate_size", "num_attention_heads"):
        if not isinstance(layer.get(name), int):
            raise checkpoint.refused(f"{name} is {layer.get(name)!r} in its config.json, but must be a number")
    config = _config_of(layer)
    for name, wanted in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if getattr(config, name) != wanted:
            raise checkpoint.refused(f"its layer has {name} = {getattr(config, name)!r}, and only {wanted!r} is known")
    if "sliding_attention" in (layer.get("layer_types") or ()):
        raise checkpoint.refused("its layer sees a sliding window only, and only full attention is known")
    theta, frequencies = _rope(checkpoint, config)
    return replace(BlockShape.of(config), rope_theta=theta, qk_norm=qk_norm, frequencies=frequencies)


def _config_of(layer: Mapping[str, Any]) -> Any:
    """The layer as transformers understands it. Importing that takes half a second, so what `save_head` wrote, which
    leaves nothing open, is taken as it stands."""
    kinds = {name: type(value) for name, value in layer.items() if name != "dtype"}
    plain = {"rope_type": "default", "rope_theta": layer.get("rope_theta")}
    if kinds == _WRITTEN and layer["rope_parameters"] == plain:
        hidden, heads = layer["hidden_size"], layer["num_attention_heads"]
        if heads > 0 and hidden % heads == 0:
            return SimpleNamespace(**layer)
    from transformers import LlamaConfig

    known: Any = {name: value for name, value in layer.items() if name not in ("model_type", "architectures")}
    return LlamaConfig(**known)


def _rope(checkpoint: Checkpoint, config: Any) -> tuple[float, tuple[float, ...]]:
    """Theta, and the frequencies themselves where they are scaled."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters or {}
    kind, share = rope.get("rope_type", "default"), rope.get("partial_rotary_factor", 1.0)
    if kind not in (*_PLAIN_ROPE, *_SCALED_ROPE) or share != 1.0:
        what = f"of kind {kind!r}" if share == 1.0 else f"over {share} of each head only"
        raise checkpoint.refused(
            f"its rotary positions are {what}, and only {', '.join(_PLAIN_ROPE + _SCALED_ROPE)} is known"
        )
    theta = float(rope.get("rope_theta", 10000.0))
    if kind in _PLAIN_ROPE:
        return theta, ()
    return theta, tuple(ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0].tolist())


def require_target(checkpoint: Checkpoint, target: Backend, vocab_size: int | None = None) -> None:
    """Refuse a head that was made for a target of other sizes.

    Raises:
        UnsupportedError: Naming both sides.
    """
    hidden = checkpoint.config.get("target_hidden_size") or checkpoint.layer.get("hidden_size")
    pairs: list[tuple[str, Any, set[int]]] = [("states", hidden, {target.hidden_size})]
    if vocab_size is not None:
        pairs.append(("a vocabulary", vocab_size, {target.embedding_rows, target.vocab_size}))
    for what, given, allowed in pairs:
        if given not in allowed:
            raise UnsupportedError(
                f"The head in {checkpoint.folder} was made for a target with {what} of {given}, and this target has "
                f"{max(allowed)}: use it with the model that it is for, or train one for this model (foredraft train)."
            )


def filled(
    head: Callable[[], HeadT],
    checkpoint: Checkpoint,
    named: Callable[[str], str],
    target: Backend,
    ignored: Sequence[str] = (),
    replaced: Mapping[str, Tensor] | None = None,
) -> HeadT:
    """A head with the tensors of a checkpoint, on the target's device (on a CPU in float32).

    Args:
        head: Makes it; no memory is taken for its first weights.
        checkpoint: Has the tensors.
        named: What a tensor of the head is called there.
        target: What it drafts for.
        ignored: Tensors there that nothing is done with.
        replaced: Tensors that take the place of those there, by their names there.

    Raises:
        ModelError: A tensor is missing, of another shape, or unknown.
    """
    with torch.device("meta"):
        made = head()
    tensors = {**checkpoint.tensors, **(replaced or {})}
    wanted = {named(name): (name, tensor.shape) for name, tensor in made.state_dict().items()}
    missing = sorted(wanted.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - wanted.keys() - set(ignored))
    if missing or unknown:
        what = f"it lacks tensor '{missing[0]}'" if missing else f"it has tensor '{unknown[0]}', which is not known"
        raise checkpoint.refused(f"{what} ({len(missing)} missing, {len(unknown)} not known)")
    for name, (_, shape) in wanted.items():
        if tensors[name].shape != shape:
            raise checkpoint.refused(
                f"its tensor '{name}' is {list(tensors[name].shape)}, but by its config.json must be {list(shape)}"
            )
    place = target.embed([0]).device
    dtype = torch.float32 if place.type == "cpu" else None
    state = {own: tensors[name].to(place, dtype, copy=True) for name, (own, _) in wanted.items()}
    made.load_state_dict(state, assign=True)
    return made.to(place).eval().requires_grad_(False)


def require_shared(checkpoint: Checkpoint, name: str, ours: Callable[[Sequence[int]], Tensor], what: str) -> None:
    """Refuse a head whose matrix `name`, if it has one, is not the target's: drafting uses the target's own.

    A few rows are compared, by angle, for the target may be quantised.

    Raises:
        ModelError: They differ.
    """
    matrix = checkpoint.tensors.get(name)
    if matrix is None:
        return
    rows = ours([0])
    if matrix.ndim != 2 or matrix.shape[1] != rows.shape[1]:
        raise checkpoint.refused(
            f"its tensor '{name}' is {list(matrix.shape)}, for a target with states of {rows.shape[1]}"
        )
    ids = torch.linspace(0, min(len(matrix), 1000) - 1, 16).long().tolist()
    there, here = matrix[ids].float(), ours(ids).cpu()
    likeness = torch.nn.functional.cosine_similarity(there, here, dim=-1)
    if likeness[there.norm(dim=-1) > 0].median() < 0.9:
        raise checkpoint.refused(
            f"it has {what} of its own ('{name}'), and only heads that share the target's are known"
        )
