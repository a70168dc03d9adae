"""The law of the output is the target's own: every drafter x backend x rule compared and drawn on the real engine.

A new row in `RULES` is covered as soon as it is there; one in `DRAFTERS`, or a new backend, fails here until the tables
below have it. Rules are enumerated in test_rules.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import foredraft.backends
import foredraft.heads
from foredraft.acceptance import RULES, chain, default_rule
from foredraft.backends.base import Backend, KVCache
from foredraft.engine import Engine
from foredraft.errors import UnsupportedError
from foredraft.generation import Request
from foredraft.heads.model_layer import ModelLayerHead
from foredraft.heads.parallel import ParallelHead
from foredraft.heads.recurrent import RecurrentHead
from foredraft.proof.enumeration import ancestral_law
from foredraft.proof.statistics import g_test
from foredraft.proposers import DRAFTERS
from foredraft.proposers.auto import Auto
from foredraft.proposers.base import Drafter, Proposer
from foredraft.proposers.draft_model import DraftModel
from foredraft.proposers.eagle import ChainProposer, RecurrentDrafter
from foredraft.proposers.hybrid import Hybrid
from foredraft.proposers.medusa import ParallelChainProposer
from foredraft.proposers.suffix import Suffix
from foredraft.sampling import probabilities
from foredraft.types import Draft, SamplingParams
from tiny import (
    BACKENDS,
    DRAFTER_MAKERS,
    CountingBackend,
    complete,
    drafter_over,
    generate,
    plain_chain,
    tiny_llama,
)
from tiny_heads import HEAD_DRAFTERS, head_over

AHEAD: dict[str, type[Drafter]] = {
    "ssd:draft": DraftModel,
    "ssd:eagle3": RecurrentDrafter,
    "ssd:suffix": Suffix,
    "ssd:hybrid:suffix+recycling": Hybrid,
}
"""Drafters that are asked while the target verifies."""

WITH_A_HEAD = "auto:suffix+eagle3"

KINDS: dict[str, type[Drafter]] = {**DRAFTERS, **HEAD_DRAFTERS, **AHEAD, WITH_A_HEAD: Auto}
"""What drafts in each row: the drafters of the registry, one with every kind of head, some asked ahead of time, and the
one that decides with a head among its parts."""

EITHER_WAY = ("auto", WITH_A_HEAD, "ssd:eagle3", *HEAD_DRAFTERS)
"""They draft chains where there must be no trees."""

Row = tuple[str, str, str]
"""Names of drafter, backend and rule."""

MATRIX: list[Row] = list(itertools.product(KINDS, BACKENDS, RULES))


def fits(row: Row) -> bool:
    """Whether the rule is made for what the drafter drafts."""
    drafter, _, name = row
    rule, kind = RULES[name], KINDS[drafter]
    return rule.greedy or (rule.draws >= kind.draws and (rule.trees >= kind.trees or drafter in EITHER_WAY))


# The tables are complete


def test_every_drafter_is_run() -> None:
    assert set(DRAFTER_MAKERS) == set(KINDS)


def test_every_kind_of_head_is_run(target: Backend) -> None:
    for module in pkgutil.walk_packages(foredraft.heads.__path__, "foredraft.heads."):
        importlib.import_module(module.name)
    found = {*RecurrentHead.__subclasses__(), *ParallelHead.__subclasses__()}
    found -= {ModelLayerHead}  # needs a target with MTP layers of its own: test_head_files.py has answers with them
    assert {type(head_over(target, name)) for name in HEAD_DRAFTERS} == found


def test_every_backend_is_run() -> None:
    for module in pkgutil.walk_packages(foredraft.backends.__path__, "foredraft.backends."):
        importlib.import_module(module.name)
    found = {
        backend.name
        for backend in Backend.__subclasses__()
        if backend.__module__.startswith("foredraft.backends.") and not inspect.isabstract(backend)
    }
    assert found == set(BACKENDS)


@pytest.mark.parametrize(("drafter", "backend", "rule"), [row for row in MATRIX if not fits(row)])
def test_a_rule_that_is_not_made_for_the_drafts_is_refused(
    tiny_target: Any, drafter: str, backend: str, rule: str
) -> None:
    target = BACKENDS[backend](tiny_target)
    with pytest.raises(UnsupportedError, match=f"'{re.escape(drafter)}' drafts .* rule '{rule}' does not"):
        Engine(target, drafter_over(target, drafter), rule=rule)


# Equal to plain decoding

PROMPTS = [[1, 2, 3], [40, 41] * 8, [7], list(range(30)), [9, 8, 7, 9, 8, 7, 9, 8]]
GREEDY = SamplingParams(max_tokens=50)


@pytest.fixture(scope="module")
def plain_ids(tiny_target: Any) -> list[list[int]]:
    """What transformers' own `generate` says."""
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        answer = tiny_target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=50, do_sample=False, pad_token_id=0
        )
        answers.append(answer[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize("backend", BACKENDS)
def test_plain_decoding_equals_generate_of_transformers(
    tiny_target: Any, plain_ids: list[list[int]], backend: str
) -> None:
    engine = Engine(BACKENDS[backend](tiny_target))
    assert [list(generate(engine, prompt, GREEDY).ids) for prompt in PROMPTS] == plain_ids


@pytest.mark.parametrize(("drafter", "backend", "rule"), [row for row in MATRIX if fits(row)])
def test_greedy_output_equals_plain_decoding(
    tiny_target: Any, plain_ids: list[list[int]], drafter: str, backend: str, rule: str
) -> None:
    target = BACKENDS[backend](tiny_target)
    engine = Engine(target, drafter_over(target, drafter), rule=rule)
    completions = complete(engine, *(Request(prompt, GREEDY) for prompt in PROMPTS))
    assert [list(completion.ids) for completion in completions] == plain_ids
    drafted, accepted = (sum(getattr(c.stats, name) for c in completions) for name in ("drafted", "accepted"))
    assert 0 < accepted < drafted  # both ways were taken


@pytest.mark.parametrize(("drafter", "backend", "rule"), [row for row in MATRIX if fits(row) and RULES[row[2]].keyed])
def test_seeded_output_of_keyed_rules_equals_plain_decoding(
    tiny_target: Any, drafter: str, backend: str, rule: str
) -> None:
    target = BACKENDS[backend](tiny_target)
    requests = [
        Request(prompt, SamplingParams(max_tokens=50, temperature=temperature, top_p=0.95, seed=seed))
        for seed, (prompt, temperature) in enumerate(itertools.product(PROMPTS, (0.3, 1.0)))
    ]
    plain = complete(Engine(target), *requests)
    completions = complete(Engine(target, drafter_over(target, drafter), rule=rule), *requests)
    assert [completion.ids for completion in completions] == [completion.ids for completion in plain]
    drafted, accepted = (sum(getattr(c.stats, name) for c in completions) for name in ("drafted", "accepted"))
    assert 0 < accepted < drafted


class StaleBackend(CountingBackend):
    """Keeps the rejected tokens in its cache. Heads hear of the accepted ones alone, and so can go on."""

    def commit(self, cache: KVCache, path: Sequence[int]) -> None:
        readers, cache.features = cache.features, []
        for features in readers:
            features.commit(path)
        super().commit(cache, range(len(self.drafts[-1])))
        cache.features = readers


@pytest.mark.parametrize(("drafter", "backend"), list(itertools.product(KINDS, BACKENDS)))
def test_control_stale_cache_is_caught_by_equality(
    tiny_target: Any, plain_ids: list[list[int]], drafter: str, backend: str
) -> None:
    target = BACKENDS[backend](tiny_target)
    engine = Engine(StaleBackend(target), drafter_over(target, drafter))
    answers = [list(generate(engine, prompt, replace(GREEDY, max_tokens=20)).ids) for prompt in PROMPTS]
    assert answers != [ids[:20] for ids in plain_ids]


# Drawn on the real engine

FEW = 6  # tokens of the vocabulary
POSITIONS = 3
SAMPLES = 2000
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]  # n-grams have something to propose from the first round on
SAMPLED = SamplingParams(max_tokens=POSITIONS, temperature=1.2, top_k=5, min_p=0.02)

# A right sampler fails the G-test with odds of 1e-9 (the seeds are fixed). A wrong one whose law is 0.04 nats (KL) from
# the target's is found with odds of 0.9 at least. The control, which does not subtract q, is 0.07 nats away.
DETECTABLE = 0.04


@pytest.fixture(scope="module")
def few_tokens() -> Any:
    return tiny_llama(seed=2, layers=2, vocabulary=FEW)


@pytest.fixture(scope="module")
def exact(few_tokens: Any) -> dict[tuple[int, ...], float]:
    """The target's law of the next tokens, from plain forwards over every possible continuation."""

    def target(context: tuple[int, ...]) -> Tensor:
        return probabilities(plain_chain(few_tokens, [*PROMPT, *context])[-1:], SAMPLED)[0]

    return ancestral_law(target, POSITIONS)


def drawn(few_tokens: Any, drafter: str, backend: str, rule: str) -> Counter[tuple[int, ...]]:
    """Answers of many requests, each with a seed of its own."""
    target = BACKENDS[backend](few_tokens)
    engine = Engine(target, drafter_over(target, drafter, noise=0.2), draft_tokens=2, rule=rule)
    requests = [Request(PROMPT, replace(SAMPLED, seed=seed)) for seed in range(SAMPLES)]
    return Counter(completion.ids for completion in complete(engine, *requests))


# To save time, every drafter is drawn by its default rule on the native backend, the fastest, and one of each kind of
# draw by every rule there. Rules and engine are the same on every backend, and equality is tested in all rows: on the
# others a few drafters will do. Heads are drawn where they draft by chance; their trees are in the rows of equality.
BY_EVERY_RULE = ("ngram", "draft", "ssd:draft", "eagle3", "medusa")
ON_OTHER_BACKENDS = ("ngram", "draft", "recycling", "eagle3", "medusa")


def drawing(lossy: bool) -> list[Row]:
    rows = [row for row in MATRIX if fits(row) and RULES[row[2]].lossy == lossy and not RULES[row[2]].greedy]
    return [row for row in rows if is_drawn(*row)]


def is_drawn(drafter: str, backend: str, rule: str) -> bool:
    usual = rule == usual_rule(drafter)
    return drafter in BY_EVERY_RULE or usual if backend == "native" else drafter in ON_OTHER_BACKENDS and usual


def usual_rule(drafter: str) -> str:
    kind = KINDS[drafter]
    return "block" if drafter.removeprefix("ssd:") in HEAD_DRAFTERS else default_rule(kind.draws, kind.trees).name


@pytest.mark.parametrize(("drafter", "backend", "rule"), drawing(lossy=False))
def test_sampled_output_follows_the_targets_law(
    few_tokens: Any, exact: dict[tuple[int, ...], float], drafter: str, backend: str, rule: str
) -> None:
    test = g_test(drawn(few_tokens, drafter, backend, rule), exact)
    assert test.passed and test.detectable < DETECTABLE


@pytest.mark.parametrize(("drafter", "backend", "rule"), drawing(lossy=True))
def test_sampled_output_of_a_lossy_rule_is_found_out(
    few_tokens: Any, exact: dict[tuple[int, ...], float], drafter: str, backend: str, rule: str
) -> None:
    assert not g_test(drawn(few_tokens, drafter, backend, rule), exact).passed


@pytest.mark.parametrize("drafter", ["ngram", "draft"])
def test_control_correction_without_subtraction_is_caught_on_the_engine(
    few_tokens: Any, exact: dict[tuple[int, ...], float], monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    monkeypatch.setattr(chain, "residual", lambda draft, node, p: p)
    assert not g_test(drawn(few_tokens, drafter, "native", "token"), exact).passed


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(("drafter", "proposer"), [("eagle3", ChainProposer), ("medusa", ParallelChainProposer)])
def test_control_a_chain_that_was_drawn_at_another_temperature_is_caught(
    few_tokens: Any,
    exact: dict[tuple[int, ...], float],
    monkeypatch: pytest.MonkeyPatch,
    drafter: str,
    proposer: type[Proposer],
    rule: str,
) -> None:
    honest = proposer.propose

    def at_half_of_it(self: Proposer, tokens: Sequence[int], budget: int) -> Draft:
        draft = honest(self, tokens, budget)
        return replace(draft, q=tuple(q**2 / (q**2).sum() for q in draft.q if q is not None))

    monkeypatch.setattr(proposer, "propose", at_half_of_it)
    assert not g_test(drawn(few_tokens, drafter, "native", rule), exact).passed
