"""What drafts: a drafter is loaded once and shared; its proposer drafts for one sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from foredraft.acceptance import Draws, Rule
from foredraft.backends.base import Backend, KVCache
from foredraft.costs import Costs
from foredraft.randomness import RandomSource
from foredraft.sampling import Law
from foredraft.types import Draft, Foresight, Verdict

if TYPE_CHECKING:
    from foredraft.proposers.forks import Fork, Plan

OFFER = np.dtype([("token", "i4"), ("parent", "i4"), ("score", "f8")], align=True)
"""A node of a draft that is to be joined with others."""
NO_SCORE = -1.0


def drafted(nodes: NDArray[Any]) -> Draft:
    """The draft of these rows of `OFFER`, which have scores."""
    tokens, parents, scores = zip(*nodes.tolist(), strict=True) if len(nodes) else ((), (), ())
    return Draft(tokens, parents, scores=scores)


class Verification(NamedTuple):
    """What the target said about a draft: `logits` are `[N+1, V]`, row 0 after the root."""

    draft: Draft
    logits: Tensor
    root: int
    accept_seconds: float = 0.0
    """What it took after the forward: sampling law, acceptance and commit."""


class Proposer(ABC):
    """Drafts for one sequence and learns from what happened to its drafts."""

    forwards: int = 0
    """Forwards of a draft model so far."""
    watches: bool = False
    """Whether it learns from verifications of others' drafts too, in rounds in which it was not asked for one."""
    stops: bool = False
    """Whether what it offers, if it runs a model for it, ends by itself where going on would not pay."""
    foresight: Foresight | None = None
    """What it drafted during the last verification for after it, if it does such a thing."""

    @abstractmethod
    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """A draft of at most `budget` nodes below the last of `tokens`, all tokens so far. May be empty.

        It is asked once a round; `budget` is 0 in the last one if a single token is left to emit.
        """

    def offer(
        self, tokens: Sequence[int], budget: int, nodes: NDArray[Any], costs: NDArray[np.float64], least: float = 0.0
    ) -> int:
        """`propose` for who joins drafts and verifies only what pays.

        The nodes go to the first of `nodes`, rows of `OFFER`. `costs` `[1 + budget]` are the seconds that so many nodes
        add to a forward, in plain steps; of several drafts it may offer the one that is worth most at these. Below
        nodes whose path probability is less than `least` it need not run a model. Returns how many nodes it offers.
        """
        draft = self.propose(tokens, budget)
        if len(draft):
            scores = draft.scores or (NO_SCORE,) * len(draft)
            nodes[: len(draft)] = list(zip(draft.tokens, draft.parents, scores, strict=True))
        return len(draft)

    def attach(self, cache: KVCache) -> None:  # noqa: B027  (most need no target)
        """Get the target's cache of this sequence, before the first draft: for those who draft with the target."""

    def verifying(self, tokens: Sequence[int], draft: Draft) -> None:  # noqa: B027  (most have nothing to do)
        """Told that the target is about to score a draft below the last of `tokens`, for who works meanwhile."""

    def fork(self, tokens: Sequence[int], draft: Draft, plan: Plan) -> Fork | None:
        """Begin to draft for what may come of `draft`, which is being verified below the last of `tokens`.

        Until the fork is settled nothing else is asked of the proposer; then it is as if the prepared draft, if there
        is one, had been proposed. `None` if it has nothing to go on from now.
        """
        raise NotImplementedError("this proposer cannot fork")

    def peek(self, tokens: Sequence[int], budget: int) -> Draft:
        """What it would draft if the text were `tokens`, which begin as its own do. It forgets about them at once."""
        raise NotImplementedError("this proposer cannot draft for another text than its own")

    def observe(self, verification: Verification, verdict: Verdict) -> None:  # noqa: B027  (learning is optional)
        """See what the target made of the last draft."""

    def finish(self, tokens: Sequence[int]) -> None:  # noqa: B027
        """See the whole text, prompt included, once it is complete."""

    def close(self) -> None:  # noqa: B027
        """Nothing will be asked of it any more, whether or not the text is complete."""


class Drafter(ABC):
    """A way of drafting: what is shared between the sequences it drafts for."""

    name: str
    draws: Draws = Draws.POINT
    """How chance enters its drafts, at temperatures above 0."""
    trees: bool = False
    """Whether its drafts may branch."""
    usage: str
    """How users write it: the name, `name:WHAT` if it takes an argument, `name[:WHAT]` if it may take one."""
    draft_tokens: int
    """Nodes of a draft when the user does not say."""
    forks: bool = False
    """Whether its proposers can `fork`; those that run no model can also `peek`."""
    reweigh: Callable[[Tensor], Tensor] | None = None
    """Of drafters that fork: makes of the law `[V]` of a model the one that is drawn from; `None` leaves it."""
    races: bool = False
    """Whether its drafts depend on the clock. Only rules keyed by position give a seed the same text each time then."""
    learns: bool = False
    """Whether it learns from earlier text: what, `save` keeps in a folder for the next process to `load`."""
    costs: Costs | None = None
    """The measured costs by which it decides what is worth drafting, if it does."""
    sequences: int = 0
    """Of the round that it is to draft for, told by the engine; 0 if nobody says."""
    when_nothing_is_accepted: str
    """Likely causes of zero acceptance, for a warning."""

    @property
    def remark(self) -> str | None:
        """What whoever uses it should know by now, as a warning; `None` if there is nothing."""
        return None

    @property
    def runs_model(self) -> bool:
        """Whether what it drafts takes forwards of some network: then it is asked only for what should pay."""
        return self.draws is not Draws.POINT

    @classmethod  # noqa: B027  (of most only the target can tell)
    def check_argument(cls, argument: str) -> None:
        """Refuse what can be known to be wrong of an argument before anything is loaded.

        Raises:
            InvalidInputError: The argument is not one that it takes.
        """

    @classmethod
    def for_target(cls, target: Backend, argument: str = "") -> Drafter:
        """The drafter for a target, as `NAME` or `NAME:ARGUMENT` asks for it.

        Raises:
            InvalidInputError: The argument is not one that it takes.
            UnsupportedError: It cannot draft for this target.
        """
        return cls()

    def fit(self, *, trees: bool, rule: Rule | None) -> None:  # noqa: B027  (most draft what they draft)
        """Told by the engine whether backend and rule take trees, and the rule: for those who can draft either way."""

    def apart(self, threads: int | None) -> None:  # noqa: B027  (most run no model)
        """Run what it runs by threads of its own, not by the target's: it will draft while the target verifies."""

    def at_times(self) -> None:  # noqa: B027  (most have little to catch up with)
        """It will be asked now and then only: what it then has to catch up with must not take long."""

    def save(self, folder: Path) -> None:  # noqa: B027  (most have nothing to keep)
        """Keep in a folder what was learned, in files that are named after the drafter and are whole or not there.

        Several drafters may share a folder. Whoever learns nothing writes nothing.

        Raises:
            ModelError: The folder cannot be written.
        """

    def load(self, folder: Path) -> None:  # noqa: B027
        """Take up what `save` kept, if the folder has it; else learn from the beginning.

        Raises:
            ModelError: It cannot be read, is damaged, or was learned for another target.
        """

    def select(
        self, drafts: Sequence[Draft], context: int, others: Sequence[Draft] = (), most: int | None = None
    ) -> list[Draft]:
        """What is verified of the drafts of one round, which are those of all its running sequences.

        Args:
            drafts: What the proposers proposed.
            context: Tokens that are cached, of each sequence about.
            others: What is verified for sequences of other drafters in the same forward.
            most: Nodes of the forward, if there is a limit. Only who decides needs to keep to it here: of all others
                each sequence was asked for no more than its share.
        """
        return list(drafts)

    @abstractmethod
    def proposer(self, law: Law, source: RandomSource) -> Proposer:
        """A proposer for a new sequence, which is sampled with `law` and draws from `source`."""
