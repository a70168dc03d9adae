"""A transformers model with its linear layers in int8, made from one that is loaded."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from foredraft.backends.base import USE_INSTEAD
from foredraft.backends.partial import refuse_hooks, twin
from foredraft.errors import UnsupportedError

logger = logging.getLogger(__name__)

_KERNEL_STEP = 32  # inputs that torch's int8 kernel takes at once; it reads past the end of rows that are no multiple
_LEVELS = 127


class Int8Linear(nn.Module):
    """A linear layer with int8 weights `[out, in]` and a scale for each output: `x @ (weight * scale).T + bias`.

    Args:
        weight: `[out, in]`, of any floating dtype.
        bias: `[out]` or `None`; it is kept as it is.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        # The kernel is made for bfloat16 (with float32 it is slower than a float32 product): round the scale first.
        scale = (weight.abs().amax(1).float() / _LEVELS).clamp(min=torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
        rounded = (weight.float() / scale[:, None].float()).round().clamp(-_LEVELS, _LEVELS)
        self.bias = bias
        self.weight = nn.Buffer(rounded.to(torch.int8).contiguous(), persistent=False)
        self.scale = nn.Buffer(scale, persistent=False)
        self._packed = _kernel_is_right(weight.shape[0], weight.shape[1])

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`, in the dtype of `x`."""
        if self._packed:
            rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
            y: Tensor = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scale)
            y = y.to(x.dtype).view(*x.shape[:-1], -1)
        else:
            y = functional.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)
        return y if self.bias is None else y + self.bias

    @property
    def nbytes(self) -> int:
        """Bytes that are its own."""
        return self.weight.nbytes + self.scale.nbytes


def quantize(model: Any) -> Any:
    """The model with 8-bit linear layers, its head among them; all else is shared. What it takes is logged.

    Raises:
        UnsupportedError: It is not on a CPU, or has no plain linear layers (they are quantised already, say).
    """
    refuse_hooks(model, "self_quant")
    if model.device.type != "cpu":
        raise UnsupportedError(
            f"Drafter 'self_quant' runs on a CPU only, and the target is on {model.device}: weights that are unpacked "
            f"for every forward would make the draft slower there than the target. {USE_INSTEAD}"
        )
    layers: dict[str, nn.Module] = {}
    taken = replaced = 0
    with torch.no_grad():
        for name, module in model.named_modules():
            if type(module) not in (nn.Linear, Conv1D):
                continue
            weight = module.weight.T if isinstance(module, Conv1D) else module.weight
            layers[name] = small = Int8Linear(weight, module.bias)
            taken += small.nbytes
            replaced += module.weight.nbytes
    if not layers:
        raise UnsupportedError(
            f"Drafter 'self_quant' found no linear layers in this model of type '{model.config.model_type}' "
            f"(it may be quantised already). {USE_INSTEAD}"
        )
    logger.info(
        "The int8 copy of the target takes %.1f MB more: %d linear layers of %.1f MB in the target's %s",
        taken / 1e6,
        len(layers),
        replaced / 1e6,
        str(model.dtype).removeprefix("torch."),
    )
    return twin(model, layers)


@functools.cache
def _kernel_is_right(outputs: int, inputs: int) -> bool:
    """Whether torch's weight-only int8 kernel gives on this CPU what it should, for weights of this shape."""
    if inputs % _KERNEL_STEP:
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-_LEVELS, _LEVELS + 1, (outputs, inputs), generator=generator).to(torch.int8)
    x = torch.randn(3, inputs, generator=generator).to(torch.bfloat16)
    expected = x.float() @ weight.float().T
    try:
        found = torch.ops.aten._weight_int8pack_mm(x, weight, torch.ones(outputs, dtype=torch.bfloat16))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return bool((found.float() - expected).abs().max() <= 0.01 * expected.abs().max())
