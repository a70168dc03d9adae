"""How much to draft, who drafts, and when to stop: whatever pays at the measured cost, and nothing else.

Pure logic over figures: no model, no tokens. `proposers/auto.py` feeds it and does what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from foredraft.arms import robust_mean
from foredraft.costs import Costs
from foredraft.types import Draft

_ROUNDS = 50.0  # over which the running rate is a mean
_FIRST = 3.0  # plain rounds that it begins with
_PROMISES = 20.0  # accepted tokens after which what was promised is half believed
_EXPLORES_EVERY, _PLAIN_AMONG = 12, 20  # rounds that draft; one of so many of these is plain
_TABLE_LASTS = 8  # rounds between two looks at the cost curve
_CONTEXT_STEP = 64  # tokens of context, likewise


class Choice(NamedTuple):
    """What is worth verifying: the kept nodes of each draft, in order."""

    kept: list[list[int]]
    gain: float
    """Tokens that they promise over a plain step, less what their verification costs at the ratio of the round."""


class Controller:
    """The stopping rule, for one workload.

    With R tokens per second, a node is worth verifying if its path probability is at least R times the seconds that it
    adds (Dinkelbach's rule for the best ratio of tokens to seconds). R is the best ratio that the round at hand allows:
    where text is copied the next round will copy, too, so tokens come cheaper there than in the mean of all rounds.
    Whom to ask, and whether to run a draft model, is decided before the round, by the running rate.

    Path probabilities fall along a path, so nodes in their order are closed under parents. As measured costs have
    steps, the nodes that are kept are those up to the largest total gain, not up to the first that does not pay by
    itself. If there is none, the round is a plain step. In a batch one forward serves all requests, so one order goes
    over the nodes of all of them.

    Nodes that were *drawn* from a distribution q are never left out: whether a node is kept would depend on the token
    that was drawn, and then q is no longer the law it was drawn from, which bends the output. Of such drafts only the
    length may be decided, before the draw (`draft_length`). Nodes without q, point masses, are functions of the
    context: leaving out any of them keeps every rule exact.

    Args:
        costs: Seconds of the target's forwards on this machine.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.price = 0.0
        """Tokens that each of the last round's nodes had to promise to pay for itself."""
        self._tokens = self._seconds = 0.0  # of recent rounds
        self._promised = self._kept_promises = 0.0
        self._accept_seconds = 0.0  # of a row, after the forward
        self._rounds = self._drafting = 0
        self._sequences = 1  # of the last round
        self._tables: dict[int, _Table] = {}  # by sequences

    def rate(self, context: int) -> float:
        """R: tokens per second of the recent rounds, and never less than plain decoding would give."""
        sequences = self._sequences
        step = self._forward_seconds(sequences, 0, context) + sequences * self._accept_seconds
        running = (self._tokens + _FIRST * sequences) / (self._seconds + _FIRST * step)
        return max(sequences / step, running)

    def choose(self, drafts: Sequence[Draft], context: int, draft_seconds: float = 0.0) -> Choice:
        """Pick the nodes that pay, and count the round.

        Args:
            drafts: One for each sequence of the batch, with path probabilities as scores.
            context: Tokens that are cached, of each about.
            draft_seconds: What drafting them took.
        """
        sequences = self._sequences = len(drafts)
        drawn = [any(q is not None for q in draft.q) for draft in drafts]
        base = sum(len(draft) for draft, fixed in zip(drafts, drawn, strict=True) if fixed)
        offers = [
            (score, index, node)
            for index, draft in enumerate(drafts)
            if not drawn[index]
            for node, score in enumerate(draft.scores)
        ]
        offers.sort(key=lambda offer: -offer[0])  # stable: parents stay before children of the same probability
        scores = [score for score, _, _ in offers]
        count, rate = self._best_ratio(scores, base, sequences, context, draft_seconds)
        without, with_them = (self._forward_seconds(sequences, nodes, context) for nodes in (base, base + count))
        cost = rate * (with_them - without + count * self._accept_seconds)
        gain = self.trust * sum(scores[:count]) - cost
        self.price = cost / count if count else 0.0
        count = self._explored(count, len(offers))
        kept: list[list[int]] = [list(range(len(d))) if fixed else [] for d, fixed in zip(drafts, drawn, strict=True)]
        for _, index, node in offers[:count]:
            kept[index].append(node)
        self._count_round(sequences, base + count, context, draft_seconds)
        return Choice([sorted(nodes) for nodes in kept], gain)

    def draft_length(
        self, chances: Sequence[float], others: Sequence[tuple[float, int]], step: float, context: int
    ) -> tuple[int, float]:
        """How many tokens a drafter that runs a model should draft, decided before it draws any.

        Args:
            chances: For each depth the chance that its chain is right so far, from its record.
            others: Path probability and depth of each node that is drafted already.
            step: Seconds of drafting one token.
            context: Tokens that are cached.

        Returns:
            The length and the tokens that it gains over what is there, costs paid; 0 and 0 if none pays.
        """
        sequences, rate = self._sequences, self.rate(context)
        others = sorted(others, key=lambda other: -other[0])
        base = self._most_gain([score for score, _ in others], 0, sequences, context, rate)
        covered = [0.0] * len(chances)
        for score, depth in others[:base]:
            if depth <= len(covered):
                covered[depth - 1] += score
        gain, best, length = 0.0, 0.0, 0
        before = self._forward_seconds(sequences, base, context)
        for number, (chance, other) in enumerate(zip(chances, covered, strict=True), start=1):
            after = self._forward_seconds(sequences, base + number, context)
            gain += self.trust * max(chance - other, 0.0) - rate * (after - before + step + self._accept_seconds)
            before = after
            if gain > best:
                best, length = gain, number
        return length, best

    @property
    def trust(self) -> float:
        """Accepted tokens over promised ones: of many estimates the best are picked, and these flatter."""
        return min(1.0, (self._kept_promises + _PROMISES) / (self._promised + _PROMISES))

    def plain_seconds(self, context: int) -> float:
        """A plain step of the batch."""
        return self._forward_seconds(self._sequences, 0, context)

    def learn(self, tokens: int, promised: float, accepted: int, rows: int, accept_seconds: float) -> None:
        """What one request made of its round: tokens emitted, accepted ones promised and found, seconds after it."""
        self._tokens += tokens
        fade = 1.0 - 1.0 / _ROUNDS
        self._promised = self._promised * fade + promised
        self._kept_promises = self._kept_promises * fade + accepted
        self._accept_seconds = robust_mean(self._accept_seconds, accept_seconds / rows, self._rounds)

    def _best_ratio(
        self, scores: Sequence[float], base: int, sequences: int, context: int, draft_seconds: float
    ) -> tuple[int, float]:
        """With how many of the likeliest nodes this round has its best ratio of tokens to seconds, and that ratio."""
        tokens, best, count, trust = float(sequences), 0.0, 0, self.trust
        rows = sequences + base
        forwards = self._forwards(sequences, rows + len(scores), context)
        for number, score in enumerate([0.0, *scores]):
            tokens += trust * score
            seconds = forwards[rows + number - 1] + (rows + number) * self._accept_seconds + draft_seconds
            if tokens / seconds > best:
                best, count = tokens / seconds, number
        return count, best

    def _most_gain(self, scores: Sequence[float], base: int, sequences: int, context: int, rate: float) -> int:
        """How many of the likeliest nodes gain most together at a rate."""
        gain = best = 0.0
        count, trust = 0, self.trust
        rows = sequences + base
        forwards = self._forwards(sequences, rows + len(scores), context)
        for number, score in enumerate(scores, start=1):
            extra = forwards[rows + number - 1] - forwards[rows + number - 2] + self._accept_seconds
            gain += trust * score - rate * extra
            if gain > best:
                best, count = gain, number
        return count

    def _explored(self, count: int, most: int) -> int:
        """Now and then a node more or less: of forwards that never happen nothing is learned about their cost."""
        self._drafting += count > 0
        if count == 0 or self._drafting % _EXPLORES_EVERY:
            return count
        turn = self._drafting // _EXPLORES_EVERY
        if turn % _PLAIN_AMONG == 0:
            return 0
        return max(1, count - 1) if turn % 2 else min(count + 1, most)

    def _count_round(self, sequences: int, nodes: int, context: int, draft_seconds: float) -> None:
        """Seconds as the curve has them, not as measured: a stalled round says nothing about the next one."""
        fade = 1.0 - 1.0 / _ROUNDS
        accept = (sequences + nodes) * self._accept_seconds
        seconds = self._forward_seconds(sequences, nodes, context) + draft_seconds + accept
        self._tokens, self._seconds = self._tokens * fade, self._seconds * fade + seconds
        self._rounds += 1

    def _forwards(self, sequences: int, rows: int, context: int) -> list[float]:
        """Seconds of a forward over 1, 2, … rows, at least so many."""
        table, context = self._tables.get(sequences), context // _CONTEXT_STEP * _CONTEXT_STEP
        if table is None or table.context != context or rows > len(table.seconds) or self._rounds >= table.until:
            most = max(rows, sequences + 32)
            seconds = self.costs.curve_of(sequences).all_seconds(most, context).tolist()
            table = self._tables[sequences] = _Table(context, self._rounds + _TABLE_LASTS, seconds)
        return table.seconds

    def _forward_seconds(self, sequences: int, nodes: int, context: int) -> float:
        return self._forwards(sequences, sequences + nodes, context)[sequences + nodes - 1]


class _Table(NamedTuple):
    """Seconds of 1 and more rows, looked up once for several rounds."""

    context: int
    until: int
    seconds: list[float]
