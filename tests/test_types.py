"""Settings refuse what is out of range and say why; drafts and verdicts know their shape."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from foredraft.errors import ForedraftError
from foredraft.types import Draft, SamplingParams, Stats, Verdict

NAN, INFINITY = float("nan"), float("inf")

REFUSED = [
    ("max_tokens", 0, "max_tokens is 0, but must be an integer >= 1."),
    ("max_tokens", -3, "max_tokens is -3, but must be an integer >= 1."),
    ("max_tokens", 2.0, "max_tokens is 2.0, but must be an integer >= 1."),
    ("max_tokens", True, "max_tokens is True, but must be an integer >= 1."),
    ("max_tokens", None, "max_tokens is None, but must be an integer >= 1."),
    ("temperature", -0.1, "temperature is -0.1, but must be 0 (greedy), or a number >= 1e-12."),
    ("temperature", NAN, "temperature is nan, but must be 0 (greedy), or a number >= 1e-12."),
    ("temperature", INFINITY, "temperature is inf, but must be 0 (greedy), or a number >= 1e-12."),
    ("temperature", "hot", "temperature is 'hot', but must be 0 (greedy), or a number >= 1e-12."),
    ("top_k", -1, "top_k is -1, but must be an integer >= 0 (0 keeps all)."),
    ("top_k", 1.5, "top_k is 1.5, but must be an integer >= 0 (0 keeps all)."),
    ("top_p", 0, "top_p is 0, but must be a number in (0, 1]."),
    ("top_p", 1.01, "top_p is 1.01, but must be a number in (0, 1]."),
    ("top_p", NAN, "top_p is nan, but must be a number in (0, 1]."),
    ("min_p", -0.01, "min_p is -0.01, but must be a number in [0, 1]."),
    ("min_p", 1.5, "min_p is 1.5, but must be a number in [0, 1]."),
    ("repetition_penalty", 0, "repetition_penalty is 0, but must be a number in [0.001, 1000] (1 is off)."),
    ("repetition_penalty", NAN, "repetition_penalty is nan, but must be a number in [0.001, 1000] (1 is off)."),
    ("frequency_penalty", 2.1, "frequency_penalty is 2.1, but must be a number in [-2, 2]."),
    ("presence_penalty", -2.1, "presence_penalty is -2.1, but must be a number in [-2, 2]."),
    ("presence_penalty", True, "presence_penalty is True, but must be a number in [-2, 2]."),
    ("logit_bias", {1: 101}, "logit_bias is {1: 101}, but must be a mapping of token ids to numbers in [-100, 100]."),
    ("logit_bias", {-1: 1}, "logit_bias is {-1: 1}, but must be a mapping of token ids to numbers in [-100, 100]."),
    ("logit_bias", {"1": 1}, "logit_bias is {'1': 1}, but must be a mapping of token ids to numbers in [-100, 100]."),
    ("logit_bias", {1: NAN}, "logit_bias is {1: nan}, but must be a mapping of token ids to numbers in [-100, 100]."),
    ("logit_bias", [1], "logit_bias is [1], but must be a mapping of token ids to numbers in [-100, 100]."),
    ("bad_words", "", "bad_words is ('',), but must be a string or a list of strings, none of them empty."),
    ("bad_words", 5, "bad_words is 5, but must be a string or a list of strings, none of them empty."),
    ("bad_words", None, "bad_words is None, but must be a string or a list of strings, none of them empty."),
    ("min_tokens", -1, "min_tokens is -1, but must be an integer in [0, max_tokens = 256]."),
    ("min_tokens", 257, "min_tokens is 257, but must be an integer in [0, max_tokens = 256]."),
    ("logprobs", -1, "logprobs is -1, but must be an integer in [0, 20], or None for none."),
    ("logprobs", 21, "logprobs is 21, but must be an integer in [0, 20], or None for none."),
    ("logprobs", True, "logprobs is True, but must be an integer in [0, 20], or None for none."),
    ("seed", -1, "seed is -1, but must be an integer in [0, 2**63), or None for a fresh one."),
    ("seed", 2**63, f"seed is {2**63}, but must be an integer in [0, 2**63), or None for a fresh one."),
    ("seed", 1.0, "seed is 1.0, but must be an integer in [0, 2**63), or None for a fresh one."),
    ("stop", "", "stop is ('',), but must be a string or a list of strings, none of them empty."),
    ("stop", ["a", ""], "stop is ('a', ''), but must be a string or a list of strings, none of them empty."),
    ("stop", [1], "stop is (1,), but must be a string or a list of strings, none of them empty."),
    ("stop", 5, "stop is 5, but must be a string or a list of strings, none of them empty."),
]


@pytest.mark.parametrize(("name", "value", "message"), REFUSED)
def test_a_setting_out_of_range_is_refused_by_name_value_and_range(name: str, value: Any, message: str) -> None:
    with pytest.raises(ForedraftError) as refused:
        SamplingParams(**{name: value})
    assert str(refused.value) == message
    assert isinstance(refused.value, ValueError)


def test_the_ends_of_every_range_are_allowed() -> None:
    SamplingParams(max_tokens=1, temperature=0, top_k=0, top_p=1, min_p=0, seed=0, stop=[])
    for end in (-2, 2):
        SamplingParams(frequency_penalty=end, presence_penalty=end, repetition_penalty=0.001)
    SamplingParams(logit_bias={0: -100, 10**9: 100.0}, bad_words=(), min_tokens=256, logprobs=20)
    SamplingParams(max_tokens=10**9, temperature=1e6, top_k=10**9, top_p=1e-9, min_p=1, seed=2**63 - 1)


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(**{"temprature": 1.0})  # type: ignore[arg-type]


def test_stop_takes_one_string_or_many() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(bad_words="end").bad_words == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == SamplingParams(stop=("a", "b")).stop == ("a", "b")


def test_settings_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        SamplingParams().seed = 1  # type: ignore[misc]


def test_greedy_is_temperature_zero_and_nothing_near_it() -> None:
    assert SamplingParams(temperature=0).greedy and SamplingParams(temperature=0.0).greedy
    assert not SamplingParams(temperature=1e-6).greedy


def test_a_chain_is_a_tree_without_branches() -> None:
    chain = Draft.chain([4, 5, 6])
    assert (chain.tokens, chain.parents, len(chain)) == ((4, 5, 6), (-1, 0, 1), 3)
    assert chain.is_chain and Draft().is_chain and len(Draft()) == 0
    assert not Draft((4, 5), (-1, -1)).is_chain
    assert not Draft((4, 5, 6), (-1, 0, 0)).is_chain


def test_a_draft_without_q_is_made_of_point_masses() -> None:
    assert Draft.chain([4, 5]).q == Draft((4, 5), (-1, -1)).q == (None, None)
    rows = torch.eye(2)
    assert all(torch.equal(q, row) for q, row in zip(Draft.chain([0, 1], rows).q, rows, strict=True) if q is not None)
    assert len(Draft.chain([0, 1], rows).q) == 2


@pytest.mark.parametrize(
    ("tokens", "parents", "q"),
    [((1, 2), (-1,), ()), ((1, 2), (-1, 1), ()), ((1,), (-2,), ()), ((1,), (-1,), tuple(torch.ones(2, 3)))],
    ids=["a parent short", "own parent", "parent out of range", "a row of q too many"],
)
def test_a_malformed_draft_cannot_be_built(tokens: Any, parents: Any, q: Any) -> None:
    with pytest.raises(AssertionError):
        Draft(tokens, parents, q)


@pytest.mark.parametrize(
    ("verdict", "origins"),
    [
        (Verdict((), (3,), rejected=False), ("bonus",)),
        (Verdict((), (3,), rejected=True), ("correction",)),
        (Verdict((0, 1), (7, 8, 9), rejected=False), ("draft", "draft", "bonus")),
        (Verdict((0, 2), (7, 8, 9), rejected=True), ("draft", "draft", "correction")),
        (Verdict((0, 1), (7, 8), rejected=False), ("draft", "draft")),
    ],
    ids=["plain", "rejected at once", "all accepted", "rejected later", "cut inside the accepted run"],
)
def test_origins_name_each_token(verdict: Verdict, origins: tuple[str, ...]) -> None:
    assert verdict.origins == origins


def test_stats_become_plain_json() -> None:
    stats = Stats(
        1, 1, 1, 0, 0, 0, None, 1.0, 2.0, None, 3.0, 4.0, 0.0, 0.1, 0.2, {}, {}, "none", "greedy", "transformers"
    )
    assert json.loads(json.dumps(stats.to_dict())) == stats.to_dict()
