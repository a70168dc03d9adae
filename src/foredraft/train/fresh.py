"""Heads before training, made to the measure of a target, and what they are trained for."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from foredraft.backends.base import Backend
from foredraft.heads.block import BlockShape
from foredraft.heads.files import Head
from foredraft.heads.parallel import MedusaHead, MTPHead, ParallelHead
from foredraft.heads.recurrent import Eagle3Head, EagleHead, SequentialMTPHead
from foredraft.train.loop import Objective
from foredraft.train.objectives import ParallelObjective, RecurrentObjective
from foredraft.train.recipe import Recipe
from foredraft.train.vocabulary import choose_draft_ids


def feature_layers(recipe: Recipe, layers: int) -> tuple[int, ...]:
    """Which the head reads: for EAGLE-3 a low, a middle and a high one, for others what the final norm gives out."""
    if recipe.kind != "eagle3":
        return (layers,)
    return tuple(sorted({min(2, layers), max(1, layers // 2), max(1, layers - 3)}))


def new_head(recipe: Recipe, target: Backend, counts: Tensor) -> Head:
    """A fresh head of the recipe.

    Args:
        recipe: How to train.
        target: For whom the head will draft.
        counts: `[V]` how often each token occurs in the text.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        head = _made(recipe, target, counts)
    if isinstance(head, ParallelHead):
        return head
    rows = _rows(head, target)
    with torch.no_grad():
        if head.lm_head is not None:
            head.lm_head.weight.copy_(rows)
        if isinstance(head, (Eagle3Head, SequentialMTPHead)):
            head.norm.weight.copy_(target.final_norm()[0])
        if isinstance(head, Eagle3Head):
            _begin_as_last_layer(head, target)
    return head


def objective_of(head: Head, recipe: Recipe, target: Backend) -> Objective:
    """What a head is trained for."""
    if isinstance(head, ParallelHead):
        return ParallelObjective(head, _rows(head, target))
    embedding = target.embed(range(target.vocab_size))
    regression = 1.0 if recipe.kind == "eagle" else 0.0
    return RecurrentObjective(head, embedding, _rows(head, target), steps=recipe.ahead, regression=regression)


def _rows(head: Head, target: Backend) -> Tensor:
    """The target's head for the tokens that this one drafts."""
    ids = head.draft_ids if head.draft_ids is not None else torch.arange(target.vocab_size)
    return target.head_rows(ids.tolist())


def _made(recipe: Recipe, target: Backend, counts: Tensor) -> Head:
    """With weights at random."""
    shape, layers = BlockShape.of(target.config), target.layers
    if recipe.kind == "eagle":
        return EagleHead(shape, layers)
    if recipe.kind == "mtp" and recipe.form == "sequential":  # in the only form that the speculators library reads
        return SequentialMTPHead(replace(shape, qk_norm=True), layers, norm_output=True)
    few = recipe.draft_vocab < target.vocab_size
    ids = choose_draft_ids(counts, recipe.draft_vocab)
    if recipe.kind == "eagle3":
        return Eagle3Head(shape, feature_layers(recipe, layers), ids)
    some = ids if few else None
    if recipe.kind == "medusa":
        return MedusaHead(target.hidden_size, layers, recipe.ahead, draft_ids=some)
    return MTPHead(target.hidden_size, layers, recipe.ahead, form=recipe.form, draft_ids=some)


_FAINT = 0.05  # of what the target has no counterpart for, beside what it has


def _begin_as_last_layer(head: Eagle3Head, target: Backend) -> None:
    """Have the block begin as the target's last layer over its highest feature, to which the embedding is new.

    It learns as from twice the text, compared with weights at random (SmolLM2-135M, 350,000 tokens). Nothing is done if
    the target's layers are of another shape.
    """
    own = target.layer_weights(target.layers - 1)
    if own is None:
        return
    hidden, block = head.shape.hidden, head.block
    head.fc.weight *= _FAINT
    head.fc.weight[:, -hidden:] += torch.eye(hidden)
    for name in ("q_proj", "k_proj", "v_proj"):
        weights: Tensor = getattr(block.self_attn, name).weight
        weights[:, :hidden] *= 0.5
        weights[:, hidden:] = own[name]
    block.self_attn.o_proj.weight.copy_(own["o_proj"])
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(block.mlp, name).weight.copy_(own[name])
    head.hidden_norm.weight.copy_(own["input_layernorm"])
    block.post_attention_layernorm.weight.copy_(own["post_attention_layernorm"])


def precision_of(recipe: Recipe, target: Backend) -> torch.dtype:
    """In what matrices are multiplied: where the recipe leaves it open, bfloat16 if the machine has that natively."""
    if recipe.precision != "auto":
        return torch.bfloat16 if recipe.precision == "bfloat16" else torch.float32
    device = target.embed([0]).device
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    fast = device.type == "cpu" and getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return torch.bfloat16 if fast else torch.float32
