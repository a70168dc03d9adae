"""One forward scores a whole chain as single steps would, and rejected tokens leave no trace in the cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from foredraft.backends.base import KVCache, Query
from foredraft.backends.transformers import TransformersBackend
from foredraft.engine import Engine
from foredraft.errors import UnsupportedError
from foredraft.types import Draft, SamplingParams
from tiny import DRAFTER_MAKERS, VOCABULARY, drafter_over, generate, plain_chain, seeded, tiny_llama
from tiny_heads import HEADS, drafter_with, head_over

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
GPT2_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}

FAMILIES: dict[str, tuple[Any, Any]] = {
    "gpt2": (GPT2LMHeadModel, GPT2Config(**GPT2_SHAPE)),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig(**SHAPE)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**GROUPED)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**GROUPED, head_dim=8)),
    "mistral without a window": (MistralForCausalLM, MistralConfig(**GROUPED, sliding_window=None)),
}

REFUSED: dict[str, tuple[Any, Any, str]] = {
    "mistral": (
        MistralForCausalLM,
        MistralConfig(**GROUPED, sliding_window=8),
        "'mistral' has layers of sliding-window attention",
    ),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config(**GROUPED, head_dim=8, sliding_window=8),
        "'gemma2' has layers of sliding-window attention",
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=8),
        "'gemma3_text' has layers of sliding-window attention",
    ),
    "lfm2": (
        Lfm2ForCausalLM,
        Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"]),
        "'lfm2' has layers of LinearAttentionLayer",
    ),
    "mamba": (
        MambaForCausalLM,
        MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, state_size=4),
        "'mamba' keeps a recurrent state",
    ),
    "t5": (
        T5ForConditionalGeneration,
        T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4),
        "'t5' is an encoder-decoder",
    ),
    "openai-gpt": (
        OpenAIGPTLMHeadModel,
        OpenAIGPTConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4),
        "'openai-gpt' takes no KV cache",
    ),
}


def random_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_of(backend: TransformersBackend, cache: KVCache, tokens: Sequence[int]) -> Tensor:
    """Logits after each of the tokens, scored as a root and a chain. They stay uncommitted."""
    return backend.forward([Query(cache, tokens[0], Draft.chain(tokens[1:]))])[0]


def assert_like_a_plain_forward(backend: TransformersBackend, ids: Sequence[int]) -> None:
    """Prefill a part; reject a draft; accept a draft; then score the rest: equal to one forward over everything."""
    expected = plain_chain(backend.model, ids)[:, : backend.vocab_size]
    cache = backend.new_cache()
    backend.prefill(cache, ids[:6])
    assert cache.length == 6
    assert torch.allclose(logits_of(backend, cache, [ids[6], 1, 2, 3])[0], expected[6], atol=1e-4)
    backend.commit(cache, [])
    assert cache.length == 7
    assert torch.allclose(logits_of(backend, cache, ids[7:12]), expected[7:12], atol=1e-4)
    backend.commit(cache, range(4))
    assert cache.length == 12
    assert torch.allclose(logits_of(backend, cache, ids[12:]), expected[12:], atol=1e-4)


# Scoring


def test_prefill_and_forward_equal_a_plain_forward(target: TransformersBackend) -> None:
    for seed in range(5):
        assert_like_a_plain_forward(target, random_ids(24, seed))


@pytest.mark.parametrize("prompt_length", [0, 1, 5])
def test_short_prompts_equal_a_plain_forward(target: TransformersBackend, prompt_length: int) -> None:
    ids = random_ids(prompt_length + 4)
    cache = target.new_cache()
    target.prefill(cache, ids[:prompt_length])
    scored = logits_of(target, cache, ids[prompt_length:])
    assert torch.allclose(scored, plain_chain(target.model, ids)[prompt_length:], atol=1e-4)


def test_a_long_prompt_is_read_in_parts_with_the_same_result(
    target: TransformersBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foredraft.backends.transformers._PREFILL_CHUNK", 7)
    assert_like_a_plain_forward(target, random_ids(24))
    ids, cache = random_ids(31), target.new_cache()
    target.prefill(cache, ids[:-1])
    assert cache.length == 30
    assert torch.allclose(logits_of(target, cache, ids[-1:]), plain_chain(target.model, ids)[-1:], atol=1e-4)


def test_several_sequences_are_scored_each_by_itself(target: TransformersBackend) -> None:
    ids = [random_ids(length, seed=length) for length in (5, 9, 14)]
    caches = [target.new_cache() for _ in ids]
    for cache, tokens in zip(caches, ids, strict=True):
        target.prefill(cache, tokens[:2])
    queries = [Query(cache, tokens[2], Draft.chain(tokens[3:])) for cache, tokens in zip(caches, ids, strict=True)]
    for tokens, scored in zip(ids, target.forward(queries), strict=True):
        assert torch.allclose(scored, plain_chain(target.model, tokens)[2:], atol=1e-4)


def test_padding_of_the_vocabulary_is_cut_off(tiny_target: Any) -> None:
    backend = TransformersBackend(tiny_target, vocab_size=50)
    assert backend.vocab_size == 50
    assert logits_of(backend, backend.new_cache(), [1, 2, 3]).shape == (3, 50)
    assert_like_a_plain_forward(backend, [i % 50 for i in random_ids(24)])
    assert TransformersBackend(tiny_target, vocab_size=1000).vocab_size == VOCABULARY


def test_it_knows_the_models_context(target: TransformersBackend) -> None:
    assert target.context == 1024
    assert TransformersBackend(seeded(*FAMILIES["gpt2"])).context == 128


# Rollback


def test_cache_after_200_random_rounds_equals_a_fresh_prefill(target: TransformersBackend) -> None:
    dice = random.Random(1)
    cache, tokens = target.new_cache(), random_ids(10)
    target.prefill(cache, tokens[:-1])
    for _ in range(200):
        drafted = [dice.randrange(VOCABULARY) for _ in range(dice.randint(0, 6))]
        logits_of(target, cache, [tokens[-1], *drafted])
        accepted = dice.randint(0, len(drafted))
        target.commit(cache, range(accepted))
        tokens += [*drafted[:accepted], dice.randrange(VOCABULARY)]
        assert cache.length == len(tokens) - 1
    fresh = target.new_cache()
    target.prefill(fresh, tokens[:-1])
    probe = [tokens[-1], *random_ids(8)]
    rolled_back = logits_of(target, cache, probe)
    assert torch.allclose(rolled_back, logits_of(target, fresh, probe), atol=1e-4)
    assert torch.allclose(rolled_back, plain_chain(target.model, [*tokens, *probe[1:]])[-9:], atol=1e-4)


def test_a_cache_that_was_not_rolled_back_would_be_noticed(target: TransformersBackend) -> None:
    ids = random_ids(12)
    cache = target.new_cache()
    target.prefill(cache, ids[:6])
    logits_of(target, cache, [ids[6], 1, 2])
    target.commit(cache, range(2))  # wrong: these were not accepted
    stale = logits_of(target, cache, ids[7:])
    assert not torch.allclose(stale, plain_chain(target.model, ids)[7:], atol=1e-1)


@pytest.mark.parametrize("length", [0, 1, 7, 10])
def test_truncate_forgets_committed_tokens(target: TransformersBackend, length: int) -> None:
    ids = random_ids(10)
    cache = target.new_cache()
    target.prefill(cache, ids)
    target.truncate(cache, length)
    assert cache.length == length
    probe = random_ids(4, seed=1)
    expected = plain_chain(target.model, [*ids[:length], *probe])[length:]
    assert torch.allclose(logits_of(target, cache, probe), expected, atol=1e-4)


def test_caches_are_independent(target: TransformersBackend) -> None:
    first, second = target.new_cache(), target.new_cache()
    target.prefill(first, random_ids(5))
    assert (first.length, second.length) == (5, 0)


# Which models


@pytest.mark.parametrize("family", FAMILIES)
def test_model_families_with_full_attention_work(family: str) -> None:
    backend = TransformersBackend(seeded(*FAMILIES[family]))
    assert_like_a_plain_forward(backend, random_ids(24))
    greedy = SamplingParams(max_tokens=30)
    plain = generate(Engine(backend), [1, 2, 3], greedy)
    layered = backend.capabilities.early_exit
    for name in DRAFTER_MAKERS:
        if name in HEADS:  # what they say does not matter here, so they need no training
            if backend.capabilities.features:
                engine = Engine(backend, drafter_with(head_over(backend, name), backend))
                assert generate(engine, [1, 2, 3], greedy).ids == plain.ids
        elif "eagle3" not in name and (layered or name not in ("early_exit", "layer_skip")):
            assert generate(Engine(backend, drafter_over(backend, name)), [1, 2, 3], greedy).ids == plain.ids


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_cannot_be_rolled_back_are_refused_by_name(kind: str) -> None:
    model_class, config, says = REFUSED[kind]
    with pytest.raises(UnsupportedError, match=says) as refused:
        TransformersBackend(seeded(model_class, config))
    assert "Use a decoder-only model with full attention" in str(refused.value)


def test_a_model_is_put_into_evaluation_mode() -> None:
    model = seeded(GPT2LMHeadModel, GPT2Config(**GPT2_SHAPE, resid_pdrop=0.5)).train()
    assert_like_a_plain_forward(TransformersBackend(model), random_ids(24))


# GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize("drafter", DRAFTER_MAKERS)
def test_on_a_gpu_speculative_equals_plain_in_float32(drafter: str) -> None:
    backend = TransformersBackend(tiny_llama(seed=1).to("cuda"))
    speculative = Engine(backend, drafter_over(backend, drafter))
    for prompt in ([1, 2, 3], random_ids(20), [5, 6] * 8):
        greedy = SamplingParams(max_tokens=60)
        assert generate(speculative, prompt, greedy).ids == generate(Engine(backend), prompt, greedy).ids
        sampled = SamplingParams(max_tokens=60, temperature=1.0, seed=3)
        assert generate(speculative, prompt, sampled).ids == generate(speculative, prompt, sampled).ids
