"""Parts and variants of a transformers model that share its weights: some layers only, sublayers left out or replaced.

Each is run by the model's own code, so that masks, positions, scalings and caps are what the model says.
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from foredraft.backends.base import USE_INSTEAD, require_inner_layer
from foredraft.backends.sublayers import Sublayers, fingerprint, sample_places
from foredraft.errors import UnsupportedError

LAYERED = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "llama",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
)
"""Model types whose body is embeddings, then `layers` of `self_attn` and `mlp` that add to the residual, then `norm`.

Their forward does nothing to given embeddings before the first layer, so it can go on from hidden states. Each is
tested."""


def twin(module: nn.Module, parts: Mapping[str, nn.Module]) -> Any:
    """A module that is `module` but for some submodules, given by dotted names. All else is shared, not copied."""
    other = copy.copy(module)
    other.__dict__["_modules"] = dict(module._modules)
    below: defaultdict[str, dict[str, nn.Module]] = defaultdict(dict)
    for name, part in parts.items():
        first, _, rest = name.partition(".")
        below[first][rest] = part
    for first, inner in below.items():
        child = module._modules[first]
        assert child is not None
        other._modules[first] = inner[""] if "" in inner else twin(child, inner)
    return other


def refuse_unless_layered(model: Any, drafter: str) -> None:
    """Raise `UnsupportedError` for models that cannot be taken apart by layers, naming the type and what to use."""
    kind = model.config.model_type
    if kind not in LAYERED:
        raise UnsupportedError(
            f"Drafter '{drafter}' cannot take apart models of type '{kind}', only {', '.join(LAYERED)}. {USE_INSTEAD}"
        )
    refuse_hooks(model, drafter)


def refuse_hooks(model: Any, drafter: str) -> None:
    """Raise `UnsupportedError` for models spread over devices: their hooks would run them whatever a twin replaces."""
    if any("forward" in vars(module) for module in model.modules()):
        raise UnsupportedError(f"Drafter '{drafter}' needs the whole model on one device, without hooks. {USE_INSTEAD}")


class Split(NamedTuple):
    """A model cut after some layers. All three share its weights; `first` is a body, the others are whole models."""

    first: Any
    """Token ids to hidden states `[1, n, H]` before the final norm."""
    rest: Any
    """Those hidden states, given as `inputs_embeds`, to the logits of the whole model."""
    head: Any
    """The same hidden states to the logits of the final norm and head alone."""


def split(model: Any, layers: int) -> Split:
    """Cut a model after its first `layers` layers.

    Raises:
        UnsupportedError: Models of this type cannot be taken apart.
        InvalidInputError: There are not more layers than that.
    """
    refuse_unless_layered(model, "early_exit")
    body, prefix = model.base_model, model.base_model_prefix
    require_inner_layer(layers, len(body.layers))
    return Split(
        first=twin(body, {"layers": body.layers[:layers], "norm": nn.Identity()}),
        rest=twin(model, {f"{prefix}.layers": body.layers[layers:]}),
        head=twin(model, {f"{prefix}.layers": nn.ModuleList()}),
    )


class _NoAttention(nn.Module):
    """Adds nothing to the residual, and nothing to the cache."""

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


class _NoMLP(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.zeros_like(hidden_states)


def without(model: Any, attention: Collection[int], mlp: Collection[int]) -> Any:
    """The model without the attention and MLP sublayers of these layers.

    The remaining attention sublayers are numbered anew, so its cache holds them alone; a layer without either is gone.

    Raises:
        UnsupportedError: Models of this type cannot be taken apart.
    """
    refuse_unless_layered(model, "layer_skip")
    kept: list[nn.Module] = []
    row = 0
    for index, layer in enumerate(model.base_model.layers):
        parts: dict[str, nn.Module] = {}
        if index in attention:
            parts["self_attn"] = _NoAttention()
        else:
            parts["self_attn"] = copy.copy(layer.self_attn)
            parts["self_attn"].layer_idx = row  # type: ignore[assignment]
            row += 1
        if index in mlp:
            parts["mlp"] = _NoMLP()
        if index not in attention or index not in mlp:
            kept.append(twin(layer, parts))
    return twin(model, {f"{model.base_model_prefix}.layers": nn.ModuleList(kept)})


def sublayers(model: Any) -> Sublayers:
    """What `without` can leave out.

    Raises:
        UnsupportedError: Models of this type cannot be taken apart.
    """
    refuse_unless_layered(model, "layer_skip")
    layers = model.base_model.layers
    matrices = [
        _tensors(part)[0] for part in (model.get_input_embeddings(), *(layer.mlp.down_proj for layer in layers))
    ]
    sampled = [(tuple(weights.shape), weights[sample_places(*weights.shape)]) for weights in matrices]
    return Sublayers(
        fingerprint(model.config.model_type, sampled),
        attention=tuple(_bytes(layer.self_attn) for layer in layers),
        mlp=tuple(_bytes(layer.mlp) for layer in layers),
        head=_tensors(model.get_output_embeddings())[0].nbytes,
    )


def _tensors(module: nn.Module) -> list[Tensor]:
    """Its weights, which quantised layers hold as buffers."""
    return list(itertools.chain(module.parameters(), module.buffers()))


def _bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in _tensors(module))
