"""Reading models for the native engine: every family, live or in folders, damaged ones, and what it refuses."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from decoders import FAMILY, ROTATIONS, SHAPE, SIZES, assert_holds, config_of, matrices, model_of
from foredraft.backends.native import families
from foredraft.backends.native.reading import read_native, refuses, refuses_model, weights_of_model
from foredraft.errors import InvalidInputError, ModelError, UnsupportedError
from foredraft.inspection import inspect_model
from foredraft.models import ModelFiles
from tiny import seeded, tiny_llama

# A model that is loaded already


@FAMILY
@SHAPE
def test_a_live_model_is_read_as_it_is(family: str, sizes: dict[str, Any]) -> None:
    model = model_of(family, sizes)
    assert_holds(weights_of_model(model), model)


@FAMILY
@SHAPE
def test_the_measures_are_the_models(family: str, sizes: dict[str, Any]) -> None:
    model = model_of(family, sizes)
    read, attention = weights_of_model(model), model.model.layers[0].self_attn
    m = read.measures
    assert (m.architecture, m.layers, m.hidden) == (model.config.model_type, 2, sizes["hidden_size"])
    assert (m.heads, m.kv_heads) == (sizes["num_attention_heads"], sizes["num_key_value_heads"])
    assert (m.head_dim, m.attention_scale) == (attention.head_dim, attention.scaling)
    assert (m.mlp, m.vocabulary, m.context) == (sizes["intermediate_size"], 50, 128)
    assert m.epsilon == model.config.rms_norm_eps
    assert m.activation == ("gelu_tanh" if family == "gemma" else "silu")
    assert m.embedding_scale == (m.hidden**0.5 if family == "gemma" else 1)
    assert [layer.rotates for layer in read.layers] == [True, family != "smollm3"]
    assert read.config is model.config


@FAMILY
@SHAPE
def test_the_rotation_has_the_bits_of_transformers(family: str, sizes: dict[str, Any]) -> None:
    model = model_of(family, sizes)
    read = weights_of_model(model)
    assert np.array_equal(read.inverse_frequencies, model.model.rotary_emb.inv_freq.numpy())
    assert read.rotary_scale == 1


@pytest.mark.parametrize("kind", ROTATIONS)
def test_scaled_rotations_have_the_bits_of_transformers(kind: str) -> None:
    parameters = {"rope_type": kind, "rope_theta": 5000.0} | ROTATIONS[kind]
    model = model_of("llama", rope_parameters=parameters)
    read, theirs = weights_of_model(model), model.model.rotary_emb
    assert np.array_equal(read.inverse_frequencies, theirs.inv_freq.numpy())
    assert read.rotary_scale == theirs.attention_scaling
    assert (read.rotary_scale > 1) == (kind == "yarn")


@pytest.mark.parametrize(("dtype", "format_"), [("float32", "f32"), ("bfloat16", "bf16"), ("float16", "f16")])
@SHAPE
def test_floats_keep_their_type(dtype: str, format_: str, sizes: dict[str, Any]) -> None:
    model = model_of("llama", sizes).to(getattr(torch, dtype))
    read = weights_of_model(model)
    assert {matrix.format for matrix in matrices(read)} == {format_}
    assert_holds(read, model)


def test_doubles_become_singles() -> None:
    model = model_of("llama").double()
    read = weights_of_model(model)
    assert {matrix.format for matrix in matrices(read)} == {"f32"}
    assert_holds(read, model)


def test_a_live_model_shares_its_memory_where_columns_fill_blocks() -> None:
    model = model_of("llama")
    read = weights_of_model(model)
    for matrix, weight in (
        (read.embedding, model.model.embed_tokens.weight),
        (read.layers[1].down.weight, model.model.layers[1].mlp.down_proj.weight),
    ):
        assert np.shares_memory(matrix.data, weight.detach().numpy())


@pytest.mark.parametrize(
    ("weights", "format_", "error"), [("f32", "f32", 0), ("bf16", "bf16", 2**-8), ("q8", "q8_0", 0)]
)
@FAMILY
@SHAPE
def test_weights_can_be_converted(
    weights: str, format_: str, error: float, family: str, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foredraft.backends.native.tensors._CHUNK", 1000)  # in several parts
    model = model_of(family, sizes)
    read = weights_of_model(model, weights)
    assert {matrix.format for matrix in matrices(read)} == {format_}
    atol = 0.01 if weights == "q8" else 0.0  # largest weights are near 0.08; a step is a 127th of the largest
    assert_holds(read, model, lambda found, wanted: np.testing.assert_allclose(found, wanted, error, atol))


def test_unknown_weights_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="weights is 'q4', but must be one of auto, f32, bf16, q8"):
        weights_of_model(model_of("llama"), "q4")


@pytest.mark.parametrize(("ends", "expected"), [(None, set()), (7, {7}), ([7, 9], {7, 9})])
def test_stop_tokens_are_those_of_the_generation_settings(ends: Any, expected: set[int]) -> None:
    model = model_of("llama")
    model.generation_config.eos_token_id = ends
    assert weights_of_model(model).stop_tokens == expected


# What is refused


REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "another family": ("does not know model type 'gpt2', only llama, mistral, qwen2", transformers.GPT2Config),
    "soft caps": ("does not know model type 'gemma2'", transformers.Gemma2Config),
    "experts": ("does not know model type 'qwen3_moe'", transformers.Qwen3MoeConfig),
    "a window": (
        r"layers of sliding-window attention \(64 of 128 tokens\)",
        lambda: config_of("mistral", SIZES, sliding_window=64),
    ),
    "a window in some layers": (
        r"layers of sliding-window attention \(64 of 128 tokens\)",
        lambda: config_of("qwen2", SIZES, use_sliding_window=True, sliding_window=64, max_window_layers=1),
    ),
    "layers of another kind": (
        "layers of chunked_attention",
        lambda: config_of("qwen3", SIZES, layer_types=["full_attention", "chunked_attention"]),
    ),
    "another activation": ("no activation 'relu'", lambda: config_of("llama", SIZES, hidden_act="relu")),
    "exact GELU": ("no activation 'gelu'", lambda: config_of("llama", SIZES, hidden_act="gelu")),
    "both directions": ("bidirectional", lambda: config_of("gemma", SIZES, use_bidirectional_attention=True)),
    "longrope past its context": (
        "'longrope' changes past 32 tokens, and its context is 128",
        lambda: config_of(
            "llama",
            SIZES,
            rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}
            | ROTATIONS["longrope"]
            | {"original_max_position_embeddings": 32},
        ),
    ),
    "a rotation of another kind": (
        "a rotary embedding of kind 'proportional'",
        lambda: config_of("llama", SIZES, rope_parameters={"rope_type": "proportional", "rope_theta": 1e4}),
    ),
    "weights of GPTQ": (
        "quantised by 'gptq', which only GGUF files can be",
        lambda: config_of("llama", SIZES, quantization_config={"quant_method": "gptq", "bits": 4}),
    ),
    "heads that do not share evenly": (
        "2 heads do not share 3 KV heads evenly",
        lambda: config_of("llama", SIZES, num_key_value_heads=3),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_named(case: str) -> None:
    reason, config = REFUSED[case]
    with pytest.raises(UnsupportedError, match=reason) as caught:
        families.measures(config())
    assert "The native backend does not run this model: " in str(caught.value)
    assert "Use --backend transformers (backend='transformers')." in str(caught.value)
    assert str(families.refuses(config())) in str(caught.value)


@FAMILY
def test_what_is_supported_is_not_refused(family: str) -> None:
    assert families.refuses(config_of(family, SIZES)) is None
    assert refuses_model(model_of(family)) is None


def test_a_live_model_that_is_wrapped_is_refused_with_the_tensor() -> None:
    model = model_of("llama")
    wrapped = types.SimpleNamespace(config=model.config, state_dict=lambda: {"base.model.norm.weight": torch.ones(64)})
    assert "its tensors are not as usual (the model has 1 tensors" in str(refuses_model(cast(Any, wrapped)))
    assert families.refuses(model.config) is None
    other = seeded(transformers.GPT2LMHeadModel, transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2), 0)
    assert "does not know model type 'gpt2'" in str(refuses_model(other))


@pytest.mark.parametrize(
    "config",
    [
        config_of("mistral", SIZES, sliding_window=128),
        config_of("qwen2", SIZES, use_sliding_window=True, sliding_window=256, max_window_layers=1),
        config_of("qwen2", SIZES, use_sliding_window=True, sliding_window=64, max_window_layers=2),
        config_of("smollm3", SIZES, use_sliding_window=False, sliding_window=64),
    ],
)
def test_a_window_that_never_closes_is_none(config: Any) -> None:
    assert families.refuses(config) is None


def test_a_model_with_more_tensors_than_its_kind_has_is_refused() -> None:
    model = model_of("llama")
    model.model.layers[1].self_attn.extra = torch.nn.Linear(3, 3, bias=False)
    reason = "it holds tensors that no model of type 'llama' has, such as 'model.layers.1.self_attn.extra.weight'"
    with pytest.raises(UnsupportedError, match=re.escape(f"does not run the model: {reason}. Use --backend")):
        weights_of_model(model)
    assert refuses_model(model) == reason


def test_weights_that_are_no_floats_are_refused() -> None:
    model = model_of("llama")
    model.model.norm.weight = torch.nn.Parameter(torch.ones(64, dtype=torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedError, match=r"'model\.norm\.weight' is of type int8, and no float32, bfloat16"):
        weights_of_model(model)


# Folders of safetensors


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Any) -> Path:
    """A small Llama and its tokenizer, as `save_pretrained` leaves them."""
    model = tiny_llama(3, vocabulary=len(tokenizer))
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(tmp_path / "a model")
    tokenizer.save_pretrained(tmp_path / "a model")
    return tmp_path / "a model"


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def reconfigure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@FAMILY
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_is_read_as_it_was_saved(family: str, dtype: str, tmp_path: Path, tokenizer: Any) -> None:
    model = model_of(family).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    read, read_tokenizer = read_native(tmp_path)
    assert_holds(read, model)
    assert {matrix.format for matrix in matrices(read)} == {"f32" if dtype == "float32" else "bf16"}
    assert read_tokenizer("hello the 你好")["input_ids"] == tokenizer("hello the 你好")["input_ids"]


def test_shards_are_read_as_one(folder: Path, tmp_path: Path) -> None:
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    whole.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert_holds(read_native(folder).weights, whole)
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelError, match=f"lacks '{gone.name}', which its index names"):
        read_native(folder)


def test_matrices_of_a_folder_stay_in_the_file(folder: Path) -> None:
    model_of("phi3").save_pretrained(folder)
    read = read_native(folder).weights
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    ranges = [[int(end, 16) for end in words[0].split("-")] for words in maps]
    for matrix in matrices(read):
        assert any(start <= matrix.data.ctypes.data < stop for start, stop in ranges)


def test_stop_tokens_of_a_folder(folder: Path, tokenizer: Any) -> None:
    assert read_native(folder).weights.stop_tokens == {tokenizer.eos_token_id}
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert read_native(folder).weights.stop_tokens == {3, 4}
    (folder / "generation_config.json").unlink()
    reconfigure(folder, eos_token_id=5)
    assert read_native(folder).weights.stop_tokens == {5}


def cut(folder: Path, share: float) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: int(share * weights.stat().st_size)])


DAMAGE: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "weights cut in half": ("model.safetensors.*may be cut short", lambda folder: cut(folder, 0.5)),
    "weights cut in the header": ("model.safetensors.*may be cut short", lambda folder: cut(folder, 0.001)),
    "weights empty": ("model.safetensors.*may be cut short", lambda folder: cut(folder, 0)),
    "weights gone": ("lacks model.safetensors", lambda folder: (folder / "model.safetensors").unlink()),
    "an index that is none": (
        r"model\.safetensors\.index\.json.*may be cut short",
        lambda folder: (
            (folder / "model.safetensors").rename(folder / "gone")
            and (folder / "model.safetensors.index.json").write_text("[]")
        ),
    ),
    "a tensor gone": (
        r"lacks 1 of its tensors, such as 'model\.layers\.1\.mlp\.up_proj\.weight'",
        lambda folder: rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight")),
    ),
    "a tensor of another shape": (
        r"'model\.norm\.weight' of .* has shape \[7\], but must have \[32\]",
        lambda folder: rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)})),
    ),
    "config of another size": (
        r"'model\.embed_tokens\.weight' of .* has shape \[\d+, 32\], but must have \[\d+, 64\]",
        lambda folder: reconfigure(folder, hidden_size=64, head_dim=8),
    ),
    "more layers in the config": (
        r"lacks 9 of its tensors, such as 'model\.layers\.2\.",
        lambda folder: reconfigure(folder, num_hidden_layers=3),
    ),
    "config is no JSON": (r"Cannot read the model .* \(", lambda folder: (folder / "config.json").write_text("{ garb")),
    "unknown model type": (
        r"Cannot read the model .* \(",
        lambda folder: reconfigure(folder, model_type="nonsense"),
    ),
    "no tokenizer": (
        r"Cannot read the model .* \(",
        lambda folder: [file.rename(f"{file}.gone") for file in folder.glob("token*")],
    ),
    "generation settings cut short": (
        r"Cannot read the model .* \(",
        lambda folder: (folder / "generation_config.json").write_text('{"eos'),
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_a_model_error_that_says_what_is_wrong(damage: str, folder: Path) -> None:
    message, spoil = DAMAGE[damage]
    spoil(folder)
    with pytest.raises(ModelError, match=message) as caught:
        read_native(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_quantised_checkpoint_is_refused_by_its_method(folder: Path) -> None:
    reconfigure(folder, quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(UnsupportedError, match="quantised by 'awq'"):
        read_native(folder)
    assert "quantised by 'awq'" in str(refuses(folder))


def test_a_folder_that_is_supported_is_not_refused_and_a_damaged_one_is_told(folder: Path) -> None:
    assert refuses(folder) is None
    cut(folder, 0.5)
    with pytest.raises(ModelError, match="may be cut short"):
        refuses(folder)


def test_facts_of_a_folder(folder: Path) -> None:
    model = model_of("llama", num_attention_heads=2, tie_word_embeddings=True).bfloat16()
    model.save_pretrained(folder)
    facts, read = inspect_model(ModelFiles("it", folder)), read_native(folder).weights
    assert (facts.model, facts.path, facts.architecture, facts.context) == ("it", str(folder), "llama", 128)
    assert facts.parameters == sum(weight.numel() for weight in model.parameters())
    assert facts.tensors == {"BF16": len(list(model.parameters()))}
    assert facts.bytes == 2 * facts.parameters
    assert facts.bytes_per_token == read.bytes_per_token
    assert (facts.backend, facts.not_native) == ("native", None)


def test_facts_of_a_folder_that_another_backend_runs(folder: Path) -> None:
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, n_positions=77)
    seeded(transformers.GPT2LMHeadModel, config, 0).save_pretrained(folder)
    facts = inspect_model(ModelFiles("it", folder))
    assert (facts.architecture, facts.context, facts.bytes_per_token) == ("gpt2", 77, None)
    assert facts.backend == "transformers" and "does not know model type 'gpt2'" in str(facts.not_native)
    cut(folder, 0.5)
    with pytest.raises(ModelError, match="may be cut short"):
        inspect_model(ModelFiles("it", folder))


def test_tensors_by_other_names_are_left_to_the_other_backend(folder: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    rewrite(folder, rename)
    assert "it holds tensors that no model of type 'llama' has, such as 'embed_tokens.weight'" in str(refuses(folder))
    with pytest.raises(ModelError, match=r"Cannot read the model .*nowhere"):
        read_native(folder / "nowhere")


def test_frequencies_that_old_checkpoints_hold_are_left_alone(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(4)}))
    read_native(folder)
