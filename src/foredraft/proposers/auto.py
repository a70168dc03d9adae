"""The drafter that decides: who drafts, how much, and whether at all, by what it costs and gains here and now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from foredraft.acceptance import Rule
from foredraft.backends.base import Backend
from foredraft.costs import Costs
from foredraft.errors import UnsupportedError
from foredraft.estimates import UNSCORED
from foredraft.proposers.base import Drafter
from foredraft.proposers.hybrid import Joint
from foredraft.proposers.recycling import Recycling
from foredraft.proposers.suffix import Suffix
from foredraft.randomness import RandomSource
from foredraft.sampling import Law
from foredraft.tree import first
from foredraft.types import Draft

if TYPE_CHECKING:  # else where they are used: numba takes a while to import
    from foredraft.proposers.joint import AutoProposer

DEFAULT_PARTS: tuple[type[Drafter], ...] = (Suffix, Recycling)


class Auto(Joint):
    """Merges the drafts of its parts, and verifies of them what pays.

    Before each round it knows what a forward over any number of rows costs, what each part takes to draft, and, from
    the text so far, how often each part's drafts come true. Parts that are not worth their time are left out and tried
    again now and then; nodes that are not worth their rows are cut off (`Controller`). If none is, the round is plain.

    All nodes count as point masses, as in a hybrid: given the draft, every rule for point masses is exact, whatever
    made it and whatever was cut off it. Whether a draft was right is read off the text that came about, so every draft
    teaches, verified or not, and no forward is spent on finding out.

    Args:
        parts: The drafters, in the order in which equals are preferred.
        costs: What the target's forwards cost here. The engine refines them.
        clock: Seconds, for what drafting takes.
        usual: Whether these are the parts that it has when nobody names any: then its name does not name them either.

    Raises:
        UnsupportedError: A part must be verified whole.
    """

    usage = "auto[:A+B]"
    trees = True
    draft_tokens = 32
    when_nothing_is_accepted = "none of its parts fits this text"

    def __init__(
        self,
        parts: Sequence[Drafter],
        costs: Costs,
        clock: Callable[[], float] = perf_counter,
        *,
        usual: bool = False,
    ) -> None:
        if any(part.name == "lookahead" for part in parts):
            raise UnsupportedError(
                "Drafter 'lookahead' cannot be a part of 'auto': its guesses must be verified whether or not they pay. "
                "Use 'lookahead' alone or in a hybrid."
            )
        super().__init__("auto", parts, at_times=any(part.runs_model for part in parts))
        if usual:
            self.name = "auto"
        for part in parts:
            part.at_times()
        self.costs: Costs = costs
        self.clock = clock
        from foredraft.arms import new_arms
        from foredraft.controller import Controller

        self.controller = Controller(costs)
        self.arms = new_arms(
            [part.runs_model for part in parts],
            [costs.acceptance.get(part.name, UNSCORED) for part in parts],
        )
        """What is known of each part across requests, a row each; `arms.new_arms` has the fields."""
        self.rounds = self.plain_rounds = 0
        self.draft_seconds = 0.0
        """That parts took to draft and to learn since the last round was decided."""

    @classmethod
    def for_target(cls, target: Backend, argument: str = "") -> Auto:
        """With the parts that need nothing, over costs that are measured now."""
        from foredraft.calibration import costs_for  # a second of forwards: nobody needs it who brings costs

        parts = [part.for_target(target) for part in DEFAULT_PARTS]
        return cls(parts, costs_for(target, None, Path()), usual=True)

    def proposer(self, law: Law, source: RandomSource) -> AutoProposer:
        """A proposer with one of each part."""
        from foredraft.proposers.joint import AutoProposer

        return AutoProposer(self, [part.proposer(law, source) for part in self.parts])

    def fit(self, *, trees: bool, rule: Rule | None) -> None:
        """Without trees it drafts the likeliest path alone."""
        self.trees = trees

    def select(
        self, drafts: Sequence[Draft], context: int, others: Sequence[Draft] = (), most: int | None = None
    ) -> list[Draft]:
        """The nodes that pay, of all sequences together. A draft that is alone was cut when it was made."""
        selected = list(drafts)
        if self.sequences != 1:
            choice = self.controller.choose(drafts, context, self.draft_seconds, others, most)
            selected = [first(draft, count) for draft, count in zip(drafts, choice.kept, strict=True)]
            self.draft_seconds = 0.0
        self.rounds += 1
        self.plain_rounds += not any(selected)
        return selected
