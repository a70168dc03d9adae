"""Reading models: whole ones, damaged ones, too large ones, and GGUF files with their converted copy."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from foredraft import api
from foredraft.backends import checkpoint
from foredraft.backends.checkpoint import load_checkpoint, memory_budget, pick_device, pick_dtype
from foredraft.errors import InvalidInputError, ModelError
from gguf_files import write_gguf
from tiny import plain_chain, tiny_llama

IDS = list(range(3, 40))


@pytest.fixture(scope="module")
def gguf_content(tmp_path_factory: pytest.TempPathFactory, text_target: Any, tokenizer: Any) -> bytes:
    """The model of `text_target` as a GGUF file."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(file, text_target.model, tokenizer)
    return file.read_bytes()


@pytest.fixture
def gguf_file(tmp_path: Path, gguf_content: bytes) -> Path:
    file = tmp_path / "tiny model.gguf"
    file.write_bytes(gguf_content)
    return file


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model's folder that a test may damage."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "copy"))


# Whole models


def test_a_folder_loads_as_it_was_saved(tiny_folder: Path, text_target: Any, tokenizer: Any) -> None:
    model, read_tokenizer = load_checkpoint(tiny_folder)
    assert torch.equal(plain_chain(model, IDS), plain_chain(text_target.model, IDS))
    assert read_tokenizer.get_vocab() == tokenizer.get_vocab()
    assert model.dtype == torch.float32
    assert model.device.type == "cpu" or torch.cuda.is_available()
    assert not model.training


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_dtype_is_what_was_asked_for(dtype: str, tiny_folder: Path) -> None:
    model, _ = load_checkpoint(tiny_folder, device="cpu", dtype=dtype)
    assert {weight.dtype for weight in model.parameters()} == {getattr(torch, dtype)}


def test_on_a_cpu_auto_is_float32_whatever_the_checkpoint_has(tmp_path: Path, tiny_folder: Path) -> None:
    half, tokenizer = load_checkpoint(tiny_folder, device="cpu", dtype="bfloat16")
    half.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert load_checkpoint(tmp_path, device="cpu").model.dtype == torch.float32
    assert pick_dtype("auto", torch.device("cuda")) == "auto"  # the checkpoint's own


# Wrong arguments


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", "cpu:x", ""])
def test_a_device_that_is_not_there_is_refused(device: str, tiny_folder: Path) -> None:
    with pytest.raises(InvalidInputError, match=rf"Device '{device}' cannot be used here \(.+\)\. Try 'auto' or 'cpu'"):
        load_checkpoint(tiny_folder, device=device)


def test_the_cpu_is_always_there() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", ["float64", "int8", "nonsense", ""])
def test_an_unknown_dtype_is_refused(dtype: str, tiny_folder: Path) -> None:
    with pytest.raises(InvalidInputError, match=f"dtype is '{dtype}', but must be one of auto, float32, "):
        load_checkpoint(tiny_folder, dtype=dtype)


# Damaged models


def _cut_short(folder: Path, share: float) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: int(share * weights.stat().st_size)])


def _change_tensor(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "weights cut in half": lambda folder: _cut_short(folder, 0.5),
    "weights cut in the header": lambda folder: _cut_short(folder, 0.001),
    "weights empty": lambda folder: _cut_short(folder, 0),
    "weights of another kind": lambda folder: (folder / "model.safetensors").write_text("<!DOCTYPE html>" * 99),
    "a tensor of another shape": lambda folder: _change_tensor(folder, "model.norm.weight", lambda w: w[:7]),
    "config is no JSON": lambda folder: (folder / "config.json").write_text("{ garbage"),
    "config is empty": lambda folder: (folder / "config.json").write_text(""),
    "config is a list": lambda folder: (folder / "config.json").write_text("[1]"),
    "config without a model type": lambda folder: (folder / "config.json").write_text("{}"),
    "config is not text": lambda folder: (folder / "config.json").write_bytes(bytes(range(256))),
    "unknown model type": lambda folder: _change_config(folder, model_type="nonsense"),
    "config of another size": lambda folder: _change_config(folder, hidden_size=64),
    "config with a wrong value": lambda folder: _change_config(folder, num_hidden_layers="two"),
    "no tokenizer": lambda folder: [file.rename(f"{file}.gone") for file in folder.glob("token*")],
    "tokenizer cut short": lambda folder: (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {'),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_folder_is_a_model_error_that_names_it(damage: Callable[[Path], Any], folder: Path) -> None:
    damage(folder)
    with pytest.raises(ModelError) as caught:
        load_checkpoint(folder)
    assert f"Cannot read the model {folder} (" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_tensor_is_named_and_not_made_up(folder: Path) -> None:
    _change_tensor(folder, "model.layers.1.mlp.up_proj.weight", lambda _: None)
    with pytest.raises(ModelError, match=r"lacks 1 of its tensors, such as 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load_checkpoint(folder)


def test_a_missing_layer_is_counted(folder: Path) -> None:
    _change_config(folder, num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"lacks 9 of its tensors, such as 'model\.layers\.2\.") as caught:
        load_checkpoint(folder)
    assert str(folder) in str(caught.value)


# The memory budget


def test_the_memory_budget_of_the_tiny_model_is_right() -> None:
    model = tiny_llama(seed=1)
    budget = memory_budget(model.config, torch.float32)
    assert budget.weights == sum(weight.nbytes for weight in model.parameters())
    assert budget.kv_per_token == 2 * 4 * 2 * 2 * 8  # keys and values, float32, layers, KV heads, head size
    assert budget.total(100) == budget.weights + 100 * budget.kv_per_token


def test_the_memory_budget_is_what_a_cache_takes() -> None:
    model = tiny_llama(seed=1)
    with torch.inference_mode():
        cache = model(input_ids=torch.tensor([IDS]), use_cache=True).cache
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == len(IDS) * memory_budget(model.config, torch.float32).kv_per_token


def test_the_memory_budget_halves_in_half_precision() -> None:
    config = tiny_llama(seed=1).config
    full, half = memory_budget(config, torch.float32), memory_budget(config, torch.bfloat16)
    assert (2 * half.weights, 2 * half.kv_per_token) == tuple(full)
    config.dtype = torch.float16
    assert memory_budget(config, "auto") == half


def test_the_memory_budget_counts_tied_embeddings_once() -> None:
    tied = tiny_llama(seed=1, tie_word_embeddings=True)
    apart = tiny_llama(seed=1, tie_word_embeddings=False)
    saved = memory_budget(apart.config, torch.float32).weights - memory_budget(tied.config, torch.float32).weights
    assert saved == tied.get_input_embeddings().weight.nbytes


def test_a_model_that_does_not_fit_is_refused_with_the_figures_before_it_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _cut_short(folder, 0.5)  # would be noticed if it were read
    monkeypatch.setattr(checkpoint, "memory_budget", lambda *_: checkpoint.MemoryBudget(7_250_000_000, 131_072))
    monkeypatch.setattr(checkpoint, "available_memory", lambda _: 4_000_000_000)
    figures = "7.25 GB of weights and 131 kB of KV a token, with 4.00 GB free on cpu"
    with pytest.raises(ModelError) as caught:
        load_checkpoint(folder, device="cpu")
    assert f"does not fit: it takes {figures}. Use a smaller model, a smaller dtype" in str(caught.value)


def test_the_budget_has_room_for_a_sequence(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = memory_budget(load_checkpoint(tiny_folder).model.config, torch.float32)
    enough = budget.total(2048)
    monkeypatch.setattr(checkpoint, "available_memory", lambda _: enough)
    load_checkpoint(tiny_folder, device="cpu")
    monkeypatch.setattr(checkpoint, "available_memory", lambda _: enough - 1)
    with pytest.raises(ModelError, match="does not fit"):
        load_checkpoint(tiny_folder, device="cpu")


def test_the_budget_is_logged(tiny_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="foredraft"):
        load_checkpoint(tiny_folder)
    assert "GB of weights" in caplog.text


def test_there_is_memory_here() -> None:
    assert checkpoint.available_memory(torch.device("cpu")) > 0


# GGUF files


def test_a_gguf_file_loads_as_the_model_it_was_made_from(gguf_file: Path, text_target: Any, tokenizer: Any) -> None:
    model, read_tokenizer = load_checkpoint(gguf_file)
    assert torch.equal(plain_chain(model, IDS), plain_chain(text_target.model, IDS))
    text = "hello the 你好 🌍"
    assert read_tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert read_tokenizer.chat_template == tokenizer.chat_template
    assert read_tokenizer.eos_token == tokenizer.eos_token


def test_a_gguf_file_is_converted_once_and_the_copy_is_reused(gguf_file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "cache" / "converted"
    first = load_checkpoint(gguf_file, converted=copy)
    assert sorted(path.name for path in copy.parent.iterdir()) == ["converted"]
    gguf_file.write_bytes(b"GGUF and nothing else")  # would be noticed if it were read
    again = load_checkpoint(gguf_file, converted=copy)
    assert torch.equal(plain_chain(again.model, IDS), plain_chain(first.model, IDS))
    assert again.tokenizer.get_vocab() == first.tokenizer.get_vocab()
    assert again.tokenizer.chat_template == first.tokenizer.chat_template
    assert again.model.generation_config.eos_token_id == first.model.generation_config.eos_token_id


def test_without_a_folder_for_it_no_copy_is_kept(gguf_file: Path) -> None:
    load_checkpoint(gguf_file)
    assert [path.name for path in gguf_file.parent.iterdir()] == [gguf_file.name]


def test_only_an_exact_copy_is_kept(gguf_file: Path, tmp_path: Path) -> None:
    load_checkpoint(gguf_file, converted=tmp_path / "copy", dtype="bfloat16")
    assert not (tmp_path / "copy").exists()


def test_a_gguf_file_that_changed_is_converted_anew(gguf_file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    options: Any = {"cache": cache, "backend": "transformers"}
    api.load(gguf_file, "none", **options)
    os.utime(gguf_file, ns=(1, 1))
    api.load(gguf_file, "none", **options)
    api.load(gguf_file, "none", **options)
    assert len(list((cache / "converted").iterdir())) == 2


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.05, 0.5, 0.9, 0.999])
def test_a_gguf_file_cut_short_is_a_model_error_that_names_it(
    share: float, gguf_file: Path, gguf_content: bytes, tmp_path: Path
) -> None:
    gguf_file.write_bytes(gguf_content[: int(share * len(gguf_content))])
    with pytest.raises(ModelError, match=r"Cannot read the model .*cut short, damaged, or of a kind") as caught:
        load_checkpoint(gguf_file, converted=tmp_path / "copy")
    assert str(gguf_file) in str(caught.value)
    assert not (tmp_path / "copy").exists()


def _no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_copy_that_cannot_be_saved_is_only_a_warning(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", _no_space)
    model, _ = load_checkpoint(gguf_file, converted=tmp_path / "converted" / "copy")
    assert plain_chain(model, IDS).isfinite().all()
    assert "The converted model is not kept" in caplog.text
    assert "No space left on device" in caplog.text
    assert list((tmp_path / "converted").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_only_a_warning(
    gguf_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "converted").write_text("a file where the folder should be")
    model, _ = load_checkpoint(gguf_file, converted=tmp_path / "converted" / "copy")
    assert plain_chain(model, IDS).isfinite().all()
    assert "The converted model is not kept" in caplog.text


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_damaged_copy_is_made_again(
    share: float, gguf_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = tmp_path / "copy"
    first = load_checkpoint(gguf_file, converted=copy)
    _cut_short(copy, share)
    again = load_checkpoint(gguf_file, converted=copy)
    assert "The converted copy is not used" in caplog.text
    assert torch.equal(plain_chain(again.model, IDS), plain_chain(first.model, IDS))
    caplog.clear()
    load_checkpoint(gguf_file, converted=copy)
    assert caplog.text == ""


def test_a_folder_without_a_model_is_not_taken_for_a_copy(gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    model, _ = load_checkpoint(gguf_file, converted=tmp_path / "copy")
    assert plain_chain(model, IDS).isfinite().all()
    assert (tmp_path / "copy" / "config.json").is_file()
