"""Drafting with the target itself: its first layers, fewer of its sublayers, its weights in 8 bits."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from transformers.pytorch_utils import Conv1D

from foredraft.backends.base import Backend, Query
from foredraft.backends.int8 import Int8Linear, quantize
from foredraft.backends.partial import LAYERED, sublayers, without
from foredraft.backends.transformers import TransformersBackend, TransformersCache
from foredraft.engine import Engine
from foredraft.errors import ForedraftError, InvalidInputError, ModelError, UnsupportedError
from foredraft.generation import Request
from foredraft.proof.enumeration import ancestral_law
from foredraft.proof.statistics import g_test
from foredraft.proposers.base import Drafter
from foredraft.proposers.early_exit import EarlyExit
from foredraft.proposers.layer_skip import LayerSkip, SkipSet, default_skip_set, expected_speedup
from foredraft.proposers.self_quant import SelfQuantized
from foredraft.proposers.skip_search import search_skip_set
from foredraft.sampling import SamplingLaw, probabilities
from foredraft.types import Draft, SamplingParams
from tiny import (
    BACKENDS,
    VOCABULARY,
    CountingBackend,
    RecordingSource,
    complete,
    generate,
    plain_chain,
    seeded,
    tiny_llama,
)

LAYERS = 4
EXIT = 2
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FULL: dict[str, Any] = {"layer_types": ["full_attention"] * LAYERS}

FAMILIES: dict[str, tuple[Any, Any]] = {
    "gemma": (GemmaForCausalLM, GemmaConfig(**SHAPE, head_dim=8)),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**SHAPE, **FULL, head_dim=8)),
    "gemma3_text": (Gemma3ForCausalLM, Gemma3TextConfig(**SHAPE, **FULL, head_dim=8)),
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE)),
    "mistral": (MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=None)),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config(**SHAPE)),
    "phi3": (Phi3ForCausalLM, Phi3Config(**SHAPE, sliding_window=None)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SHAPE)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=8)),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config(**SHAPE)),
}
GPT2: tuple[Any, Any] = (
    GPT2LMHeadModel,
    GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=None),
)
GRANITE: tuple[Any, Any] = (GraniteForCausalLM, GraniteConfig(**SHAPE, embedding_multiplier=2.0))

GREEDY = SamplingParams(max_tokens=40)
SAMPLED = SamplingParams(max_tokens=40, temperature=0.8, top_k=20, top_p=0.95, repetition_penalty=1.1)
PROMPTS = [[1, 2, 3], [40, 41] * 8, [7], list(range(30))]


def silenced(model: Any, attention: Sequence[int], mlp: Sequence[int], strength: float = 0.0) -> Any:
    """A copy in which these sublayers add nothing to the residual, or `strength` times what they did."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for layer in attention:
            other.model.layers[layer].self_attn.o_proj.weight *= strength
        for layer in mlp:
            other.model.layers[layer].mlp.down_proj.weight *= strength
    return other


def truncated(model: Any, layers: int) -> Any:
    """A copy that has the first layers only."""
    other = copy.deepcopy(model)
    other.model.layers = other.model.layers[:layers]
    other.config.num_hidden_layers = layers
    return other


@pytest.fixture(scope="module")
def settled() -> Any:
    """A Llama whose last two layers change little: its early exit is often, not always, right."""
    return silenced(tiny_llama(seed=5, layers=LAYERS), (2, 3), (2, 3), strength=0.2)


@pytest.fixture(scope="module")
def backend(settled: Any) -> TransformersBackend:
    return TransformersBackend(settled)


@pytest.fixture(scope="module", params=BACKENDS)
def target(request: pytest.FixtureRequest, settled: Any) -> Backend:
    """Each backend over it."""
    return BACKENDS[request.param](settled)


def random_ids(count: int, dice: random.Random) -> list[int]:
    return [dice.randrange(VOCABULARY) for _ in range(count)]


# Early exit: the arithmetic


@pytest.mark.parametrize("family", FAMILIES)
def test_early_logits_are_those_of_the_truncated_model_and_verification_those_of_the_whole(family: str) -> None:
    model = seeded(*FAMILIES[family])
    target, dice = TransformersBackend(model), random.Random(0)
    assert target.capabilities.early_exit
    ids = random_ids(20, dice)
    short, whole = plain_chain(truncated(model, EXIT), ids), plain_chain(model, ids)
    cache = target.new_cache()
    target.prefill(cache, ids[:9])
    for drafted in range(5):
        query = Query(cache, ids[9], Draft.chain(ids[10 : 10 + drafted]))
        assert torch.allclose(target.early_logits(query, EXIT)[0], short[9 + drafted], atol=1e-4)
        assert cache.length == 9
    scored = target.forward([Query(cache, ids[9], Draft.chain(ids[10:15]))])[0]
    assert torch.allclose(scored, whole[9:15], atol=1e-4)
    target.commit(cache, range(5))
    assert cache.length == 15
    assert torch.allclose(target.forward([Query(cache, ids[15], Draft.chain(ids[16:]))])[0], whole[15:], atol=1e-4)


def test_every_type_that_can_be_taken_apart_is_tested() -> None:
    assert set(FAMILIES) == set(LAYERED)


def random_draft(early: Sequence[int], dice: random.Random) -> Draft:
    """What may be verified after an early exit: its chain, a part of it, more, another chain, a tree, its siblings."""
    kind = dice.randrange(6)
    if kind == 0:
        return Draft.chain(early)
    if kind == 1:
        return Draft.chain([*early[: dice.randint(0, len(early))], *random_ids(2, dice)])
    if kind == 2:
        return Draft.chain(random_ids(3, dice))
    if kind == 5:
        return Draft(tuple(early), (-1,) * len(early))
    tokens = [*early, *random_ids(3, dice)] if kind == 3 else random_ids(4, dice)
    trunk = len(early) if kind == 3 else 1
    parents = [i - 1 if i < trunk else dice.randint(-1, i - 1) for i in range(len(tokens))]
    return Draft(tuple(tokens), tuple(parents))


def random_path(draft: Draft, dice: random.Random) -> list[int]:
    node = dice.randint(-1, len(draft) - 1)
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = draft.parents[node]
    return path


def rows_of(cache: TransformersCache) -> list[Tensor]:
    """Keys and values of every layer."""
    layers: Any = cache.kv.layers
    return [states for layer in layers for states in (layer.keys, layer.values)]


def test_all_rows_of_the_shared_cache_equal_a_fresh_prefill_after_200_random_rounds(
    backend: TransformersBackend, settled: Any
) -> None:
    dice = random.Random(2)
    cache, tokens = backend.new_cache(), [3]  # the first round begins with an empty cache
    for _ in range(200):
        early: list[int] = []
        layers = dice.randint(1, LAYERS - 1)
        for _ in range(dice.randint(0, 4)):
            query = Query(cache, tokens[-1], Draft.chain(early))
            backend.early_logits(query, layers if dice.random() < 0.9 else 1)  # now and then with another depth
            early.append(dice.randrange(VOCABULARY))
        draft = random_draft(early, dice)
        scored = backend.forward([Query(cache, tokens[-1], draft)])[0]
        path = random_path(draft, dice)
        accepted = [draft.tokens[node] for node in path]
        expected = plain_chain(settled, [*tokens, *accepted])[-len(path) - 1 :]
        assert torch.allclose(scored[[0, *(node + 1 for node in path)]], expected, atol=1e-4)
        backend.commit(cache, path)
        tokens = [*tokens, *accepted, dice.randrange(VOCABULARY)]
        assert cache.length == len(tokens) - 1
    assert len(tokens) > 300
    fresh = backend.new_cache()
    backend.prefill(fresh, tokens[:-1])
    for kept, right in zip(rows_of(cache), rows_of(fresh), strict=True):
        assert kept.shape == right.shape
        assert torch.allclose(kept, right, atol=1e-4)


def test_every_layer_sees_every_token_once(settled: Any) -> None:
    model = copy.deepcopy(settled)
    seen: Counter[int] = Counter()
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(
            lambda _, args, index=index: seen.update({index: args[0].shape[1]}),
        )
    target = TransformersBackend(model)
    cache, drafted = target.new_cache(), [5, 6, 7]
    for count in range(3):
        target.early_logits(Query(cache, 4, Draft.chain(drafted[:count])), EXIT)
    assert seen == {0: 3, 1: 3}  # the root and two of the drafted: the last was drawn, but not read
    target.forward([Query(cache, 4, Draft.chain(drafted))])
    assert seen == dict.fromkeys(range(LAYERS), 4)


def test_asking_again_computes_nothing_again_and_says_the_same(backend: TransformersBackend) -> None:
    cache = backend.new_cache()
    query = Query(cache, 4, Draft.chain([5, 6]))
    first = backend.early_logits(query, EXIT)
    rows = cache.kv.get_seq_length()
    assert torch.equal(backend.early_logits(query, EXIT), first)
    assert cache.kv.get_seq_length() == rows == 3


def test_control_a_first_layer_that_keeps_rejected_rows_is_noticed(backend: TransformersBackend, settled: Any) -> None:
    cache = backend.new_cache()
    backend.prefill(cache, [1, 2, 3])
    for drafted in ([], [5], [5, 6]):
        backend.early_logits(Query(cache, 4, Draft.chain(drafted)), EXIT)
    assert cache.early is not None
    cache.early = cache.early._replace(tokens=(4, 8, 9))  # as if other tokens had been drafted
    scored = backend.forward([Query(cache, 4, Draft.chain([8, 9]))])[0]
    assert not torch.allclose(scored, plain_chain(settled, [1, 2, 3, 4, 8, 9])[3:], atol=1e-1)


# Early exit: the drafts


def early_draft(
    target: Backend, params: SamplingParams, source: RecordingSource, stops: Sequence[int] = ()
) -> tuple[Draft, int]:
    """A draft of up to 5 tokens after 5, 6, 7, and how many forwards it took."""
    drafting = EarlyExit(target, EXIT, stops).proposer(SamplingLaw(params, prompt_length=3), source)
    cache = target.new_cache()
    target.prefill(cache, [5, 6])
    drafting.attach(cache)
    return drafting.propose([5, 6, 7], 5), drafting.forwards


def test_early_drafts_are_drawn_from_q_and_q_is_the_exits_law_under_the_requests_settings(
    target: Backend, settled: Any
) -> None:
    source = RecordingSource(3)
    draft, forwards = early_draft(target, SAMPLED, source)
    assert draft.is_chain and forwards == 5
    assert list(draft.tokens) == source.drawn
    for row, weights in zip(draft.q, source.weights, strict=True):
        assert row is weights
    logits = plain_chain(truncated(settled, EXIT), [5, 6, 7, *draft.tokens])
    law = SamplingLaw(SAMPLED, prompt_length=3)
    for i, row in enumerate(draft.q):
        expected = law([5, 6, 7, *draft.tokens[:i]], Draft(), logits[2 + i : 3 + i])[0]
        assert row is not None and torch.allclose(row, expected, atol=1e-4)


def test_greedy_early_drafts_are_what_the_truncated_model_generates(target: Backend, settled: Any) -> None:
    source = RecordingSource(0)
    draft, _ = early_draft(target, GREEDY, source)
    alone = generate(Engine(TransformersBackend(truncated(settled, EXIT))), [5, 6, 7], replace(GREEDY, max_tokens=5))
    assert draft.tokens == alone.ids
    assert draft.q == (None,) * 5 and source.drawn == []


def test_early_drafting_ends_after_a_stop_token(target: Backend) -> None:
    drafted = early_draft(target, GREEDY, RecordingSource(0))[0].tokens
    shorter = early_draft(target, GREEDY, RecordingSource(0), stops=[drafted[2]])[0].tokens
    assert shorter == drafted[: drafted.index(drafted[2]) + 1]


@pytest.mark.parametrize("layers", [0, -1, LAYERS, LAYERS + 7])
def test_exits_that_are_not_between_layers_are_refused(target: Backend, layers: int) -> None:
    with pytest.raises(InvalidInputError, match=r"after one of its layers 1 to 3 \(it has 4\): try early_exit:1"):
        EarlyExit(target, layers)


# Equal to plain decoding, whoever drafts


def self_drafters(target: Backend) -> dict[str, Drafter]:
    model = target.sublayers().fingerprint
    return {
        "early_exit": EarlyExit(target, EXIT),
        "layer_skip": LayerSkip(target, SkipSet(model, attention=(2,), mlp=(3,))),
        "self_quant": SelfQuantized(target),
    }


@pytest.mark.parametrize("name", ["early_exit", "layer_skip", "self_quant"])
def test_greedy_and_seed_exact_output_equal_plain_decoding(target: Backend, name: str) -> None:
    sampled = [
        Request(prompt, replace(SAMPLED, seed=seed, temperature=temperature))
        for seed, (prompt, temperature) in enumerate(itertools.product(PROMPTS, (0.3, 1.0)))
    ]
    requests = [*(Request(prompt, GREEDY) for prompt in PROMPTS), *sampled]
    drafter = self_drafters(target)[name]
    completions = complete(Engine(target, drafter, rule="seed-exact"), *requests)
    plain = complete(Engine(target), *requests)
    assert [c.ids for c in completions] == [c.ids for c in plain]
    drafted, accepted = (sum(getattr(c.stats, figure) for c in completions) for figure in ("drafted", "accepted"))
    assert 0.2 * drafted < accepted < drafted


@pytest.mark.parametrize("name", ["early_exit", "layer_skip", "self_quant"])
def test_a_sampled_request_is_drafted_with_q_and_block_verification(target: Backend, name: str) -> None:
    completion = generate(Engine(target, self_drafters(target)[name]), [1, 2, 3], replace(SAMPLED, seed=1))
    assert completion.stats.rule == "block"
    assert completion.stats.accepted > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["early_exit", "layer_skip", "self_quant"])
def test_answers_go_on_to_the_very_end_of_the_context(name: str, backend: str) -> None:
    target = BACKENDS[backend](tiny_llama(seed=5, layers=LAYERS, context=24))
    long = replace(GREEDY, max_tokens=100)
    answer = generate(Engine(target, self_drafters(target)[name]), [1, 2, 3], long)
    assert answer.ids == generate(Engine(target), [1, 2, 3], long).ids and len(answer.ids) == 21


FEW = SamplingParams(max_tokens=3, temperature=1.2, top_k=5)


def test_sampled_output_of_an_early_exit_follows_the_targets_law() -> None:
    """A right sampler fails with odds of 1e-9; the seeds are fixed."""
    model = tiny_llama(seed=2, layers=2, vocabulary=6)
    target, prompt = TransformersBackend(model), [1, 2, 3]

    def law(context: tuple[int, ...]) -> Tensor:
        return probabilities(plain_chain(model, [*prompt, *context])[-1:], FEW)[0]

    engine = Engine(target, EarlyExit(target, 1), draft_tokens=2, rule="block")
    requests = [Request(prompt, replace(FEW, seed=seed)) for seed in range(600)]
    test = g_test(Counter(completion.ids for completion in complete(engine, *requests)), ancestral_law(law, 3))
    assert test.passed


# What cannot be taken apart


@pytest.mark.parametrize("kind", [GPT2, GRANITE], ids=["gpt2", "granite"])
def test_models_that_cannot_be_taken_apart_are_refused_by_name(kind: tuple[Any, Any]) -> None:
    target = TransformersBackend(seeded(*kind))
    assert not target.capabilities.early_exit
    says = f"cannot take apart models of type '{kind[1].model_type}', only gemma, .*Use 'suffix'"
    with pytest.raises(UnsupportedError, match=f"'early_exit' {says}"):
        EarlyExit(target, 1)
    with pytest.raises(UnsupportedError, match=f"'layer_skip' {says}"):
        LayerSkip(target)
    with pytest.raises(UnsupportedError, match=f"'layer_skip' {says}"):
        search_skip_set(target, [[1, 2, 3]])
    completion = generate(Engine(target, SelfQuantized(target)), [1, 2, 3], GREEDY)  # 8 bits fit every type
    assert completion.ids == generate(Engine(target), [1, 2, 3], GREEDY).ids and completion.stats.accepted


def test_backends_that_hold_their_own_weights_are_refused(backend: TransformersBackend) -> None:
    other = CountingBackend(backend)
    other.name = "other"
    for make in (lambda: EarlyExit(other, 1), lambda: LayerSkip(other), lambda: SelfQuantized(other)):
        with pytest.raises(UnsupportedError, match=r"backend 'other'.*Use 'suffix'"):
            make()
    with pytest.raises(NotImplementedError):
        other.early_logits(Query(other.new_cache(), 1), 1)


def test_models_with_hooks_of_accelerate_are_refused(settled: Any) -> None:
    model = copy.deepcopy(settled)
    model.model.forward = model.model.forward  # what add_hook_to_module does
    target = TransformersBackend(model)
    assert not target.capabilities.early_exit
    for make in (lambda: EarlyExit(target, 1), lambda: LayerSkip(target), lambda: SelfQuantized(target)):
        with pytest.raises(
            UnsupportedError, match=r"needs the whole model on one device, without hooks\. Use 'suffix'"
        ):
            make()


# Skipped sublayers


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_without_sublayers_is_one_whose_sublayers_add_nothing(family: str) -> None:
    model, ids = seeded(*FAMILIES[family]), random_ids(16, random.Random(1))
    before = plain_chain(model, ids)
    shallow = TransformersBackend(without(model, attention=(0, 2), mlp=(1, 2)))
    expected = plain_chain(silenced(model, (0, 2), (1, 2)), ids)
    assert torch.allclose(plain_chain(shallow.model, ids), expected, atol=1e-4)
    cache = shallow.new_cache()
    shallow.prefill(cache, ids[:5])
    assert torch.allclose(shallow.forward([Query(cache, ids[5], Draft.chain(ids[6:9]))])[0], expected[5:9], atol=1e-4)
    shallow.commit(cache, [0])
    assert torch.allclose(shallow.forward([Query(cache, ids[7])])[0], expected[7:8], atol=1e-4)
    assert len(cache.kv.layers) == 2  # the attention sublayers that are left
    assert torch.equal(plain_chain(model, ids), before)  # and the target is as it was


def test_skipping_copies_no_weights(settled: Any) -> None:
    own = {p.data_ptr() for p in settled.parameters()}
    shallow = without(settled, (1, 2), (2,))
    assert {p.data_ptr() for p in shallow.parameters()} < own
    assert len(shallow.model.layers) == LAYERS - 1 and len(settled.model.layers) == LAYERS


@pytest.mark.parametrize(
    ("layers", "skipped"), [(2, (1,)), (3, (1,)), (4, (1,)), (8, (2, 4)), (30, (*range(7, 23, 2),))]
)
def test_default_set_is_every_other_attention_of_the_middle(layers: int, skipped: tuple[int, ...]) -> None:
    target = TransformersBackend(tiny_llama(seed=1, layers=layers))
    drafter = LayerSkip.for_target(target)
    assert (drafter.skips.attention, drafter.skips.mlp) == (skipped, ())
    assert drafter.skips.agreement is None and drafter.skips.speedup == 1 and drafter.draft_tokens == 2
    assert drafter.skips == default_skip_set(target.sublayers())


@pytest.mark.parametrize(
    ("attention", "mlp", "says"),
    [
        ((), (), "nothing is left out"),
        ((0, 1, 2, 3), (), "no attention is left"),
        ((4,), (), "attention names layer 4, but there are layers 0 to 3"),
        ((), (-1,), "mlp names layer -1"),
    ],
)
def test_sets_that_do_not_fit_the_model_are_refused(
    target: Backend, attention: tuple[int, ...], mlp: tuple[int, ...], says: str
) -> None:
    with pytest.raises(InvalidInputError, match=says):
        LayerSkip(target, SkipSet(target.sublayers().fingerprint, attention, mlp))


def test_a_model_of_one_layer_has_no_default_set() -> None:
    with pytest.raises(InvalidInputError, match="nothing is left out"):
        LayerSkip(TransformersBackend(tiny_llama(seed=1, layers=1)))


# Search


def text(target: Backend, seed: int = 0) -> list[int]:
    """Eight random tokens and what the model says after them."""
    prompt = random_ids(8, random.Random(seed))
    return [*prompt, *generate(Engine(target), prompt, replace(SAMPLED, max_tokens=60, seed=1)).ids]


@pytest.fixture(scope="module", params=BACKENDS)
def planted(request: pytest.FixtureRequest) -> Backend:
    """A Llama in which two attentions and one MLP add nothing."""
    return BACKENDS[request.param](silenced(tiny_llama(seed=6, layers=LAYERS), (1, 3), (2,)))


def test_search_finds_the_planted_harmless_sublayers(planted: Backend) -> None:
    heard: list[str] = []
    texts = [text(planted, seed) for seed in range(3)]
    found = search_skip_set(planted, texts, notify=heard.append)
    assert {1, 3} <= set(found.attention) and 2 in found.mlp
    only = search_skip_set(planted, texts, steps=2 * LAYERS + 3)  # each alone, and the best three together
    assert (only.attention, only.mlp, only.agreement) == ((1, 3), (2,), 1.0)
    assert only.speedup > 1 and found.speedup >= only.speedup
    assert only.tokens == sum(len(t) for t in texts)
    assert heard[-1].endswith(f"expected speedup {found.speedup:.3f}")


def test_search_is_a_function_of_its_seed(planted: Backend) -> None:
    once, again = (search_skip_set(planted, [text(planted)], seed=3, steps=30) for _ in range(2))
    assert once == again


@pytest.mark.parametrize("backend", BACKENDS)
def test_share_is_that_of_the_weights(backend: str) -> None:
    target = BACKENDS[backend](tiny_llama(seed=6, layers=LAYERS, head_dim=32))  # no backend pads these
    found = search_skip_set(target, [text(target)], steps=1)
    block, head = 2 * 32 * 128 + 2 * 32 * 64, 64 * 32
    left_out = block * len(found.attention) + 3 * 32 * 64 * len(found.mlp)
    assert found.share == pytest.approx(1 - left_out / (LAYERS * (block + 3 * 32 * 64) + head))


def test_search_keeps_to_its_budget_and_always_leaves_something_out(planted: Backend) -> None:
    for budget in ({"steps": 1}, {"seconds": 0.0}):
        found = search_skip_set(planted, [text(planted)], **budget)
        assert len(found.attention) + len(found.mlp) == 1 and found.agreement is not None


def test_long_texts_are_compared_in_parts(planted: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.proposers.skip_search._LONGEST_TEXT", 30)
    ids = random_ids(61, random.Random(0))  # the last has no company
    assert search_skip_set(planted, [ids], steps=1).tokens == 60


@pytest.mark.parametrize(("texts", "steps"), [([], 5), ([[1]], 5), ([[1, 2, 3]], 0)])
def test_a_search_without_text_or_steps_is_refused(planted: Backend, texts: list[list[int]], steps: int) -> None:
    with pytest.raises(InvalidInputError, match="it needs one at least of both"):
        search_skip_set(planted, texts, steps=steps)


@pytest.mark.parametrize(("agreement", "speedup"), [(0.4, 1.53), (0.6, 2.13), (0.8, 3.11), (0.9, 3.79), (0.95, 4.19)])
def test_expected_speedup_has_the_known_values(agreement: float, speedup: float) -> None:
    assert expected_speedup(agreement, 1 / 50, 4) == pytest.approx(speedup, abs=0.006)


def test_draft_length_is_the_one_with_the_best_expected_speedup() -> None:
    skips = SkipSet("", attention=(1,), agreement=0.9, share=0.3)
    lengths = {k: expected_speedup(0.9, 0.3, k) for k in range(1, 17)}
    assert skips.draft_tokens == max(lengths, key=lambda k: lengths[k]) and skips.speedup == max(lengths.values())


# Files


def test_a_skip_set_survives_the_file(tmp_path: Path, planted: Backend) -> None:
    found = search_skip_set(planted, [text(planted)], steps=12)
    file = tmp_path / "new folder" / "skips.json"
    found.write(file)
    assert SkipSet.read(file, planted.sublayers()) == found
    drafter = LayerSkip(planted, SkipSet.read(file, planted.sublayers()))
    assert drafter.draft_tokens == found.draft_tokens
    assert [p.name for p in file.parent.iterdir()] == ["skips.json"]


def test_a_file_for_another_model_is_refused_with_both_fingerprints(
    tmp_path: Path, planted: Backend, settled: Any
) -> None:
    SkipSet(planted.sublayers().fingerprint, (1,)).write(tmp_path / "skips.json")
    says = f"made for the model {planted.sublayers().fingerprint}, and this one is {sublayers(settled).fingerprint}"
    with pytest.raises(ModelError, match=f"{says}.*foredraft tune-skip"):
        SkipSet.read(tmp_path / "skips.json", sublayers(settled))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, "is not a skip set of version 1"),
        ({"foredraft": "something"}, "is not a skip set of version 1"),
        ({"attention": [4]}, "damaged .*layer 4"),
        ({"attention": [True]}, "damaged .*layer True"),
        ({"attention": "12"}, "damaged .*layer 1"),
        ({"mlp": 3}, "damaged"),
        ({"agreement": "high"}, "damaged .*agreement is 'high'"),
        ({"share": 2.0}, r"damaged .*share is 2\.0"),
        ({"attention": [], "mlp": []}, "damaged .*nothing is left out"),
        ({"extra": 1}, "damaged"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, planted: Backend, change: dict[str, Any], says: str) -> None:
    file = tmp_path / "skips.json"
    SkipSet(planted.sublayers().fingerprint, (1,), (2,), 0.9, 0.8, 100).write(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelError, match=says) as refused:
        SkipSet.read(file, planted.sublayers())
    assert str(file) in str(refused.value) and "foredraft tune-skip" in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1]", b"null"])
def test_what_is_no_skip_set_is_refused(tmp_path: Path, planted: Backend, content: bytes) -> None:
    (tmp_path / "skips.json").write_bytes(content)
    with pytest.raises(ModelError, match="skip set"):
        SkipSet.read(tmp_path / "skips.json", planted.sublayers())


def test_files_that_are_not_there_or_cannot_be_written_are_told(tmp_path: Path, planted: Backend) -> None:
    with pytest.raises(ModelError, match="Cannot read the skip set"):
        SkipSet.read(tmp_path / "none.json", planted.sublayers())
    (tmp_path / "file").write_text("")
    with pytest.raises(ForedraftError, match="Cannot write the skip set"):
        SkipSet(planted.sublayers().fingerprint, (1,)).write(tmp_path / "file" / "skips.json")


def fingerprint(model: Any, backend: str = "transformers") -> str:
    return BACKENDS[backend](model).sublayers().fingerprint


@pytest.mark.parametrize("backend", BACKENDS)
def test_fingerprints_tell_models_apart_whatever_the_dtype(backend: str) -> None:
    models = [tiny_llama(seed=1), tiny_llama(seed=2), tiny_llama(seed=1, layers=3), tiny_llama(seed=1, vocabulary=65)]
    assert len({fingerprint(model, backend) for model in models}) == 4
    same = (models[0], tiny_llama(seed=1), tiny_llama(seed=1).bfloat16())
    assert len({fingerprint(model, backend) for model in same}) == 1


# 8 bits


@pytest.mark.parametrize("inputs", [32, 96, 40, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_linear_is_close_to_the_linear_layer(inputs: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(inputs)
    weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((21, inputs), (21,)))
    x = torch.randn(2, 3, inputs, generator=generator).to(dtype)
    small = Int8Linear(weight, bias)
    exact = nn.functional.linear(x.float(), weight.float(), bias.float())
    y = small(x)
    assert y.shape == (2, 3, 21) and y.dtype == dtype
    # Half a level of each weight, and the roundings of bfloat16 on the way.
    level = weight.float().abs().amax(1) / 127
    bound = x.float().abs().sum(-1, keepdim=True) * level * 0.6 + 0.02 * exact.abs() + 0.05
    assert ((y.float() - exact).abs() <= bound).all()
    assert small.nbytes == 21 * inputs + 2 * 21


def test_int8_linear_takes_rows_of_zeros_and_no_bias() -> None:
    weight = torch.zeros(4, 32)
    weight[1, 3] = -2.0
    y = Int8Linear(weight, None)(torch.ones(1, 32))
    assert y.tolist() == [[0.0, pytest.approx(-2.0, rel=0.01), 0.0, 0.0]]


def test_the_slow_way_says_what_the_kernel_says(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(16, 64, generator=generator), torch.randn(5, 64, generator=generator)
    fast = Int8Linear(weight, None)
    monkeypatch.setattr("foredraft.backends.int8._kernel_is_right", lambda *_: False)
    assert torch.allclose(fast(x), Int8Linear(weight, None)(x), atol=0.15)


def test_quantised_logits_are_close_to_the_originals(settled: Any) -> None:
    ids = random_ids(200, random.Random(0))
    exact, small = plain_chain(settled, ids), plain_chain(quantize(settled), ids)
    assert (small - exact).std() < 0.05 * exact.std()
    assert (small.argmax(-1) == exact.argmax(-1)).float().mean() > 0.9


def test_embeddings_and_norms_are_shared_and_the_target_stays_as_it_is(settled: Any) -> None:
    model = copy.deepcopy(settled)
    before = plain_chain(model, [1, 2, 3])
    small = quantize(model)
    assert small.model.embed_tokens is model.model.embed_tokens and small.model.norm is model.model.norm
    assert small.model.layers[1].input_layernorm is model.model.layers[1].input_layernorm
    assert isinstance(small.lm_head, Int8Linear) and type(model.lm_head) is nn.Linear
    assert not any(type(module) is nn.Linear for module in small.modules())
    assert torch.equal(plain_chain(model, [1, 2, 3]), before)


def test_memory_of_the_copy_is_logged(settled: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="foredraft"):
        quantize(settled)
    weights = LAYERS * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64) + 64 * 32
    scales = LAYERS * (2 * 32 + 2 * 16 + 2 * 64 + 32) + 64
    assert (
        f"takes {(weights + 2 * scales) / 1e6:.1f} MB more: 29 linear layers of {weights * 4 / 1e6:.1f} MB"
        in (caplog.messages[0])
    )


def test_transposed_weights_of_gpt2_are_quantised_as_well() -> None:
    model = seeded(*GPT2)
    ids = random_ids(30, random.Random(0))
    assert any(isinstance(module, Conv1D) for module in model.modules())
    small = quantize(model)
    assert not any(isinstance(module, Conv1D) for module in small.modules())
    exact = plain_chain(model, ids)
    assert (plain_chain(small, ids) - exact).std() < 0.05 * exact.std()


def test_a_bfloat16_target_is_quantised(settled: Any) -> None:
    target = TransformersBackend(copy.deepcopy(settled).bfloat16())
    completion = generate(Engine(target, SelfQuantized(target)), [1, 2, 3], GREEDY)
    assert completion.stats.accepted > 0


def test_a_target_that_is_not_on_a_cpu_is_refused_for_8_bits(settled: Any) -> None:
    target = TransformersBackend(copy.deepcopy(settled).to("meta"))
    with pytest.raises(UnsupportedError, match=r"runs on a CPU only, and the target is on meta.*Use 'suffix'"):
        SelfQuantized(target)


def test_a_model_without_linear_layers_is_refused_for_8_bits(settled: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"no linear layers in this model of type 'llama'"):
        quantize(quantize(settled))
