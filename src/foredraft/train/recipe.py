"""What a drafter is trained from and how: everything that the outcome follows from, besides the text and the target."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from foredraft.checks import is_integer, require
from foredraft.errors import InvalidInputError
from foredraft.train.loop import Schedule

KINDS = ("eagle3", "eagle", "medusa", "mtp", "draft")
FORMS = ("sequential", "independent", "cascaded")
LOSSES = ("forward-kl", "reverse-kl", "jsd")
PRECISIONS = ("auto", "float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train.

    Args:
        kind: One of `KINDS`.
        passes: How often all text is seen.
        batch_tokens: About so many in a batch.
        window: Longest piece of a dialogue.
        ahead: Tokens ahead that it is trained for: steps of training-time test, or heads.
        draft_vocab: Tokens that an EAGLE-3 head, Medusa or parallel MTP heads can draft.
        form: Of MTP heads, one of `FORMS`.
        layers: Of the target, which a draft model begins with; 0 takes a third.
        loss: Of a draft model, one of `LOSSES`.
        precision: Of the arithmetic; `auto` is bfloat16 where the machine multiplies it fast.
        seed: Of first weights and of the order of the text.
        schedule: Learning rate and the like.

    Raises:
        InvalidInputError: One of them is out of range.
    """

    kind: str
    passes: int = 3
    batch_tokens: int = 2048
    window: int = 512
    ahead: int = 4
    draft_vocab: int = 8192
    form: str = "sequential"
    layers: int = 0
    loss: str = "forward-kl"
    precision: str = "auto"
    seed: int = 0
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        for name, known in (("kind", KINDS), ("form", FORMS), ("loss", LOSSES), ("precision", PRECISIONS)):
            value = getattr(self, name)
            require(name, value, value in known, f"one of {', '.join(known)}")
        for name, least in (("passes", 1), ("batch_tokens", 16), ("window", 16), ("draft_vocab", 1), ("layers", 0)):
            value = getattr(self, name)
            require(name, value, is_integer(value) and value >= least, f"an integer >= {least}")
        require("ahead", self.ahead, is_integer(self.ahead) and 1 <= self.ahead <= 16, "an integer in [1, 16]")
        require("seed", self.seed, is_integer(self.seed) and self.seed >= 0, "an integer >= 0")
        if self.window > self.batch_tokens:
            raise InvalidInputError(
                f"window is {self.window}, but a batch has {self.batch_tokens} tokens: give a smaller window."
            )

    @property
    def about(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "schedule": self.schedule.about}
