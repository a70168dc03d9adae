"""Heads in files: every layout there and back, foreign checkpoints, what does not fit, and drafters by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.backends.base import Backend
from foredraft.backends.transformers import TransformersBackend
from foredraft.engine import Engine
from foredraft.errors import ForedraftError, InvalidInputError, ModelError, UnsupportedError
from foredraft.heads import checkpoints, files
from foredraft.heads.block import BlockShape, rotary
from foredraft.heads.checkpoints import Checkpoint, TargetConfig
from foredraft.heads.files import Head, about_head, load_head, save_head
from foredraft.heads.model_layer import ModelLayerHead, own_head
from foredraft.heads.parallel import MedusaHead, MTPHead, ParallelHead
from foredraft.heads.recurrent import Eagle3Head, Eagle3Norms, EagleHead, RecurrentHead, SequentialMTPHead
from foredraft.heads.runs import runs_of
from foredraft.loading import Loader, parse_drafter
from foredraft.models import BUNDLED, ModelFiles
from foredraft.proposers.auto import Auto
from foredraft.proposers.hybrid import Hybrid
from foredraft.types import SamplingParams
from tiny import BACKENDS, CountingBackend, generate, seeded, tiny_llama

VOCABULARY, LAYERS = 64, 5
SHAPE = BlockShape(hidden=32, heads=4, kv_heads=2, head_dim=8, mlp=48, rope_theta=50000.0)
NORMED = BlockShape(hidden=32, heads=4, kv_heads=2, head_dim=16, mlp=48, qk_norm=True)
SOME, ALL = torch.arange(1, VOCABULARY, 3), torch.arange(VOCABULARY)

HEADS: dict[str, Callable[[], RecurrentHead]] = {
    "eagle3": lambda: Eagle3Head(SHAPE, (1, 2, 4), SOME),
    "eagle3-all-tokens": lambda: Eagle3Head(SHAPE, (0, 3), ALL),
    "eagle3-qk-norms": lambda: Eagle3Head(NORMED, (1, 2, 3), SOME),
    "eagle3-norm-before-residual": lambda: Eagle3Head(SHAPE, (1, 2), SOME, Eagle3Norms(norm_before_residual=True)),
    "eagle3-norm-before-fc": lambda: Eagle3Head(SHAPE, (1, 2), SOME, Eagle3Norms(norm_before_fc=True)),
    "eagle3-fc-norm": lambda: Eagle3Head(SHAPE, (1, 2), SOME, Eagle3Norms(fc_norm=True, norm_output=True)),
    "eagle": lambda: EagleHead(SHAPE, LAYERS),
    "mtp": lambda: SequentialMTPHead(SHAPE, LAYERS),
    "mtp-qwen3": lambda: SequentialMTPHead(NORMED, LAYERS, norm_output=True),
}


@pytest.fixture(scope="module")
def target() -> TransformersBackend:
    return TransformersBackend(tiny_llama(1, layers=LAYERS))


def made(name: str) -> RecurrentHead:
    """A seeded head, whose norms are not all ones either."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        head = HEADS[name]()
        with torch.no_grad():
            for weight in head.parameters():
                weight.add_(torch.randn_like(weight), alpha=0.2)
    return head.eval()


def saved(name: str, folder: Path, target: Backend, **more: Any) -> RecurrentHead:
    head = made(name)
    config = TargetConfig.of(target, "org/name")
    save_head(head, folder, target_config=config, dtype=torch.float32, **more)
    return head


@torch.inference_mode()
def logits_of(head: Head, target: Backend) -> Tensor:
    """`[3, V]`: after some committed tokens, and two drafted ones further, over all ids of the target."""
    assert isinstance(head, RecurrentHead)
    ids = [3, 1, 4, 1, 5, 9]
    cache = target.new_cache()
    kept = cache.keep_features(head.feature_layers)
    target.prefill(cache, ids)
    rows = kept.take()[1]
    assert rows is not None
    run = runs_of(head, target)()
    run.commit(rows[:2], ids[1:3])
    found = torch.cat([run.commit(rows[2:-1], ids[3:]), run.expand([-1], [1]), run.expand([0], [2])])
    if head.draft_ids is None:
        return found
    return torch.full((3, target.vocab_size), -torch.inf).index_copy_(1, head.draft_ids, found)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_comes_back_as_it_was(name: str, tmp_path: Path, target: Backend) -> None:
    head = saved(name, tmp_path / "head", target, about={"recipe": "none"}, embedding=target.embed(range(VOCABULARY)))
    back = load_head(tmp_path / "head", target)
    assert type(back) is type(head) and back.feature_layers == head.feature_layers and back.shape == head.shape
    assert torch.equal(logits_of(back, target), logits_of(head, target))
    assert about_head(tmp_path / "head")["recipe"] == "none"
    assert not any(weight.requires_grad for weight in back.parameters())


def test_weights_are_kept_in_16_bits_unless_asked_otherwise(tmp_path: Path, target: Backend) -> None:
    head = made("eagle3")
    save_head(head, tmp_path / "head", target_config=TargetConfig.of(target, "org/name"))
    stored = load_file(tmp_path / "head" / "model.safetensors")
    assert stored["fc.weight"].dtype is torch.bfloat16 and stored["t2d"].dtype is torch.bool
    assert (logits_of(load_head(tmp_path / "head", target), target) - logits_of(head, target)).abs().nanmean() < 0.1


def test_offsets_and_mask_name_the_targets_ids(tmp_path: Path, target: Backend) -> None:
    saved("eagle3", tmp_path / "head", target)
    stored = load_file(tmp_path / "head" / "model.safetensors")
    assert torch.equal(torch.arange(len(SOME)) + stored["d2t"], SOME)
    assert torch.equal(stored["t2d"].nonzero()[:, 0], SOME)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3" and config["draft_vocab_size"] == len(SOME)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/name"


PARALLEL: dict[str, Callable[[], ParallelHead]] = {
    "medusa": lambda: MedusaHead(SHAPE.hidden, LAYERS, 3, blocks=2),
    "medusa, few tokens": lambda: MedusaHead(SHAPE.hidden, LAYERS, 2, own_matrices=len(SOME), draft_ids=SOME),
    "medusa, matrices of its own": lambda: MedusaHead(SHAPE.hidden, LAYERS, 2, own_matrices=VOCABULARY),
    "mtp, independent": lambda: MTPHead(SHAPE.hidden, LAYERS, 3, form="independent", mlp=24),
    "mtp, cascaded": lambda: MTPHead(SHAPE.hidden, LAYERS, 2, form="cascaded", draft_ids=SOME),
}


@pytest.mark.parametrize("name", PARALLEL)
def test_parallel_heads_come_back_as_they_were_written(name: str, tmp_path: Path, target: Backend) -> None:
    torch.manual_seed(5)
    head = PARALLEL[name]()
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(torch.randn(weight.shape).bfloat16())
    save_head(head, tmp_path / "head", target_config=TargetConfig.of(target, "org/name"))
    back = load_head(tmp_path / "head", target)
    assert isinstance(back, ParallelHead) and type(back) is type(head)
    ids, others = back.draft_ids, head.draft_ids
    assert ids is others if ids is None or others is None else torch.equal(ids, others)
    states = torch.randn(3, 1, SHAPE.hidden)
    assert torch.equal(back.states(states), head.states(states))
    for own, other in zip(back.parameters(), head.parameters(), strict=True):
        assert torch.equal(own, other)


def test_a_public_medusa_checkpoint_is_read(tmp_path: Path, target: Backend) -> None:
    """As its authors' training writes it: a `.pt` file, and a matrix for each head."""
    torch.manual_seed(5)
    tensors = {}
    for depth in range(2):
        tensors[f"{depth}.0.linear.weight"] = torch.randn(SHAPE.hidden, SHAPE.hidden)
        tensors[f"{depth}.0.linear.bias"] = torch.randn(SHAPE.hidden)
        tensors[f"{depth}.1.weight"] = torch.randn(VOCABULARY, SHAPE.hidden)
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "org/name"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    head = load_head(tmp_path, target)
    assert isinstance(head, MedusaHead)
    x = torch.randn(1, 1, SHAPE.hidden)
    read = x[:, 0] + torch.nn.functional.silu(x[:, 0] @ tensors["1.0.linear.weight"].T + tensors["1.0.linear.bias"])
    found = head.logits(head.states(x), target.head)[1]
    assert torch.allclose(found, read @ tensors["1.1.weight"].T, atol=1e-4)
    found_by_name = drafter(f"medusa:{tmp_path}", target)
    params = SamplingParams(max_tokens=12)
    wanted = generate(Engine(target), [3, 1, 4], params).ids
    assert generate(Engine(target, found_by_name), [3, 1, 4], params).ids == wanted
    (tmp_path / "config.json").write_text(json.dumps({**config, "medusa_num_heads": 3}))
    with pytest.raises(ModelError, match=r"lacks tensor '2.0.linear.bias'"):
        load_head(tmp_path, target)
    other = tensors | {"0.0.linear.weight": torch.randn(8, 8)}
    torch.save(other, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(UnsupportedError, match=r"states of 8, and this target has 32"):
        load_head(tmp_path, target)


def test_a_layer_after_the_final_norm_cannot_be_written(tmp_path: Path, target: Backend) -> None:
    head = Eagle3Head(SHAPE, (1, LAYERS), SOME)
    with pytest.raises(InvalidInputError, match="reads layer 5 of 5"):
        save_head(head, tmp_path / "head", target_config=TargetConfig.of(target, "org/name"))


def test_a_head_is_written_whole_or_not_at_all(
    tmp_path: Path, target: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = saved("eagle3", tmp_path / "head", target)

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("foredraft.heads.checkpoints.save_file", full)
    with pytest.raises(ModelError, match=r"Cannot write .*no space left"):
        saved("mtp", tmp_path / "head", target)
    assert torch.equal(logits_of(load_head(tmp_path / "head", target), target), logits_of(old, target))
    assert [file.name for file in tmp_path.iterdir()] == ["head"]
    monkeypatch.undo()
    new = saved("mtp", tmp_path / "head", target)
    assert torch.equal(logits_of(load_head(tmp_path / "head", target), target), logits_of(new, target))


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, target: Backend) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(b"")
    with pytest.raises(InvalidInputError, match=r"also holds checkpoint\.pt"):
        saved("eagle3", tmp_path, target)
    with pytest.raises(InvalidInputError, match="is a file"):
        saved("eagle3", tmp_path / "checkpoint.pt", target)


# Layouts of others


def llama_config(shape: BlockShape, **more: Any) -> dict[str, Any]:
    """A config.json as those that train heads write it."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": shape.epsilon,
        "rope_theta": shape.rope_theta,
        "vocab_size": VOCABULARY,
        "torch_dtype": "float16",
        **more,
    }


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, as_pickle: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if as_pickle:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def eagle3_tensors(head: RecurrentHead, order: Tensor) -> dict[str, Tensor]:
    """EAGLE-3 by SafeAILab's names, its draft vocabulary in the order given."""
    own = head.state_dict()
    layer = {name: own.pop(name) for name in list(own) if name.startswith(("block.", "input_layernorm", "hidden_norm"))}
    tensors = own | {f"midlayer.{name.removeprefix('block.')}": tensor for name, tensor in layer.items()}
    assert head.draft_ids is not None
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    tensors["d2t"] = head.draft_ids[order] - torch.arange(len(order))
    tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, head.draft_ids, True)
    return tensors


@pytest.mark.parametrize("as_pickle", [True, False], ids=["bin", "safetensors"])
def test_safeailabs_eagle3_in_any_order_of_ids(as_pickle: bool, tmp_path: Path, target: Backend) -> None:
    head = Eagle3Head(SHAPE, (2, LAYERS // 2 + 1, LAYERS - 1), SOME)
    head.load_state_dict(made("eagle3").state_dict())
    order = torch.randperm(len(SOME), generator=torch.Generator().manual_seed(0))
    config = llama_config(SHAPE, draft_vocab_size=len(SOME), eagle_aux_hidden_state_layer_ids=[2, 3, 4])
    write(tmp_path, config, eagle3_tensors(head, order), as_pickle=as_pickle)
    back = load_head(tmp_path, target)
    assert isinstance(back, Eagle3Head) and torch.equal(back.draft_ids, SOME)
    assert torch.equal(logits_of(back, target), logits_of(head, target))


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({}, (2, 4, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 6]}}, (1, 2, 7)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 3, 4]}, (0, 3, 4)),
    ],
    ids=["usual", "sglang", "vllm"],
)
def test_which_layers_a_head_reads(settings: dict[str, Any], layers: tuple[int, ...], tmp_path: Path) -> None:
    target = TransformersBackend(tiny_llama(1, layers=8))
    head = made("eagle3")
    config = llama_config(SHAPE, draft_vocab_size=len(SOME), **settings)
    write(tmp_path, config, eagle3_tensors(head, torch.arange(len(SOME))))
    assert load_head(tmp_path, target).feature_layers == layers


@pytest.mark.parametrize("bias", [True, False])
def test_safeailabs_eagle1(bias: bool, tmp_path: Path, target: Backend) -> None:
    head = made("eagle")
    own = head.state_dict()
    tensors = {name.replace("block.", "layers.0."): tensor for name, tensor in own.items()}
    tensors["embed_tokens.weight"] = target.embed(range(VOCABULARY))
    if not bias:
        own["fc.bias"].zero_()
        del tensors["fc.bias"]
    write(tmp_path, llama_config(SHAPE, bias=bias), tensors, as_pickle=True)
    back = load_head(tmp_path, target)
    assert isinstance(back, EagleHead)
    assert torch.equal(logits_of(back, target), logits_of(head, target))


def test_the_speculators_formats_own_eagle1(tmp_path: Path, target: Backend) -> None:
    head = made("eagle")
    tensors = {name.replace("block.", "layers.0."): tensor for name, tensor in head.state_dict().items()}
    tensors["lm_head.weight"] = target.head_rows(range(VOCABULARY))
    config = {"speculators_model_type": "eagle", "fusion_bias": True, "layernorms": False}
    config["transformer_layer_config"] = llama_config(SHAPE)
    back = load_head(write(tmp_path, config, tensors), target)
    assert torch.equal(logits_of(back, target), logits_of(head, target))
    write(tmp_path, {**config, "layernorms": True}, tensors)
    with pytest.raises(ModelError, match="layernorms = true"):
        load_head(tmp_path, target)


def test_a_layer_as_it_was_written_is_the_one_that_transformers_reads(
    tmp_path: Path, target: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short way, which does not import transformers' models, and the long one, which all other files take."""
    save_head(made("eagle3"), tmp_path / "head", target_config=TargetConfig.of(target, "org/name"))
    file = tmp_path / "head" / "config.json"
    config = json.loads(file.read_text())
    taken = Checkpoint(tmp_path, config, {})
    assert isinstance(checkpoints._config_of(taken.layer), SimpleNamespace)
    short = checkpoints.block_shape(taken)
    for other in ({"hidden_size": None}, {"more": 1}, {"mlp_bias": 0}, {"rope_theta": 1.0}):
        assert not isinstance(_config_or_none({**taken.layer, **other}), SimpleNamespace)
    gelu = {"transformer_layer_config": {**taken.layer, "hidden_act": "gelu"}}
    with pytest.raises(ModelError, match="hidden_act = 'gelu'"):
        checkpoints.block_shape(Checkpoint(tmp_path, gelu, {}))
    monkeypatch.setattr(checkpoints, "_WRITTEN", {})
    assert checkpoints.block_shape(taken) == short


def _config_or_none(layer: Any) -> Any:
    """What is made of a layer, `None` if transformers refuses it."""
    try:
        return checkpoints._config_of(layer)
    except Exception:  # its own
        return None


def test_rotary_positions_scaled_as_in_llama_3(tmp_path: Path, target: Backend) -> None:
    """The angles are those that transformers computes, and the head drafts with them."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    head = made("eagle")
    tensors = {name.replace("block.", "layers.0."): tensor for name, tensor in head.state_dict().items()}
    config = llama_config(SHAPE, rope_scaling=rope, max_position_embeddings=512)
    back = load_head(write(tmp_path, config, tensors), target)
    known: Any = {name: value for name, value in config.items() if name != "architectures"}
    positions = torch.arange(100)
    wanted: Any = LlamaRotaryEmbedding(LlamaConfig(**known))
    cos, sin = wanted(torch.zeros(1, 100, 32), positions[None])
    assert isinstance(back, RecurrentHead)
    assert torch.allclose(rotary(positions, back.shape)[0], cos[0, :, :4], atol=1e-5)
    assert torch.allclose(rotary(positions, back.shape)[1], sin[0, :, :4], atol=1e-5)
    assert not torch.equal(logits_of(back, target), logits_of(head, target))


# What does not fit


def changed_config(**change: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "config.json"
        config = json.loads(file.read_text())
        for place in (config, config["transformer_layer_config"]):
            place.update({name: value for name, value in change.items() if name in place or name.startswith("rope_s")})
        file.write_text(json.dumps(config))

    return apply


def changed_tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def removed(tensors: dict[str, Tensor], *names: str) -> None:
    for name in names:
        del tensors[name]


WRONG: dict[str, tuple[Callable[[Path], Any], type[ForedraftError], str]] = {
    "hidden size": (changed_config(hidden_size=48), UnsupportedError, "with states of 48, and this target has 32"),
    "vocabulary": (changed_config(vocab_size=99), UnsupportedError, "a vocabulary of 99, and this target has 64"),
    "layers of the target": (
        changed_config(eagle_aux_hidden_state_layer_ids=[1, 2, 30]),
        UnsupportedError,
        "reads layers 1, 2, 30 of its target, and this target has layers 0 to 4",
    ),
    "own size": (changed_config(target_hidden_size=64), UnsupportedError, "with states of 64"),
    "more layers": (changed_config(num_hidden_layers=2), ModelError, "has 2 decoder layers"),
    "activation": (changed_config(hidden_act="gelu"), ModelError, "hidden_act = 'gelu'"),
    "bias": (changed_config(attention_bias=True), ModelError, "attention_bias = True"),
    "rotary": (changed_config(rope_parameters={"rope_type": "yarn", "factor": 2.0}), ModelError, "of kind 'yarn'"),
    "size missing": (changed_config(num_attention_heads=None), ModelError, "num_attention_heads is None"),
    "draft vocabulary": (changed_config(draft_vocab_size=12), ModelError, r"'d2t' is \[21\], but .* must be \[12\]"),
    "two feature norms": (changed_config(fc_norm=True, norm_before_fc=True), InvalidInputError, "fc_norm is True"),
    "a norm that is not there": (changed_config(fc_norm=True), ModelError, "lacks tensor 'fc_norm.0.weight'"),
    "tensor missing": (changed_tensors(lambda t: removed(t, "norm.weight")), ModelError, "lacks tensor 'norm.weight'"),
    "tensor unknown": (
        changed_tensors(lambda t: t.update({"layers.1.w": torch.zeros(1)})),
        ModelError,
        "has tensor 'layers.1.w', which is not known",
    ),
    "tensor of another shape": (
        changed_tensors(lambda t: t.update({"fc.weight": torch.zeros(32, 64)})),
        ModelError,
        r"'fc.weight' is \[32, 64\], but by its config.json must be \[32, 96\]",
    ),
    "ids missing": (changed_tensors(lambda t: removed(t, "d2t", "t2d")), ModelError, "lacks tensor 'd2t'"),
    "ids twice": (changed_tensors(lambda t: t["d2t"].mul_(0).sub_(torch.arange(21))), ModelError, "21 different ids"),
    "ids and mask": (changed_tensors(lambda t: t["t2d"].logical_not_()), ModelError, "'d2t' and 't2d' do not name"),
    "rows missing": (
        changed_tensors(lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:5].clone()})),
        ModelError,
        "must have a row for each of 21 ids",
    ),
    "own embedding": (
        changed_tensors(lambda t: t.update({"embed_tokens.weight": torch.randn(64, 32)})),
        ModelError,
        "has an embedding of its own",
    ),
    "kind": (
        lambda folder: (folder / "config.json").write_text('{"speculators_model_type": "dflash"}'),
        ModelError,
        r"of no known kind \(eagle, eagle3, medusa, mtp\)",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), ModelError, "must say what the head in it is"),
    "no table": (lambda folder: (folder / "config.json").write_text("[]"), ModelError, "must hold a table"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ModelError, "has no weights"),
    "cut short": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{"),
        ModelError,
        "may be cut short",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_told(what: str, tmp_path: Path, target: Backend) -> None:
    spoil, error, says = WRONG[what]
    saved("eagle3", tmp_path, target)
    spoil(tmp_path)
    with pytest.raises(error, match=says):
        load_head(tmp_path, target)


def test_files_that_would_run_code_are_refused(tmp_path: Path, target: Backend) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_config(SHAPE)))
    torch.save({"fc.weight": subprocess.Popen}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="more than tensors, which is not loaded"):
        load_head(tmp_path, target)
    torch.save([torch.zeros(1)], tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="must hold tensors by name"):
        load_head(tmp_path, target)


# By name


def drafter(name: str, target: Backend, model: ModelFiles | None = None) -> Any:
    return Loader().drafter(parse_drafter(name), target, None, model)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["eagle3", "eagle", "mtp"])
def test_a_drafter_by_the_name_of_its_head(name: str, backend: str, tmp_path: Path) -> None:
    target = BACKENDS[backend](tiny_llama(1, layers=LAYERS))
    saved(name, tmp_path / "head", target)
    found = drafter(f"{name}:{tmp_path / 'head'}", target)
    assert found.name == name and found.runs_model
    params = SamplingParams(max_tokens=12)
    assert generate(Engine(target, found), [3, 1, 4], params).ids == generate(Engine(target), [3, 1, 4], params).ids


def test_heads_are_parts_of_hybrid_and_auto(tmp_path: Path, target: Backend) -> None:
    saved("eagle3", tmp_path / "head", target)
    hybrid = drafter(f"hybrid:suffix+eagle3:{tmp_path / 'head'}", target)
    assert isinstance(hybrid, Hybrid) and hybrid.name == "hybrid:suffix+eagle3"
    auto = drafter(f"auto:suffix+eagle3:{tmp_path / 'head'}", target)
    assert isinstance(auto, Auto) and auto.arms["costly"].tolist() == [False, True]
    params = SamplingParams(max_tokens=24)
    wanted = generate(Engine(target), [3, 1, 4], params).ids
    assert generate(Engine(target, hybrid), [3, 1, 4], params).ids == wanted
    assert generate(Engine(target, auto), [3, 1, 4], params).ids == wanted


def test_a_head_of_another_kind_is_told(tmp_path: Path, target: Backend) -> None:
    saved("mtp", tmp_path / "head", target)
    with pytest.raises(InvalidInputError, match="is of kind 'mtp': ask for mtp:"):
        drafter(f"eagle3:{tmp_path / 'head'}", target)


@pytest.mark.parametrize("name", ["eagle", "medusa"])
def test_some_heads_must_be_named(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"needs more: {name}:REF with the folder or hub id"):
        parse_drafter(name)


def test_a_reference_that_is_nothing(tmp_path: Path, target: Backend) -> None:
    with pytest.raises(ModelError, match=r"is not there\. Give a folder"):
        drafter(f"eagle3:{tmp_path / 'nothing'}", target)
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"is a file\. Give a folder"):
        drafter(f"eagle3:{tmp_path / 'file'}", target)


def test_a_backend_without_features_is_refused(target: Backend) -> None:
    counting = CountingBackend(target)
    counting.capabilities = type(target.capabilities)(trees=True)
    for name in ("eagle3", "eagle:x", "mtp", "medusa:x"):
        with pytest.raises(UnsupportedError, match="needs what the target's layers compute"):
            drafter(name, counting)


def test_the_head_that_comes_with_a_model(tmp_path: Path, target: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_BUNDLED", tmp_path)
    with pytest.raises(UnsupportedError, match=r"only for: none yet.*foredraft train eagle3 MODEL"):
        drafter("eagle3", target)
    name = next(iter(BUNDLED))
    head = saved("eagle3", tmp_path / name, target)
    with pytest.raises(UnsupportedError, match=f"only for: {name}"):
        drafter("eagle3", target, ModelFiles("other", tmp_path))
    found = drafter("eagle3", target, ModelFiles(name, tmp_path))
    assert torch.equal(logits_of(found.head, target), logits_of(head, target))
    assert drafter(f"eagle3:{name}", target).head.kind == "eagle3"


# MTP layers of the model's own


def random_like(model: Any, names: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, shape in names.items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.1 * noise if len(shape) == 1 else 0.2 * noise
    return tensors


def module_names(prefix: str, hidden: int, deepseek: bool) -> dict[str, tuple[int, ...]]:
    names = (
        ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        if deepseek
        else ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    )
    shapes: tuple[tuple[int, ...], ...] = ((hidden,), (hidden,), (hidden, 2 * hidden), (hidden,))
    return {f"{prefix}{name}.weight": shape for name, shape in zip(names, shapes, strict=True)}


def with_mtp(model: Any, folder: Path, *, deepseek: bool) -> tuple[TransformersBackend, dict[str, Tensor]]:
    """A checkpoint with one more decoder layer like the model's last, and the rest of an MTP module, in a shard."""
    model.save_pretrained(folder)
    config = model.config
    count, last = config.num_hidden_layers, config.num_hidden_layers - 1
    stored = load_file(folder / "model.safetensors")
    prefix = f"model.layers.{count}." if deepseek else "mtp."
    layer = {name: tuple(t.shape) for name, t in stored.items() if name.startswith(f"model.layers.{last}.")}
    inner = prefix if deepseek else f"{prefix}layers.0."
    names = {name.replace(f"model.layers.{last}.", inner): shape for name, shape in layer.items()}
    tensors = random_like(model, {**names, **module_names(prefix, config.hidden_size, deepseek)})
    if deepseek:
        tensors[f"{prefix}embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
        tensors[f"{prefix}shared_head.head.weight"] = model.get_output_embeddings().weight.detach().clone()
    save_file(tensors, folder / "mtp.safetensors")
    return TransformersBackend(model), tensors


@pytest.mark.parametrize("deepseek", [True, False], ids=["model.layers.N", "mtp."])
def test_a_dense_models_own_mtp_layer(deepseek: bool, tmp_path: Path) -> None:
    target, tensors = with_mtp(tiny_llama(1, layers=LAYERS), tmp_path, deepseek=deepseek)
    head = drafter("mtp", target, ModelFiles("x", tmp_path)).head
    assert isinstance(head, SequentialMTPHead) and head.norm_output is not deepseek
    name = f"model.layers.{LAYERS}.eh_proj.weight" if deepseek else "mtp.fc.weight"
    assert torch.equal(head.eh_proj.weight, tensors[name])
    wrapped = own_layer_head(target, head)
    assert (logits_of(wrapped, target) - logits_of(head, target)).abs().max() < 1e-4


def own_layer_head(target: TransformersBackend, head: SequentialMTPHead) -> ModelLayerHead:
    """The same module around the model's own class of decoder layers."""
    wrapped = ModelLayerHead(target.model, norm_output=head.norm_output)
    state = {
        (f"layer.{name.removeprefix('block.')}" if name.startswith(("block.", "input_layernorm")) else name): tensor
        for name, tensor in head.state_dict().items()
    }
    wrapped.load_state_dict(state)
    return wrapped.eval()


def deepseek_v3() -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=12,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        initializer_range=0.3,
        max_position_embeddings=256,
    )
    return seeded(DeepseekV3ForCausalLM, config)


def glm4_moe() -> Any:
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    make: Any = Glm4MoeConfig  # its constructor's type hints lack head_dim
    config = make(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        use_qk_norm=True,
        initializer_range=0.3,
        max_position_embeddings=256,
    )
    return seeded(Glm4MoeForCausalLM, config)


def qwen3_next() -> Any:
    """Of full attention only, which can forget: the family's own models have other layers too, and are refused."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention", "full_attention"],
        initializer_range=0.3,
        max_position_embeddings=256,
    )
    model = seeded(Qwen3NextForCausalLM, config)
    model._is_stateful = False
    return model


@torch.inference_mode()
def plain_module(target: TransformersBackend, head: Any, ids: list[int]) -> Tensor:
    """The module over a whole text in one pass, by its definition: `[n, V]`."""
    cache = target.new_cache()
    kept = cache.keep_features(head.feature_layers)
    target.prefill(cache, ids)
    rows = kept.take()[1]
    assert rows is not None
    h, e = rows[:-1, 0], target.embed(ids[1:])
    x = head.eh_proj(torch.cat([head.enorm(e), head.hnorm(h)], dim=-1))[None]
    positions = torch.arange(len(ids) - 1)[None]
    mask = torch.full((len(ids) - 1, len(ids) - 1), torch.finfo(torch.float32).min).triu(1)[None, None]
    out = head.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=head.rotary(x, positions))
    return target.head(head.norm(out[0] if isinstance(out, tuple) else out)[0])


@pytest.mark.parametrize("family", [deepseek_v3, glm4_moe, qwen3_next])
def test_the_own_mtp_layer_of_a_family_runs_as_its_own_class(family: Callable[[], Any], tmp_path: Path) -> None:
    target, tensors = with_mtp(family(), tmp_path, deepseek=family is not qwen3_next)
    found = drafter("mtp", target, ModelFiles("x", tmp_path))
    head = found.head
    assert isinstance(head, ModelLayerHead)
    experts = head.layer.mlp.experts
    inner = "mtp.layers.0" if family is qwen3_next else "model.layers.2"
    gate = tensors[f"{inner}.mlp.experts.3.gate_proj.weight"]
    assert torch.equal(experts.gate_up_proj[3, : len(gate)], gate)
    ids = [3, 1, 4, 1, 5, 9]
    assert (plain_module(target, head, ids)[-1] - logits_of(head, target)[0]).abs().max() < 1e-3
    params = SamplingParams(max_tokens=16)
    assert generate(Engine(target, found), ids, params).ids == generate(Engine(target), ids, params).ids


def test_a_model_without_mtp_layers_says_so(tmp_path: Path, target: TransformersBackend) -> None:
    target.model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=r"no MTP layers of its own .* foredraft train mtp MODEL"):
        drafter("mtp", target, ModelFiles("x", tmp_path))
    with pytest.raises(UnsupportedError, match="this target is in none"):
        drafter("mtp", target)


def test_quantised_mtp_layers_and_other_backends_are_refused(tmp_path: Path) -> None:
    model = deepseek_v3()
    target, tensors = with_mtp(model, tmp_path, deepseek=True)
    with pytest.raises(UnsupportedError, match="only backend 'transformers' runs"):
        own_head(tmp_path, BACKENDS["native"](tiny_llama(1, layers=2)))
    save_file(tensors | {"model.layers.2.eh_proj.weight_scale_inv": torch.ones(1)}, tmp_path / "mtp.safetensors")
    with pytest.raises(ModelError, match="is quantised"):
        own_head(tmp_path, target)


def test_the_speculators_library_says_the_same() -> None:
    pytest.importorskip("speculators", reason="pip install speculators to compare with that library")
    script = Path(__file__).parents[1] / "benchmarks" / "speculators_check.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
