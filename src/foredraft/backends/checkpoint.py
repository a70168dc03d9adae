"""Reads a model and its tokenizer through transformers, checked before it takes memory and after it is read."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from foredraft.errors import ForedraftError, InvalidInputError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16", "float16")
_BUDGET_TOKENS = 2048  # room for the KV of a sequence this long is part of the memory budget
_LARGEST_CONVERTED = 4e9  # bytes of float32 weights; larger GGUF models are read anew each time


class Checkpoint(NamedTuple):
    """A loaded model and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def pick_device(device: str) -> torch.device:
    """The torch device of a name; `auto` is the GPU if there is one, else the CPU.

    Raises:
        InvalidInputError: There is no such device here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
        torch.empty(0, device=picked)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InvalidInputError(f"Device '{device}' cannot be used here ({reason}). Try 'auto' or 'cpu'.") from error
    return picked


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    """The weights' dtype; `auto` is float32 on a CPU, where outputs then are exact, else the checkpoint's own.

    Raises:
        InvalidInputError: Unknown name.
    """
    if dtype not in DTYPES:
        raise InvalidInputError(f"dtype is '{dtype}', but must be one of {', '.join(DTYPES)}.")
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    picked = getattr(torch, dtype)
    assert isinstance(picked, torch.dtype)
    return picked


def load_checkpoint(
    path: Path, *, device: str = "auto", dtype: str = "auto", converted: Path | None = None
) -> Checkpoint:
    """Load a folder of safetensors or a GGUF file.

    Args:
        path: The folder, or the `.gguf` file.
        device: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`.
        dtype: One of `DTYPES`.
        converted: Folder in which the dequantised copy of a GGUF file is kept, so that it is converted only once;
            `None` keeps none.

    Raises:
        ModelError: The files are damaged, incomplete or of an unknown kind, or do not fit into memory.
        InvalidInputError: Unknown device or dtype.
    """
    place = pick_device(device)
    options: dict[str, Any] = {"dtype": pick_dtype(dtype, place)}
    if path.suffix == ".gguf":
        if converted is not None and (converted / "config.json").is_file():
            try:
                return _read(path, converted, place, options)
            except ModelError as error:  # if it is not the copy's fault, the file itself will say so again
                logger.warning("The converted copy is not used: %s", error)
        checkpoint = _read(path, path.parent, place, options | {"gguf_file": path.name})
        if converted is not None:
            _keep_converted(checkpoint, converted)
        return checkpoint
    return _read(path, path, place, options)


def _read(path: Path, folder: Path, device: torch.device, options: dict[str, Any]) -> Checkpoint:
    source = {key: value for key, value in options.items() if key == "gguf_file"}
    with readable(path):
        config = AutoConfig.from_pretrained(folder, **source)
        tokenizer = AutoTokenizer.from_pretrained(folder, **source)
        refuse_unless_it_fits(config, options["dtype"], device)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, use_safetensors=True, output_loading_info=True, device_map=device, **options
        )
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(f"{path} lacks {len(missing)} of its tensors, such as '{missing[0]}': it is incomplete.")
    return Checkpoint(model.eval(), tokenizer)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Whatever a damaged file makes the readers raise, the user needs one sentence with the file's name."""
    try:
        yield
    except ForedraftError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ModelError(
            f"Cannot read the model {path} ({reason}). The file may be cut short, damaged, or of a kind that "
            "transformers does not know."
        ) from error


class MemoryBudget(NamedTuple):
    """Bytes a model needs; see `memory_budget`."""

    weights: int
    kv_per_token: int

    def total(self, tokens: int) -> int:
        """Weights and one sequence of `tokens`."""
        return self.weights + tokens * self.kv_per_token


def memory_budget(config: Any, dtype: torch.dtype | str) -> MemoryBudget:
    """What a model takes, from its configuration alone."""
    if not isinstance(dtype, torch.dtype):
        dtype = getattr(config, "dtype", None) or torch.float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    size = torch.empty(0, dtype=dtype).element_size()
    return MemoryBudget(
        weights=size * sum(p.numel() for p in model.parameters()),
        kv_per_token=2 * size * text.num_hidden_layers * heads * head_dim,
    )


def available_memory(device: torch.device) -> int:
    """Bytes that can be taken on the device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)


def refuse_unless_it_fits(config: Any, dtype: torch.dtype | str, device: torch.device) -> None:
    """Log what the model will take; raise `ModelError` with the figures if that is more than there is."""
    try:
        budget = memory_budget(config, dtype)
    except (AttributeError, ValueError) as error:  # an unusual configuration: let the loader judge it
        logger.info("No memory budget for model type '%s': %s", config.model_type, error)
        return
    refuse_beyond_memory(f"Model type '{config.model_type}'", budget, device)


def refuse_beyond_memory(what: str, budget: MemoryBudget, device: torch.device) -> None:
    """Log what a model will take; raise `ModelError` with the figures if that is more than there is."""
    free = available_memory(device)
    figures = (
        f"{budget.weights / 1e9:.2f} GB of weights and {budget.kv_per_token / 1e3:.0f} kB of KV a token, "
        f"with {free / 1e9:.2f} GB free on {device}"
    )
    logger.info("%s: %s", what, figures)
    if budget.total(_BUDGET_TOKENS) > free:
        raise ModelError(
            f"The model does not fit: it takes {figures}. Use a smaller model, a smaller dtype, or another device."
        )


def _keep_converted(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the dequantised model beside the cache, whole or not at all; a full disk costs only the copy."""
    model: Any = checkpoint.model
    if sum(p.numel() for p in model.parameters()) * 4 > _LARGEST_CONVERTED or model.dtype != torch.float32:
        return
    model.hf_quantizer = None  # the weights are plain tensors now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=folder.parent))
    except OSError as error:
        logger.warning("The converted model is not kept: %s", error)
        return
    try:
        model.save_pretrained(staging)
        checkpoint.tokenizer.save_pretrained(staging)
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        staging.rename(folder)
    except (OSError, SafetensorError) as error:
        logger.warning("The converted model is not kept: %s", error)
        shutil.rmtree(staging, ignore_errors=True)
