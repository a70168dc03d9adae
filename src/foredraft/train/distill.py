"""Draft models taught by the target: what a smaller causal model is trained for, what it may start from, its folder."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from foredraft.backends.partial import refuse_unless_layered, twin
from foredraft.checks import is_integer, is_number, require
from foredraft.errors import InvalidInputError, ModelError, UnsupportedError
from foredraft.train.features import Window
from foredraft.train.objectives import wide

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Teacher = Callable[[Window], Tensor]
"""Log-probabilities `[B, n, V]` of the target after each token of a padded window `[B, n]`."""

DIVERGENCES = ("forward-kl", "reverse-kl", "jsd")

_BY_LAYER = ("layer_types", "no_rope_layers")  # settings of a configuration that have an entry for each layer


class DistillObjective:
    """How far the law of a draft model is from the target's, token for token.

    Windows that are cut out of a longer text are read as if they were all of it: of the target's law, which knows what
    was before, the draft model then learns the average. Long windows are better than short ones.

    Args:
        model: The draft model, a causal model of transformers whose ids mean what the target's mean.
        teacher: The target's law: `by_states` needs no target in memory, `by_model` no features.
        divergence: `forward-kl` covers all that the target says, `reverse-kl` sticks to what it says most, `jsd` is
            between (Agarwal et al. 2024, arXiv 2306.13649).
        beta: Of `jsd`, in (0, 1).

    Raises:
        InvalidInputError: An unknown divergence, or beta is out of range.
    """

    def __init__(
        self, model: nn.Module, teacher: Teacher, *, divergence: str = "forward-kl", beta: float = 0.5
    ) -> None:
        require("divergence", divergence, divergence in DIVERGENCES, f"one of {', '.join(DIVERGENCES)}")
        require("beta", beta, is_number(beta) and 0 < beta < 1, "a number in (0, 1)")
        self.head = model
        self.teacher = teacher
        self.divergence = divergence
        self.beta = beta

    def losses(self, batch: Window) -> dict[str, Tensor]:
        """The mean divergence in nats a token as `loss`; while the model is not training also what acceptance it gives.

        `agree` is the share of places where the likeliest tokens are the same, which is the acceptance rate at
        temperature 0; `overlap` is the sum of min(p, q), which is that of rejection sampling at temperature 1.

        Raises:
            UnsupportedError: The model has fewer token ids than the target.
        """
        known = torch.isfinite(batch.log_total)
        with torch.no_grad():
            log_p = wide(self.teacher(batch))
        logits = self.head(input_ids=batch.ids, use_cache=False).logits
        if logits.shape[-1] < log_p.shape[-1]:
            raise UnsupportedError(
                f"The draft model has {logits.shape[-1]} token ids and the target {log_p.shape[-1]}: "
                "distil into a model with the target's vocabulary."
            )
        log_q = torch.log_softmax(wide(logits[..., : log_p.shape[-1]]), dim=-1)
        each = divergence_of(log_p, log_q, self.divergence, self.beta)
        found = {"loss": _mean(each, known)}
        if not self.head.training:
            with torch.no_grad():
                found["agree"] = _mean(log_q.argmax(-1) == log_p.argmax(-1), known)
                found["overlap"] = _mean(torch.minimum(log_p, log_q).exp().sum(-1), known)
        return found


def _mean(each: Tensor, known: Tensor) -> Tensor:
    """Over the places that are known."""
    return (each * known).sum() / known.sum().clamp(min=1)


def divergence_of(log_p: Tensor, log_q: Tensor, kind: str, beta: float = 0.5) -> Tensor:
    """Nats `[…]` between laws given as log-probabilities `[…, V]`, the target's p and the draft's q.

    `forward-kl` is KL(p | q), `reverse-kl` KL(q | p), `jsd` is beta KL(p | m) + (1 - beta) KL(q | m) with
    m = beta p + (1 - beta) q.
    """
    if kind == "forward-kl":
        return _kl(log_p, log_q)
    if kind == "reverse-kl":
        return _kl(log_q, log_p)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    return (log_a.exp() * (log_a - log_b)).sum(-1)


def by_states(rows: Tensor) -> Teacher:
    """The law by what the target's final norm gave out, as windows have it, and all rows `[V, H]` of its head.

    States are kept rounded, so their own sum makes them a law, not the total of the windows. For targets whose head is
    a matrix and nothing else: those that cap their logits need `by_model`.
    """
    return lambda batch: torch.log_softmax(wide(nn.functional.linear(batch.states.to(rows.dtype), rows)), dim=-1)


def by_model(target: nn.Module, vocab_size: int) -> Teacher:
    """The law by the target itself, a causal model of transformers, over the first `vocab_size` ids."""
    return lambda batch: torch.log_softmax(
        wide(target(input_ids=batch.ids, use_cache=False).logits[..., :vocab_size]), dim=-1
    )


def truncated(model: Any, layers: int, *, evenly: bool = False) -> Any:
    """A copy of some layers of a model with its embedding, norm and head, as a draft model to start from.

    Args:
        model: A causal model of transformers. It stays as it is, and shares nothing with the copy.
        layers: How many layers to keep.
        evenly: Keep layers from all over the model, the first and the last among them, and not just the first ones.

    Raises:
        UnsupportedError: Models of this type cannot be taken apart.
        InvalidInputError: The model does not have more layers than that.
    """
    refuse_unless_layered(model, "draft")
    count = len(model.base_model.layers)
    good = is_integer(layers) and 1 <= layers < count
    require("layers", layers, good, f"an integer in [1, {count - 1}], for the model has {count} layers")
    kept = evenly_chosen(layers, count) if evenly else list(range(layers))
    chosen = nn.ModuleList(model.base_model.layers[index] for index in kept)
    small = copy.deepcopy(twin(model, {f"{model.base_model_prefix}.layers": chosen}))
    for index, layer in enumerate(small.base_model.layers):
        layer.self_attn.layer_idx = index
    config = small.config
    config.num_hidden_layers = layers
    for name in _BY_LAYER:
        if getattr(config, name, None) is not None:
            setattr(config, name, [getattr(config, name)[index] for index in kept])
    return small


def evenly_chosen(layers: int, count: int) -> list[int]:
    """Which `layers` of `count`, from 0 on: the first, the last and what lies evenly between; of one, the first."""
    return [round(index * (count - 1) / max(1, layers - 1)) for index in range(layers)]


def save_draft(
    model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path, *, dtype: torch.dtype | None = None
) -> None:
    """Write a draft model as an ordinary folder of transformers, which `draft:FOLDER` takes; whole or not at all.

    Args:
        model: The draft model.
        tokenizer: The target's.
        folder: Where; it must not be there yet, or be empty.
        dtype: Of the weights in the file; `None` leaves them as they are.

    Raises:
        InvalidInputError: The folder has something in it.
        ModelError: It cannot be written.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise InvalidInputError(f"{folder} is there already and not empty: give another folder, or remove it.")
    kept = model if dtype is None or dtype == model.dtype else copy.deepcopy(model).to(dtype)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as staging:
            fresh = Path(staging) / folder.name
            kept.save_pretrained(fresh)
            tokenizer.save_pretrained(fresh)
            fresh.rename(folder)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"Cannot write the draft model to {folder} ({error}): check the folder and the free space."
        ) from error
