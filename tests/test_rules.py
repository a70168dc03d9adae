"""Every acceptance rule keeps the target's law exactly, known mistakes are caught, and rules accept what they promise.

Laws are enumerated through the production code, every branch of it, so nothing here is left to luck; the one sampled
test says its odds. A new row in `RULES` is covered as soon as it is there.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from statistics import mean
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foredraft.acceptance import RULES, Draws, Rule, chain, default_rule
from foredraft.acceptance.chain import remainder
from foredraft.backends.base import Capabilities
from foredraft.backends.transformers import TransformersBackend
from foredraft.engine import Engine
from foredraft.errors import InvalidInputError, UnsupportedError
from foredraft.proof.audit import audit
from foredraft.proof.controls import CONTROLS, stale_cache
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
from foredraft.proof.statistics import g_test
from foredraft.proof.toys import CHAINS, DRAWS, TREES, Case, Children, Siblings, cases_for, drawn_tree, toy_model
from foredraft.proof.verify import enumerate_control, enumerate_rule
from foredraft.randomness import KeyedSource, RandomSource, TorchSource
from foredraft.sampling import probabilities
from foredraft.tree import paths
from foredraft.types import Draft, SamplingParams
from tiny import CountingBackend, Oracle, drafter_over

EXACT, WRONG = 1e-9, 1e-4
"""Total variation below which a law is the target's, and above which a mistake is caught."""

LOSSLESS = [rule for rule in RULES.values() if not rule.lossy]
SAMPLING = [rule for rule in LOSSLESS if not rule.greedy]
LOSSY = [rule for rule in RULES.values() if rule.lossy]


def named(rules: Iterable[Rule]) -> list[Any]:
    return [pytest.param(rule, id=rule.name) for rule in rules]


def distance(rule: Rule, propose: Propose, p: ToyModel, length: int) -> float:
    return total_variation(joint_law(rule.decide, propose, p, length), ancestral_law(p, length))


# The law, on the cases that `foredraft verify` takes


@pytest.mark.parametrize("rule", named(LOSSLESS))
def test_the_law_is_the_targets_on_every_kind_of_draft(rule: Rule) -> None:
    for row in enumerate_rule(rule):
        assert row.total_variation < EXACT, row
        assert row.passed


@pytest.mark.parametrize("rule", named(LOSSY))
def test_the_law_of_a_lossy_rule_is_found_out(rule: Rule) -> None:
    for row in enumerate_rule(rule):
        print(f"{row.rule}, {row.kind}: TV {row.total_variation:.3g}")  # noqa: T201
        assert row.total_variation > WRONG and not row.passed


def test_the_cases_are_those_that_the_specification_lists() -> None:
    every = [case for rule in RULES.values() for case in cases_for(rule)]
    assert {case.widths for case in every} == {*CHAINS, *TREES}
    assert {case.siblings for case in every} == set(DRAWS)
    assert max(len(case.widths) for case in every) == 3
    assert {len(case.target(())) for case in every} == {3, 4}
    for rule in SAMPLING:
        cases = list(cases_for(rule))
        assert any(case.target is case.draft for case in cases)  # identical laws
        assert any(not (case.target(()) * case.draft(())).any() for case in cases)  # laws without overlap
        assert {DRAWS[case.siblings] for case in cases} == set(range(rule.draws + 1))
        assert rule.trees == any(max(case.widths) > 1 for case in cases)


# The law, under real settings, every point mass and every length


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

WARM = SamplingParams(temperature=1.0)
SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.4),
    WARM,
    SamplingParams(temperature=1.5, top_k=3, top_p=0.9, min_p=0.05),
]


def chains(rule: Rule, q: ToyModel, vocabulary: int, k: int) -> Iterator[Propose]:
    """Every chain that the rule accepts: each possible point mass, and what is drawn from q."""
    for tokens in itertools.product(range(vocabulary), repeat=k):
        yield lambda source, tokens=tokens: Draft.chain(tokens)  # type: ignore[misc]
    if rule.draws >= Draws.ONE:
        yield drawn_chain(q, k)


@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.__name__)
@pytest.mark.parametrize("rule", named(LOSSLESS))
def test_the_law_is_the_targets_for_every_chain(rule: Rule, pair: Any, k: int) -> None:
    for vocabulary, params in itertools.product((2, 3, 4), SETTINGS[:1] if rule.greedy else SETTINGS):
        p, q = pair(vocabulary, params)
        for propose in chains(rule, q, vocabulary, k):
            assert distance(rule, propose, p, k + 1) < EXACT, (vocabulary, params)


@pytest.mark.parametrize("rule", named(rule for rule in SAMPLING if rule.draws >= Draws.ONE))
def test_draft_and_target_may_have_settings_of_their_own(rule: Rule) -> None:
    p = toy(1, 4, SamplingParams(temperature=0.7, top_k=2))
    q = toy(2, 4, SamplingParams(temperature=1.3, min_p=0.2))
    assert distance(rule, drawn_chain(q, 3), p, 4) < EXACT


@pytest.mark.parametrize("rule", named(SAMPLING))
def test_any_drawn_chain_may_be_verified_as_a_point_mass(rule: Rule) -> None:
    p, q = different(3, WARM)
    assert distance(rule, lambda source: replace(drawn_chain(q, 2)(source), q=()), p, 3) < EXACT


@pytest.mark.parametrize("rule", named(rule for rule in SAMPLING if rule.trees))
def test_siblings_of_the_same_token_do_no_harm(rule: Rule) -> None:
    p, _ = different(3, WARM)
    twins = Draft((1, 1, 0, 2, 1), (-1, -1, 0, 1, 1))
    assert distance(rule, lambda source: twins, p, 3) < EXACT


@given(seed=st.integers(0, 10**6), rule=st.sampled_from(SAMPLING), data=st.data())
def test_the_law_is_the_targets_on_random_toys(seed: int, rule: Rule, data: st.DataObject) -> None:
    siblings = data.draw(st.sampled_from([s for s, draws in DRAWS.items() if draws <= rule.draws]))
    widths = data.draw(st.sampled_from([(1,), (1, 1), *([(2,), (2, 1), (1, 2)] if rule.trees else [])]))
    temperature = data.draw(st.sampled_from([0.05, 0.3, 1.0, 3.0]))
    p, q = toy_model(3, seed, temperature), toy_model(3, seed + 1)
    case = Case("random", p, q, widths, siblings)
    assert distance(rule, case.propose, p, len(widths) + 1) < EXACT


# Known mistakes


@pytest.mark.parametrize("name", [name for name, control in CONTROLS.items() if not control.breaks_the_cache])
def test_a_known_mistake_is_caught(name: str) -> None:
    control = CONTROLS[name]
    rows = enumerate_control(control)
    worst = max(row.total_variation for row in rows)
    print(f"{name} ({control.mistake}): TV {worst:.3g}")  # noqa: T201
    assert worst > WRONG
    if control.children is not None:  # the same drafts, rightly drawn, are right
        rows = enumerate_control(replace(control, children=drawn_rightly(control.siblings)))
    else:
        rows = enumerate_control(replace(control, decide=RULES[control.rule or ""].decide))
    assert all(row.passed for row in rows)


def drawn_rightly(siblings: Siblings) -> Children:
    """Every child from the law itself, which is what `single` and `with replacement` say."""
    assert siblings in ("single", "with replacement")
    return lambda law, width, source: [(source.draw(law), law) for _ in range(width)]


@pytest.mark.parametrize("drafter", ["ngram", "draft"])
def test_a_stale_cache_is_caught_by_the_audit(target: TransformersBackend, drafter: str) -> None:
    prompts = [[1, 2, 3], [40, 41] * 8, [9, 8, 7, 9, 8, 7, 9, 8]]
    params = SamplingParams(max_tokens=30)
    engines = [Engine(backend, drafter_over(target, drafter)) for backend in (target, stale_cache(target))]
    right, stale = (audit(Engine(target), engine, target, prompts, params, "greedy") for engine in engines)
    assert right.differences == ()
    assert stale.defects > 0
    print(f"stale-cache: {stale.defects} defects in {stale.prompts} prompts, {stale.tokens} tokens")  # noqa: T201


def test_every_control_of_the_specification_is_there() -> None:
    assert set(CONTROLS) >= {"block-weight", "draft-temperature", "replacement", "stale-cache"}
    assert [name for name, control in CONTROLS.items() if control.breaks_the_cache] == ["stale-cache"]


@pytest.mark.parametrize("propose", ["drawn", "point mass"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_correction_without_subtraction_is_caught(monkeypatch: pytest.MonkeyPatch, propose: str, k: int) -> None:
    p, q = different(3, WARM)
    made = drawn_chain(q, k) if propose == "drawn" else lambda source: Draft.chain([0] * k)
    assert distance(RULES["token"], made, p, k + 1) < EXACT
    monkeypatch.setattr(chain, "residual", lambda draft, node, p: p)
    assert distance(RULES["token"], made, p, k + 1) > 10 * WRONG


@pytest.mark.parametrize("rule", named(rule for rule in SAMPLING if rule.draws >= Draws.ONE and not rule.keyed))
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_draft_of_another_temperature_than_its_q_is_caught(rule: Rule, k: int) -> None:
    p, q = different(3, WARM)
    _, hot = different(3, SamplingParams(temperature=1.5))

    def mismatched(source: RandomSource) -> Draft:
        draft = drawn_chain(hot, k)(source)
        return replace(draft, q=tuple(score(q, draft)[:k]))

    assert distance(rule, mismatched, p, k + 1) > 10 * WRONG


def test_siblings_drawn_with_replacement_but_said_to_be_without_are_caught() -> None:
    p, q = toy_model(4, 0), toy_model(4, 1)

    def mismatched(source: RandomSource) -> Draft:
        law = q(())
        x, y = source.draw(law), source.draw(law)
        left = law.clone()
        left[x] = 0.0
        return Draft((x, y), (-1, -1), (law, left / left.sum()))

    for name in ("recursive", "traversal"):
        assert distance(RULES[name], mismatched, p, 2) > WRONG


# The enumeration itself


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
    p, q = different(4, WARM)
    for law in (ancestral_law(p, 3), joint_law(RULES["token"].decide, drawn_chain(q, 2), p, 3)):
        assert sum(law.values()) == pytest.approx(1, abs=1e-12)
        assert set(map(len, law)) == {3}


# How much is accepted


class CoinsOnly:
    """Passes coins on. Draws decide no length in the rules it is used with: it takes the likeliest token."""

    def __init__(self, source: RandomSource) -> None:
        self._source = source

    def at(self, position: int) -> RandomSource:
        return self

    def below(self, position: int, root: int) -> RandomSource:
        return self

    def coin(self, probability: float) -> bool:
        return self._source.coin(probability)

    def draw(self, weights: Tensor, depth: int = 0) -> int:
        return int(weights.argmax())


def expected_length(rule: Rule, propose: Propose, p: ToyModel, *, coins_only: bool = False) -> float:
    """The expected number of accepted tokens, exactly, from every branch of the rule's own code."""

    def play(source: RandomSource) -> int:
        draft = propose(source)
        return len(rule.decide(draft, score(p, draft), CoinsOnly(source) if coins_only else source).path)

    return sum(length * mass for length, mass in outcome_law(play).items())


def overlap(p: Tensor, q: Tensor) -> float:
    """1 - TV of two distributions."""
    return float(torch.minimum(p, q).sum())


def random_pairs(count: int, vocabulary: int) -> Iterator[tuple[ToyModel, ToyModel]]:
    """Toy models as different as they come: each pair has temperatures of its own."""
    for seed in range(count):
        hot, cold = 0.3 + 0.02 * (seed % 97), 0.3 + 0.02 * (seed % 89)
        yield toy_model(vocabulary, 2 * seed, hot), toy_model(vocabulary, 2 * seed + 1, cold)


def test_block_accepts_at_least_as_much_as_token_on_1000_random_pairs() -> None:
    gains = []
    for p, q in random_pairs(1000, vocabulary=3):
        token, block = (
            expected_length(RULES[name], drawn_chain(q, 2), p, coins_only=True) for name in ("token", "block")
        )
        first = torch.minimum(p(()), q(()))
        second = [overlap(p((x,)), q((x,))) for x in range(3)]
        assert token == pytest.approx(
            float(first.sum()) + float(first @ torch.tensor(second, dtype=first.dtype)), abs=1e-12
        )
        assert block >= token - 1e-12
        gains.append(block - token)
    print(f"block over token: mean {mean(gains):.4f}, largest {max(gains):.4f} tokens a round of 2")  # noqa: T201
    assert mean(gains) > 0.001


def test_the_length_is_decided_by_coins_alone_in_token_and_block() -> None:
    for p, q in random_pairs(5, vocabulary=3):
        for name in ("token", "block"):
            lengths = [expected_length(RULES[name], drawn_chain(q, 2), p, coins_only=only) for only in (True, False)]
            assert lengths[0] == pytest.approx(lengths[1], abs=1e-12)


def test_traversal_of_a_chain_is_block() -> None:
    for p, q in random_pairs(20, vocabulary=3):
        lengths = [
            expected_length(RULES[name], drawn_chain(q, 3), p, coins_only=True) for name in ("traversal", "block")
        ]
        assert lengths[0] == pytest.approx(lengths[1], abs=1e-12)


@pytest.mark.parametrize("widths", [(2,), (2, 1), (2, 2)], ids=str)
def test_hus_children_under_traversal_are_accepted_most(widths: tuple[int, ...]) -> None:
    hu_traversal, without_replacement = [], []
    for p, q in random_pairs(40 if widths != (2, 2) else 8, vocabulary=3):
        children = drawn_tree(q, widths, "drawn and top")
        traversal, recursive, hu = (
            expected_length(RULES[name], children, p, coins_only=name != "hu")
            for name in ("traversal", "recursive", "hu")
        )
        assert traversal >= recursive - 1e-12
        assert recursive == pytest.approx(hu, abs=1e-12)
        hu_traversal.append(traversal)
        drawn = drawn_tree(q, widths, "without replacement")
        without_replacement.append(expected_length(RULES["recursive"], drawn, p, coins_only=True))
    print(f"{widths}: Hu + traversal {mean(hu_traversal):.3f}, recursive {mean(without_replacement):.3f}")  # noqa: T201
    assert mean(hu_traversal) >= mean(without_replacement)


def most_possible(p: ToyModel, draft: Draft) -> float:
    """The optimum for a fixed tree: the mass of its paths, since the target's own token is all the chance there is."""
    return sum(mass_of(p, path) for path in set(paths(draft)))


def mass_of(p: ToyModel, path: Sequence[int]) -> float:
    mass = 1.0
    for depth, token in enumerate(path):
        mass *= float(p(tuple(path[:depth]))[token])
    return mass


@pytest.mark.parametrize("rule", named(rule for rule in SAMPLING if rule.trees))
@pytest.mark.parametrize("widths", [(1, 1, 1), *TREES], ids=str)
def test_no_rule_exceeds_the_optimum_of_a_fixed_tree_and_walks_reach_it(rule: Rule, widths: tuple[int, ...]) -> None:
    for p, q in random_pairs(20, vocabulary=4):
        propose = drawn_tree(q, widths, "point")
        best = most_possible(p, propose(TorchSource()))
        length = expected_length(rule, propose, p)
        assert length <= best + 1e-12
        if rule.name in ("walk", "seed-exact", "hu", "recursive"):
            assert length == pytest.approx(best, abs=1e-12)


# Acceptance of a single token


def single(rule: Rule, p: Tensor, q: Tensor) -> float:
    """The exact probability that a token drawn from q is accepted."""
    return expected_length(rule, drawn_chain(lambda _: q, 1), lambda _: p)


def random_law(vocabulary: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (1.5 * torch.randn(vocabulary, generator=generator, dtype=torch.float64)).softmax(-1)


@pytest.mark.parametrize("name", ["token", "block", "recursive", "hu", "traversal"])
def test_acceptance_is_one_minus_total_variation(name: str) -> None:
    for seed in range(50):
        p, q = random_law(4, 2 * seed), random_law(4, 2 * seed + 1)
        assert single(RULES[name], p, q) == pytest.approx(overlap(p, q), abs=1e-12)


def agreement(p: Tensor, q: Tensor) -> float:
    """P[argmax(log p + g) == argmax(log q + g)] for one Gumbel noise g: sum_x 1 / sum_y max(p_y / p_x, q_y / q_x)."""
    both = ((p > 0) & (q > 0)).nonzero()[:, 0]
    ratios = torch.maximum(p[:, None] / p[both], q[:, None] / q[both])
    return float((1 / ratios.sum(0)).sum())


def test_agreement_is_at_least_its_bound_on_1000_random_pairs() -> None:
    for seed in range(1000):
        vocabulary = 2 + seed % 60
        p, q = random_law(vocabulary, 2 * seed), random_law(vocabulary, 2 * seed + 1)
        tv = 1 - overlap(p, q)
        assert (1 - tv) / (1 + tv) - 1e-12 <= agreement(p, q) <= 1 - tv + 1e-12


def test_agreement_at_the_ends() -> None:
    p = random_law(5, 1)
    apart = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64)
    assert agreement(p, p) == pytest.approx(1, abs=1e-12)
    assert agreement(apart, apart.flip(0)) == 0


@pytest.mark.parametrize("seed", range(4))
def test_seed_exact_accepts_as_often_as_the_formula_says(seed: int) -> None:
    """Odds of failing for a right rule: 1e-9 over seeds. An acceptance that is 0.05 off is found with odds of 0.9."""
    vocabulary, positions = 8 * (seed + 1), 8000
    p, q = random_law(vocabulary, 2 * seed), random_law(vocabulary, 2 * seed + 1)
    exact = agreement(p, q)
    rule, noise = RULES["seed-exact"], KeyedSource(seed)
    rows = torch.stack([p, p])

    def accepted(position: int) -> bool:
        source = noise.at(position)
        return bool(rule.decide(Draft.chain([source.draw(q)], [q]), rows, source).path)

    test = g_test(
        Counter(accepted(position) for position in range(0, 2 * positions, 2)), {True: exact, False: 1 - exact}
    )
    assert test.passed
    assert test.detectable < 2 * 0.05**2  # Pinsker: a law that is 0.05 off is at least this many nats away


# Whatever the draft


def sparse(seed: int, vocabulary: int) -> ToyModel:
    """Laws of which about half the tokens have no mass."""

    @cache
    def law(context: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *context)) % 2**63)
        logits = 3 * torch.randn(vocabulary, generator=generator, dtype=torch.float64)
        logits[torch.rand(vocabulary, generator=generator) < 0.5] = -torch.inf
        logits[int(torch.randint(vocabulary, (), generator=generator))] = 0.0  # something is left
        return logits.softmax(-1)

    return law


WIDTHS = [(), (1,), (1, 1, 1), (2,), (3, 2), (2, 2, 2), (1, 3, 1)]


@given(seed=st.integers(0, 2**31), rule=st.sampled_from(SAMPLING), data=st.data())
def test_a_verdict_is_a_path_of_possible_tokens(seed: int, rule: Rule, data: st.DataObject) -> None:
    kinds: list[Siblings] = [
        s for s, draws in DRAWS.items() if draws <= rule.draws and (rule.trees or s in ("point", "single"))
    ]
    widths = data.draw(st.sampled_from([w for w in WIDTHS if rule.trees or max(w, default=1) == 1]))
    propose = drawn_tree(sparse(seed + 1, 6), widths, data.draw(st.sampled_from(kinds)))
    chance: Callable[[], RandomSource] = lambda: TorchSource(torch.Generator().manual_seed(seed))  # noqa: E731
    draft = propose(chance())
    p = score(sparse(seed, 6), draft)
    verdict = rule.decide(draft, p, KeyedSource(seed) if rule.keyed else chance())
    above = -1
    for node, token in zip(verdict.path, verdict.tokens, strict=False):
        assert draft.parents[node] == above and draft.tokens[node] == token
        above = node
    assert len(verdict.tokens) == len(verdict.path) + 1
    rows = [0, *(node + 1 for node in verdict.path)]
    assert all(p[row, token] > 0 for row, token in zip(rows, verdict.tokens, strict=True))
    assert verdict.rejected == (above in draft.parents)  # something below the path's end was turned down


@given(seed=st.integers(0, 2**31), siblings=st.sampled_from(sorted(DRAWS)), weight=st.floats(0.0, 1.0))
def test_laws_are_distributions_and_what_is_left_is_never_negative(
    seed: int, siblings: Siblings, weight: float
) -> None:
    draft = drawn_tree(sparse(seed + 1, 6), (3, 2), siblings)(TorchSource(torch.Generator().manual_seed(seed)))
    p = score(sparse(seed, 6), draft)
    for law in [*p, *(q for q in draft.q if q is not None)]:
        assert (law >= 0).all() and not law.isnan().any()
        assert float(law.sum()) == pytest.approx(1, abs=1e-12)
    for node, parent in enumerate(draft.parents):
        before = p.clone()
        left = remainder(draft, node, p[parent + 1], weight)
        assert (left >= 0).all() and not left.isnan().any()
        assert (left <= p[parent + 1]).all()
        assert draft.q[node] is not None or left[draft.tokens[node]] == 0
        assert torch.equal(p, before)  # it is a copy


def test_a_rejection_without_anything_left_is_refused() -> None:
    p = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    wrong_q = torch.tensor([1.0, 0.5], dtype=torch.float64)
    for name in ("token", "recursive", "hu", "block"):
        with pytest.raises(InvalidInputError, match=r"residual \(p - q\)\+ has no mass after drafted token 1"):
            RULES[name].decide(Draft.chain([1], [wrong_q]), p, TorchSource())


# Which rule a drafter gets, and which it is refused


class TreeBackend(CountingBackend):
    """Says that it can verify trees."""

    capabilities = Capabilities(trees=True)

    def __init__(self, inner: TransformersBackend) -> None:
        super().__init__(inner)
        self.capabilities = TreeBackend.capabilities


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("draws", Draws, ids=lambda draws: draws.name)
@pytest.mark.parametrize("rule", named(RULES.values()))
def test_a_rule_refuses_drafts_it_is_not_made_for(
    rule: Rule, draws: Draws, trees: bool, target: TransformersBackend
) -> None:
    drafter = Oracle([1], [2])
    drafter.draws, drafter.trees = draws, trees
    fitting = [r.name for r in LOSSLESS if r.draws >= draws and r.trees >= trees]
    if rule.greedy or (rule.draws >= draws and rule.trees >= trees):
        Engine(TreeBackend(target), drafter, rule=rule.name)
        return
    with pytest.raises(UnsupportedError) as refused:
        Engine(TreeBackend(target), drafter, rule=rule.name)
    said = str(refused.value)
    assert "'oracle'" in said and f"'{rule.name}'" in said
    assert said.endswith(f"Use {' or '.join(fitting)}.")
    assert not any(r.name in said for r in LOSSY if r is not rule)


@pytest.mark.parametrize(
    ("draws", "trees"),
    [(Draws.POINT, False), (Draws.ONE, False), (Draws.POINT, True), (Draws.ONE, True), (Draws.ANY, True)],
)
def test_the_default_rule_fits_and_keeps_the_law(draws: Draws, trees: bool) -> None:
    rule = default_rule(draws, trees)
    assert rule.draws >= draws and rule.trees >= trees
    assert not rule.lossy and not rule.greedy
    assert rule.keyed == (draws is Draws.POINT)


def test_rules_are_known_by_their_names_and_say_what_they_do() -> None:
    assert set(RULES) == {
        *("greedy", "token", "block", "seed-exact", "walk", "recursive", "hu", "traversal", "lossy-typical")
    }
    for name, rule in RULES.items():
        assert rule.name == name and rule.summary
        assert rule.lossy == name.startswith("lossy-")  # whoever asks for it reads the word
