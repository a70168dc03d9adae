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
    from foredraft.controller import Table
    from foredraft.proposers.auto import Auto

_ROOM = 64  # nodes of a draft
_LEAST_ASKED = 3  # nodes that are asked for, to see what more would have been right
_DEEPEST = 16  # tokens of a costly part's draft
_NOTHING = Draft()
_NO_COSTS = np.zeros(1 + _ROOM)


def compile_kernels() -> None:
    """Run every kernel once, so that compiling them falls into loading and not into the first request."""
    calibration, book, none = Calibration([""]), np.ones(1, dtype=kernels.BOOK), np.zeros(0, dtype=int)
    arms = new_arms([False], [UNSCORED])
    state = State(arms, new_turns(arms, [False]), book, calibration.counts, calibration.counts, trees=True)
    kernels.begin(state.record, none)
    kernels.join(state.record, 0, 0, 0, True, 0.0)
    kernels.choose(book, np.ones(1), np.zeros(0), np.zeros(1, dtype=int), 0.0, 0)
    kernels.advance(state.record, 0, 0, 0, 0, 0.0, 0.0)
    kernels.count_verified(calibration.counts, state.drafted[:0], none)


class State:
    """The arrays that one sequence's drafts are joined in, and the record of their addresses.

    Args:
        arms: `[P]` of the parts across requests; none where nothing is decided.
        turns: `[P]` of the parts.
        book: Of the controller; likewise.
        workload: Tries of the workload; none where they count with the request's.
        request: Tries of the request, of the same shape.
        trees: Whether drafts may branch.
    """

    def __init__(
        self,
        arms: NDArray[Any] | None,
        turns: NDArray[Any],
        book: NDArray[Any] | None,
        workload: NDArray[np.float64] | None,
        request: NDArray[np.float64],
        *,
        trees: bool,
    ) -> None:
        self.offers = np.zeros((len(turns), _ROOM), dtype=OFFER)
        self.drafted = np.zeros(_ROOM, dtype=kernels.DRAFTED)
        self.nodes = np.zeros(kernels.MOST_HELD + self.offers.size, dtype=kernels.NODE)
        self.text, self.path = np.zeros((2, 1 + _ROOM), dtype=np.int64)
        self.turns = turns
        self._kept = arms, turns, book, workload, request  # whose addresses they are must not go
        self.record = np.zeros(1, dtype=kernels.STATE)
        names = "arms", "turns", "book", "workload", "request", "offers", "nodes", "drafted", "text", "path"
        arrays = *self._kept, self.offers, self.nodes, self.drafted, self.text, self.path
        for name, array in zip(names, arrays, strict=True):
            self.record[name] = 0 if array is None else array.ctypes.data
        self.record["parts"], self.record["sets"], self.record["room"] = len(turns), len(request), _ROOM
        self.record["trees"] = trees
        self.costs(_NO_COSTS)

    def costs(self, seconds: NDArray[np.float64]) -> None:
        """From now on, forwards with 0, 1, … nodes take so long."""
        self._seconds = np.ascontiguousarray(seconds)
        self.record["seconds"], self.record["rows"] = self._seconds.ctypes.data, len(seconds)


class JointProposer(Proposer):
    """Several proposers, in the order in which equals are preferred, and what their drafts are joined in."""

    def __init__(self, parts: Sequence[Proposer], state: State, whose: Sequence[str]) -> None:
        self._parts = tuple(parts)
        self._whose = whose
        self._state, self._record = state, state.record
        self._offered = state.turns["offered"]
        self._rows = list(state.offers)
        self._columns = [state.drafted[name] for name in ("token", "parent", "score", "who")]

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
        tokens, parents, scores, who = self._columns
        whose = [self._whose[parts] for parts in who[:size].tolist()]
        path = tuple(tokens[:size].tolist()), tuple(parents[:size].tolist())
        return Draft(*path, (), tuple(scores[:size].tolist()), tuple(whose))


class HybridProposer(JointProposer):
    """One sequence's merged drafts."""

    def __init__(self, parts: Sequence[Proposer], calibration: Calibration) -> None:
        turns = np.zeros(len(parts), dtype=kernels.TURN)
        turns["chance"] = UNSCORED
        state = State(None, turns, None, None, calibration.counts, trees=True)
        super().__init__(parts, state, calibration.whose)
        self._calibration = calibration
        self._peeking: HybridProposer | None = None
        self._proposed = False  # since the last verification

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The likeliest `budget` nodes of all parts' drafts, by calibrated path probability."""
        self._proposed = True
        for part, proposer in enumerate(self._parts):
            self._offered[part] = proposer.offer(tokens, budget, self._rows[part], _NO_COSTS)
        size, *_ = kernels.join(self._record, 0, budget, 0, False, 0.0)
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
            drafted, path = self._state.drafted[: len(verification.draft)], np.array(verdict.path, dtype=np.int64)
            kernels.count_verified(self._calibration.counts, drafted, path)
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
        turns, workload = new_turns(auto.arms, [part.stops for part in parts]), auto.calibration.counts
        book, request = auto.controller.book, np.zeros_like(workload)
        state = State(auto.arms, turns, book, workload, request, trees=auto.trees)
        super().__init__(parts, state, auto.calibration.whose)
        self._auto = auto
        self._text, self._path = state.text, state.path
        self._took, self._learned, self._steps = (turns[name] for name in ("took", "learned", "steps"))
        self._costly = [part for part, arm in enumerate(auto.arms) if arm["costly"]]
        learning = [part for part, who in enumerate(parts) if type(who).observe is not Proposer.observe]
        self._learning = [(part, parts[part].watches) for part in learning]
        self._asked = 0  # parts, as a set
        self._following: int | None = None  # those to ask in the round that `observe` has begun, if it has
        self._alone = True  # in its round
        self._asking = self._deciding = 0.0  # seconds of the parts, and of what was made of their drafts
        self._length = 0  # of the text
        self._kept = 2.0  # nodes of recent rounds, at most
        self._table: Table | None = None  # at the text's length

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The merged drafts of the parts whose turn it is, with calibrated path probabilities as scores."""
        auto = self._auto
        started = auto.clock()
        self._asked, self._asking = 0, 0.0
        self._alone = auto.sequences == 1
        table = (auto.controller.alone if self._alone else auto.controller.table)(len(tokens))
        if table is not self._table:
            self._table, self._node_costs = table, table.node_costs
            self._state.costs(table.seconds)
        asked, self._following = self._following, None
        if asked is None or len(tokens) != self._length:
            asked = self._read(tokens)
        size = self._draft_size(tokens, asked if budget > 0 else 0, budget)
        auto.draft_seconds = 0.0 if self._alone else auto.draft_seconds + self._asking
        draft = self._draft(size)
        self._deciding = auto.clock() - started - self._asking
        return draft

    def observe(self, verification: Verification, verdict: Verdict) -> None:
        """Let the parts learn, and note what each was worth."""
        auto, drafted, emitted, path = self._auto, len(verification.draft), verdict.tokens, verdict.path
        self._text[: len(emitted)], self._path[: len(path)] = emitted, path
        took = self._deciding, verification.accept_seconds
        watching, self._following = kernels.advance(self._record, len(emitted), drafted, len(path), self._asked, *took)
        self._length += len(emitted)
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
        return int(kernels.begin(self._record, np.array(tokens[start:], dtype=np.int64)))

    def _ask(self, part: int, tokens: Sequence[int], budget: int, least: float = 0.0) -> None:
        clock = self._auto.clock
        started = clock()
        self._offered[part] = self._parts[part].offer(tokens, budget, self._rows[part], self._node_costs, least)
        self._took[part] = seconds = clock() - started
        self._asked |= 1 << part
        self._asking += seconds

    def _draft_size(self, tokens: Sequence[int], asked: int, budget: int) -> int:
        """The nodes that are drafted, by the parts that are to be asked and by one that should run its model, if any.

        If the draft is alone in its round, these are those that pay.
        """
        most = min(budget, _LEAST_ASKED + round(2 * self._kept))
        for part in range(len(self._parts)):
            if asked >> part & 1:
                self._ask(part, tokens, most)
        size, part, length, least = self._join(most, min(budget, _DEEPEST) if self._costly else 0)
        if length:
            proposer = self._parts[part]
            before = proposer.forwards
            self._ask(part, tokens, most if proposer.stops else length, least)
            self._steps[part] = proposer.forwards - before
            size, *_ = self._join(max(most, length))
        return size

    def _join(self, budget: int, deepest: int = 0) -> tuple[int, int, int, float]:
        """The nodes of the draft of all that was asked for, and whose model to run beside it; see `kernels.join`."""
        drafting = self._auto.draft_seconds + self._asking
        found: tuple[int, int, int, float] = kernels.join(
            self._record, self._asked, budget, deepest, self._alone, drafting
        )
        return found
