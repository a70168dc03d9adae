"""Lookahead: the window is refined by the target itself, and what it settles on is drafted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from foredraft.backends.transformers import TransformersBackend
from foredraft.engine import Engine
from foredraft.errors import InvalidInputError
from foredraft.proposers.base import Verification
from foredraft.proposers.lookahead import Lookahead, LookaheadProposer, LookaheadSettings
from foredraft.randomness import TorchSource
from foredraft.sampling import SamplingLaw
from foredraft.tree import paths
from foredraft.types import Draft, SamplingParams, Verdict
from tiny import generate

VOCABULARY = 30


def new_proposer(**settings: int) -> LookaheadProposer:
    return Lookahead(LookaheadSettings(**settings)).proposer(SamplingLaw(SamplingParams()), TorchSource())


def counting_logits(root: int, draft: Draft) -> torch.Tensor:
    """A target that always counts on by one."""
    last = [root, *(path[-1] for path in paths(draft))]
    return torch.nn.functional.one_hot((torch.tensor(last) + 1) % VOCABULARY, VOCABULARY).float()


def play(proposer: LookaheadProposer, tokens: Sequence[int], budget: int) -> tuple[Draft, list[int]]:
    """One round against the counting target."""
    draft = proposer.propose(tokens, budget)
    logits = counting_logits(tokens[-1], draft)
    path: list[int] = []
    answer = [(tokens[-1] + 1) % VOCABULARY]
    while (node := _child(draft, path[-1] if path else -1, answer[-1])) is not None:
        path.append(node)
        answer.append((answer[-1] + 1) % VOCABULARY)
    proposer.observe(Verification(draft, logits, tokens[-1]), Verdict(tuple(path), tuple(answer), True))
    return draft, [*tokens, *answer]


def _child(draft: Draft, parent: int, token: int) -> int | None:
    return next(
        (n for n, (t, p) in enumerate(zip(draft.tokens, draft.parents, strict=True)) if (t, p) == (token, parent)), None
    )


def test_the_first_draft_is_the_window_below_the_root() -> None:
    draft = new_proposer(window=3).propose([5, 6, 7], budget=10)
    assert draft == Draft.chain([5, 6, 7])


def test_columns_grow_by_the_targets_guesses() -> None:
    proposer = new_proposer(window=2, ngram=3)
    _, tokens = play(proposer, [5, 9], budget=10)
    draft = proposer.propose(tokens, budget=10)
    assert paths(draft) == [(5,), (5, 6), (5, 9), (5, 9, 10)]


def test_guesses_that_settle_are_drafted_after_their_root() -> None:
    proposer = new_proposer(window=4, ngram=3, candidates=4)
    tokens, lengths = [3, 1, 4, 1], []
    for _ in range(40):
        before = len(tokens)
        _, tokens = play(proposer, tokens, budget=24)
        lengths.append(len(tokens) - before)
    assert sum(lengths[20:]) > 20  # more than one token a round: n-grams of counting were pooled and accepted


@pytest.mark.parametrize("budget", range(1, 30))
def test_the_budget_is_kept(budget: int) -> None:
    proposer = new_proposer()
    tokens = [3, 1, 4, 1, 5]
    for _ in range(8):
        draft, tokens = play(proposer, tokens, budget)
        assert len(draft) <= budget
        assert len(set(paths(draft))) == len(draft)


@pytest.mark.parametrize("wrong", [{"window": 0}, {"ngram": 1}, {"candidates": 0}, {"window": 2.5}])
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        LookaheadSettings(**wrong)


@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=60), SamplingParams(max_tokens=60, temperature=0.8, seed=2)]
)
def test_output_equals_plain_decoding(target: TransformersBackend, params: SamplingParams) -> None:
    prompt = [1, 2, 3, 4]
    assert generate(Engine(target, Lookahead()), prompt, params).ids == generate(Engine(target), prompt, params).ids
