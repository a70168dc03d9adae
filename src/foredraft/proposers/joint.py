"""One sequence's drafts out of those of several proposers, as one tree: of a fixed number of nodes, or of what pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foredraft import deciding_kernels as kernels
from foredraft.arms import new_arms, new_turns
from foredraft.backends.base import KVCache
from foredraft.estimates import UNSCORED, Calibration
from foredraft.proposers.base import OFFER, Proposer, Verification
from foredraft.proposers.forks import Fork, PeekFork, Plan
from foredraft.types import Draft, Verdict

if TYPE_CHECKING:
    from foredraft.proposers.auto import Auto

_ROOM = 64  # nodes of a draft
_LEAST_ASKED = 3  # nodes that are asked for, to see what more would have been right
_TRIED = 1  # tokens that a costly part is asked for while it does not pay
_DEEPEST = 16  # tokens of a costly part's draft
_NOTHING = Draft()
_NO_COUNTS = np.zeros((0, 1, 1, 2))
_NO_COSTS = np.zeros(1 + _ROOM)


def compile_kernels() -> None:
    """Run every kernel once, so that compiling them falls into loading and not into the first request."""
    arms, books, text, path = (
        new_arms([False], [UNSCORED]),
        np.ones(1, dtype=kernels.BOOK),
        *np.zeros((2, 0), dtype=int),
    )
    calibration, nodes = Calibration([""]), np.zeros(1, dtype=kernels.NODE)
    counts, turns, drafted = calibration.counts, new_turns(arms), np.zeros(0, dtype=kernels.DRAFTED)
    kernels.begin(arms, turns, books, counts, counts, nodes, 0, 0, 1.0, 0, text)
    kernels.join(np.zeros((1, 1), dtype=OFFER), turns, 0, counts, counts, nodes, 0, drafted, True)
    kernels.cut(books, np.ones(1), drafted, 0.0)
    kernels.choose(books, np.ones(1), np.zeros(0), np.zeros(1, dtype=int), 0.0, 0)
    kernels.advance(arms, turns, books, counts, counts, nodes, 0, 0, 1.0, 0, text, drafted, path, 0, 0.0, 0.0)
    kernels.count_verified(counts, drafted, path)


class JointProposer(Proposer):
    """Several proposers, in the order in which equals are preferred, and the arrays that their drafts are joined in."""

    def __init__(self, parts: Sequence[Proposer], turns: NDArray[Any], whose: Sequence[str]) -> None:
        self._parts = tuple(parts)
        self._whose = whose
        self._turns = turns
        self._offered = turns["offered"]
        self._offers = np.zeros((len(parts), _ROOM), dtype=OFFER)
        self._rows = list(self._offers)
        self._nodes = np.zeros(kernels.MOST_HELD + self._offers.size, dtype=kernels.NODE)
        self._drafted = np.zeros(_ROOM, dtype=kernels.DRAFTED)

    @property
    def forwards(self) -> int:  # type: ignore[override]
        """Forwards of all parts' draft models."""
        return sum(part.forwards for part in self._parts)

    def attach(self, cache: KVCache) -> None:
        """Hand the target's cache to every part."""
        for part in self._parts:
            part.attach(cache)

    def finish(self, tokens: Sequence[int]) -> None:
        """Tell every part."""
        for part in self._parts:
            part.finish(tokens)

    def _draft(self, size: int) -> Draft:
        """The first drafted nodes, with calibrated path probabilities as scores."""
        if size == 0:
            return _NOTHING
        tokens, parents, scores, who, _ = zip(*self._drafted[:size].tolist(), strict=True)
        return Draft(tokens, parents, scores=scores, proposers=tuple([self._whose[parts] for parts in who]))


class HybridProposer(JointProposer):
    """One sequence's merged drafts."""

    def __init__(self, parts: Sequence[Proposer], calibration: Calibration) -> None:
        turns = np.zeros(len(parts), dtype=kernels.TURN)
        turns["chance"] = UNSCORED
        super().__init__(parts, turns, calibration.whose)
        self._calibration, self._counts = calibration, calibration.counts
        self._peeking: HybridProposer | None = None
        self._proposed = False  # since the last verification

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The likeliest `budget` nodes of all parts' drafts, by calibrated path probability."""
        self._proposed = True
        for part, proposer in enumerate(self._parts):
            self._offered[part] = proposer.offer(tokens, budget, self._rows[part], _NO_COSTS)
        _, size = kernels.join(
            self._offers, self._turns, 0, _NO_COUNTS, self._counts, self._nodes, 0, self._drafted[:budget], True
        )
        return self._draft(size)

    def peek(self, tokens: Sequence[int], budget: int) -> Draft:
        """The same of what the parts peek at, with arrays of their own."""
        if self._peeking is None:
            self._peeking = HybridProposer([_Peeking(part) for part in self._parts], self._calibration)
        return self._peeking.propose(tokens, budget)

    def fork(self, tokens: Sequence[int], draft: Draft, plan: Plan) -> Fork:
        """See `Proposer`."""
        return PeekFork(self, tokens, draft, plan)

    def observe(self, verification: Verification, verdict: Verdict) -> None:
        """Calibrate, and let every part learn. Parts with a KV cache of their own see what was accepted of theirs.

        A draft that was peeked at calibrates nothing: which score each part gave its nodes was not kept.
        """
        proposed, self._proposed = self._proposed, False
        if proposed:
            drafted, path = self._drafted[: len(verification.draft)], np.array(verdict.path, dtype=np.int64)
            kernels.count_verified(self._counts, drafted, path)
        for part in self._parts:
            part.observe(verification, verdict)


class _Peeking(Proposer):
    """Proposes what another one peeks at."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        return self._proposer.peek(tokens, budget)


class AutoProposer(JointProposer):
    """One sequence's merged drafts, and the record of its parts on this text."""

    def __init__(self, auto: Auto, parts: Sequence[Proposer]) -> None:
        super().__init__(parts, new_turns(auto.arms), auto.calibration.whose)
        self._auto = auto
        self._counts = auto.calibration.counts, np.zeros_like(auto.calibration.counts)  # the workload's, the request's
        self._took, self._learned = self._turns["took"], self._turns["learned"]
        self._costly = [part for part, arm in enumerate(auto.arms) if arm["costly"]]
        learning = [part for part, who in enumerate(parts) if type(who).observe is not Proposer.observe]
        self._learning = [(part, parts[part].watches) for part in learning]
        self._state = auto.arms, self._turns, auto.controller.book, *self._counts, self._nodes
        self._asked = 0  # parts, as a set
        self._following: int | None = None  # those to ask in the round that `observe` has begun, if it has
        self._asking = self._deciding = 0.0  # seconds of the parts, and of what was made of their drafts
        self._length = 0  # of the text
        self._held = self._fresh = 0  # nodes of earlier drafts that may still come true; behind them the last one's
        self._kept = 2.0  # nodes of recent rounds, at most
        self._table = auto.controller.table(0)  # at the text's length

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The merged drafts of the parts whose turn it is, with calibrated path probabilities as scores."""
        auto = self._auto
        started = auto.clock()
        self._asked, self._asking = 0, 0.0
        alone = auto.sequences == 1
        if alone:
            auto.controller.sequences = 1
        self._table = auto.controller.table(len(tokens))
        asked, self._following, size = self._following, None, 0
        if asked is None or len(tokens) != self._length:
            asked = self._read(tokens)
        if budget > 0:
            most = min(budget, _LEAST_ASKED + round(2 * self._kept))
            for part in range(len(self._parts)):
                if asked >> part & 1:
                    self._ask(part, tokens, most)
            size = self._join(most) if self._asked else 0
            if self._costly:
                part, length = self._worth_running(min(budget, _DEEPEST))
                if length:
                    self._ask(part, tokens, length)
                    size = self._join(max(most, length))
        auto.draft_seconds += self._asking
        if alone:
            size = auto.controller.cut(self._drafted[:size], self._table, auto.draft_seconds)
            auto.draft_seconds = 0.0
        draft = self._draft(size)
        self._deciding = auto.clock() - started - self._asking
        return draft

    def observe(self, verification: Verification, verdict: Verdict) -> None:
        """Let the parts learn, and note what each was worth."""
        auto, drafted, start = self._auto, len(verification.draft), self._length
        watching, self._following, self._held = kernels.advance(
            *self._state,
            self._held,
            self._fresh,
            self._table.plain,
            start,
            np.array(verdict.tokens, dtype=np.int64),
            self._drafted[:drafted],
            np.array(verdict.path, dtype=np.int64),
            self._asked,
            self._deciding,
            verification.accept_seconds,
        )
        self._fresh, self._length = 0, start + len(verdict.tokens)
        self._kept = max(float(drafted), 0.9 * self._kept)
        for part, watches in self._learning:
            if (self._asked | (watching if watches else 0)) >> part & 1:
                started = auto.clock()
                self._parts[part].observe(verification, verdict)
                self._learned[part] = seconds = auto.clock() - started
                auto.draft_seconds += seconds

    def _read(self, tokens: Sequence[int]) -> int:
        """Begin a round with whatever the text has that was not read yet. Returns who is to be asked."""
        start, self._length = self._length, len(tokens)
        text = np.array(tokens[start:], dtype=np.int64)
        held = self._held, self._fresh
        asked, self._held = kernels.begin(*self._state, *held, self._table.plain, start, text)
        self._fresh = 0
        return asked

    def _ask(self, part: int, tokens: Sequence[int], budget: int) -> None:
        auto = self._auto
        started = auto.clock()
        nodes = self._parts[part].offer(tokens, budget, self._rows[part], self._table.node_costs)
        self._offered[part] = nodes
        self._took[part] = seconds = auto.clock() - started
        if part in self._costly:
            auto.costs.note_draft(auto.parts[part].name, nodes, seconds)
        self._asked |= 1 << part
        self._asking += seconds

    def _join(self, budget: int) -> int:
        """The nodes of the draft of all that was asked for."""
        self._fresh, size = kernels.join(
            self._offers,
            self._turns,
            self._asked,
            *self._counts,
            self._nodes[self._held :],
            self._length,
            self._drafted[:budget],
            self._auto.trees,
        )
        return int(size)

    def _worth_running(self, most: int) -> tuple[int, int]:
        """The part to run a model for, if any, and for how many tokens: what gains most beyond the draft at hand."""
        auto, best, found = self._auto, 0.0, (0, 0)
        nodes = self._nodes[self._held : self._held + self._fresh]
        others = list(zip(nodes["score"].tolist(), nodes["depth"].tolist(), strict=True))
        for part in self._costly:
            chance = float(self._turns["chance"][part])
            step = auto.costs.draft_seconds(auto.parts[part].name, most) / most
            chances = [chance**depth for depth in range(1, most + 1)]
            length, gain = auto.controller.draft_length(chances, others, step, self._length)
            if not auto.arms["asked"][part]:
                length = min(length, _TRIED)
            if gain > best:
                best, found = gain, (part, length)
            elif not found[1] and kernels.trial(auto.arms, self._turns, part, self._table.plain, _TRIED * step):
                found = (part, min(_TRIED, most))
        return found
