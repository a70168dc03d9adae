"""The drafter that decides: who drafts, how much, and whether at all, by what it costs and gains here and now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from foredraft.acceptance import Rule
from foredraft.arms import Arm, Turn, robust_mean
from foredraft.backends.base import Backend
from foredraft.controller import Controller
from foredraft.costs import Costs
from foredraft.errors import UnsupportedError
from foredraft.estimates import UNSCORED, Calibration
from foredraft.proposers.base import Drafter, Proposer, Verification
from foredraft.proposers.hybrid import Joint, JointProposer, Node, likeliest, merge
from foredraft.proposers.ngram import NGram
from foredraft.proposers.recycling import Recycling
from foredraft.proposers.suffix import Suffix
from foredraft.randomness import RandomSource
from foredraft.sampling import Law
from foredraft.tree import keep
from foredraft.types import Draft, Verdict

DEFAULT_PARTS: tuple[type[Drafter], ...] = (Suffix, Recycling, NGram)
_WORKLOAD_MEMORY, _REQUEST_MEMORY = 200.0, 45.0  # nodes, for each proposer, score and context
_LEAST_ASKED = 3  # nodes that are asked for, to see what more would have been right
_TRIED = 1  # tokens that a costly part is asked for while it does not pay
_DEEPEST = 16  # tokens of a costly part's draft
# After a draft of which nothing was worth verifying, so many rounds are plain without asking, unless to ask takes no
# more than this share of a plain step. What is copied is mostly longer than that; where nothing is, it costs the less.
_LONGEST_REST, _LITTLE = 1, 0.02


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

    Raises:
        UnsupportedError: A part must be verified whole.
    """

    usage = "auto[:A+B]"
    trees = True
    draft_tokens = 32
    when_nothing_is_accepted = "none of its parts fits this text"

    def __init__(self, parts: Sequence[Drafter], costs: Costs, clock: Callable[[], float] = perf_counter) -> None:
        if any(part.name == "lookahead" for part in parts):
            raise UnsupportedError(
                "Drafter 'lookahead' cannot be a part of 'auto': its guesses must be verified whether or not they pay. "
                "Use 'lookahead' alone or in a hybrid."
            )
        super().__init__("auto", parts, Calibration(memory=_WORKLOAD_MEMORY))
        if [part.name for part in parts] == [kind.name for kind in DEFAULT_PARTS]:
            self.name = "auto"
        self.costs: Costs = costs
        self.clock = clock
        self.controller = Controller(costs)
        self.arms = {
            part.name: Arm(part.name, part.runs_model, costs.acceptance.get(part.name, UNSCORED)) for part in self.parts
        }
        self.rounds = self.plain_rounds = 0
        self.deciding = 0.0
        """Seconds of a round in which drafts were asked for, without what the parts took; robust to interruptions."""
        self._decided = 0
        self._draft_seconds = 0.0  # of the round at hand

    @classmethod
    def for_target(cls, target: Backend, argument: str = "") -> Auto:
        """With the parts that need nothing, over costs that are measured now."""
        from foredraft.calibration import costs_for  # a second of forwards: nobody needs it who brings costs

        return cls([part.for_target(target) for part in DEFAULT_PARTS], costs_for(target, None, Path()))

    def proposer(self, law: Law, source: RandomSource) -> AutoProposer:
        """A proposer with one of each part."""
        return AutoProposer(self, {part.name: part.proposer(law, source) for part in self.parts})

    def fit(self, *, trees: bool, rule: Rule | None) -> None:
        """Without trees it drafts the likeliest path alone."""
        self.trees = trees

    def select(self, drafts: Sequence[Draft], context: int) -> list[Draft]:
        """The nodes that pay, of all sequences together."""
        choice = self.controller.choose(drafts, context, self._draft_seconds)
        self._draft_seconds = 0.0
        self.rounds += 1
        self.plain_rounds += not any(choice.kept)
        return [keep(draft, nodes) for draft, nodes in zip(drafts, choice.kept, strict=True)]

    def note_ask(self, arm: Arm, nodes: int, seconds: float) -> None:
        """A part was asked for a draft."""
        self._draft_seconds += seconds
        arm.note_ask(seconds)
        if arm.costly:
            self.costs.note_draft(arm.name, nodes, seconds)

    def note_deciding(self, seconds: float) -> None:
        """What was asked for has been merged and scored."""
        self._decided += 1
        self.deciding = robust_mean(self.deciding, seconds, self._decided)

    def note_watch(self, arm: Arm, seconds: float) -> None:
        """A part learned from a verification."""
        self._draft_seconds += seconds
        arm.note_watch(seconds)


class AutoProposer(JointProposer):
    """One sequence's merged drafts, and the record of its parts on this text."""

    def __init__(self, auto: Auto, parts: dict[str, Proposer]) -> None:
        super().__init__(parts)
        self._auto = auto
        self._calibration = Calibration(auto.calibration, _REQUEST_MEMORY)
        self._learning = {n: part for n, part in parts.items() if type(part).observe is not Proposer.observe}
        self._turns = {name: Turn(arm) for name, arm in auto.arms.items()}
        self._asked: list[str] = []
        self._asking = 0.0  # seconds of the parts, this round
        self._length = 0  # of the text
        self._open: list[_Open] = []
        self._kept = 2.0  # nodes of recent rounds, at most
        self._resting = 0  # rounds for which nobody is asked

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The merged drafts of the parts whose turn it is, with calibrated path probabilities as scores."""
        started = self._auto.clock()
        self._asked, self._asking, self._length = [], 0.0, len(tokens)
        if self._resting > 0:
            self._resting -= 1
            return Draft()
        self._read(tokens)
        if budget < 1:
            return Draft()
        controller, context = self._auto.controller, len(tokens)
        rate, plain = controller.rate(context), controller.plain_seconds(context)
        deciding = self._auto.deciding / len(self._turns)
        drafts: dict[str, Draft] = {}
        for name, turn in self._turns.items():
            turn.count_round()
            if not turn.arm.costly and turn.due(rate, plain, deciding):
                drafts[name] = self._ask(name, tokens, min(budget, _LEAST_ASKED + round(2 * self._kept)))
        nodes = self._merged(drafts)
        name, length = self._costly(nodes, context, plain, min(budget, _DEEPEST))
        if length:
            drafts[name] = self._ask(name, tokens, length)
            nodes = self._merged(drafts)
        if not drafts:
            return Draft()
        self._open.append(_Open(len(tokens), nodes, self._asked))
        draft = likeliest(nodes if self._auto.trees else _likeliest_path(nodes), budget)[0]
        self._auto.note_deciding(self._auto.clock() - started - self._asking)
        return draft

    def observe(self, verification: Verification, verdict: Verdict) -> None:
        """Let the parts learn, and note what each was worth."""
        draft, controller, clock = verification.draft, self._auto.controller, self._auto.clock
        plain = controller.plain_seconds(self._length)
        for name, part in self._learning.items():
            if name in self._asked or (part.watches and self._turns[name].watches(plain)):
                started = clock()
                part.observe(verification, verdict)
                self._auto.note_watch(self._auto.arms[name], clock() - started)
        gained = dict.fromkeys(self._asked, 0.0)
        for node, (who, score) in enumerate(zip(draft.proposers, draft.scores, strict=True)):
            names = who.split("+")
            for name in names:
                arm = self._auto.arms[name]
                arm.verified += 1 / len(names)
                arm.accepted += (node in verdict.path) / len(names)
                gained[name] += (score - controller.price) / len(names)
        rate = controller.rate(self._length)
        for name, gain in gained.items():
            self._turns[name].note_worth(gain, rate)
        if self._asked and not len(draft):
            cost = self._auto.deciding + sum(self._auto.arms[name].seconds for name in self._asked)
            self._resting = min(round(cost / (_LITTLE * plain)), _LONGEST_REST)
        self._kept = max(float(len(draft)), 0.9 * self._kept)
        promised = sum(draft.scores)
        controller.learn(len(verdict.tokens), promised, len(verdict.path), len(draft) + 1, verification.accept_seconds)

    def finish(self, tokens: Sequence[int]) -> None:
        """Learn from the last drafts, and tell every part."""
        self._read(tokens)
        super().finish(tokens)

    def _ask(self, name: str, tokens: Sequence[int], budget: int) -> Draft:
        started = self._auto.clock()
        draft = self._parts[name].propose(tokens, budget)
        seconds = self._auto.clock() - started
        self._auto.note_ask(self._auto.arms[name], len(draft), seconds)
        self._asked.append(name)
        self._asking += seconds
        return draft

    def _costly(self, nodes: Sequence[Node], context: int, plain: float, most: int) -> tuple[str, int]:
        """The part to run a model for, if any, and for how many tokens: what gains most beyond the draft at hand."""
        best, found = 0.0, ("", 0)
        others = [(node.score, node.depth) for node in nodes]
        for name, turn in self._turns.items():
            if not turn.arm.costly:
                continue
            rate = turn.per_token
            step = self._auto.costs.draft_seconds(name, most) / most
            length, gain = self._auto.controller.draft_length(
                [rate**depth for depth in range(1, most + 1)], others, step, context
            )
            if not turn.arm.asked:
                length = min(length, _TRIED)
            if gain > best:
                best, found = gain, (name, length)
            elif not found[1] and turn.trial(plain, _TRIED * step):
                found = (name, min(_TRIED, most))
        return found

    def _merged(self, drafts: dict[str, Draft]) -> list[Node]:
        """The union of the drafts, each node with its calibrated path probability."""
        chances = {name: self._turns[name].per_token for name, draft in drafts.items() if not draft.scores}
        contexts = {name: self._turns[name].context for name in drafts}
        nodes = merge(drafts)
        for node in nodes:
            above, node.depth = (
                (nodes[node.parent].score, nodes[node.parent].depth + 1) if node.parent >= 0 else (1.0, 1)
            )
            node.context = max([contexts[name] for name in node.raw])
            prior = max([chances[n] ** node.depth if n in chances else raw for n, raw in node.raw.items()])
            node.score = min(above, self._calibration(node.who, node.best, node.context, prior))
        return nodes

    def _read(self, tokens: Sequence[int]) -> None:
        """Find out which nodes of earlier drafts came true, as far as the text goes."""
        still_open = []
        for draft in self._open:
            told, unknown = draft.judge(tokens, self._calibration)
            for name, (foreseen, missed) in told.items():
                self._turns[name].note_text(foreseen, missed)
            if unknown:
                still_open.append(draft)
        self._open = still_open


def _likeliest_path(nodes: list[Node]) -> list[Node]:
    """A chain of the best child of the best child …, with places of its own."""
    path: list[Node] = []
    at = -1
    while below := [index for index, node in enumerate(nodes) if node.parent == at]:
        at = max(below, key=lambda index: nodes[index].score)
        path.append(replace(nodes[at], parent=len(path) - 1))
    return path


class _Open:
    """A draft, verified or not, of which the text does not tell everything yet."""

    def __init__(self, position: int, nodes: list[Node], asked: Sequence[str]) -> None:
        self._position = position
        self._nodes = nodes
        self._deepest = {name: max((n.depth for n in nodes if name in n.raw), default=0) for name in asked}
        self._fresh = True

    def judge(self, tokens: Sequence[int], calibration: Calibration) -> tuple[dict[str, tuple[int, bool]], bool]:
        """Note which nodes came true.

        Returns:
            For each part the tokens it had right since then and whether it then was wrong (nothing on later calls, for
            these tokens were drafted for anew), and whether there are nodes left to judge.
        """
        known = len(tokens) - self._position
        status: list[bool | None] = []
        reached = dict.fromkeys(self._deepest, 0)
        for node in self._nodes:
            right = status[node.parent] if node.parent >= 0 else True
            if right:
                right = tokens[self._position + node.depth - 1] == node.token if node.depth <= known else None
            status.append(right)
            if right is not None and not node.judged:
                calibration.note(node.who, node.best, right, node.context)
                node.judged = True
            if right:
                for name in node.raw:
                    reached[name] = node.depth  # parents come first, and one path is right
        told = {
            name: (depth, depth < known and (self._deepest[name] > depth or not self._deepest[name]))
            for name, depth in reached.items()
        }
        fresh, self._fresh = self._fresh, False
        return told if fresh else {}, None in status
