"""Prompt lookup copies what followed the longest, then newest, earlier occurrence of the last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.backends.transformers import TransformersBackend
from foredraft.errors import InvalidInputError
from foredraft.proposers.base import Proposer
from foredraft.proposers.ngram import LONGEST, SHORTEST, NGram
from foredraft.randomness import TorchSource
from foredraft.sampling import SamplingLaw
from foredraft.types import SamplingParams


def proposer() -> Proposer:
    return NGram().proposer(SamplingLaw(SamplingParams()), TorchSource())


def proposed(tokens: Sequence[int], budget: int = 3) -> list[int]:
    draft = proposer().propose(tokens, budget)
    assert draft.is_chain and set(draft.q) <= {None}
    return list(draft.tokens)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 7, 9, 2, 3, 8, 9, 1, 2, 3], [7, 9, 2]),
        ([1, 2, 5, 9, 1, 2, 6, 8, 1, 2], [6, 8, 1]),
        ([4, 1, 2, 3, 4, 9, 1, 2, 3, 4], [9, 1, 2]),
        ([1, 2, 1, 2], [1, 2, 1]),
        ([7, 7, 7], [7, 7, 7]),
        ([3, 1, 5, 3], []),
        ([1, 2, 3], []),
        ([1], []),
    ],
    ids=[
        "the longest match wins",
        "of equally long ones the newest",
        "a match may be as long as four",
        "a period is continued into the copy itself",
        "so is a single token",
        "one token is no match",
        "nothing seen before, nothing proposed",
        "nor after a single token",
    ],
)
def test_proposes(tokens: list[int], expected: list[int]) -> None:
    assert proposed(tokens) == expected


@pytest.mark.parametrize("budget", [1, 2, 5, 64])
def test_fills_its_budget_and_no_more(budget: int) -> None:
    assert proposed([1, 2, 3, 1, 2], budget) == ([3, 1, 2] * budget)[:budget]


def by_search(tokens: Sequence[int], budget: int) -> list[int]:
    """The same by scanning the tokens."""
    for length in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                copied = list(tokens)
                for position in range(start + length, start + length + budget):
                    copied.append(copied[position])
                return copied[len(tokens) :]
    return []


@given(steps=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=8))
def test_index_that_grows_with_the_answer_equals_a_search(steps: list[list[int]]) -> None:
    growing, tokens = proposer(), [0]
    for step in steps:
        tokens += step
        assert list(growing.propose(tokens, 4).tokens) == by_search(tokens, 4)


def test_sequences_do_not_share_what_they_saw() -> None:
    drafter = NGram()
    law, source = SamplingLaw(SamplingParams()), TorchSource()
    first, second = drafter.proposer(law, source), drafter.proposer(law, source)
    assert len(first.propose([1, 2, 3, 1, 2], 3)) == 3
    assert len(second.propose([3, 4, 1, 2], 3)) == 0


@pytest.mark.parametrize(("argument", "lengths"), [("", (2, 4)), ("3-5", (3, 5)), ("1-1", (1, 1))])
def test_the_name_may_say_how_long_matches_are(target: TransformersBackend, argument: str, lengths: Any) -> None:
    drafter = NGram.for_target(target, argument)
    assert (drafter.shortest, drafter.longest) == lengths


@pytest.mark.parametrize("argument", ["3", "4-3", "0-3", "2-65", "a-b"])
def test_wrong_lengths_are_refused(target: TransformersBackend, argument: str) -> None:
    with pytest.raises(InvalidInputError, match=r"must be"):
        NGram.for_target(target, argument)


def test_only_matches_of_these_lengths_count() -> None:
    tokens = [1, 2, 3, 9, 8, 2, 3]
    law, source = SamplingLaw(SamplingParams()), TorchSource()
    assert NGram(2, 2).proposer(law, source).propose(tokens, 2).tokens == (9, 8)
    assert NGram(3, 4).proposer(law, source).propose(tokens, 2).tokens == ()
