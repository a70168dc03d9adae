"""Speculation without a model: planted texts, drafters that are right as planted, planted costs, a clock that is told.

The drafter under test is the real `Auto` with its controller; the loop around it is the engine's, less the forwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foredraft.acceptance import Draws
from foredraft.costs import CostCurve, Costs
from foredraft.proposers.auto import Auto
from foredraft.proposers.base import Drafter, Proposer, Verification
from foredraft.randomness import KeyedSource, RandomSource
from foredraft.sampling import Law, SamplingLaw
from foredraft.types import Draft, SamplingParams, Verdict

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CONTEXT = 128  # all the time: how costs grow with it is not what is simulated
_WRONG = 10**9  # no text has this token


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Skill:
    """How often a drafter is right, token by token, and what it says about that.

    At every position there is a chance that its next token is right; it is drawn around `mean`, from a Beta law with
    `spread` 0 (always the mean) to 1 (always 0 or 1). In `bursts` the chance holds for that many tokens on average.
    A drafter with scores says its chances, to the power `boast`: below 1 it flatters itself.
    """

    mean: float
    spread: float = 0.0
    bursts: float = 1.0
    scored: bool = False
    boast: float = 1.0

    def chances(self, length: int, random: random.Random) -> list[float]:
        """The chance at each position of a text."""
        found: list[float] = []
        while len(found) < length:
            if 0 < self.spread < 1:
                weight = 1 / self.spread - 1
                chance = random.betavariate(self.mean * weight, (1 - self.mean) * weight)
            else:
                chance = float(random.random() < self.mean) if self.spread else self.mean
            lasts = 1 if self.bursts <= 1 else 1 + int(random.expovariate(1 / (self.bursts - 1)))
            found += [chance] * lasts
        return found[:length]


class Planted(Drafter):
    """Drafts a chain of the text's own tokens up to where it is planted to be wrong.

    A `model` is told how long to draft before it begins, a `head` stops by itself.
    """

    draft_tokens = 8
    when_nothing_is_accepted = "planted so"

    def __init__(self, name: str, skills: Sequence[tuple[int, Skill]], step: float, clock: Clock, seed: int) -> None:
        self.name = self.usage = name
        self.head = "head" in name
        self.draws = Draws.ONE if "model" in name else Draws.POINT
        self.step, self.clock = step, clock
        generator = random.Random(f"{name} {seed}")
        self.said: list[float] = []
        self.right: list[bool] = []
        for length, skill in skills:
            chances = skill.chances(length, generator)
            self.said += [chance**skill.boast for chance in chances]
            self.right += [generator.random() < chance for chance in chances]
        self.scored = any(skill.scored for _, skill in skills)

    @property
    def runs_model(self) -> bool:
        return self.head or self.draws is not Draws.POINT

    def proposer(self, law: Law, source: RandomSource) -> Proposer:
        return _PlantedProposer(self)

    def run_from(self, position: int, most: int) -> int:
        """Tokens of a chain of `most` that would be right."""
        run = 0
        while run < most and position + run < len(self.right) and self.right[position + run]:
            run += 1
        return run


class _PlantedProposer(Proposer):
    def __init__(self, drafter: Planted) -> None:
        self._drafter = drafter
        self.stops = drafter.head

    def offer(self, tokens: Sequence[int], budget: int, nodes: Any, costs: Any, least: float = 0.0) -> int:
        steps, path, said = 0, 1.0, self._drafter.said[len(tokens) :]
        while steps < min(budget, 8, len(said)) and (steps == 0 or path >= least):
            path *= said[steps]
            steps += 1
        return super().offer(tokens, steps if self.stops else budget, nodes, costs)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        drafter, start = self._drafter, len(tokens)
        length = max(0, min(budget, len(drafter.right) - start))
        self.forwards += length if drafter.runs_model else 0
        # A model takes its time for every token, a look-up once.
        drafter.clock.now += drafter.step * (length if drafter.runs_model else 1)
        run = drafter.run_from(start, length)
        drafted = [start + i if i < run else _WRONG + i for i in range(length)]
        scores, path = [], 1.0
        for said in drafter.said[start : start + length] if drafter.scored else ():
            path *= said
            scores.append(path)
        return Draft(tuple(drafted), tuple(range(-1, length - 1)), scores=tuple(scores))


def planted_costs(seconds: Callable[[int], float], error: float = 0.0, seed: int = 0) -> Costs:
    """What a calibration would have measured, each point wrong by about `error`."""
    generator = random.Random(seed)
    measured = [seconds(rows) * generator.lognormvariate(0, error) for rows in ROWS]
    return Costs({1: CostCurve(ROWS, (CONTEXT,), [measured])})


@dataclass
class Round:
    """One round of a game."""

    tokens: int
    seconds: float
    drafted: int


def play(
    parts: Sequence[Planted], seconds: Callable[[int], float], clock: Clock, *, noise: float, seed: int = 0
) -> tuple[Auto, list[Round]]:
    """Write the whole text with `auto` over these parts; forwards take the planted seconds, a little more or less.

    What the drafter sees is noisy, one forward in fifty stalls for ten times its seconds, and the calibration was off
    by half as much as a forward is. The rounds that are returned have the planted seconds, so that figures are of
    decisions and not of noise.
    """
    generator, costs = random.Random(seed), planted_costs(seconds, error=noise / 2, seed=seed)
    auto = Auto(parts, costs, clock=clock)
    auto.sequences = 1
    law = SamplingLaw(SamplingParams(), prompt_length=1, stop_tokens=())
    proposer, tokens, rounds = auto.proposer(law, KeyedSource(0)), [0], []
    length = len(parts[0].right)
    while len(tokens) < length:
        started = clock()
        [draft] = auto.select([proposer.propose(tokens, min(32, length - len(tokens) - 1))], CONTEXT)
        drafting = clock() - started
        stall = 10.0 if generator.random() < 0.02 else 1.0
        costs.note(len(draft) + 1, CONTEXT, seconds(len(draft) + 1) * generator.lognormvariate(0, noise) * stall)
        verdict = judge(draft, tokens)
        tokens += verdict.tokens
        proposer.observe(Verification(draft, torch.empty(0), tokens[-1]), verdict)
        rounds.append(Round(len(verdict.tokens), drafting + seconds(len(draft) + 1), len(draft)))
    proposer.finish(tokens)
    return auto, rounds


def judge(draft: Draft, tokens: Sequence[int]) -> Verdict:
    """What greedy verification says where the text is the numbers from 0 on."""
    path: list[int] = []
    at, wanted = -1, len(tokens)
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if parent == at and token == wanted:
            path.append(node)
            at, wanted = node, wanted + 1
    rejected = any(parent == at for parent in draft.parents)
    return Verdict(tuple(path), tuple(range(len(tokens), wanted + 1)), rejected)


def fixed(part: Planted | None, chain: int, seconds: Callable[[int], float], first: int = 1) -> list[Round]:
    """A chain of always the same length, for the text from `first` on; without a drafter plain decoding."""
    return _chains(part, seconds, lambda position: chain, first)


def confident(part: Planted, seconds: Callable[[int], float], threshold: float = 0.4) -> list[Round]:
    """How transformers drafts by default: up to 20 tokens, ended by the first one below the confidence threshold."""

    def length(position: int) -> int:
        ahead = 0
        while ahead < 20 and position + ahead < len(part.said) and part.said[position + ahead] >= threshold:
            ahead += 1
        return min(ahead + 1, 20)  # the token that ends the draft was drafted as well

    return _chains(part, seconds, length)


def _chains(
    part: Planted | None, seconds: Callable[[int], float], length: Callable[[int], int], first: int = 1
) -> list[Round]:
    if part is None:
        return [Round(1, seconds(1), 0)]
    rounds, position, total = [], first, len(part.right)
    while position < total:
        chain = min(length(position), total - position - 1)
        accepted = part.run_from(position, chain)
        drafting = part.step * (chain if part.runs_model else 1)
        rounds.append(Round(accepted + 1, drafting + seconds(chain + 1), chain))
        position += accepted + 1
    return rounds


def tokens_per_second(rounds: Sequence[Round]) -> float:
    return sum(r.tokens for r in rounds) / sum(r.seconds for r in rounds)
