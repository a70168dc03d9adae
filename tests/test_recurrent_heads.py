"""Heads that go on from their own output: shapes, gradients, the tree against a reference, and what they overfit to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from foredraft.backends.base import Backend
from foredraft.backends.transformers import TransformersBackend
from foredraft.engine import Engine
from foredraft.generation import Request
from foredraft.heads.block import BlockShape
from foredraft.heads.recurrent import Eagle3Head, EagleHead, RecurrentHead, SequentialMTPHead
from foredraft.proposers.eagle import RecurrentDrafter, TreeProposer
from foredraft.proposers.head_trees import DEEPEST, WIDTH
from foredraft.randomness import KeyedSource
from foredraft.sampling import SamplingLaw
from foredraft.train.features import Window, features_of, padded
from foredraft.train.objectives import RecurrentObjective
from foredraft.train.rollout import Rollout
from foredraft.tree import paths
from foredraft.types import FinishEvent, SamplingParams
from tiny import BACKENDS, tiny_llama
from tiny_heads import fit

VOCABULARY, LAYERS = 64, 3
SHAPE = BlockShape(hidden=32, heads=4, kv_heads=2, head_dim=8, mlp=48)
HALF = torch.arange(0, VOCABULARY, 2)

HEADS: dict[str, Callable[[], RecurrentHead]] = {
    "eagle3": lambda: Eagle3Head(SHAPE, (1, 2, 3), HALF),
    "eagle": lambda: EagleHead(SHAPE, LAYERS),
    "mtp": lambda: SequentialMTPHead(SHAPE, LAYERS),
}


def made(name: str, seed: int = 0) -> RecurrentHead:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return HEADS[name]()


def objective(head: RecurrentHead, target: Backend, steps: int = 3) -> RecurrentObjective:
    every = range(VOCABULARY) if head.draft_ids is None else head.draft_ids.tolist()
    return RecurrentObjective(
        head,
        target.embed(range(VOCABULARY)),
        target.head_rows(every),
        steps=steps,
        regression=1.0 if head.kind == "eagle" else 0.0,
    )


def window(target: Backend, head: RecurrentHead, ids: list[int]) -> Window:
    states, totals = features_of(target, ids, head.feature_layers)
    return Window(torch.tensor(ids), states[:, :-1], states[:, -1], totals, 0)


def text_of(target: Backend, count: int, prompt: list[int] | None = None) -> list[int]:
    prompt = prompt or [3, 1, 4, 1, 5]
    events = list(Engine(target).run([Request(prompt, SamplingParams(max_tokens=count))]))
    finish = events[-1][1]
    assert isinstance(finish, FinishEvent)
    return [*prompt, *finish.completion.ids]


@pytest.mark.parametrize("name", HEADS)
def test_every_weight_gets_a_gradient_that_differences_confirm(name: str) -> None:
    """In float64 along a random direction; the relative error of a central difference is far below 1e-5."""
    target = TransformersBackend(tiny_llama(1, layers=LAYERS))
    head = made(name).double()
    task = objective(head, target)
    task.embedding, task.target_rows = task.embedding.double(), task.target_rows.double()
    batch = window(target, head, text_of(target, 20))
    batch = padded([batch._replace(features=batch.features.double(), states=batch.states.double())])
    task.losses(batch)["loss"].backward()  # type: ignore[no-untyped-call]
    for label, weight in head.named_parameters():
        assert weight.grad is not None and weight.grad.abs().max() > 0, label
    generator = torch.Generator().manual_seed(1)
    directions = [torch.randn(w.shape, generator=generator, dtype=torch.float64) for w in head.parameters()]
    slope = sum(
        float((w.grad * d).sum()) for w, d in zip(head.parameters(), directions, strict=True) if w.grad is not None
    )
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            for w, d in zip(head.parameters(), directions, strict=True):
                w.add_(d, alpha=sign * 1e-6)
            values.append(float(task.losses(batch)["loss"]))
            for w, d in zip(head.parameters(), directions, strict=True):
                w.sub_(d, alpha=sign * 1e-6)
    assert (values[0] - values[1]) / 2e-6 == pytest.approx(slope, rel=1e-3)


@pytest.mark.parametrize("name", HEADS)
def test_drafting_goes_where_training_looked(name: str) -> None:
    """The state after each chain of drafting is that of the rollout over the whole text."""
    target = TransformersBackend(tiny_llama(1, layers=LAYERS))
    head = made(name)
    ids = text_of(target, 20)
    features = features_of(target, ids, head.feature_layers)[0][:, :-1].float()
    roll = Rollout(head, features[None], target.embed(ids)[None])
    states = [roll.state]
    kept = torch.tensor([[1, 4, 9, 11]])
    for _ in range(2):
        roll.go_on(kept)
        states.append(torch.zeros_like(states[0]).index_copy(1, roll.places[0], roll.state))
        kept = torch.tensor([[1, 3]])
    from foredraft.heads.running import HeadCache

    for place in (4, 11):
        run = HeadCache(head, target)
        for first in range(0, place + 1, 3):  # committed in pieces
            rows = features[first : min(first + 3, place + 1)]
            run.commit(rows, ids[first + 1 : first + 1 + len(rows)])
        assert (run.states[0] - states[0][0, place]).abs().max() < 1e-5
        for step in (1, 2):
            run.expand([step - 2], [ids[place + 1 + step]])
            assert (run.states[step] - states[step][0, place]).abs().max() < 1e-5


def reference_tree(
    drafter: RecurrentDrafter,
    law: SamplingLaw,
    tokens: list[int],
    features: torch.Tensor,
    budget: int,
    seed: int | None,
) -> set[tuple[tuple[int, ...], float]]:
    """The same tree, each node's law by a run of its own from the text's beginning: paths and their probabilities."""
    from foredraft.heads.running import HeadCache

    head, target = drafter.head, drafter.target

    def chances(path: tuple[int, ...]) -> list[tuple[int, float]]:
        run = HeadCache(head, target)
        logits = run.commit(features, tokens[1:])
        for step, token in enumerate(path):
            logits = run.expand([step - 1], [token])
        log_q = torch.log_softmax(logits[0] / (1.0 if law.greedy else law.temperature), dim=-1)
        ids = head.draft_ids if head.draft_ids is not None else torch.arange(VOCABULARY)
        if seed is not None:
            log_q = log_q + KeyedSource(seed, len(tokens) + len(path)).noise(ids)
        best = log_q.topk(WIDTH)
        odds = torch.softmax(best.values, -1) if seed is not None else best.values.exp()
        return list(zip(ids[best.indices].tolist(), odds.tolist(), strict=True))

    scored: dict[tuple[int, ...], float] = {(token,): odds for token, odds in chances(())}
    level = list(scored)
    for _ in range(DEEPEST - 1):
        best = sorted(scored.values(), reverse=True)
        bar = best[min(budget, len(best)) - 1]
        level = sorted((p for p in level if scored[p] >= bar), key=lambda p: -scored[p])[:WIDTH]
        fresh = {(*p, token): scored[p] * odds for p in level for token, odds in chances(p)}
        scored |= fresh
        level = list(fresh)
    kept = sorted(scored.items(), key=lambda item: -item[1])[:budget]
    return {(path, round(odds, 5)) for path, odds in kept}


@pytest.mark.parametrize("seed", [None, 5], ids=["by-probability", "with-the-target's-noise"])
@pytest.mark.parametrize("name", HEADS)
def test_a_tree_is_that_of_a_run_for_each_node(name: str, seed: int | None) -> None:
    target = TransformersBackend(tiny_llama(1, layers=LAYERS))
    drafter = RecurrentDrafter(made(name), target)
    tokens = text_of(target, 12)
    features = features_of(target, tokens[:-1], drafter.head.feature_layers)[0][:, :-1].float()
    law = SamplingLaw(SamplingParams(temperature=0.0 if seed is None else 0.8))
    proposer = TreeProposer(drafter, law, KeyedSource(seed or 0))
    cache = target.new_cache()
    proposer.attach(cache)
    target.prefill(cache, tokens[:-1])
    draft = proposer.propose(tokens, 12)
    wanted = reference_tree(drafter, law, tokens, features, 12, seed)
    assert len(draft) == 12
    found = sorted(zip(paths(draft), draft.scores, strict=True))
    for (path, odds), (other, score) in zip(found, sorted(wanted), strict=True):
        assert path == other
        assert odds == pytest.approx(score, abs=1e-3)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_overfits_a_text(name: str) -> None:
    """After 200 steps on one answer of 100 tokens, more than 95 % of what it drafts is accepted, by both backends."""
    model = tiny_llama(1, layers=LAYERS)
    with torch.no_grad():
        model.lm_head.weight *= 4  # a law with few ties, of which a small head may remember the other side
    target = TransformersBackend(model)
    head = made(name)
    if head.draft_ids is not None:
        head = Eagle3Head(SHAPE, (1, 2, 3), torch.arange(VOCABULARY))
    ids = text_of(target, 100)
    task = objective(head, target)
    batch = padded([window(target, head, ids)])
    fit(head, lambda: task.losses(batch), 200, 2e-2)
    for backend in BACKENDS.values():
        own = backend(model)
        engine = Engine(own, RecurrentDrafter(head, own), rule="token", draft_tokens=3)
        finish = list(engine.run([Request(ids[:5], SamplingParams(max_tokens=100))]))[-1][1]
        assert isinstance(finish, FinishEvent)
        assert list(finish.completion.ids) == ids[5:]
        rate = finish.completion.stats.acceptance_rate
        assert rate is not None and rate > 0.95
