"""Recurrent heads on the native engine's kernels: the same states, logits and drafts as by torch."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foredraft.backends.base import Query
from foredraft.backends.native.backend import NativeBackend
from foredraft.backends.native.reading import weights_of_model
from foredraft.engine import Engine
from foredraft.generation import Request
from foredraft.heads.block import BlockShape
from foredraft.heads.native_run import NativeRun
from foredraft.heads.recurrent import Eagle3Head, Eagle3Norms, EagleHead, RecurrentHead, SequentialMTPHead
from foredraft.heads.running import HeadCache, HeadRun
from foredraft.heads.runs import runs_of
from foredraft.proposers.base import OFFER
from foredraft.proposers.eagle import RecurrentDrafter
from foredraft.proposers.head_trees import DEEPEST
from foredraft.randomness import KeyedSource, RandomSource, TorchSource
from foredraft.ranking_kernels import largest
from foredraft.sampling import SamplingLaw
from foredraft.types import Draft, SamplingParams
from tiny import tiny_llama

LAYERS, VOCABULARY = 3, 72
SHAPES = {
    "whole blocks": BlockShape(hidden=32, heads=2, kv_heads=1, head_dim=32, mlp=64),
    "odd sizes": BlockShape(hidden=40, heads=6, kv_heads=3, head_dim=10, mlp=52, qk_norm=True, rope_theta=500.0),
    "given frequencies": BlockShape(
        hidden=72, heads=4, kv_heads=2, head_dim=8, mlp=33, frequencies=(1, 0.3, 0.1, 0.01)
    ),
}
NORMS = {
    "eagle3": Eagle3Norms(),
    "eagle3, norm before fc": Eagle3Norms(norm_before_fc=True, norm_output=True),
    "eagle3, norms of all layers": Eagle3Norms(fc_norm=True, norm_before_residual=True),
}
KINDS = [*NORMS, "eagle", "mtp", "mtp, normed output"]


def target_of(hidden: int, threads: int = 1) -> NativeBackend:
    model = tiny_llama(1, layers=LAYERS, vocabulary=VOCABULARY)
    config = model.config
    config.hidden_size, config.head_dim = hidden, 8
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = type(model)(config).eval()
    return NativeBackend(weights_of_model(model), threads=threads)


def made(kind: str, shape: BlockShape, seed: int = 0) -> RecurrentHead:
    """Every weight drawn, norms and biases too, and few states alike."""
    head: RecurrentHead
    if kind in NORMS:
        head = Eagle3Head(shape, (1, 2, 3), torch.arange(0, VOCABULARY, 2), NORMS[kind])
    elif kind == "eagle":
        head = EagleHead(shape, LAYERS)
    else:
        head = SequentialMTPHead(shape, LAYERS, norm_output=kind != "mtp")
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in head.parameters():
            spread = 0.3 if weight.ndim == 1 else 1.5 * weight.shape[-1] ** -0.5
            weight.copy_(spread * torch.randn(weight.shape, generator=dice) + (weight.ndim == 1))
    return head.eval()


def rounds(run: HeadRun, hidden: int, layers: int, seed: int) -> list[Tensor]:
    """States and logits of commits in pieces, each followed by a random tree that is then forgotten."""
    dice, draw = random.Random(seed), torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return [dice.randrange(VOCABULARY) for _ in range(count)]

    found = []
    for count in (1, 5, 300, 2, 17, 1):
        found.append(run.commit(torch.randn(count, layers, hidden, generator=draw), tokens(count)))
        level, expanded = [-1], 0
        for _ in range(dice.randrange(1, 5)):
            parents = sorted(dice.choices(level, k=dice.choice((1, 2, 8, 11))))
            found.append(run.expand(parents, tokens(len(parents))))
            level = list(range(expanded, expanded + len(parents)))
            expanded += len(parents)
        assert run.states.shape == (1 + expanded, hidden)
        found.append(run.states)
    return found


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_states_and_logits_are_those_of_torch(kind: str, shape: str, threads: int) -> None:
    """In float32, but for the order of sums; relative to the largest."""
    hidden = SHAPES[shape].hidden
    target, head = target_of(hidden, threads), made(kind, SHAPES[shape])
    own, other = runs_of(head, target, "f32")(), HeadCache(head, target)
    assert isinstance(own, NativeRun)
    layers = len(head.feature_layers)
    for ours, theirs in zip(rounds(own, hidden, layers, 5), rounds(other, hidden, layers, 5), strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() < 1e-4 * max(1.0, float(theirs.abs().max()))
    assert own.committed == other.committed == 326


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "mtp"])
def test_16_bits_are_those_of_the_rounded_weights(kind: str) -> None:
    """What is rounded is the matrices: torch with these in float32 computes the same. Others are told apart."""
    shape = SHAPES["odd sizes"]
    target, head, rounded = target_of(shape.hidden), made(kind, shape), made(kind, shape)
    with torch.no_grad():
        for weight in rounded.parameters():
            if weight.ndim == 2:
                weight.copy_(weight.bfloat16())
    own, layers = runs_of(head, target, "bf16")(), len(head.feature_layers)
    found = rounds(own, shape.hidden, layers, 2)
    for ours, theirs in zip(found, rounds(HeadCache(rounded, target), shape.hidden, layers, 2), strict=True):
        assert (ours - theirs).abs().max() < 1e-4 * max(1.0, float(theirs.abs().max()))
    unlike = zip(found, rounds(HeadCache(head, target), shape.hidden, layers, 2), strict=True)
    assert max(float((ours - theirs).abs().max()) for ours, theirs in unlike) > 1e-3


def test_bits_do_not_depend_on_threads_nor_on_pieces() -> None:
    shape = SHAPES["odd sizes"]
    head, features = made("eagle3", shape), torch.randn(20, 3, shape.hidden, generator=torch.Generator().manual_seed(1))
    tokens = [i * 7 % VOCABULARY for i in range(20)]
    found = []
    for threads, pieces in ((1, [20]), (2, [1, 2, 3, 4, 10]), (3, [13, 7])):
        run, start = runs_of(head, target_of(shape.hidden, threads))(), 0
        for count in pieces:
            part = slice(start, start + count)
            logits = run.commit(features[part], tokens[part])
            start += count
        found.append(torch.cat([logits, run.expand([-1, -1, -1], [4, 5, 6])]))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


class TorchHead(RecurrentDrafter):
    """Drafts by torch, whatever the target."""

    def __init__(self, head: RecurrentHead, target: NativeBackend) -> None:
        super().__init__(head, target, "f32")
        self.new_run = lambda: HeadCache(head, target)


SOURCES: dict[str, tuple[float, Callable[[], RandomSource]]] = {
    "greedy": (0.0, lambda: KeyedSource(5)),
    "the target's noise": (0.7, lambda: KeyedSource(5)),
    "coins": (0.7, lambda: TorchSource(torch.Generator())),
}


def offers(drafter: RecurrentDrafter, target: NativeBackend, source: str) -> list[Any]:
    """Nodes that it offers, and the steps taken, of a text that grows: with any room, until paths become unlikely."""
    dice, draw = random.Random(3), torch.Generator().manual_seed(3)
    temperature, begin = SOURCES[source]
    law = SamplingLaw(SamplingParams(temperature=temperature), prompt_length=1, stop_tokens=())
    proposer, cache, tokens, found = drafter.proposer(law, begin()), target.new_cache(), [0], []
    proposer.attach(cache)
    for count, room, least in ((1, 32, 1e-9), (5, 7, 1e-9), (300, 32, 1.5), (2, 32, 0.2), (17, 1, 1e-9), (1, 32, 0.01)):
        shape = count, len(drafter.head.feature_layers), drafter.head.shape.hidden
        cache.features[0].append(torch.randn(shape, generator=draw))
        tokens += [dice.randrange(VOCABULARY) for _ in range(count)]
        nodes, before = np.zeros(room, dtype=OFFER), proposer.forwards
        size = proposer.offer(tokens, room, nodes, np.zeros(1 + room), least)
        found.append((nodes[:size], proposer.forwards - before))
    return found


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_path_in_one_call_is_the_path_step_by_step(kind: str, shape: str, threads: int, source: str) -> None:
    target, head = target_of(SHAPES[shape].hidden, threads), made(kind, SHAPES[shape])
    own, other = RecurrentDrafter(head, target, "f32"), TorchHead(head, target)
    steps = set()
    for (ours, taken), (theirs, wanted) in zip(offers(own, target, source), offers(other, target, source), strict=True):
        assert taken == wanted
        assert ours["score"] == pytest.approx(theirs["score"], abs=1e-4)
        likely = ours["score"] > 1e-4  # of others, which are as good as impossible, any may come first
        assert ours[likely][["token", "parent"]].tolist() == theirs[likely][["token", "parent"]].tolist()
        steps.add(taken)
    assert {1, 3, DEEPEST} <= steps  # of seven nodes the third level is the last


@pytest.mark.parametrize("native", [True, False])
def test_after_a_while_without_drafts_only_the_last_tokens_are_read(native: bool) -> None:
    """As by one that has never seen more; and what comes in pieces is read as a whole."""
    target, head = target_of(32), made("eagle3", SHAPES["whole blocks"])
    draw = torch.Generator().manual_seed(1)
    rows, tokens = torch.randn(200, 3, 32, generator=draw), [i * 7 % VOCABULARY for i in range(201)]
    found = []
    for pieces in ([(0, 10), (10, 90), (90, 170), (170, 200)], [(200 - 32, 200)]):
        drafter = RecurrentDrafter(head, target, "f32") if native else TorchHead(head, target)
        drafter.at_times()
        proposer = drafter.proposer(SamplingLaw(SamplingParams(), prompt_length=1, stop_tokens=()), KeyedSource(0))
        cache, nodes = target.new_cache(), np.zeros(16, dtype=OFFER)
        cache.committed = pieces[0][0]
        proposer.attach(cache)
        for start, end in pieces:
            cache.features[0].append(rows[start:end])
            if end in (10, 200):
                size = proposer.offer(tokens[: 1 + end], 16, nodes, np.zeros(17), 1e-9)
        found.append((nodes[:size]["token"].tolist(), nodes[:size]["score"]))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-5)


def drafts(target: NativeBackend, drafter: RecurrentDrafter, params: SamplingParams, rule: str | None) -> list[Draft]:
    """What was drafted, round by round."""
    found: list[Draft] = []
    engine = Engine(target, drafter, draft_tokens=6, rule=rule)
    forward = target.forward

    def recorded(queries: Sequence[Query]) -> list[Tensor]:
        found.extend(query.draft for query in queries)
        return forward(queries)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "forward", recorded)
        for _ in engine.run([Request([3, 1, 4, 1, 5], params)]):
            pass
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "with-the-target's-noise"])
@pytest.mark.parametrize("rule", [None, "token"], ids=["trees", "chains"])
@pytest.mark.parametrize("kind", ["eagle3", "eagle", "mtp"])
def test_drafts_are_those_of_torch(kind: str, rule: str | None, temperature: float) -> None:
    target, head = target_of(32), made(kind, SHAPES["whole blocks"])
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=4)
    ours = drafts(target, RecurrentDrafter(head, target, "f32"), params, rule)
    theirs = drafts(target, TorchHead(head, target), params, rule)
    assert [(draft.tokens, draft.parents) for draft in ours] == [(draft.tokens, draft.parents) for draft in theirs]
    for our, their in zip(ours, theirs, strict=True):
        assert our.scores == pytest.approx(their.scores, abs=1e-4)
    assert sum(map(len, ours)) > 24


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_the_largest_numbers_are_those_of_a_stable_sort(kind: type) -> None:
    """With many ties, rows of several blocks, and more infinities than there are places."""
    rows: Any = np.random.default_rng(0).integers(-40, 40, (6, 700)).astype(kind)
    rows[1, :] = -np.inf
    rows[2, 9:] = -np.inf
    columns, values = largest(rows, 12)
    order = np.argsort(-rows, axis=1, kind="stable")[:, :12]
    assert np.array_equal(columns, order) and np.array_equal(values, np.take_along_axis(rows, order, axis=1))
    columns, _ = largest(np.full((1, 20), np.nan, dtype=kind), 8)
    assert len(set(columns[0].tolist())) == 8


def test_what_a_copy_of_the_head_takes_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    shape = BlockShape(hidden=320, heads=4, kv_heads=4, head_dim=80, mlp=1024)
    with caplog.at_level(logging.INFO, logger="foredraft"):
        RecurrentDrafter(made("eagle3", shape), target_of(320), "bf16")
    # In 2 bytes each: fc 320 x 960; q, k, v 3 x 384 x 640 with each head padded to 96; o 320 x 384; MLP 3 x 320 x 1024;
    # 36 x 320 for the tokens
    assert "4.3 MB in bf16" in caplog.text
