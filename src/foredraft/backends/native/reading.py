"""From a model's files, or a model that is loaded already, to the native engine's weights and the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from foredraft.backends.checkpoint import MemoryBudget, readable, refuse_beyond_memory
from foredraft.backends.native import families
from foredraft.backends.native.gguf_config import gguf_config, stop_tokens
from foredraft.backends.native.gguf_file import GgufFile
from foredraft.backends.native.gguf_tensors import GgufTensors
from foredraft.backends.native.kept import tokenizer_of, with_kernels
from foredraft.backends.native.tensors import WEIGHTS, Tensors, build, bytes_when_read, check
from foredraft.backends.native.torch_tensors import folder_tensors, model_tensors
from foredraft.backends.native.weights import Weights
from foredraft.checks import require
from foredraft.errors import ModelError
from foredraft.models import file_key

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from foredraft.models import Notify


class NativeModel(NamedTuple):
    """Weights and the tokenizer that goes with them."""

    weights: Weights
    tokenizer: PreTrainedTokenizerBase


def read_native(
    path: Path, *, weights: str = "auto", cache: Path | None = None, notify: Notify = lambda _: None
) -> NativeModel:
    """Read a folder of safetensors or a GGUF file; matrices stay in the files, mapped into memory.

    Args:
        path: The folder, or the `.gguf` file.
        weights: `auto` leaves each matrix in the type it is stored in, if that has a kernel, and makes it bf16 if not;
            `f32`, `bf16` and `q8` convert all of them.
        cache: Folder of foredraft's cache, for tokenizers and converted tensors of GGUF files; `None` keeps nothing.
        notify: Called with a sentence when something that takes time begins.

    Raises:
        ModelError: The files are damaged or incomplete.
        NotNativeError: The engine does not run such a model.
        InvalidInputError: Unknown `weights`.
    """
    require("weights", weights, weights in WEIGHTS, f"one of {', '.join(WEIGHTS)}")
    opened = open_native(path)
    with readable(path):
        _refuse_beyond_memory(opened, weights)
        folder = None if cache is None or path.is_dir() else cache / "native" / file_key(path)
        tensors = with_kernels(opened.tensors, folder, notify) if weights == "auto" else opened.tensors
        read = build(opened.config, tensors, weights=weights, stop_tokens=opened.stop_tokens)
        return NativeModel(read, _folder_tokenizer(path) if path.is_dir() else tokenizer_of(path, folder))


def _refuse_beyond_memory(opened: Opened, weights: str) -> None:
    """Mapped weights count too: an engine that reads them from the disk for every token is none."""
    measures = families.measures(opened.config)
    kv = 2 * 4 * measures.layers * measures.kv_heads * measures.head_dim
    budget = MemoryBudget(bytes_when_read(opened.config, opened.tensors, weights), kv)
    refuse_beyond_memory(f"Model type '{measures.architecture}'", budget, torch.device("cpu"))


class Opened(NamedTuple):
    """A model's files, of which all has been checked but the values of the weights, and none of those read."""

    config: PreTrainedConfig
    tensors: Tensors
    stop_tokens: frozenset[int]


def open_native(path: Path) -> Opened:
    """Open a folder or a GGUF file; errors as those of `read_native`."""
    with readable(path):
        opened = _open_folder(path) if path.is_dir() else _open_gguf(path)
        check(opened.config, opened.tensors)
        return opened


def refuses(path: Path) -> str | None:
    """Why the engine does not run the model of a folder or a GGUF file, as a clause; `None` if it does.

    Raises:
        ModelError: The files are damaged or incomplete.
    """
    try:
        open_native(path)
    except families.NotNativeError as error:
        return error.reason
    return None


def _open_folder(path: Path) -> Opened:
    from transformers import AutoConfig  # with its models' modules slower to import than a GGUF file is to read

    config = AutoConfig.from_pretrained(path)
    families.require_supported(config)
    return Opened(config, folder_tensors(path), _stop_tokens(path, config))


def _folder_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    return tokenizer


def _open_gguf(path: Path) -> Opened:
    file = GgufFile(path)
    config = gguf_config(file)
    return Opened(config, GgufTensors(file, config), stop_tokens(file))


def weights_of_model(model: PreTrainedModel, weights: str = "auto") -> Weights:
    """The weights of a transformers model; they share its memory unless they are converted.

    Args:
        model: The model.
        weights: See `read_native`.

    Raises:
        NotNativeError: The engine does not run such a model.
        InvalidInputError: Unknown `weights`.
    """
    require("weights", weights, weights in WEIGHTS, f"one of {', '.join(WEIGHTS)}")
    families.require_supported(model.config)
    ends = getattr(model.generation_config, "eos_token_id", None)
    return build(model.config, model_tensors(model), weights=weights, stop_tokens=_ids(ends))


def refuses_model(model: PreTrainedModel) -> str | None:
    """Why the engine does not run a transformers model, as a clause; `None` if it does."""
    try:
        families.require_supported(model.config)
        check(model.config, model_tensors(model))
    except families.NotNativeError as error:
        return error.reason
    except ModelError as error:  # as where adapters are wrapped around it
        return f"its tensors are not as usual ({error})"
    return None


def _stop_tokens(folder: Path, config: Any) -> frozenset[int]:
    """The ids that end an answer, as transformers takes them: of the generation settings if there are such."""
    settings = folder / "generation_config.json"
    if settings.is_file():
        return _ids(json.loads(settings.read_text(encoding="utf-8")).get("eos_token_id"))
    return _ids(config.eos_token_id)


def _ids(ends: int | list[int] | None) -> frozenset[int]:
    return frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)
