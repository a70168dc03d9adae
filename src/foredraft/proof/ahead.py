"""Two rounds of `ssd` on toy models, with a scripted race: the law of what they emit, every branch taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from foredraft.acceptance import Rule
from foredraft.backends.base import Backend, Capabilities, KVCache, Query
from foredraft.proof.enumeration import Tokens, ToyModel, ancestral_law, continued, outcome_law, total_variation
from foredraft.proof.toys import toy_model
from foredraft.proposers.base import Proposer, Verification
from foredraft.proposers.beside import Work
from foredraft.proposers.draft_model import DraftModel
from foredraft.proposers.foresight import Fallback, Planner
from foredraft.proposers.forks import Confidence, Fork, Plan
from foredraft.proposers.ssd import Ssd
from foredraft.randomness import RandomSource
from foredraft.sampling import SamplingLaw
from foredraft.tree import paths
from foredraft.types import Draft, SamplingParams

Course = Literal["hit", "part", "late", "miss", "looked up"]
"""What a race comes to: all is prepared in time; a part of it; what follows the whole draft is known, and nothing is
drafted for it; nothing was begun, and the draft is drawn afresh, or looked up."""

STEPS: dict[Course, int] = {"hit": 99, "part": 2, "late": 1, "miss": 0, "looked up": 0}


class ScriptedRace:
    """Makes so many steps of each fork at once."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def enter(self) -> None:
        """See `Race`."""

    def leave(self) -> None:
        """See `Race`."""

    def begin(self, fork: Fork, seconds: float | None = None) -> Work:
        """See `Race`."""
        work = Work(fork)
        for _ in range(self._steps):
            if not work.step():
                break
        return work

    def pause(self) -> float:
        """See `Race`."""
        return 0.0


class ToyCache(KVCache):
    """The tokens themselves."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.pending: list[Tokens] = []  # of the root and the nodes of the last forward, with what is above each
        self.features = []

    @property
    def length(self) -> int:
        """See `KVCache`."""
        return len(self.tokens)


class ToyBackend(Backend):
    """A toy model with caches. Its texts begin with a token that the model does not see.

    Args:
        model: The law of the next token.
        vocabulary: Tokens.
    """

    name = "toy"
    capabilities = Capabilities(trees=True)
    context = None
    stop_tokens = frozenset()

    def __init__(self, model: ToyModel, vocabulary: int) -> None:
        self._model, self.vocab_size = model, vocabulary

    def new_cache(self, room: int = 0) -> ToyCache:
        """See `Backend`."""
        return ToyCache()

    def prefill(self, cache: KVCache, tokens: Sequence[int]) -> None:
        """See `Backend`."""
        assert isinstance(cache, ToyCache)
        cache.tokens += tokens

    def forward(self, queries: Sequence[Query]) -> list[Tensor]:
        """See `Backend`."""
        return [self._rows(query)[query.known :].log() for query in queries]

    def _rows(self, query: Query) -> Tensor:
        cache = query.cache
        assert isinstance(cache, ToyCache)
        texts = [(*cache.tokens, query.root, *path) for path in ((), *paths(query.draft))]
        assert texts[: query.known] == cache.pending[: query.known]
        cache.pending = texts
        return torch.stack([self._model(text[1:]) for text in texts])

    def commit(self, cache: KVCache, path: Sequence[int]) -> None:
        """See `Backend`."""
        assert isinstance(cache, ToyCache)
        cache.tokens = list(cache.pending[path[-1] + 1 if path else 0])
        cache.pending = []

    def truncate(self, cache: KVCache, length: int) -> None:
        """See `Backend`."""
        assert isinstance(cache, ToyCache) and not cache.pending
        del cache.tokens[length:]


class _Fixed(Planner, Fallback):
    """Prepares for as many outcomes each time, and looks up if it is told to."""

    def __init__(self, branches: int, looks_up: bool) -> None:
        Planner.__init__(self)
        self._branches, self._looks_up = branches, looks_up

    def plan(
        self, ends: Callable[[Sequence[Confidence | None]], list[float]], deepest: int, budget: int, model: bool
    ) -> Plan:
        """See `Planner`."""
        return Plan(ends, self._branches, budget, 99, 1.0)

    def cheap(self, verify_seconds: float) -> bool:
        """See `Fallback`."""
        return self._looks_up

    def note(self, *_: object) -> None:
        """Nothing is learned."""


class _LastToken(Proposer):
    """Looks up what was there before."""

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        return Draft.chain(tokens[-1:])


class Rounds(NamedTuple):
    """Toys for two rounds."""

    target: ToyModel
    draft: ToyModel
    vocabulary: int
    tokens: int
    """Of a draft."""
    branches: int
    """Outcomes that are prepared for: others are missed."""


ROUNDS = (
    Rounds(toy_model(2, 0), toy_model(2, 1), 2, 1, 2),
    Rounds(toy_model(3, 2), toy_model(3, 3), 3, 1, 1),
    Rounds(toy_model(2, 4), toy_model(2, 5), 2, 2, 1),
)
"""Few enough branches to take each in a second."""


def emitted_law(rule: Rule, toys: Rounds, course: Course, make: Callable[..., Ssd] = Ssd) -> dict[Tokens, float]:
    """The law of the tokens that two rounds emit, the second one drafted while the first was verified or not.

    Drafter, fork and rule are the production code; only the thread is none.
    """
    law = SamplingLaw(SamplingParams(temperature=1.0), prompt_length=1)

    def play(source: RandomSource) -> Tokens:
        drafter = DraftModel(ToyBackend(toys.draft, toys.vocabulary), toys.vocabulary)
        ssd = make(drafter, race=lambda: ScriptedRace(STEPS[course]), always=True)
        ssd.planner = ssd.fallback = _Fixed(toys.branches, course == "looked up")
        proposer, text = ssd.proposer(law, source), [0]
        if course == "looked up":
            proposer._lookup = _LastToken()  # type: ignore[attr-defined]
        for _ in range(2):
            draft = proposer.propose(text, toys.tokens)
            proposer.verifying(text, draft)
            p = torch.stack([toys.target((*text[1:], *path)) for path in ((), *paths(draft))])
            verdict = rule.decide(draft, p, source)
            proposer.observe(Verification(draft, p, text[-1]), verdict)
            text += verdict.tokens
        return tuple(text[1:])

    return outcome_law(play)


def distance(rule: Rule, toys: Rounds, course: Course, make: Callable[..., Ssd] = Ssd) -> float:
    """Total variation of that law, continued by the target to its greatest length, from the target's own."""
    length = 2 * (toys.tokens + 1)
    law = continued(emitted_law(rule, toys, course, make), toys.target, length)
    return total_variation(law, ancestral_law(toys.target, length))
