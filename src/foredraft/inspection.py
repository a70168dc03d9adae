"""What a model's files hold, without reading the weights: for `foredraft models show`."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig

from foredraft.backends.checkpoint import readable
from foredraft.backends.native import reading
from foredraft.backends.native.families import NotNativeError
from foredraft.backends.native.gguf_file import GgufFile
from foredraft.backends.native.tensors import bytes_when_read
from foredraft.backends.native.torch_tensors import open_file, shards
from foredraft.models import ModelFiles


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model before it is loaded."""

    model: str
    """The reference."""
    path: str
    architecture: str
    parameters: int
    """Numbers in all tensors; packed ones of quantised checkpoints count as they are stored."""
    tensors: dict[str, int]
    """How many there are of each type, the most frequent first."""
    bytes: int
    """Of all tensors as they are stored."""
    bytes_per_token: int | None
    """What the native backend reads of them for each token; `None` where it does not run the model."""
    context: int | None
    backend: str
    """What runs it on a CPU unless another is asked for."""
    not_native: str | None
    """Why that is not the native backend."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class _Tensor(NamedTuple):
    kind: str
    numbers: int
    size: int


def inspect_model(files: ModelFiles) -> ModelFacts:
    """Look into a model's files.

    Raises:
        ModelError: They are damaged, incomplete, or of a kind that no backend knows.
    """
    reason, per_token = None, None
    try:
        opened = reading.open_native(files.path)
        per_token = bytes_when_read(opened.config, opened.tensors)
    except NotNativeError as error:
        reason = error.reason
    architecture, context, tensors = _of_gguf(files.path) if files.is_gguf else _of_folder(files.path)
    return ModelFacts(
        model=files.reference,
        path=str(files.path),
        architecture=architecture,
        parameters=sum(tensor.numbers for tensor in tensors),
        tensors=dict(Counter(tensor.kind for tensor in tensors).most_common()),
        bytes=sum(tensor.size for tensor in tensors),
        bytes_per_token=per_token,
        context=context,
        backend="native" if reason is None else "transformers",
        not_native=reason,
    )


def _of_gguf(path: Path) -> tuple[str, int | None, list[_Tensor]]:
    file = GgufFile(path)
    architecture = str(file.metadata.get("general.architecture"))
    context = file.metadata.get(f"{architecture}.context_length")
    tensors = [_Tensor(place.type.name, math.prod(place.shape), place.size) for place in file.places.values()]
    return architecture, context, tensors


def _of_folder(path: Path) -> tuple[str, int | None, list[_Tensor]]:
    with readable(path):
        config = AutoConfig.from_pretrained(path)
        tensors = []
        for file in shards(path):
            opened = open_file(file)
            for name in opened.keys():  # noqa: SIM118 (it is no dict)
                stored = opened.get_tensor(name)
                tensors.append(_Tensor(opened.get_slice(name).get_dtype(), stored.numel(), stored.nbytes))
    text = config.get_text_config(decoder=True)
    return config.model_type, getattr(text, "max_position_embeddings", None), tensors
