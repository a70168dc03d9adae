"""Heads before training, made to the measure of a target."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.backends.base import Backend
from foredraft.heads.block import BlockShape
from foredraft.heads.recurrent import Eagle3Head, EagleHead, RecurrentHead, SequentialMTPHead
from foredraft.train.loop import Objective
from foredraft.train.objectives import RecurrentObjective
from foredraft.train.recipe import Recipe
from foredraft.train.vocabulary import choose_draft_ids


def feature_layers(recipe: Recipe, layers: int) -> tuple[int, ...]:
    """Which the head reads: for EAGLE-3 a low, a middle and a high one, for others what the final norm gives out."""
    if recipe.kind != "eagle3":
        return (layers,)
    return tuple(sorted({min(2, layers), max(1, layers // 2), max(1, layers - 3)}))


def new_head(recipe: Recipe, target: Backend, counts: Tensor) -> tuple[RecurrentHead, Objective]:
    """A fresh head of the recipe and what it is trained for. Its output begins as the target's own."""
    shape = block_shape(target)
    every = torch.arange(target.vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        head: RecurrentHead
        if recipe.kind == "eagle3":
            ids = choose_draft_ids(counts, recipe.draft_vocab)
            head = Eagle3Head(shape, feature_layers(recipe, target.layers), ids)
        else:
            ids = every
            kind = EagleHead if recipe.kind == "eagle" else SequentialMTPHead
            head = kind(shape, target.layers)
    rows = target.head_rows(ids.tolist())
    with torch.no_grad():
        if head.lm_head is not None:
            head.lm_head.weight.copy_(rows)
        if isinstance(head, (Eagle3Head, SequentialMTPHead)):
            head.norm.weight.copy_(target.final_norm()[0])
    embedding = target.embed(every.tolist())
    regression = 1.0 if recipe.kind == "eagle" else 0.0
    return head, RecurrentObjective(head, embedding, rows, steps=recipe.ahead, regression=regression)


def block_shape(target: Backend) -> BlockShape:
    """Of a head's block: that of the target's own layers."""
    config = target.config
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    return BlockShape(
        hidden=target.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or target.hidden_size // heads,
        mlp=config.intermediate_size,
        epsilon=getattr(config, "rms_norm_eps", 1e-5),
        rope_theta=float(rope.get("rope_theta", None) or getattr(config, "rope_theta", None) or 10000.0),
    )


def precision_of(recipe: Recipe, target: Backend) -> torch.dtype:
    """In what matrices are multiplied: where the recipe leaves it open, bfloat16 if the machine has that natively."""
    if recipe.precision != "auto":
        return torch.bfloat16 if recipe.precision == "bfloat16" else torch.float32
    device = target.embed([0]).device
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    fast = device.type == "cpu" and getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return torch.bfloat16 if fast else torch.float32
