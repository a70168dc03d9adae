"""From text to a trained head: features, a fresh head, the loop, and a folder that loads again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from foredraft.backends.base import Backend
from foredraft.errors import InvalidInputError, UnsupportedError
from foredraft.heads.checkpoints import TargetConfig
from foredraft.heads.files import save_head
from foredraft.models import Notify
from foredraft.pages import make_folder
from foredraft.proposers.eagle import RecurrentDrafter
from foredraft.train.dialogues import Dialogue
from foredraft.train.features import FeatureFiles, batches, padded, write_features
from foredraft.train.fresh import feature_layers, new_head, precision_of
from foredraft.train.loop import Progress, Training
from foredraft.train.recipe import Recipe
from foredraft.train.validation import SETTINGS, accepted_length
from foredraft.train.vocabulary import coverage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    tokenizer: PreTrainedTokenizerBase | None = None,
    stop_tokens: Collection[int] = (),
    notify: Notify = lambda _: None,
    progress: Callable[[Progress], None] = lambda _: None,
    count: Callable[[int, int], None] = lambda done, total: None,
) -> Trained:
    """Train a head for a target, in a folder that a run which was killed goes on in.

    Args:
        target: For whom it drafts; also computes the features.
        text: To learn from.
        recipe: How.
        out: For features, checkpoint, log, and the drafter in the end (`out/drafter`).
        model: What names the target (`train.generation.target_key`).
        reference: By which other programs load it: the drafter's files say so.
        tokenizer: The target's, which a draft model is saved with.
        stop_tokens: Ids that end an answer.
        notify: Told what is done.
        progress: Told after every step.
        count: Told how many dialogues have been read by the target, and of how many.

    Raises:
        UnsupportedError: The target's backend does not hand out features.
        InvalidInputError: There is too little text, or the folder holds something else.
    """
    if not target.capabilities.features:
        raise UnsupportedError(
            f"Heads learn from what the target's layers compute, which backend '{target.name}' does not hand out for "
            "this model. Train a draft model instead: foredraft train draft."
        )
    make_folder(out)
    precision = precision_of(recipe, target)
    layers = feature_layers(recipe, target.layers)
    notify("Reading the text with the target")
    dialogues = [(dialogue.ids, dialogue.n_prompt) for dialogue in text.dialogues]
    stored = FeatureFiles(write_features(target, dialogues, layers, out / "features", model, count), recipe.window)
    order = list(batches(stored.places, recipe.batch_tokens, recipe.seed, recipe.passes))
    if len(order) < recipe.schedule.accumulate:
        raise InvalidInputError(f"{stored.tokens} tokens of text are too few to train on: give more.")
    counts = stored.counts(target.vocab_size)
    head, objective = new_head(recipe, target, counts)
    if head.draft_ids is not None:
        share = coverage(counts, head.draft_ids)
        notify(f"{len(head.draft_ids)} tokens can be drafted, which are {share:.1%} of the text")
    device = target.embed([0]).device

    def validate(step: int) -> Mapping[str, float]:
        notify(f"Measuring accepted lengths on {len(text.held_out)} prompts")
        drafter = RecurrentDrafter(head, target)  # anew, for it may draft with a copy of the weights
        return {
            setting.name: accepted_length(target, drafter, text.held_out, setting, stop_tokens=stop_tokens)
            for setting in SETTINGS
        }

    training = Training(
        objective,
        order,
        lambda places: padded([stored.read(place) for place in places]).to(device),
        recipe.schedule,
        out,
        {"recipe": recipe.about, "model": model, "text": _digest(dialogues), "layers": list(layers)},
        precision=precision,
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
    save_head(head, out / "drafter", target_config=TargetConfig.of(target, reference), about=about)
    parameters = sum(weight.numel() for weight in head.parameters())
    return Trained(out / "drafter", training.figures, parameters, training.tokens)


def _digest(dialogues: Sequence[tuple[Sequence[int], int]]) -> str:
    plain: list[Any] = [[list(ids), answer] for ids, answer in dialogues]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()
