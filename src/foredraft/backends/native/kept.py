"""What is kept of a GGUF file so that the next start is quick: its tokenizer, and tensors of types without a kernel."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

from foredraft.backends.native.tensors import Stored, Tensors, as_matrix, has_kernel
from foredraft.backends.native.torch_tensors import TorchTensors, file_tensors
from foredraft.backends.native.weights import Floats
from foredraft.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foredraft.models import Notify

logger = logging.getLogger(__name__)

_LARGEST = 4e9  # bytes of converted tensors
_CONVERTED = "converted.safetensors"
_Fast: Any = PreTrainedTokenizerFast  # its constructor has no type hints


def tokenizer_of(path: Path, folder: Path | None) -> PreTrainedTokenizerBase:
    """The tokenizer and chat template of a GGUF file, from `folder` if they are kept there, else kept there."""
    kept = folder and folder / "tokenizer"
    if kept is not None and kept.is_dir():
        try:
            return _load_tokenizer(kept)
        except Exception as error:  # whatever a damaged one raises
            logger.warning("The tokenizer kept in %s is not used: %s", kept, error)
    tokenizer = _load_tokenizer(path.parent, gguf_file=path.name)
    if kept is not None:
        _keep(kept, tokenizer.save_pretrained)
    return tokenizer


def _load_tokenizer(folder: Path, **source: str) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = _Fast.from_pretrained(folder, local_files_only=True, **source)
    return tokenizer


class Converted(Tensors):
    """Tensors over those that they were converted from."""

    def __init__(self, converted: Tensors, original: Tensors) -> None:
        self.where, self.free_biases = original.where, original.free_biases
        self.norm_offset_included = original.norm_offset_included
        self._converted, self._original = converted, original

    def names(self) -> Collection[str]:
        """See `Tensors`."""
        return self._original.names()

    def kind(self, name: str) -> tuple[GGMLQuantizationType, tuple[int, ...]]:
        """See `Tensors`."""
        return self._of(name).kind(name)

    def get(self, name: str) -> Stored:
        """See `Tensors`."""
        return self._of(name).get(name)

    def own_name(self, name: str) -> str:
        """See `Tensors`."""
        return self._original.own_name(name)

    def refine(self, frequencies: Floats) -> Floats:
        """See `Tensors`."""
        return self._original.refine(frequencies)

    def _of(self, name: str) -> Tensors:
        return self._converted if name in self._converted.names() else self._original


def with_kernels(tensors: Tensors, folder: Path | None, notify: Notify) -> Tensors:
    """The same tensors, with bf16 in place of matrices whose types have no kernel; these are kept in `folder`.

    Args:
        tensors: All of a model's.
        folder: Where the model's files are kept; `None` keeps none.
        notify: Told before any are converted.
    """
    kinds = {name: tensors.kind(name) for name in tensors.names()}
    foreign = {name: shape for name, (kind, shape) in kinds.items() if len(shape) == 2 and _needs_conversion(kind)}
    if not foreign:
        return tensors
    file = folder and folder / "converted" / _CONVERTED
    if file is not None and file.is_file():
        kept = _kept(file, foreign)
        if kept is not None:
            return Converted(kept, tensors)
    counted = Counter(kinds[name][0].name for name in foreign)
    counts = ", ".join(f"{count} of type {kind}" for kind, count in sorted(counted.items()))
    notify(f"Converting tensors whose types have no kernel to bf16: {counts}")
    converted = {name: _bfloat16(tensors.get(name)) for name in foreign}
    small_enough = sum(tensor.nbytes for tensor in converted.values()) <= _LARGEST
    if (
        file is not None
        and small_enough
        and _keep(file.parent, lambda staging: save_file(converted, staging / _CONVERTED))
    ):
        return Converted(file_tensors(file), tensors)
    return Converted(TorchTensors(tensors.where, {name: converted[name].detach for name in foreign}), tensors)


def _needs_conversion(kind: GGMLQuantizationType) -> bool:
    return not has_kernel(kind) and kind != GGMLQuantizationType.F64  # which becomes f32 in no time


def _kept(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> Tensors | None:
    """Converted tensors of just these shapes, or `None`."""
    try:
        tensors = file_tensors(file)
        found = {name: tensors.kind(name) for name in tensors.names()}
    except (ModelError, SafetensorError) as error:
        logger.warning("The converted tensors are not used: %s", error)
        return None
    if found == {name: (GGMLQuantizationType.BF16, shape) for name, shape in shapes.items()}:
        return tensors
    logger.warning("The converted tensors are not used: %s holds others", file)
    return None


def _bfloat16(stored: Stored) -> torch.Tensor:
    data = as_matrix(stored, "bf16").data
    return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)


def _keep(folder: Path, write: Callable[[Path], object]) -> bool:
    """Write a folder whole or not at all; a full disk costs only the copy."""
    staging = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=folder.parent))
        write(staging)
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        staging.rename(folder)
    except (OSError, SafetensorError) as error:
        logger.warning("Nothing is kept in %s: %s", folder, error)
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
        return False
    return True
