"""Twins of the native engine, which draft for it: less of its sublayers, its weights in 8 bits."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decoders import FAMILY, SHAPE, SIZES, model_of
from foredraft.backends.base import Query
from foredraft.backends.native import kernels
from foredraft.backends.native.backend import NativeBackend
from foredraft.backends.native.reading import weights_of_model
from foredraft.backends.native.twins import in_8_bits
from foredraft.backends.native.weights import Matrix
from foredraft.backends.transformers import TransformersBackend
from foredraft.errors import UnsupportedError
from foredraft.proposers.layer_skip import LayerSkip
from foredraft.proposers.self_quant import SelfQuantized
from foredraft.types import Draft
from tiny import native, plain_chain, tiny_llama

IDS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 4, 5]


def chain(backend: NativeBackend, ids: list[int] = IDS) -> torch.Tensor:
    """Logits `[n, V]` of one forward over all ids."""
    return backend.forward([Query(backend.new_cache(), ids[0], Draft.chain(ids[1:]))])[0]


# Less sublayers


@FAMILY
@SHAPE
def test_a_twin_without_sublayers_is_that_of_transformers(family: str, sizes: dict[str, Any]) -> None:
    rotations: dict[str, Any] = {"no_rope_layers": [1, 0, 1]} if family == "smollm3" else {}
    model = model_of(family, sizes, num_hidden_layers=3, **rotations)
    left_out = (0, 2), (1, 2)
    backend, before = native(model), plain_chain(model, IDS)
    twin = backend.without(*left_out)
    expected = plain_chain(TransformersBackend(model).without(*left_out).model, IDS)
    assert torch.allclose(chain(twin), expected, atol=1e-4)
    cache = twin.new_cache()
    twin.prefill(cache, IDS[:5])
    assert torch.allclose(twin.forward([Query(cache, IDS[5], Draft.chain(IDS[6:9]))])[0], expected[5:9], atol=1e-4)
    twin.commit(cache, [0])
    assert torch.allclose(twin.forward([Query(cache, IDS[7])])[0], expected[7:8], atol=1e-4)
    assert not torch.allclose(expected, before, atol=0.01)
    assert torch.allclose(chain(backend), before, atol=1e-4)  # the target is as it was


def test_twins_share_weights_threads_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(seed=1)
    backend = native(model)
    chain(backend.quantized())  # the kernels of 8 bits are made here, if none needed them before
    monkeypatch.setattr(kernels, "object_code", lambda *_: pytest.fail("compiled again"))
    shallow, small = backend.without([1], []), backend.quantized()
    assert shallow.weights is backend.weights
    assert small.weights.embedding is backend.weights.embedding
    assert small.weights.layers[0].attention_norm is backend.weights.layers[0].attention_norm
    for twin in (shallow, small):
        assert twin.team is backend.team
        chain(twin)


def test_twins_keep_the_settings_of_the_target(tmp_path: Path) -> None:
    weights = weights_of_model(tiny_llama(seed=1))
    backend = NativeBackend(weights, 60, threads=1, kv_format="bf16", kernels=tmp_path)
    for twin in (backend.without([1], []), backend.quantized()):
        assert (twin.vocab_size, twin.kv_format, twin.context) == (60, "bf16", backend.context)
        assert chain(twin).shape == (len(IDS), 60)
    names = {file.name.partition("-")[0] for file in tmp_path.iterdir()}
    assert names == {"f32", "q8_0", "others_bf16"}


def test_a_twin_of_a_twin_lacks_what_both_lack() -> None:
    backend = native(tiny_llama(seed=1, layers=4))
    both = backend.without([1, 2], [3])
    assert torch.equal(chain(backend.without([1], [3]).without([2], [])), chain(both))
    shallow_and_small = chain(backend.without([1, 2], [3]).quantized())
    assert torch.equal(shallow_and_small, chain(backend.quantized().without([1, 2], [3])))
    assert not torch.equal(shallow_and_small, chain(both))


# What there is to leave out


@FAMILY
@SHAPE
def test_fingerprints_are_those_of_transformers(family: str, sizes: dict[str, Any]) -> None:
    model = model_of(family, sizes)
    own = native(model).sublayers().fingerprint
    assert own == TransformersBackend(model).sublayers().fingerprint
    halves = NativeBackend(weights_of_model(model, "bf16"), threads=1)
    assert halves.sublayers().fingerprint == own  # float32 and bfloat16 are one model
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight *= 1.5
    assert native(model).sublayers().fingerprint != own


def test_weights_of_fewer_bits_are_another_model() -> None:
    model = tiny_llama(seed=1)
    packed = NativeBackend(weights_of_model(model, "q8"), threads=1)
    assert packed.sublayers().fingerprint != native(model).sublayers().fingerprint


def test_sizes_are_the_bytes_that_a_forward_reads() -> None:
    model = model_of("llama", SIZES | {"head_dim": 32})  # nothing is padded
    backend = native(model)
    assert backend.sublayers() == TransformersBackend(model).sublayers()
    for twin in (backend, backend.quantized()):
        found = twin.sublayers()
        assert sum(found.attention) + sum(found.mlp) + found.head == twin.weights.bytes_per_token


# 8 bits


@FAMILY
@SHAPE
def test_logits_in_8_bits_are_close_to_the_originals(family: str, sizes: dict[str, Any]) -> None:
    model = model_of(family, sizes)
    exact, found = chain(native(model)), chain(native(model).quantized())
    assert 0 < (found - exact).std() < 0.05 * exact.std()


def test_what_is_small_already_is_left_as_it_is() -> None:
    weights = weights_of_model(tiny_llama(seed=1))
    first = weights.layers[0]
    mixed = weights._replace(
        layers=(first._replace(q=first.q._replace(weight=first.q.weight.to("q4_1"))), *weights.layers[1:]),
        head=weights.head.to("q8_0"),
    )
    small = in_8_bits(mixed)
    assert small.layers[0].q.weight is mixed.layers[0].q.weight and small.head is mixed.head
    assert small.formats == {"f32", "q4_1", "q8_0"}  # the embedding is shared
    assert {matrix.format for matrix in small.matrices} == {"q4_1", "q8_0"}


@pytest.mark.parametrize("format_", ["q8_0", "q4_0", "q4_1"])
def test_a_model_of_8_bits_or_less_is_refused_for_8_bits(format_: str) -> None:
    weights = weights_of_model(tiny_llama(seed=1), "q8")
    layers = tuple(layer._replace(up=layer.up._replace(weight=layer.up.weight.to(format_))) for layer in weights.layers)
    target = NativeBackend(weights._replace(layers=layers), threads=1)
    with pytest.raises(UnsupportedError, match=rf"8 bits or less already \(.*{format_}.*Use 'suffix'"):
        SelfQuantized(target)
    LayerSkip(target)  # which needs no other weights


def test_matrices_are_converted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    floats = np.random.default_rng(0).standard_normal((37, 64), dtype=np.float32)
    whole = Matrix.from_floats(floats, "q8_0")
    monkeypatch.setattr("foredraft.backends.native.weights._CHUNK", 5 * 64)
    assert np.array_equal(Matrix.from_floats(floats).to("q8_0").data, whole.data)


def test_memory_of_the_copy_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="foredraft"):
        native(model_of("llama", SIZES | {"head_dim": 32})).quantized()
    weights = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96) + 50 * 64
    taken, replaced = weights / 32 * 34 / 1e6, weights * 4 / 1e6
    assert f"takes {taken:.1f} MB more: 15 matrices that take {replaced:.1f} MB in f32" in caplog.messages[0]
