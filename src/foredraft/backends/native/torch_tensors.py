"""Tensors out of torch: of a folder of safetensors, mapped into memory, or of a model that is loaded already."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType
from safetensors import SafetensorError, safe_open

from foredraft.backends.native import families
from foredraft.backends.native.tensors import Stored, Tensors
from foredraft.errors import ModelError

_TYPES = {
    torch.float32: GGMLQuantizationType.F32,
    torch.bfloat16: GGMLQuantizationType.BF16,
    torch.float16: GGMLQuantizationType.F16,
    torch.float64: GGMLQuantizationType.F64,
}


class TorchTensors(Tensors):
    """Tensors that are got by name. Their memory is shared where they lie on the CPU in one piece."""

    def __init__(self, where: str, tensors: Mapping[str, Callable[[], torch.Tensor]]) -> None:
        self.where = where
        self._get = tensors

    def names(self) -> Collection[str]:
        """See `Tensors`."""
        return self._get.keys()

    def kind(self, name: str) -> tuple[GGMLQuantizationType, tuple[int, ...]]:
        """See `Tensors`."""
        tensor = self._get[name]()
        if tensor.dtype not in _TYPES:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise families.NotNativeError(
                self.where, f"its tensor '{name}' is of type {kind}, and no float32, bfloat16, float16 or float64"
            )
        return _TYPES[tensor.dtype], tuple(tensor.shape)

    def get(self, name: str) -> Stored:
        """See `Tensors`."""
        kind, shape = self.kind(name)
        tensor = self._get[name]().detach().cpu().contiguous()
        data = tensor.view(torch.uint8).reshape(-1, shape[-1] * tensor.element_size())
        return Stored(kind, shape, data.numpy())


def model_tensors(model: Any) -> Tensors:
    """The tensors of a transformers model."""
    state: dict[str, torch.Tensor] = model.state_dict()
    return TorchTensors("the model", {name: partial(state.__getitem__, name) for name in state})


def folder_tensors(folder: Path) -> Tensors:
    """The tensors of a folder of safetensors, in one file or in shards.

    Raises:
        ModelError: A file is missing, cut short or damaged; the message names it.
    """
    getters: dict[str, Callable[[], torch.Tensor]] = {}
    for file in shards(folder):
        getters |= _getters(file)
    return TorchTensors(str(folder), getters)


def file_tensors(file: Path) -> Tensors:
    """The tensors of one file of safetensors; errors as those of `folder_tensors`."""
    return TorchTensors(str(file), _getters(file))


def _getters(file: Path) -> dict[str, Callable[[], torch.Tensor]]:
    opened = open_file(file)
    names: list[str] = opened.keys()
    return {name: partial(opened.get_tensor, name) for name in names}


def open_file(file: Path) -> Any:
    """A file of safetensors, mapped into memory; errors as those of `folder_tensors`."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"Cannot read {file} ({error}): it may be cut short or damaged.") from error


def shards(folder: Path) -> list[Path]:
    """The files of safetensors of a folder that transformers would read; errors as those of `folder_tensors`."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file() or not index.is_file():
        files = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    else:
        try:
            parts = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            files = [folder / name for name in sorted(set(parts))]
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"Cannot read {index} ({error}): it may be cut short or damaged.") from error
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        what = f"'{missing[0]}', which its index names" if missing else "model.safetensors"
        raise ModelError(f"{folder} lacks {what}: it is incomplete.")
    return files
