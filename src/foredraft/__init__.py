"""Lossless speculative decoding: faster generation from the language model you already have.

`load` a model and `generate` with it, or give `custom_generate` to a transformers model you hold already.
`speculative_decode_step` is the idea itself, on plain tensors.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foredraft.acceptance.step import speculative_decode_step
    from foredraft.api import Model, load
    from foredraft.errors import ForedraftError
    from foredraft.hf import custom_generate
    from foredraft.types import Completion, SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "Completion": "types",
    "ForedraftError": "errors",
    "Model": "api",
    "SamplingParams": "types",
    "custom_generate": "hf",
    "load": "api",
    "speculative_decode_step": "acceptance.step",
}
__all__ = [
    "Completion",
    "ForedraftError",
    "Model",
    "SamplingParams",
    "custom_generate",
    "load",
    "speculative_decode_step",
]


def __getattr__(name: str) -> object:
    """Import public names when they are first used, so that the command line starts without loading torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'foredraft' has no attribute '{name}'")
    return getattr(import_module(f"foredraft.{_HOMES[name]}"), name)
