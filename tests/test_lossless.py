"""The law of the output is the target's own: every rule enumerated, every drafter x backend x rule compared and drawn.

A new row in `RULES` or `DRAFTERS`, or a new backend, fails here until the tables below cover it.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import foredraft.backends
from chance import FALSE_FAILURE, g_test
from foredraft.acceptance import RULES, Rule, chain
from foredraft.backends.base import Backend, KVCache
from foredraft.backends.transformers import TransformersBackend
from foredraft.engine import Engine
from foredraft.generation import Request
from foredraft.proof.enumeration import (
    Propose,
    ToyModel,
    ancestral_law,
    drawn_chain,
    joint_law,
    outcome_law,
    score,
    total_variation,
)
from foredraft.proposers import DRAFTERS
from foredraft.randomness import RandomSource
from foredraft.sampling import probabilities
from foredraft.types import Draft, SamplingParams
from tiny import (
    DRAFTER_MAKERS,
    CountingBackend,
    complete,
    drafter_over,
    generate,
    plain_chain,
    tiny_llama,
)

EXACT, WRONG = 1e-9, 1e-3
"""Total variation below which a law is the target's, and above which a control is caught."""

SETTINGS: dict[str, list[SamplingParams]] = {
    "greedy": [SamplingParams()],
    "token": [
        SamplingParams(),
        SamplingParams(temperature=0.4),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.5, top_k=3, top_p=0.9, min_p=0.05),
    ],
}
"""Settings under which each rule is enumerated."""

BACKENDS: dict[str, Callable[[Any], TransformersBackend]] = {"transformers": TransformersBackend}
"""How each backend is made over a tiny model."""

MATRIX = list(itertools.product(DRAFTERS, BACKENDS, RULES))


# The tables are complete


def test_every_rule_is_enumerated() -> None:
    assert set(SETTINGS) == set(RULES)
    assert not any(rule.trees for rule in RULES.values()), "a rule for trees needs drafts with branches in `drafts`"


def test_every_drafter_is_run() -> None:
    assert set(DRAFTER_MAKERS) == set(DRAFTERS)


def test_every_backend_is_run() -> None:
    for module in pkgutil.walk_packages(foredraft.backends.__path__, "foredraft.backends."):
        importlib.import_module(module.name)
    found = {
        backend.name
        for backend in Backend.__subclasses__()
        if backend.__module__.startswith("foredraft.") and not inspect.isabstract(backend)
    }
    assert found == set(BACKENDS)


# Enumerated


def toy(seed: int, vocabulary: int, params: SamplingParams, support: Sequence[int] = ()) -> ToyModel:
    """A model whose every context has random logits of its own; outside `support`, if given, none has mass."""

    @cache
    def law(context: tuple[int, ...]) -> Tensor:
        number = 0
        for token in context:
            number = number * (vocabulary + 1) + token + 1
        generator = torch.Generator().manual_seed(1_000_003 * seed + number)
        logits = 2 * torch.randn(1, vocabulary, generator=generator, dtype=torch.float64)
        if support:
            logits[:, [x for x in range(vocabulary) if x not in support]] = -torch.inf
        return probabilities(logits, params)[0]

    return law


def different(vocabulary: int, params: SamplingParams) -> tuple[ToyModel, ToyModel]:
    return toy(1, vocabulary, params), toy(2, vocabulary, params)


def identical(vocabulary: int, params: SamplingParams) -> tuple[ToyModel, ToyModel]:
    return toy(1, vocabulary, params), toy(1, vocabulary, params)


def without_overlap(vocabulary: int, params: SamplingParams) -> tuple[ToyModel, ToyModel]:
    half = vocabulary // 2
    return toy(1, vocabulary, params, range(half)), toy(2, vocabulary, params, range(half, vocabulary))


PAIRS = [different, identical, without_overlap]
"""p and q."""


def drafts(rule: Rule, q: ToyModel, vocabulary: int, k: int) -> Iterable[Propose]:
    """Every kind of draft that the rule accepts: each possible point mass, and what is drawn from q."""
    for tokens in itertools.product(range(vocabulary), repeat=k):
        yield lambda source, tokens=tokens: Draft.chain(tokens)  # type: ignore[misc]
    if rule.sampled:
        yield drawn_chain(q, k)


def distance(rule: Rule, propose: Propose, p: ToyModel, length: int) -> float:
    return total_variation(joint_law(rule.decide, propose, p, length), ancestral_law(p, length))


@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.__name__)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_enumerated_law_is_the_targets(rule: Rule, pair: Any, k: int) -> None:
    for vocabulary, params in itertools.product((2, 3, 4), SETTINGS[rule.name]):
        p, q = pair(vocabulary, params)
        for propose in drafts(rule, q, vocabulary, k):
            assert distance(rule, propose, p, k + 1) < EXACT, (vocabulary, params)


def test_draft_and_target_may_have_settings_of_their_own() -> None:
    p = toy(1, 4, SamplingParams(temperature=0.7, top_k=2))
    q = toy(2, 4, SamplingParams(temperature=1.3, min_p=0.2))
    assert distance(RULES["token"], drawn_chain(q, 3), p, 4) < EXACT


def test_acceptance_is_one_minus_total_variation() -> None:
    p, q = different(4, SamplingParams(temperature=1.0))

    def accepted(source: RandomSource) -> bool:
        draft = drawn_chain(q, 1)(source)
        return bool(RULES["token"].decide(draft, score(p, draft), source).path)

    overlap = float(torch.minimum(p(()), q(())).sum())
    assert outcome_law(accepted)[True] == pytest.approx(overlap, abs=1e-12)


@pytest.mark.parametrize("propose", ["drawn", "point mass"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_control_correction_without_subtraction_is_caught(
    monkeypatch: pytest.MonkeyPatch, propose: str, k: int
) -> None:
    p, q = different(3, SamplingParams(temperature=1.0))
    made = drawn_chain(q, k) if propose == "drawn" else lambda source: Draft.chain([0] * k)
    assert distance(RULES["token"], made, p, k + 1) < EXACT
    monkeypatch.setattr(chain, "residual", lambda draft, p, i: p[i])
    assert distance(RULES["token"], made, p, k + 1) > WRONG


@pytest.mark.parametrize("k", [1, 2, 3])
def test_control_draft_of_another_temperature_than_its_q_is_caught(k: int) -> None:
    p, q = different(3, SamplingParams(temperature=1.0))
    _, hot = different(3, SamplingParams(temperature=1.5))

    def mismatched(source: RandomSource) -> Draft:
        draft = drawn_chain(hot, k)(source)
        return replace(draft, q=score(q, draft)[:k])

    assert distance(RULES["token"], mismatched, p, k + 1) > WRONG


def test_any_drawn_draft_may_be_verified_as_a_point_mass() -> None:
    p, q = different(3, SamplingParams(temperature=1.0))
    assert distance(RULES["token"], lambda source: replace(drawn_chain(q, 2)(source), q=None), p, 3) < EXACT


def test_enumeration_takes_every_branch_with_its_probability() -> None:
    weights = torch.tensor([1.0, 0.0, 3.0])

    def play(source: RandomSource) -> tuple[bool, int]:
        coin = source.coin(0.25)
        return coin, source.draw(weights) if coin else -1

    assert outcome_law(play) == {(True, 0): 0.0625, (True, 2): 0.1875, (False, -1): 0.75}
    assert outcome_law(lambda source: (source.coin(0.0), source.coin(1.0))) == {(False, True): 1.0}


def test_total_variation_is_half_the_l1_distance() -> None:
    assert total_variation({(0,): 1.0}, {(0,): 1.0}) == 0
    assert total_variation({(0,): 1.0}, {(1,): 1.0}) == 1
    assert total_variation({(0,): 0.5, (1,): 0.5}, {(0,): 0.25, (1,): 0.5, (2,): 0.25}) == 0.25


def test_laws_are_laws() -> None:
    p, q = different(4, SamplingParams(temperature=1.0))
    for law in (ancestral_law(p, 3), joint_law(RULES["token"].decide, drawn_chain(q, 2), p, 3)):
        assert sum(law.values()) == pytest.approx(1, abs=1e-12)
        assert set(map(len, law)) == {3}


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


@pytest.mark.parametrize(("drafter", "backend", "rule"), MATRIX)
def test_greedy_output_equals_plain_decoding(
    tiny_target: Any, plain_ids: list[list[int]], drafter: str, backend: str, rule: str
) -> None:
    target = BACKENDS[backend](tiny_target)
    engine = Engine(target, drafter_over(target, drafter), rule=rule)
    completions = complete(engine, *(Request(prompt, GREEDY) for prompt in PROMPTS))
    assert [list(completion.ids) for completion in completions] == plain_ids
    drafted, accepted = (sum(getattr(c.stats, name) for c in completions) for name in ("drafted", "accepted"))
    assert 0 < accepted < drafted  # both ways were taken


class StaleBackend(CountingBackend):
    """Keeps the rejected tokens in its cache."""

    def commit(self, cache: KVCache, path: Sequence[int]) -> None:
        super().commit(cache, range(len(self.drafts[-1])))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_control_stale_cache_is_caught_by_equality(
    target: TransformersBackend, plain_ids: list[list[int]], drafter: str
) -> None:
    engine = Engine(StaleBackend(target), drafter_over(target, drafter))
    answers = [list(generate(engine, prompt, replace(GREEDY, max_tokens=20)).ids) for prompt in PROMPTS]
    assert answers != [ids[:20] for ids in plain_ids]


# Drawn on the real engine

FEW = 6  # tokens of the vocabulary
POSITIONS = 3
SAMPLES = 2000
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]  # n-grams have something to propose from the first round on
SAMPLED = SamplingParams(max_tokens=POSITIONS, temperature=1.2, top_k=5, min_p=0.02)

# The G-test has some 40 cells here. Of a wrong sampler whose law is 0.04 nats (KL) from the target's it misses one in a
# thousand. The control, which does not subtract q from the residual, is 0.07 nats away.


@pytest.fixture(scope="module")
def few_tokens() -> Any:
    return tiny_llama(seed=2, vocabulary=FEW)


@pytest.fixture(scope="module")
def exact(few_tokens: Any) -> dict[tuple[int, ...], float]:
    """The target's law of the next tokens, from plain forwards over every possible continuation."""

    def target(context: tuple[int, ...]) -> Tensor:
        return probabilities(plain_chain(few_tokens, [*PROMPT, *context])[-1:], SAMPLED)[0]

    return ancestral_law(target, POSITIONS)


def draws(engine: Engine) -> list[tuple[int, ...]]:
    """Answers of many requests, each with a seed of its own."""
    requests = [Request(PROMPT, replace(SAMPLED, seed=seed)) for seed in range(SAMPLES)]
    return [completion.ids for completion in complete(engine, *requests)]


@pytest.mark.parametrize(("drafter", "backend", "rule"), [row for row in MATRIX if row[2] != "greedy"])
def test_sampled_output_follows_the_targets_law(
    few_tokens: Any, exact: dict[tuple[int, ...], float], drafter: str, backend: str, rule: str
) -> None:
    target = BACKENDS[backend](few_tokens)
    engine = Engine(target, drafter_over(target, drafter, noise=0.2), draft_tokens=2, rule=rule)
    assert g_test(draws(engine), exact) > FALSE_FAILURE


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_control_correction_without_subtraction_is_caught_on_the_engine(
    few_tokens: Any, exact: dict[tuple[int, ...], float], monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    target = TransformersBackend(few_tokens)
    engine = Engine(target, drafter_over(target, drafter, noise=0.2), draft_tokens=2, rule="token")
    monkeypatch.setattr(chain, "residual", lambda draft, p, i: p[i])
    assert g_test(draws(engine), exact) < FALSE_FAILURE
