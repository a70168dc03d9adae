"""Tree verification: every node sees its prefix and its ancestors only, and a commit keeps exactly one path."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from foredraft.backends.base import Query
from foredraft.backends.transformers import TransformersBackend
from foredraft.tree import ancestor_mask, children, depths, paths
from foredraft.types import Draft
from tiny import VOCABULARY, plain_chain, seeded

TOLERANCE = 1e-4
NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    **NO_ENDS,
}
FULL = {"layer_types": ["full_attention"] * 2}
NEOX = {key: value for key, value in COMMON.items() if key not in ("num_key_value_heads", "head_dim")}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3, **NO_ENDS}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, COMMON),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, COMMON),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, COMMON),
    "mistral": (MistralForCausalLM, MistralConfig, {**COMMON, "sliding_window": None}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {**COMMON, **FULL}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {**COMMON, **FULL}),
    "gpt2": (GPT2LMHeadModel, GPT2Config, GPT2),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, NEOX),
}
NO_SDPA = {"gemma2"}  # transformers has none for its capped attention scores


def family(name: str, attention: str) -> TransformersBackend:
    model_class, config_class, options = FAMILIES[name]
    config = config_class(**options)
    config._attn_implementation = attention
    return TransformersBackend(seeded(model_class, config))


def random_draft(chance: random.Random, most: int) -> Draft:
    count = chance.randrange(most + 1)
    parents = tuple(chance.randrange(-1, node) for node in range(count))
    return Draft(tuple(chance.randrange(VOCABULARY) for _ in range(count)), parents)


def random_path(chance: random.Random, draft: Draft) -> list[int]:
    """From the root to a random node, or nowhere."""
    path: list[int] = []
    node = chance.randrange(-1, len(draft))
    while node >= 0:
        path.append(node)
        node = draft.parents[node]
    return path[::-1]


def play(backend: TransformersBackend, rounds: int, check_every: int) -> float:
    """Random rounds; the largest difference of any node's logits from a plain forward over its own path."""
    chance = random.Random(0)
    committed = [chance.randrange(VOCABULARY) for _ in range(5)]
    cache = backend.new_cache()
    backend.prefill(cache, committed)
    worst = 0.0
    for round_ in range(rounds):
        root, draft = chance.randrange(VOCABULARY), random_draft(chance, 8)
        logits = backend.forward([Query(cache, root, draft)])[0]
        if round_ % check_every == 0:
            for row, path in zip(logits, [(), *paths(draft)], strict=True):
                expected = plain_chain(backend.model, [*committed, root, *path])[-1]
                worst = max(worst, float((row - expected).abs().max()))
        kept = random_path(chance, draft)
        backend.commit(cache, kept)
        committed += [root, *(draft.tokens[node] for node in kept)]
        assert cache.length == len(committed)
        if len(committed) > 400:
            backend.truncate(cache, 50)
            del committed[50:]
    return worst


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_node_sees_its_own_path_only(name: str, attention: str) -> None:
    if attention == "sdpa" and name in NO_SDPA:
        pytest.skip(f"transformers has no sdpa attention for {name}")
    assert play(family(name, attention), rounds=12, check_every=1) < TOLERANCE


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - NO_SDPA))
def test_sdpa_and_eager_attention_agree_on_a_tree(name: str) -> None:
    draft = Draft((3, 4, 5, 6, 7), (-1, -1, 0, 0, 2))
    rows = []
    for attention in ("sdpa", "eager"):
        backend = family(name, attention)
        cache = backend.new_cache()
        backend.prefill(cache, [1, 2, 3])
        rows.append(backend.forward([Query(cache, 9, draft)])[0])
    assert (rows[0] - rows[1]).abs().max() < TOLERANCE


def test_the_cache_equals_a_fresh_prefill_after_a_thousand_random_rounds() -> None:
    assert play(family("llama", "sdpa"), rounds=1000, check_every=50) < TOLERANCE


def test_a_tree_knows_its_shape() -> None:
    draft = Draft((10, 11, 12, 13), (-1, 0, 0, -1))
    assert depths(draft) == [0, 1, 2, 2, 1]
    assert paths(draft) == [(10,), (10, 11), (10, 12), (13,)]
    assert children(draft) == [[0, 3], [1, 2], [], [], []]
    seen = [[bool(x) for x in row] for row in ancestor_mask(draft)]
    assert seen == [
        [True, False, False, False, False],
        [True, True, False, False, False],
        [True, True, True, False, False],
        [True, True, False, True, False],
        [True, False, False, False, True],
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_trees_on_a_gpu_equal_plain_forwards() -> None:
    backend = family("llama", "sdpa")
    backend.model.to("cuda")
    draft = Draft((3, 4, 5, 6, 7), (-1, -1, 0, 0, 2))
    cache = backend.new_cache()
    backend.prefill(cache, [1, 2, 3])
    logits = backend.forward([Query(cache, 9, draft)])[0].cpu()
    backend.commit(cache, [0, 3])
    after = backend.forward([Query(cache, 8, Draft())])[0].cpu()
    backend.model.to("cpu")
    for row, path in zip(logits, [(), *paths(draft)], strict=True):
        assert (row - plain_chain(backend.model, [1, 2, 3, 9, *path])[-1]).abs().max() < 1e-3
    assert (after[0] - plain_chain(backend.model, [1, 2, 3, 9, 3, 6, 8])[-1]).abs().max() < 1e-3
