"""What is trained, what for, how it drafts meanwhile, and how it is kept: heads and draft models alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from foredraft.backends.base import Backend
from foredraft.backends.transformers import TransformersBackend
from foredraft.errors import UnsupportedError
from foredraft.heads.checkpoints import TargetConfig
from foredraft.heads.files import Head, save_head
from foredraft.loading import stop_tokens
from foredraft.models import Notify
from foredraft.proposers.base import Drafter
from foredraft.proposers.draft_model import DraftModel
from foredraft.proposers.trained import drafter_of
from foredraft.train.distill import DistillObjective, by_states, save_draft, truncated
from foredraft.train.fresh import new_head, objective_of
from foredraft.train.loop import Objective
from foredraft.train.recipe import Recipe
from foredraft.train.vocabulary import coverage

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Apprentice(NamedTuple):
    """A drafter in training."""

    objective: Objective
    drafter: Callable[[], Drafter]
    """How it drafts now. Made anew, for it may draft with a copy of the weights."""
    save: Callable[[Path, Mapping[str, str]], None]
    """Writes it into a folder, with what should be known of it."""


def new_apprentice(
    recipe: Recipe,
    target: Backend,
    tokenizer: PreTrainedTokenizerBase,
    counts: Tensor,
    reference: str,
    start: PreTrainedModel | Head | None,
    notify: Notify,
) -> Apprentice:
    """That of a recipe; `run.train_drafter` has the arguments, `counts` are how often each token occurs in the text.

    Raises:
        UnsupportedError: The target cannot be the start of a draft model, and there is no other.
    """
    if recipe.kind == "draft":
        assert not isinstance(start, Head)
        return _draft_model(recipe, target, tokenizer, start)
    assert start is None or isinstance(start, Head)
    head = new_head(recipe, target, counts) if start is None else start.float().requires_grad_(True)
    objective = objective_of(head, recipe, target)
    if head.draft_ids is not None:
        share = coverage(counts, head.draft_ids)
        notify(f"{len(head.draft_ids)} tokens can be drafted, which are {share:.1%} of the text")

    def save(folder: Path, about: Mapping[str, str]) -> None:
        save_head(head, folder, target_config=TargetConfig.of(target, reference), about=about)

    return Apprentice(objective, lambda: drafter_of(head, target), save)


def _draft_model(
    recipe: Recipe, target: Backend, tokenizer: PreTrainedTokenizerBase, start: PreTrainedModel | None
) -> Apprentice:
    """A smaller model: `start`, or layers from all over the target."""
    model: Any = start
    if model is None:
        if not isinstance(target, TransformersBackend):
            raise UnsupportedError(
                f"A draft model begins as some layers of the target, which backend '{target.name}' does not give: use "
                "--backend transformers, or --start REF with a smaller model of the same vocabulary."
            )
        model = truncated(target.model, recipe.layers or max(1, target.layers // 3), evenly=True)
    model = model.to(target.embed([0]).device, torch.float32)
    model.requires_grad_(True)
    teacher = by_states(target.head_rows(range(target.vocab_size)))
    drafter = DraftModel(TransformersBackend(model), target.vocab_size, stop_tokens(target, tokenizer))
    dtype = getattr(target, "model", model).dtype

    def save(folder: Path, about: Mapping[str, str]) -> None:
        save_draft(model, tokenizer, folder, dtype=dtype)

    return Apprentice(DistillObjective(model, teacher, divergence=recipe.loss), lambda: drafter, save)
