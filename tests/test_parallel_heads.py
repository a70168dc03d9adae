"""Heads that draft several tokens from one state: gradients, offsets, the tree against enumeration, overfitting."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.backends.base import Backend
from foredraft.backends.transformers import TransformersBackend
from foredraft.engine import Engine
from foredraft.errors import InvalidInputError
from foredraft.heads.parallel import MedusaHead, MTPHead, ParallelHead
from foredraft.proposers.medusa import (
    CANDIDATES,
    ParallelChainProposer,
    ParallelDrafter,
    ProductTreeProposer,
    likeliest_product,
)
from foredraft.randomness import KeyedSource
from foredraft.sampling import SamplingLaw
from foredraft.train.features import features_of, padded
from foredraft.train.objectives import ParallelObjective, depth_weights
from foredraft.tree import paths
from foredraft.types import Draft, SamplingParams
from tiny import BACKENDS, generate, tiny_llama
from tiny_heads import fit, objective_over, window_of

VOCABULARY, LAYERS, HIDDEN, DEPTH = 64, 3, 32, 3
HALF = torch.arange(0, VOCABULARY, 2)

HEADS: dict[str, Callable[[], ParallelHead]] = {
    "medusa": lambda: MedusaHead(HIDDEN, LAYERS, DEPTH, own_matrices=VOCABULARY),
    "medusa, small file": lambda: MedusaHead(HIDDEN, LAYERS, DEPTH, blocks=2),
    "medusa, half the vocabulary": lambda: MedusaHead(HIDDEN, LAYERS, DEPTH, own_matrices=len(HALF), draft_ids=HALF),
    "independent": lambda: MTPHead(HIDDEN, LAYERS, DEPTH),
    "cascaded": lambda: MTPHead(HIDDEN, LAYERS, DEPTH, form="cascaded"),
    "independent, half the vocabulary": lambda: MTPHead(HIDDEN, LAYERS, DEPTH, draft_ids=HALF),
}
EVERY_HEAD = pytest.mark.parametrize("name", HEADS)


def made(name: str) -> ParallelHead:
    """All its weights random: what begins as the identity would not show what it reads."""
    head = HEADS[name]()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator) + (weight.ndim == 1))
    return head


@pytest.fixture(scope="module")
def target() -> TransformersBackend:
    return TransformersBackend(tiny_llama(1, layers=LAYERS))


@pytest.fixture(scope="module")
def text(target: TransformersBackend) -> list[int]:
    prompt = [3, 1, 4, 1, 5]
    return [*prompt, *generate(Engine(target), prompt, SamplingParams(max_tokens=100)).ids]


def start(drafter: ParallelDrafter, law: SamplingLaw, seed: int, tokens: list[int]) -> Any:
    """A proposer whose target has all of `tokens` but the last."""
    proposer = drafter.proposer(law, KeyedSource(seed))
    cache = drafter.target.new_cache()
    proposer.attach(cache)
    drafter.target.prefill(cache, tokens[:-1])
    return proposer


def state_before_root(target: Backend, tokens: list[int]) -> Tensor:
    """What the heads read, `[1, 1, H]`: of the last token but one, as it was computed."""
    cache = target.new_cache()
    features = cache.keep_features([target.layers])
    target.prefill(cache, tokens[:-1])
    rows = features.take()[1]
    assert rows is not None
    return rows[-1:].clone()


# The heads


@EVERY_HEAD
def test_states_and_logits_have_a_row_for_each_depth(target: TransformersBackend, text: list[int], name: str) -> None:
    head = made(name)
    features = features_of(target, text[:9], head.feature_layers)[0][:, :-1].float()
    states = head.states(features)
    assert states.shape == (DEPTH, 9, HIDDEN)
    batched = head.states(features[None].expand(2, -1, -1, -1))
    assert batched.shape == (DEPTH, 2, 9, HIDDEN) and (batched[:, 1] - states).abs().max() < 1e-6
    width = VOCABULARY if head.draft_ids is None else len(head.draft_ids)
    assert ParallelDrafter(head, target).logits(features[-1:]).shape == (DEPTH, width)


def test_a_cascade_builds_on_the_depth_before() -> None:
    """With a weight of the first depth changed, all depths change; of independent heads only the first."""
    trunk = torch.randn(2, 1, HIDDEN, generator=torch.Generator().manual_seed(1))
    for name, moved in (("cascaded", [True] * DEPTH), ("independent", [True, False, False])):
        head = made(name)
        before = head.states(trunk)
        with torch.no_grad():
            next(head.parameters()).add_(0.5)
        assert [bool((a != b).any()) for a, b in zip(head.states(trunk), before, strict=True)] == moved


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MedusaHead(HIDDEN, LAYERS, 0), "depth is 0, but must be an integer >= 1"),
        (lambda: MedusaHead(HIDDEN, LAYERS, blocks=0), "blocks is 0"),
        (
            lambda: MedusaHead(HIDDEN, LAYERS, own_matrices=5, draft_ids=HALF),
            "own_matrices is 5, but must be the number",
        ),
        (lambda: MTPHead(HIDDEN, LAYERS, form="sequential"), "heads.recurrent.SequentialMTPHead"),
        (lambda: MTPHead(HIDDEN, LAYERS, mlp=0), "mlp is 0"),
        (lambda: MTPHead(HIDDEN, LAYERS, draft_ids=HALF.flip(0)), "ascending order"),
        (lambda: ParallelObjective(MTPHead(HIDDEN, LAYERS), torch.zeros(4, 4), [1.0]), "4 numbers >= 0"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        make()


# Training


def identity_of(name: str, target: Backend) -> ParallelHead:
    head = HEADS[name]()
    if isinstance(head, MedusaHead):
        every = range(VOCABULARY) if head.draft_ids is None else head.draft_ids.tolist()
        head.begin_as(target.head_rows(every))
    return head


@EVERY_HEAD
def test_losses_are_those_of_single_places(target: TransformersBackend, text: list[int], name: str) -> None:
    """A head that is fresh says the target's own law, at each depth of a later token: by hand, place by place."""
    head = identity_of(name, target).eval()
    task = objective_over(head, target)
    windows = [window_of(target, head, text[:n]) for n in (9, 14)]
    short, long = (window._replace(states=window.states.float()) for window in windows)
    losses = {label: value.detach() for label, value in task.losses(padded([short, long])).items()}
    ids = head.draft_ids if head.draft_ids is not None else torch.arange(VOCABULARY)
    for depth in range(DEPTH):
        terms, agreements, known = 0.0, 0, 0
        for window in (short, long):
            logits = window.states.float() @ target.head_rows(ids.tolist()).T
            p = torch.exp(logits - window.log_total[:, None])
            for i in range(len(window.ids) - 1 - depth):  # the state of token i drafts token i + 2 + depth
                terms -= float((p[i + 1 + depth] * logits[i].log_softmax(-1)).sum())
                agreements += all(p[i].argmax() == p[i + 1 + d].argmax() for d in range(depth + 1))
                known += 1
        assert float(losses[f"loss_{depth}"]) == pytest.approx(terms / known, rel=1e-4)
        assert float(losses[f"agree_{depth}"]) == pytest.approx(agreements / known)
    total = sum(float(losses[f"weight_{depth}"] * losses[f"loss_{depth}"]) for depth in range(DEPTH))
    assert float(losses["loss"]) == pytest.approx(total, rel=1e-5)


def test_weights_by_depth_are_those_of_the_papers() -> None:
    assert depth_weights(HEADS["medusa"]()) == pytest.approx((0.8, 0.64, 0.512))
    assert depth_weights(HEADS["independent"]()) == (1.0, 1.0, 1.0)


@EVERY_HEAD
def test_every_weight_gets_a_gradient_that_differences_confirm(
    target: TransformersBackend, text: list[int], name: str
) -> None:
    """In float64 along a random direction; the relative error of a central difference is far below 1e-5."""
    head = made(name).double()
    ids = range(VOCABULARY) if head.draft_ids is None else head.draft_ids.tolist()
    task = ParallelObjective(head, target.head_rows(ids).double(), [1.0, 0.5, 0.25])
    window = window_of(target, head, text[:20])
    batch = padded([window._replace(features=window.features.double(), states=window.states.double())])
    task.losses(batch)["loss"].backward()  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(1)
    slope, directions = 0.0, []
    for label, weight in head.named_parameters():
        assert weight.grad is not None and weight.grad.abs().max() > 0, label
        directions.append(torch.randn(weight.shape, generator=generator, dtype=torch.float64))
        slope += float((weight.grad * directions[-1]).sum())

    def loss_at(step: float) -> float:
        with torch.no_grad():
            for weight, direction in zip(head.parameters(), directions, strict=True):
                weight.add_(direction, alpha=step)
            value = float(task.losses(batch)["loss"])
            for weight, direction in zip(head.parameters(), directions, strict=True):
                weight.sub_(direction, alpha=step)
        return value

    assert (loss_at(1e-6) - loss_at(-1e-6)) / 2e-6 == pytest.approx(slope, rel=1e-3)


# Drafting


@pytest.mark.parametrize("backend", BACKENDS)
@EVERY_HEAD
def test_a_fresh_head_drafts_what_the_target_said_of_the_root(text: list[int], name: str, backend: str) -> None:
    """The offset: from the state of the last committed token, whose successor is the root, at every depth."""
    target = BACKENDS[backend](tiny_llama(1, layers=LAYERS))
    head = identity_of(name, target)
    tokens = text[:12]
    proposer = start(ParallelDrafter(head, target), SamplingLaw(SamplingParams(temperature=0.0)), 0, tokens)
    draft = proposer.propose(tokens, 40)
    logits = target.forward([_query(target, tokens[:-2], tokens[-2])])[0][0]
    ids = head.draft_ids if head.draft_ids is not None else torch.arange(VOCABULARY)
    likeliest = int(ids[logits[ids].argmax()])
    assert likeliest == tokens[-1] or head.draft_ids is not None  # the text is greedy
    assert (likeliest,) * DEPTH in paths(draft)
    odds = float(logits[ids].softmax(-1).max())
    assert draft.scores[paths(draft).index((likeliest,) * DEPTH)] == pytest.approx(odds**DEPTH, rel=1e-3)


def _query(target: Backend, committed: list[int], root: int) -> Any:
    from foredraft.backends.base import Query

    cache = target.new_cache()
    target.prefill(cache, committed)
    return Query(cache, root)


def product_by_enumeration(
    drafter: ParallelDrafter, law: SamplingLaw, tokens: list[int], budget: int, seed: int | None
) -> list[tuple[tuple[int, ...], float]]:
    """Every path of every length with its probability, and the likeliest of all."""
    ids = drafter.head.draft_ids if drafter.head.draft_ids is not None else torch.arange(VOCABULARY)
    levels: list[list[tuple[int, float]]] = []
    for depth, row in enumerate(drafter.logits(state_before_root(drafter.target, tokens))):
        log_q = torch.log_softmax(row / (1.0 if law.greedy else law.temperature), dim=-1)
        if seed is not None:
            log_q = log_q + KeyedSource(seed, len(tokens) + depth).noise(ids)
        best = log_q.topk(min(CANDIDATES, budget))
        odds = torch.softmax(best.values, -1) if seed is not None else best.values.exp()
        levels.append(list(zip(ids[best.indices].tolist(), odds.tolist(), strict=True)))
    found = [
        (tuple(token for token, _ in path), math.prod(odds for _, odds in path))
        for depth in range(1, DEPTH + 1)
        for path in itertools.product(*levels[:depth])
    ]
    return sorted(found, key=lambda item: -item[1])[:budget]


@pytest.mark.parametrize("budget", [1, 7, 40])
@pytest.mark.parametrize("seed", [None, 5], ids=["by-probability", "with-the-target's-noise"])
@EVERY_HEAD
def test_a_tree_is_the_likeliest_of_all_paths(
    target: TransformersBackend, text: list[int], name: str, seed: int | None, budget: int
) -> None:
    drafter, tokens = ParallelDrafter(made(name), target), text[:12]
    law = SamplingLaw(SamplingParams(temperature=0.0 if seed is None else 0.8))
    proposer = start(drafter, law, seed or 0, tokens)
    assert isinstance(proposer, ProductTreeProposer)
    with torch.no_grad():
        draft, wanted = proposer.propose(tokens, budget), product_by_enumeration(drafter, law, tokens, budget, seed)
    assert len(draft) == budget and list(draft.scores) == sorted(draft.scores, reverse=True)
    found = sorted(zip(paths(draft), draft.scores, strict=True))
    for (path, odds), (other, score) in zip(found, sorted(wanted), strict=True):
        assert path == other
        assert odds == pytest.approx(score, rel=1e-3)


def test_a_product_of_few_candidates_ends_by_itself() -> None:
    draft = likeliest_product([[5, 6], [7]], [[0.5, 0.25], [0.75]], 16)
    assert draft == Draft((5, 7, 6, 7), (-1, 0, -1, 2), scores=(0.5, 0.375, 0.25, 0.1875))


@pytest.mark.parametrize("name", ["medusa", "independent, half the vocabulary"])
def test_a_chain_is_drawn_with_the_law_that_it_names(target: TransformersBackend, text: list[int], name: str) -> None:
    """Under the request's own settings, penalties on drafted tokens included, with the noise of each position."""
    drafter, tokens = ParallelDrafter(made(name), target), text[:12]
    drafter.trees = False
    law = SamplingLaw(SamplingParams(temperature=0.7, top_k=9, repetition_penalty=1.5))
    proposer = start(drafter, law, 3, tokens)
    assert isinstance(proposer, ParallelChainProposer)
    draft = proposer.propose(tokens, 16)
    assert len(draft) == DEPTH and draft.is_chain  # no more than the head says, whatever the budget
    ids = drafter.head.draft_ids if drafter.head.draft_ids is not None else torch.arange(VOCABULARY)
    for depth, (row, q) in enumerate(zip(drafter.logits(state_before_root(target, tokens)), draft.q, strict=True)):
        logits = torch.full((1, VOCABULARY), -math.inf)
        logits[0, ids] = row.detach()
        history = [*tokens, *draft.tokens[:depth]]
        wanted: Tensor = law(history, Draft(), logits)[0]
        assert q is not None and (q - wanted).abs().max() < 1e-4 and int((q > 0).sum()) == 9
        assert KeyedSource(3).at(len(history)).draw(q) == draft.tokens[depth]


def test_before_anything_is_committed_there_is_no_draft(target: TransformersBackend) -> None:
    drafter = ParallelDrafter(made("independent"), target)
    params = SamplingParams(max_tokens=12)
    assert generate(Engine(target, drafter), [7], params).ids == generate(Engine(target), [7], params).ids


@pytest.mark.parametrize("backend", BACKENDS)
@EVERY_HEAD
def test_a_head_overfits_a_text(text: list[int], name: str, backend: str) -> None:
    """More than 95 % of what a chain drafts is accepted, after some steps on one greedy answer of 100 tokens.

    A parallel head does not see the tokens between, but in a text without chance they follow from where it is: no two
    of its states are the same.
    """
    target = BACKENDS[backend](tiny_llama(1, layers=LAYERS))
    if "half" in name:
        head: ParallelHead = MTPHead(HIDDEN, LAYERS, DEPTH, draft_ids=torch.tensor(sorted({*text})))
    else:
        head = MedusaHead(HIDDEN, LAYERS, DEPTH, blocks=3) if "small" in name else identity_of(name, target)
    task = objective_over(head, target, sharpness=4.0)
    batch = padded([window_of(target, head, text, sharpness=4.0)])
    fit(head, lambda: task.losses(batch), 200, 2e-2)
    engine = Engine(target, ParallelDrafter(head, target), rule="token", draft_tokens=DEPTH)
    completion = generate(engine, text[:5], SamplingParams(max_tokens=100))
    assert list(completion.ids) == text[5:]
    assert completion.stats.acceptance_rate is not None and completion.stats.acceptance_rate > 0.95
