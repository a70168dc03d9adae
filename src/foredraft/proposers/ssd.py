"""Speculative speculative decoding: the next round is drafted while the target verifies this one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from foredraft.acceptance import Rule
from foredraft.backends.base import KVCache
from foredraft.errors import UnsupportedError
from foredraft.proposers.base import Drafter, Proposer, Verification
from foredraft.proposers.beside import Beside, Race, Work
from foredraft.proposers.foresight import Endings, Fallback, Planner, Trial
from foredraft.proposers.forks import Outcome
from foredraft.proposers.ngram import NGramProposer
from foredraft.randomness import RandomSource
from foredraft.sampling import Law
from foredraft.tree import depths, first
from foredraft.types import Draft, Foresight, Verdict

FORKING = (
    "draft:REF (of the target's vocabulary), layer_skip, self_quant, eagle3, eagle, mtp, "
    "ngram, suffix, recycling or a hybrid of the last three"
)
"""Drafters that can draft for several texts at once."""
_SHARE, _SHAPED = 0.5, 3  # Saguaro draws: what is left of the probability of so many tokens


class Ssd(Drafter):
    """Drafts with another drafter for likely outcomes while the target verifies.

    The method is that of Kumar, Dao and May 2026, arXiv 2603.03251. Exact under every rule, for these reasons:

    - A prepared draft is drawn from a source of its own (`RandomSource.below`), keyed by the position and the token of
      the root that it hangs below. No coin of a verification depends on it, so given everything that led to an outcome,
      the draft that was prepared for it has the law that its q says, just as a fresh one has. Roots move on with every
      round, so no noise is used for two drafts that are both verified; a fresh draft below a root is drawn with the
      noise that a prepared one would have been drawn with, and is the same draft.
    - Which outcomes are prepared, for how many tokens, and when the preparation is broken off follows from what was
      known before any of their tokens was drawn, and from the clock. Nothing that was drawn is left out.
    - If nothing was prepared, the round's draft is drawn now, or looked up as point masses, and says so in its q.
    - Under `seed-exact` the output is that of plain decoding whatever is drafted; noise is then that of the request.

    With a fixed seed, rules that flip coins give text that may differ from run to run, always of the right law: how
    much was prepared in time depends on the clock, and coins are flipped for what was drafted. So `seed-exact` is the
    usual rule here; besides, it lets the drafter foresee more, as the noise of the target's draws is known.

    Args:
        drafter: Must fork (see `FORKING`).
        race: Makes what runs the preparation; the default is a thread.
        always: Prepare in every round, whether or not that pays.
        learned: See `Endings`.
        share: Saguaro draws: the likeliest tokens of each law are drawn so much more seldom than it says, so that where
            the target rejects, what it corrects to is oftener one of those that were prepared for. In (0, 1].
        lookup: Whether a draft that was not prepared may be looked up instead of drafted, where that gives more for
            its time.
        threads: Of what the drafter runs; see `Drafter.apart`.

    Raises:
        UnsupportedError: The drafter cannot fork.
    """

    usage = "ssd:DRAFTER"
    races = True

    def __init__(
        self,
        drafter: Drafter,
        *,
        race: Callable[[], Race] = Beside,
        always: bool = False,
        learned: bool = False,
        share: float = 1.0,
        lookup: bool = True,
        threads: int | None = None,
    ) -> None:
        if not drafter.forks:
            raise UnsupportedError(
                f"Drafter '{drafter.name}' cannot draft for texts that may come, which '{self._kind}' needs. Use "
                f"{self._kind}: with {FORKING}."
            )
        assert 0 < share <= 1
        self.name = f"{self._kind}:{drafter.name}"
        self.drafter = drafter
        self.draft_tokens = drafter.draft_tokens
        self.when_nothing_is_accepted = drafter.when_nothing_is_accepted
        self.draws, self.trees, self.learns = drafter.draws, drafter.trees, drafter.learns
        self.race = race()
        self.lookup = lookup and drafter.runs_model
        self.endings, self.planner, self.fallback = Endings(learned), Planner(), Fallback()
        self.trial = None if always else Trial(self.endings)
        if share < 1:
            drafter.reweigh = lambda law: weighed_down(law, share)
        drafter.apart(threads)

    @property
    def _kind(self) -> str:
        return self.usage.partition(":")[0]

    @property
    def runs_model(self) -> bool:
        """Whether the drafter does."""
        return self.drafter.runs_model

    @property
    def remark(self) -> str | None:
        """Why nothing is prepared any more, if so."""
        return self.trial.remark(self.name) if self.trial is not None else None

    def explanation(self) -> str:
        """Whether it drafts while the target verifies, and why, in a few sentences."""
        return self.trial.explanation(self.name) if self.trial is not None else f"{self.name} always drafts ahead."

    def fit(self, *, trees: bool, rule: Rule | None) -> None:
        """As the drafter does."""
        self.drafter.fit(trees=trees, rule=rule)
        self.draws, self.trees = self.drafter.draws, self.drafter.trees

    def save(self, folder: Path) -> None:
        """What the drafter learned."""
        self.drafter.save(folder)

    def load(self, folder: Path) -> None:
        """What the drafter learned."""
        self.drafter.load(folder)

    def proposer(self, law: Law, source: RandomSource) -> Proposer:
        """The drafter's own, which is asked ahead of time."""
        rooted = RootedSource(source)
        return SsdProposer(self, self.drafter.proposer(law, rooted), rooted)


class Saguaro(Ssd):
    """`Ssd` with Saguaro draws: only for drafts that are drawn, at temperatures above 0."""

    usage = "saguaro:DRAFTER"

    def __init__(self, drafter: Drafter, *, share: float = _SHARE, threads: int | None = None) -> None:
        if not drafter.runs_model:
            raise UnsupportedError(
                f"Drafter '{drafter.name}' draws nothing, so 'saguaro' would change nothing: use ssd:{drafter.name}."
            )
        super().__init__(drafter, share=share, threads=threads)


class RootedSource:
    """The source of a request as its drafter draws from it: below one root at a time."""

    def __init__(self, source: RandomSource) -> None:
        self._source = self._now = source

    def root(self, position: int, token: int) -> None:
        """The next draft begins at `position`, below `token`."""
        self._now = self._source.below(position, token)

    def at(self, position: int) -> RandomSource:
        """Of the draft."""
        return self._now.at(position)

    def below(self, position: int, root: int) -> RandomSource:
        """See `RandomSource`."""
        return self._source.below(position, root)

    def coin(self, probability: float) -> bool:
        """See `RandomSource`."""
        return self._now.coin(probability)

    def draw(self, weights: Tensor, depth: int = 0) -> int:
        """See `RandomSource`."""
        return self._now.draw(weights, depth)


class SsdProposer(Proposer):
    """One sequence's drafts: those that were prepared, else fresh ones."""

    def __init__(self, ssd: Ssd, proposer: Proposer, source: RootedSource) -> None:
        self._ssd, self._proposer, self._source = ssd, proposer, source
        self._lookup: Proposer | None = NGramProposer() if ssd.lookup else None
        self._work: Work | None = None
        self._prepared = Draft()
        self._budget = 0
        self._drafting = (0.0, 0.0)  # seconds of the last draft, and when its verification began
        self._missed: bool | None = None  # whether the last draft was looked up; `None`: it was prepared
        ssd.race.enter()
        self._leave = weakref.finalize(self, ssd.race.leave)

    @property
    def forwards(self) -> int:  # type: ignore[override]
        """The drafter's."""
        return self._proposer.forwards

    @property
    def watches(self) -> bool:  # type: ignore[override]
        """Whether the drafter does."""
        return self._proposer.watches

    def attach(self, cache: KVCache) -> None:
        """Hand the target's cache on."""
        self._proposer.attach(cache)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """What was prepared, if anything was; the drafter's state is as if it had proposed that now."""
        started = perf_counter()
        self._ssd.race.pause()
        prepared, self._prepared, self._budget = self._prepared, Draft(), budget
        self._missed = None
        if not len(prepared) or budget < 1:
            prepared = self._draft_now(tokens, budget)
        draft = first(prepared, min(len(prepared), budget))
        self._drafting = perf_counter() - started, 0.0
        return draft

    def _draft_now(self, tokens: Sequence[int], budget: int) -> Draft:
        self._source.root(len(tokens), tokens[-1])
        self._missed = False
        if self._lookup is not None and budget and self._ssd.fallback.cheap(self._ssd.planner.verify_seconds):
            found = self._lookup.propose(tokens, budget)
            if len(found):
                self._missed = True
                return found
        return self._proposer.propose(tokens, budget)

    def verifying(self, tokens: Sequence[int], draft: Draft) -> None:
        """Begin to prepare for what may come of the draft."""
        ssd, deepest = self._ssd, max(depths(draft))
        if self._budget > 0 and (ssd.trial is None or ssd.trial.on):
            plan = ssd.planner.plan(
                lambda known: ssd.endings.chances(draft, known), deepest, self._budget, ssd.runs_model
            )
            fork = self._proposer.fork(tokens, draft, plan)
            seconds = ssd.planner.verify_seconds or None
            self._work = ssd.race.begin(fork, seconds) if fork is not None else None
        self._drafting = self._drafting[0], perf_counter()

    def observe(self, verification: Verification, verdict: Verdict) -> None:
        """End the preparation, let the drafter learn, and see whether the outcome was prepared for."""
        ssd, (drafting, began) = self._ssd, self._drafting
        verified = perf_counter() - began - verification.accept_seconds
        waited = ssd.race.pause()
        work, self._work, self.foresight = self._work, None, None
        self._note(verification.draft, verdict, drafting, verified, waited, work)
        self._proposer.observe(verification, verdict)
        if work is None:
            return
        if work.error is not None:
            raise work.error
        outcome = None
        if len(verdict.tokens) > len(verdict.path):
            outcome = Outcome(verdict.path[-1] if verdict.path else -1, verdict.tokens[-1])
        self._prepared = work.fork.settle(outcome)
        if outcome is not None:
            expected = work.fork.expects(outcome)
            found = "hit" if len(self._prepared) else "late" if expected else "miss"
            self.foresight = Foresight(found, work.fork.branches, work.seconds, waited)  # type: ignore[arg-type]
            if ssd.trial is not None:
                ssd.trial.note_found(found == "hit")

    def _note(
        self, draft: Draft, verdict: Verdict, drafting: float, verified: float, waited: float, work: Work | None
    ) -> None:
        """Learn what the round took, and how it ended."""
        ssd = self._ssd
        ssd.planner.note(verified, work.steps if work is not None else ())
        ssd.endings.learn(draft, work.fork.confidences if work is not None else (), verdict)
        if self._missed is not None:
            ssd.fallback.note(self._missed, len(verdict.tokens), drafting)
        if ssd.trial is not None:
            ssd.trial.note(verified, drafting + verified + waited, max(depths(draft)))

    def finish(self, tokens: Sequence[int]) -> None:
        """Nothing is prepared for after the end."""
        self._ssd.race.pause()
        self._proposer.finish(tokens)
        self.close()

    def close(self) -> None:
        """The thread ends with the last sequence that is closed, or forgotten."""
        self._leave()


def weighed_down(law: Tensor, share: float) -> Tensor:
    """The law `[V]` with its likeliest tokens at a share of their probability, all divided by the new sum."""
    weighed = law.clone()
    best = torch.topk(law, min(_SHAPED, len(law) // 2)).indices
    weighed[best] *= share
    return weighed / weighed.sum()
