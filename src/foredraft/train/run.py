"""From text to a trained head: features, a fresh head, the loop, and a folder that loads again."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from foredraft.backends.base import Backend
from foredraft.errors import InvalidInputError, UnsupportedError
from foredraft.heads.files import Head
from foredraft.loading import stop_tokens
from foredraft.models import Notify
from foredraft.pages import make_folder
from foredraft.proposers.base import Drafter
from foredraft.train.apprentices import new_apprentice
from foredraft.train.dialogues import Dialogue
from foredraft.train.features import FeatureFiles, batches, digest_of, padded, write_features
from foredraft.train.fresh import feature_layers, precision_of
from foredraft.train.loop import Progress, Training
from foredraft.train.recipe import Recipe
from foredraft.train.validation import SETTINGS, accepted_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HELD_OUT = 24
"""Prompts of the text's own that are kept for validation if there are no others; never more than a tenth of all."""


class Text(NamedTuple):
    """What to learn from, and prompts to see how far it got."""

    dialogues: Sequence[Dialogue]
    held_out: Sequence[Sequence[int]]

    @classmethod
    def of(cls, dialogues: Sequence[Dialogue], held_out: Sequence[Sequence[int]] | None) -> Text:
        """All dialogues and these prompts; without any, the prompts of the last dialogues, which are left out then."""
        if held_out is not None:
            return cls(dialogues, held_out)
        count = min(HELD_OUT, len(dialogues) // 10)
        return cls(dialogues[: len(dialogues) - count], [dialogue.prompt for dialogue in dialogues[-count:] if count])


class Trained(NamedTuple):
    """What came of it."""

    folder: Path
    """Of the drafter."""
    figures: Mapping[str, float]
    """Mean accepted lengths by name."""
    parameters: int
    tokens: int
    """That were learnt from, each as often as it was seen."""


def train_drafter(
    target: Backend,
    text: Text,
    recipe: Recipe,
    out: Path,
    *,
    model: str,
    reference: str,
    tokenizer: PreTrainedTokenizerBase,
    start: PreTrainedModel | Head | None = None,
    notify: Notify = lambda _: None,
    progress: Callable[[Progress], None] = lambda _: None,
    count: Callable[[int, int], None] = lambda done, total: None,
) -> Trained:
    """Train a drafter for a target, in a folder that a run which was killed goes on in.

    Args:
        target: For whom it drafts; also computes the features.
        text: To learn from.
        recipe: How.
        out: For features, checkpoint, log, and the drafter in the end (`out/drafter`).
        model: What names the target (`train.generation.target_key`).
        reference: By which other programs load it: the drafter's files say so.
        tokenizer: The target's.
        start: What training begins with: a smaller model, or a head of the recipe's kind, which stays as it is made.
            `None` takes some layers of the target, or a fresh head.
        notify: Told what is done.
        progress: Told after every step.
        count: Told how many dialogues have been read by the target, and of how many.

    Raises:
        UnsupportedError: The target's backend cannot do what is needed.
        InvalidInputError: There is too little text, or the folder holds something else.
    """
    if not target.capabilities.features:
        raise UnsupportedError(
            f"Drafters learn from what the target's layers compute, which backend '{target.name}' does not hand out "
            "for this model."
        )
    make_folder(out)
    notify("Reading the text with the target")
    layers = feature_layers(recipe, target.layers)
    dialogues = [(dialogue.ids, dialogue.n_prompt) for dialogue in text.dialogues]
    stored = FeatureFiles(write_features(target, dialogues, layers, out / "features", model, count), recipe.window)
    order = list(batches(stored.places, recipe.batch_tokens, recipe.seed, recipe.passes))
    if len(order) < recipe.schedule.accumulate:
        raise InvalidInputError(f"{stored.tokens} tokens of text are too few to train on: give more.")
    apprentice = new_apprentice(recipe, target, tokenizer, stored.counts(target.vocab_size), reference, start, notify)
    device = target.embed([0]).device
    stops = stop_tokens(target, tokenizer)

    def validate(step: int) -> Mapping[str, float]:
        notify(f"Measuring accepted lengths on {len(text.held_out)} prompts")
        return _accepted_lengths(target, apprentice.drafter(), text.held_out, stops)

    training = Training(
        apprentice.objective,
        order,
        lambda places: padded([stored.read(place) for place in places]).to(device),
        recipe.schedule,
        out,
        {"recipe": recipe.about, "model": model, "text": digest_of(dialogues), "layers": list(layers)},
        precision=precision_of(recipe, target),
        validate=validate if text.held_out else None,
        watch=progress,
    )
    notify("Training")
    training.run()
    about = {
        "recipe": json.dumps(recipe.about),
        "tokens seen": str(training.tokens),
        "accepted length": json.dumps(training.figures),
    }
    apprentice.save(out / "drafter", about)
    parameters = sum(weight.numel() for weight in apprentice.objective.head.parameters())
    return Trained(out / "drafter", training.figures, parameters, training.tokens)


def _accepted_lengths(
    target: Backend, drafter: Drafter, held_out: Sequence[Sequence[int]], stops: Collection[int]
) -> dict[str, float]:
    """By the name of each setting in which it can draft."""
    return {
        setting.name: accepted_length(target, drafter, held_out, setting, stop_tokens=stops)
        for setting in SETTINGS
        if drafter.trees or setting.rule is not None
    }
