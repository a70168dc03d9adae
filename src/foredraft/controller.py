"""How much to draft, who drafts, and when to stop: whatever pays at the measured cost, and nothing else.

Pure logic over figures: no model, no tokens. `proposers/auto.py` feeds it and does what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from foredraft import deciding_kernels as kernels
from foredraft.costs import Costs, Floats
from foredraft.types import Draft

_TABLE_LASTS = 128  # rounds between two looks at the cost curve
_CONTEXT_STEP = 256  # tokens of context, likewise
_NODES = 64  # of a table at least


class Choice(NamedTuple):
    """What is worth verifying."""

    kept: list[int]
    """Of each draft so many of its first nodes."""
    gain: float
    """Tokens that they promise over a plain step, less what their verification costs at the ratio of the round."""


class Controller:
    """The stopping rule, for one workload.

    With R tokens per second, a node is worth verifying if its path probability is at least R times the seconds that it
    adds (Dinkelbach's rule for the best ratio of tokens to seconds). R is the best ratio that the round at hand allows:
    where text is copied the next round will copy, too, so tokens come cheaper there than in the mean of all rounds.
    Whom to ask, and whether to run a draft model, is decided before the round, by the running rate.

    Drafts come with their likeliest nodes first. Path probabilities fall along a path, so the first nodes of a draft
    are closed under parents, whatever their number. As measured costs have steps, the nodes that are kept are those up
    to the largest total gain, not up to the first that does not pay by itself. If there is none, the round is a plain
    step. In a batch one forward serves all requests, so one order goes over the nodes of all of them.

    Nodes that were *drawn* from a distribution q are never left out: whether a node is kept would depend on the token
    that was drawn, and then q is no longer the law it was drawn from, which bends the output. Of such drafts only the
    length may be decided, before the draw (`deciding_kernels.join`). Nodes without q, point masses, are functions of
    the context: leaving out any of them keeps every rule exact.

    Args:
        costs: Seconds of the target's forwards on this machine.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.book = np.zeros(1, dtype=kernels.BOOK)
        """Of recent rounds tokens and seconds, promised tokens and accepted ones; the seconds that follow the forward
        of a plain round, and those that each node adds; sequences of the last round, and what each of its nodes had to
        promise to pay for itself (`price`)."""
        self.book["sequences"] = 1
        self.sequences = 1
        """Of the round, once somebody has said; else of the last one."""
        self._rounds = 0
        self._tables: dict[int, Table] = {}  # by sequences

    def rate(self, context: int) -> float:
        """R: tokens per second of the recent rounds, and never less than plain decoding would give."""
        return float(kernels.rate(self.book, self.plain_seconds(context)))

    def choose(
        self,
        drafts: Sequence[Draft],
        context: int,
        draft_seconds: float = 0.0,
        others: Sequence[Draft] = (),
        most: int | None = None,
    ) -> Choice:
        """Pick the nodes that pay, and count the round.

        Args:
            drafts: One for each sequence of the batch, with path probabilities as scores, the highest first.
            context: Tokens that are cached, of each about.
            draft_seconds: What drafting them took.
            others: Drafts of the same forward that someone else decided.
            most: Nodes of the forward, if there is a limit; drafts that must stay whole keep to it as they are.
        """
        self.sequences = len(drafts) + len(others)
        self._rounds += 1
        whole = [draft.q.count(None) < len(draft) for draft in drafts]
        sizes = [-len(d) if fixed else len(d) for d, fixed in zip(drafts, whole, strict=True)]
        kept = np.array(sizes + [-len(d) for d in others])
        scores = np.array([s for d, fixed in zip(drafts, whole, strict=True) if not fixed for s in d.scores])
        total = sum(map(len, drafts)) + sum(map(len, others))
        seconds = self.table(context, total).seconds
        gain = kernels.choose(self.book, seconds, scores, kept, draft_seconds, total if most is None else most)
        self.book["tokens"] += len(others)  # that is what they get at least
        return Choice(kept[: len(drafts)].tolist(), gain)

    def alone(self, context: int) -> Table:
        """Begin a round with one draft, and count it; what forwards cost in it."""
        self._rounds += 1
        self.sequences = 1
        return self.table(context)

    @property
    def trust(self) -> float:
        """Accepted tokens over promised ones: of many estimates the best are picked, and these flatter."""
        return float(kernels.trust(self.book))

    def plain_seconds(self, context: int) -> float:
        """A plain step of the batch."""
        return self.table(context).plain

    def learn(self, tokens: int, promised: float, accepted: int, nodes: int, accept_seconds: float) -> None:
        """What one request made of its round: tokens emitted, accepted ones promised and found, seconds after it."""
        kernels.learn(self.book, tokens, promised, accepted, nodes, accept_seconds)

    def table(self, context: int, nodes: int = 0) -> Table:
        """What forwards with 0, 1, … nodes cost in this context, at least so many; never less than 64."""
        sequences, context = self.sequences, context // _CONTEXT_STEP * _CONTEXT_STEP
        table = self._tables.get(sequences)
        if table is None or table.context != context or nodes >= len(table.seconds) or self._rounds >= table.until:
            rows = sequences + max(nodes, _NODES)
            seconds = self.costs.curve_of(sequences).all_seconds(rows, context)[sequences - 1 :]
            costs = sequences * (seconds / seconds[0] - 1.0)
            table = Table(context, self._rounds + _TABLE_LASTS, seconds, costs, float(seconds[0]))
            self._tables[sequences] = table
        return table


class Table(NamedTuple):
    """Costs of forwards, looked up once for several rounds."""

    context: int
    until: int
    """The round in which to look again."""
    seconds: Floats
    """Of a forward with 0, 1, … nodes beside the roots of the batch."""
    node_costs: Floats
    """Tokens that plain steps would emit in the seconds that so many nodes add."""
    plain: float
    """Seconds of a plain step."""
