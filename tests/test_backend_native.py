"""The native engine: transformers' logits, the same bits whatever is beside a node, and kernels that are kept."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from decoders import FAMILY, ROTATIONS, SHAPE, model_of
from foredraft.backends.base import Query
from foredraft.backends.native import kernels as kernels_module
from foredraft.backends.native.backend import NativeBackend
from foredraft.backends.native.cache import NativeCache
from foredraft.backends.native.kernels import Kernels, most_nodes
from foredraft.backends.native.reading import weights_of_model
from foredraft.backends.native.vector import Cpu, host
from foredraft.backends.native.weights import FORMATS, Floats, Linear, Matrix, Weights
from foredraft.errors import InvalidInputError
from foredraft.types import Draft
from tiny import plain_chain, tiny_llama

# Kernels by themselves

ROWS, COLUMNS = 37, 96
POINTER, INTEGER = ctypes.c_void_p, ctypes.c_int64

NARROWER = [4, 8, 16]
"""Lanes of ARM's and older CPUs, of AVX2 and of AVX-512: LLVM makes any of them for the CPU that is here."""


def narrowed(lanes: int) -> Cpu:
    return host()._replace(lanes=lanes, registers=32 if lanes == 16 else 16)


def product(kernels: Kernels, matrix: Matrix, x: Floats) -> Floats:
    """`y[node, row]`, by the kernel for as many nodes."""
    y = np.full((len(x), matrix.rows), np.nan, dtype=np.float32)
    address = int(kernels.matrices[FORMATS[matrix.format].code, len(x)])
    kernel = ctypes.CFUNCTYPE(None, POINTER, INTEGER, POINTER, INTEGER, POINTER, *[INTEGER] * 4)(address)
    where = (x.ctypes.data, x.shape[1], y.ctypes.data, y.shape[1])
    kernel(matrix.data.ctypes.data, matrix.data.strides[0], *where, 0, matrix.rows, matrix.columns // 32)
    return y


def random_floats(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("lanes", NARROWER)
@pytest.mark.parametrize("format_", FORMATS)
def test_products_are_those_of_the_weights(format_: str, lanes: int) -> None:
    kernels = Kernels([format_], cpu=narrowed(lanes))
    matrix = Matrix.from_floats(random_floats(0, ROWS, COLUMNS), format_)
    for nodes in range(1, most_nodes(kernels.cpu) + 1):
        x = random_floats(1, nodes, COLUMNS)
        expected = x.astype(np.float64) @ matrix.floats().T.astype(np.float64)
        assert np.abs(product(kernels, matrix, x) - expected).max() < 1e-4


def bits_depend_on_the_others(products: Callable[[Floats], Floats], nodes: int) -> bool:
    """Whether a node's products differ between itself alone and it among others."""
    x = random_floats(2, nodes, 576)
    together = products(x)
    return any(not np.array_equal(products(x[i : i + 1])[0], together[i]) for i in range(nodes))


@pytest.mark.parametrize("lanes", NARROWER)
@pytest.mark.parametrize("format_", FORMATS)
def test_products_have_the_same_bits_for_any_number_of_nodes(format_: str, lanes: int) -> None:
    kernels = Kernels([format_], cpu=narrowed(lanes))
    matrix = Matrix.from_floats(random_floats(0, ROWS, 576), format_)
    for nodes in range(2, most_nodes(kernels.cpu) + 1):
        assert not bits_depend_on_the_others(lambda x: product(kernels, matrix, x), nodes)


def test_control_a_kernel_whose_additions_may_be_reordered_is_found_out() -> None:
    """The loop that one would write first, with additions left to the vectoriser (fastmath)."""

    @njit(fastmath=True)
    def loose(weights: Floats, x: Floats, y: Floats) -> None:
        for row in range(weights.shape[0]):
            if x.shape[0] == 1:
                one = np.float32(0)
                for k in range(weights.shape[1]):
                    one += weights[row, k] * x[0, k]
                y[0, row] = one
            else:  # eight sums at once leave no registers to add each in as many parts as one alone
                a = b = c = d = e = f = g = h = np.float32(0)
                for k in range(weights.shape[1]):
                    w = weights[row, k]
                    a, b, c, d = a + w * x[0, k], b + w * x[1, k], c + w * x[2, k], d + w * x[3, k]
                    e, f, g, h = e + w * x[4, k], f + w * x[5, k], g + w * x[6, k], h + w * x[7, k]
                for node, total in enumerate((a, b, c, d, e, f, g, h)):
                    y[node, row] = total

    weights = random_floats(0, ROWS, 576)

    def products(x: Floats) -> Floats:
        y = np.empty((len(x), ROWS), dtype=np.float32)
        loose(weights, x, y)
        return y

    assert bits_depend_on_the_others(products, 8)


def test_weights_are_expanded_as_the_products_see_them() -> None:
    for format_ in FORMATS:
        matrix = Matrix.from_floats(random_floats(0, ROWS, COLUMNS), format_)
        found = np.empty((ROWS - 3, COLUMNS), dtype=np.float32)
        address = int(Kernels([format_]).matrices[FORMATS[format_].code, 0])
        expand = ctypes.CFUNCTYPE(None, POINTER, INTEGER, POINTER, *[INTEGER] * 4)(address)
        expand(matrix.data.ctypes.data, matrix.data.strides[0], found.ctypes.data, COLUMNS, 3, ROWS, COLUMNS // 32)
        assert np.array_equal(found, matrix.floats()[3:])


def test_softmax_of_scores_far_apart() -> None:
    for lanes in NARROWER:
        scores = np.zeros(50 + lanes, dtype=np.float32)
        scores[:50] = 300 * random_floats(3, 50)
        expected = np.exp(0.5 * (scores[:50].astype(np.float64) - scores[:50].max()))
        kernel = Kernels([], cpu=narrowed(lanes)).address("softmax")
        ctypes.CFUNCTYPE(None, POINTER, INTEGER, ctypes.c_float)(kernel)(scores.ctypes.data, 50, 0.5)
        assert np.abs(scores[:50] - expected / expected.sum()).max() < 1e-6


# Kernels are kept


def test_kept_kernels_are_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, x = Matrix.from_floats(random_floats(0, ROWS, COLUMNS), "q4_0"), random_floats(1, 3, COLUMNS)
    first = product(Kernels(["q4_0"], folder=tmp_path), matrix, x)
    kernels_module._engine.cache_clear()

    def fail(*_: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(kernels_module, "object_code", fail)
    assert np.array_equal(product(Kernels(["q4_0"], folder=tmp_path), matrix, x), first)


def test_damaged_kernels_are_made_anew(tmp_path: Path) -> None:
    Kernels([], folder=tmp_path)
    kernels_module._engine.cache_clear()
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:-100] + bytes(100))
    matrix, x = Matrix.from_floats(random_floats(0, ROWS, COLUMNS)), random_floats(1, 2, COLUMNS)
    found = product(Kernels([], folder=tmp_path), matrix, x)
    assert np.abs(found - x @ matrix.floats().T).max() < 1e-4


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kernels_module._engine.cache_clear()
    (tmp_path / "file").touch()
    Kernels([], folder=tmp_path / "file")
    assert "The kernels cannot be kept in" in caplog.text


# Logits

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 4, 5]


def native(model: Any, weights: str = "auto", **options: Any) -> NativeBackend:
    return NativeBackend(weights_of_model(model, weights), **options)


def after(backend: NativeBackend, prompt: list[int]) -> NativeCache:
    cache = backend.new_cache()
    backend.prefill(cache, prompt)
    return cache


def assert_says_what_the_model_says(model: Any, threads: int = 1) -> None:
    backend = native(model, threads=threads)
    found = backend.forward([Query(after(backend, PROMPT[:5]), PROMPT[5], Draft.chain(PROMPT[6:]))])[0]
    assert (found - plain_chain(model, PROMPT)[5:]).abs().max() < 1e-4


@FAMILY
@SHAPE
def test_logits_are_those_of_transformers(family: str, sizes: dict[str, Any]) -> None:
    model = model_of(family, sizes)
    assert_says_what_the_model_says(model)
    assert_says_what_the_model_says(model, threads=2)


@pytest.mark.parametrize("kind", ROTATIONS)
def test_logits_with_scaled_rotations(kind: str) -> None:
    parameters = {"rope_type": kind, "rope_theta": 5000.0} | ROTATIONS[kind]
    assert_says_what_the_model_says(model_of("llama", rope_parameters=parameters))


def in_format(weights: Weights, change: Callable[[Matrix], Matrix]) -> Weights:
    """The model with every matrix changed."""

    def changed(part: Any) -> Any:
        return Linear(change(part.weight), part.bias) if isinstance(part, Linear) else part

    layers = tuple(type(layer)(*map(changed, layer)) for layer in weights.layers)
    return weights._replace(embedding=change(weights.embedding), head=change(weights.head), layers=layers)


@pytest.mark.parametrize("format_", FORMATS)
def test_logits_of_a_format_are_those_of_its_weights_as_floats(format_: str) -> None:
    packed = in_format(weights_of_model(tiny_llama(1)), lambda matrix: matrix.to(format_))
    plain = in_format(packed, lambda matrix: Matrix.from_floats(matrix.floats()))
    rows = []
    for weights in (packed, plain):
        backend = NativeBackend(weights, threads=1)
        rows.append(backend.forward([Query(after(backend, PROMPT[:5]), PROMPT[5], Draft.chain(PROMPT[6:]))])[0])
    assert (rows[0] - rows[1]).abs().max() < 1e-4


# Bits


def random_tree(dice: random.Random, nodes: int, vocabulary: int) -> Draft:
    parents = [dice.randrange(-1, node) for node in range(nodes)]
    if dice.random() < 0.3:
        parents = list(range(-1, nodes - 1))
    return Draft(tuple(dice.randrange(vocabulary) for _ in range(nodes)), tuple(parents))


def one_by_one(backend: NativeBackend, prompt: list[int], path: list[int]) -> torch.Tensor:
    """`[V]`: logits after the path by plain decoding, token after token from the prompt's end."""
    cache = after(backend, prompt)
    for token in path:
        row = backend.forward([Query(cache, token)])[0][0]
        backend.commit(cache, ())
    return row


def assert_same_bits(together: NativeBackend, alone: NativeBackend, dice: random.Random, nodes: int) -> None:
    vocabulary = together.vocab_size
    prompt = [dice.randrange(vocabulary) for _ in range(dice.randrange(1, 40))]
    root, draft = dice.randrange(vocabulary), random_tree(dice, nodes, vocabulary)
    rows = together.forward([Query(after(together, prompt), root, draft)])[0]
    for row in {0, nodes, dice.randrange(nodes + 1)}:
        path, node = [], row - 1
        while node >= 0:
            path.append(draft.tokens[node])
            node = draft.parents[node]
        assert torch.equal(rows[row], one_by_one(alone, prompt, [root, *reversed(path)]))


@pytest.mark.parametrize("kv_format", ["f32", "bf16"])
@pytest.mark.parametrize("format_", FORMATS)
def test_a_nodes_logits_have_the_same_bits_in_any_tree_with_any_threads(format_: str, kv_format: str) -> None:
    weights = in_format(weights_of_model(model_of("qwen3")), lambda matrix: matrix.to(format_))
    backends = [NativeBackend(weights, threads=threads, kv_format=kv_format) for threads in (1, 2)]
    dice = random.Random(0)
    for nodes in (0, 1, 2, 3, 7, 8, 12, 15, 16, 20, 31, 40):
        assert_same_bits(backends[1], backends[0], dice, nodes)
        assert_same_bits(backends[0], backends[1], dice, nodes)


@FAMILY
def test_every_familys_bits_are_the_same_in_a_tree(family: str) -> None:
    backend = native(model_of(family), threads=2)
    for nodes in (5, 9, 17):
        assert_same_bits(backend, backend, random.Random(nodes), nodes)


def test_a_prefill_has_the_same_bits_in_any_pieces() -> None:
    backend = native(tiny_llama(1), threads=2)
    tokens = [random.Random(1).randrange(64) for _ in range(600)]
    whole = after(backend, tokens)
    pieces = backend.new_cache()
    for start, end in ((0, 1), (1, 8), (8, 300), (300, 303), (303, 600)):
        backend.prefill(pieces, tokens[start:end])
    for one, other in zip(whole.rows(), pieces.rows(), strict=True):
        assert np.array_equal(one, other)


def test_control_bits_differ_where_the_tree_is_another() -> None:
    backend = native(tiny_llama(1), threads=1)
    rows = backend.forward([Query(after(backend, PROMPT), 1, Draft((2, 3), (-1, -1)))])[0]
    assert not torch.equal(rows[2], one_by_one(backend, PROMPT, [1, 2, 3]))


# The cache


@pytest.mark.parametrize("kv_format", ["f32", "bf16"])
def test_after_random_rounds_the_cache_is_that_of_a_fresh_prefill(kv_format: str) -> None:
    backend, dice = native(tiny_llama(1), threads=1, kv_format=kv_format), random.Random(2)
    cache, committed = backend.new_cache(), []
    for _ in range(300):
        root, draft = dice.randrange(64), random_tree(dice, dice.randrange(9), 64)
        backend.forward([Query(cache, root, draft)])
        path: list[int] = []
        while dice.random() < 0.7:
            below = [node for node, parent in enumerate(draft.parents) if parent == (path[-1] if path else -1)]
            if not below:
                break
            path.append(dice.choice(below))
        backend.commit(cache, path)
        committed += [root, *(draft.tokens[node] for node in path)]
        if dice.random() < 0.05:
            committed = committed[: len(committed) // 2]
            backend.truncate(cache, len(committed))
    assert cache.length == len(committed) > 20
    for found, fresh in zip(cache.rows(), after(backend, committed).rows(), strict=True):
        assert np.array_equal(found, fresh)


def test_sequences_in_one_forward_do_not_see_each_other() -> None:
    backend = native(tiny_llama(1), threads=2)
    prompts = [[1, 2, 3], list(range(50)), [7]]
    drafts = [Draft.chain([4, 5]), Draft((1, 2, 3, 4), (-1, -1, 0, 2)), Draft()]
    queries = [Query(after(backend, prompt), 9, draft) for prompt, draft in zip(prompts, drafts, strict=True)]
    for query, rows in zip(queries, backend.forward(queries), strict=True):
        assert torch.equal(rows, backend.forward([query])[0])


def test_caches_and_workspace_grow() -> None:
    model = tiny_llama(1)
    backend, tokens = native(model, threads=1), [random.Random(3).randrange(64) for _ in range(530)]
    cache = after(backend, tokens[:250])
    for start in range(250, 530, 14):
        rows = backend.forward([Query(cache, tokens[start], Draft.chain(tokens[start + 1 : start + 14]))])[0]
        backend.commit(cache, range(13))
    assert (rows - plain_chain(model, tokens)[-14:]).abs().max() < 1e-3
    assert cache.length == 530


def test_early_exit_leaves_the_bits_of_the_whole_forward() -> None:
    backend = native(tiny_llama(1, layers=3), threads=2)
    plain = backend.forward([Query(after(backend, PROMPT), 1, Draft.chain([2, 3, 4]))])[0]
    cache = after(backend, PROMPT)
    for drafted in ([], [2], [2, 3]):
        early = backend.early_logits(Query(cache, 1, Draft.chain(drafted)), 2)
        assert early.shape == (1, 64)
    assert torch.equal(backend.forward([Query(cache, 1, Draft.chain([2, 3, 4]))])[0], plain)
    backend.commit(cache, [0, 1, 2])
    for found, fresh in zip(cache.rows(), after(backend, [*PROMPT, 1, 2, 3, 4]).rows(), strict=True):
        assert np.array_equal(found, fresh)


def test_early_exit_of_other_tokens_than_are_verified_is_forgotten() -> None:
    backend = native(tiny_llama(1, layers=3), threads=1)
    plain = backend.forward([Query(after(backend, PROMPT), 1, Draft((2, 5), (-1, -1)))])[0]
    cache = after(backend, PROMPT)
    backend.early_logits(Query(cache, 1, Draft.chain([2, 3])), 2)
    other = after(backend, PROMPT)
    rows = backend.forward([Query(cache, 1, Draft((2, 5), (-1, -1))), Query(other, 1)])
    assert torch.equal(rows[0], plain) and torch.equal(rows[1], plain[:1])


def test_an_early_exit_that_is_no_layer_is_refused() -> None:
    backend = native(tiny_llama(1), threads=1)
    with pytest.raises(InvalidInputError, match=r"after one of its layers 1 to 1 \(it has 2\): try early_exit:1"):
        backend.refuse_early_exit(2)


def test_an_unknown_kv_format_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="The KV format is 'f16', but must be one of f32, bf16"):
        native(tiny_llama(1), kv_format="f16")


def test_torch_keeps_to_one_thread_only_while_the_engine_runs() -> None:
    backend, before = native(tiny_llama(1), threads=1), torch.get_num_threads()
    with backend.running():
        with native(tiny_llama(1), threads=1).running():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
