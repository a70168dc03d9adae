"""Heads in files: a table of what is written and read how, and the drafters that come with the package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import foredraft
from foredraft.backends.base import Backend
from foredraft.errors import ModelError
from foredraft.heads import layouts
from foredraft.heads import parallel_layouts as parallel
from foredraft.heads.checkpoints import WEIGHTS, Checkpoint, TargetConfig, read_checkpoint, write_folder
from foredraft.heads.layouts import Written
from foredraft.heads.parallel import MedusaHead, MTPHead, ParallelHead
from foredraft.heads.recurrent import Eagle3Head, EagleHead, RecurrentHead, SequentialMTPHead

Head: TypeAlias = RecurrentHead | ParallelHead
"""Any head that files hold."""


_BUNDLED = Path(__file__).parent / "bundled"


class Layout(NamedTuple):
    """How heads of a class lie in a folder: how they are written, told apart from others by content, and read."""

    made: type[Head]
    write: Callable[[Any, TargetConfig], Written]
    fits: Callable[[Checkpoint], bool]
    read: Callable[[Checkpoint, Backend], Head]
    weights: str = WEIGHTS
    """What the file of the weights is called."""


LAYOUTS = (
    Layout(Eagle3Head, layouts.write_eagle3, layouts.is_eagle3, layouts.read_eagle3),
    Layout(SequentialMTPHead, layouts.write_mtp, layouts.is_mtp, layouts.read_mtp),
    Layout(MTPHead, parallel.write_mtp_heads, parallel.is_mtp_heads, parallel.read_mtp_heads),
    Layout(MedusaHead, parallel.write_medusa, parallel.is_medusa, parallel.read_medusa, parallel.MEDUSA_WEIGHTS),
    Layout(EagleHead, layouts.write_eagle, layouts.is_eagle, layouts.read_eagle),
)
"""A folder is read by the first that fits."""


def save_head(
    head: Head,
    folder: Path,
    *,
    target_config: TargetConfig,
    about: Mapping[str, str] | None = None,
    embedding: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a head as a folder of `config.json` and safetensors, whole or not at all.

    EAGLE-3 and the sequential MTP module are written in the `speculators` format, EAGLE-1 in SafeAILab's layout, Medusa
    in its own. vLLM serves EAGLE-3 for any target that it knows, MTP only for those that have modules of their own.

    Args:
        head: Of a class in `LAYOUTS`.
        folder: A new one, or one that holds a head and nothing else, which is replaced.
        target_config: What it drafts for.
        about: What should be known of it, such as how it was trained; kept in the weights file.
        embedding: `[V, H]` the target's, to be written as well. Where a file has none, vLLM and foredraft take the
            target's own; the `speculators` library (0.9, EAGLE-3) and SafeAILab's programs want it in the file.
        dtype: Of the weights there.

    Raises:
        InvalidInputError: The folder holds other files, or the layout cannot hold such a head.
        ModelError: The folder cannot be written.
    """
    layout = next(layout for layout in LAYOUTS if isinstance(head, layout.made))
    config, tensors = layout.write(head, target_config)
    if embedding is not None:
        tensors["embed_tokens.weight"] = embedding.cpu()
    stored = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    layer = config.get("transformer_layer_config", config)
    layer["dtype"] = config["dtype"] = str(dtype).removeprefix("torch.")
    metadata = {"foredraft": foredraft.__version__, "kind": head.kind, **(about or {})}
    write_folder(folder, config, {name: t.contiguous() for name, t in stored.items()}, metadata, layout.weights)


def load_head(folder: Path, target: Backend) -> Head:
    """Read a head from a folder, in whichever of the layouts it is.

    On a CPU its weights become float32.

    Raises:
        ModelError: The folder cannot be read, holds no head of a known kind, or its tensors are not as they should be.
        UnsupportedError: It was made for another target; both sides are named.
    """
    checkpoint = read_checkpoint(folder)
    layout = next((layout for layout in LAYOUTS if layout.fits(checkpoint)), None)
    if layout is None:
        first = next(iter(sorted(checkpoint.tensors)), "none")
        known = ", ".join(sorted({layout.made.kind for layout in LAYOUTS}))
        raise checkpoint.refused(
            f"it is of no known kind ({known}); its first tensor is '{first}'",
            "Give the folder of a head; draft:REF takes a whole model.",
        )
    return layout.read(checkpoint, target)


def bundled_heads(kind: str) -> dict[str, Path]:
    """Folders of the heads of a kind that come with the package, by the name of the bundled model that they are for."""
    folders = sorted(_BUNDLED.iterdir()) if _BUNDLED.is_dir() else []
    return {folder.name: folder for folder in folders if about_head(folder).get("kind") == kind}


def about_head(folder: Path) -> dict[str, str]:
    """What `save_head` was told of a head; nothing of one that came from elsewhere.

    Raises:
        ModelError: The weights cannot be read.
    """
    file = next(iter(sorted(folder.glob("*.safetensors"))), None)
    if file is None:
        return {}
    try:
        with safe_open(file, framework="pt") as stored:
            return dict(stored.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise ModelError(f"Cannot read {file} ({error}).") from error
