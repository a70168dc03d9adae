"""What backends tell heads about a sequence: hidden states of committed tokens, embeddings, the target's head."""

from __future__ import annotations

import random

import pytest
import torch

from foredraft.backends.base import Backend, Query
from foredraft.types import Draft
from tiny import BACKENDS, tiny_llama

LAYERS, VOCABULARY = 3, 64


def states_of(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """`[n, layers + 1, H]` by one plain forward."""
    with torch.inference_mode():
        found = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.stack([states[0] for states in found], dim=1)


@pytest.fixture(params=BACKENDS)
def pair(request: pytest.FixtureRequest) -> tuple[torch.nn.Module, Backend]:
    model = tiny_llama(3, layers=LAYERS)
    return model, BACKENDS[request.param](model)


def test_features_of_committed_tokens_are_the_hidden_states(pair: tuple[torch.nn.Module, Backend]) -> None:
    """Over random trees of which random paths are kept, for two readers of different layers that read now and then."""
    model, backend = pair
    dice = random.Random(1)
    cache = backend.new_cache()
    text = [dice.randrange(VOCABULARY) for _ in range(9)]
    backend.prefill(cache, text[:3])  # before anyone asked
    readers = [cache.keep_features([0, 2]), cache.keep_features([1, LAYERS])]
    found: list[list[torch.Tensor]] = [[], []]
    backend.prefill(cache, text[3:-1])
    for _ in range(12):
        nodes = dice.randrange(6)
        draft = Draft(
            tuple(dice.randrange(VOCABULARY) for _ in range(nodes)), tuple(dice.randrange(-1, i) for i in range(nodes))
        )
        backend.forward([Query(cache, text[-1], draft)])
        path: list[int] = []
        while below := [i for i, p in enumerate(draft.parents) if p == (path[-1] if path else -1)]:
            if dice.random() < 0.3:
                break
            path.append(dice.choice(below))
        backend.commit(cache, path)
        text += [draft.tokens[node] for node in path]
        for reader, rows in zip(readers, found, strict=True):
            if dice.random() < 0.7:
                start, fresh = reader.take()
                assert start == 3 + sum(len(part) for part in rows)
                rows += [] if fresh is None else [fresh]
        text.append(dice.randrange(VOCABULARY))
    wanted = states_of(model, text)
    for reader, rows in zip(readers, found, strict=True):
        fresh = reader.take()[1]
        whole = torch.cat([*rows, *([] if fresh is None else [fresh])])
        assert whole.shape == (cache.length - 3, 2, backend.hidden_size)
        assert (whole - wanted[3 : cache.length, list(reader.layers)]).abs().max() < 1e-4


def test_features_of_several_sequences_in_one_forward(pair: tuple[torch.nn.Module, Backend]) -> None:
    model, backend = pair
    texts = [[1, 2, 3, 4], [5, 6, 7, 8, 9]]
    queries, readers = [], []
    for text in texts:
        cache = backend.new_cache()
        readers.append(cache.keep_features([2]))
        backend.prefill(cache, text[:2])
        queries.append(Query(cache, text[2], Draft.chain(text[3:])))
    queries.append(Query(backend.new_cache(), 1))  # nobody asks about this one
    backend.forward(queries)
    for text, query, reader in zip(texts, queries[:2], readers, strict=True):
        backend.commit(query.cache, range(len(text) - 3))
        found = reader.take()[1]
        assert found is not None
        assert (found[:, 0] - states_of(model, text)[:, 2]).abs().max() < 1e-4


def test_a_reader_of_the_last_tokens_gets_these(pair: tuple[torch.nn.Module, Backend]) -> None:
    model, backend = pair
    cache, text = backend.new_cache(), [1, 2, 3, 4, 5, 6, 7, 8]
    reader = cache.keep_features([2], 3)
    backend.prefill(cache, text[:1])
    assert reader.take()[0] == 0
    for part in (text[1:3], text[3:4], text[4:]):
        backend.prefill(cache, part)
    start, found = reader.take()
    assert start == 5 and found is not None
    assert (found[:, 0] - states_of(model, text)[5:, 2]).abs().max() < 1e-4
    assert reader.take() == (8, None)


def test_an_early_exit_before_does_not_take_layers_away(pair: tuple[torch.nn.Module, Backend]) -> None:
    model, backend = pair
    cache = backend.new_cache()
    reader = cache.keep_features([1, 3])
    backend.prefill(cache, [1, 2])
    backend.early_logits(Query(cache, 3, Draft.chain([4])), 2)
    backend.forward([Query(cache, 3, Draft.chain([4, 5]))])
    backend.commit(cache, [0, 1])
    found = reader.take()[1]
    assert found is not None
    assert (found - states_of(model, [1, 2, 3, 4, 5])[:, [1, 3]]).abs().max() < 1e-4


def test_embedding_head_and_norm(pair: tuple[torch.nn.Module, Backend]) -> None:
    model, backend = pair
    states = states_of(model, [1, 2, 3])
    assert (backend.embed([1, 2, 3]) - states[:, 0]).abs().max() < 1e-5
    with torch.inference_mode():
        logits = model(torch.tensor([[1, 2, 3]])).logits[0]
    assert (backend.head(states[:, LAYERS]) - logits).abs().max() < 1e-4
    assert (states[:, LAYERS] @ backend.head_rows([7, 9]).T - logits[:, [7, 9]]).abs().max() < 1e-4
    weight, epsilon = backend.final_norm()
    raw = torch.randn(4, backend.hidden_size, generator=torch.Generator().manual_seed(0))
    own = torch.nn.functional.rms_norm(raw, weight.shape, weight, epsilon)
    with torch.inference_mode():
        assert (own - model.get_submodule("model.norm")(raw)).abs().max() < 1e-4
