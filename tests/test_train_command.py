"""`foredraft train`: every kind from text to a folder that drafts, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import foredraft
from foredraft.cli import main
from foredraft.heads.files import about_head
from foredraft.train.dialogues import Dialogue, write_dialogues
from foredraft.types import SamplingParams
from tiny import CHAT_TEMPLATE, tiny_llama, tiny_metaspace_tokenizer

KINDS: dict[str, tuple[str, list[str]]] = {
    "eagle3": ("eagle3", []),
    "eagle": ("eagle", []),
    "medusa": ("medusa", []),
    "mtp": ("mtp", []),
    "mtp-independent": ("mtp", ["--form", "independent"]),
    "mtp-cascaded": ("mtp", ["--form", "cascaded"]),
    "draft": ("draft", ["--layers", "2", "--loss", "jsd"]),
}
QUICK = ("--passes", 1, "--batch-tokens", 64, "--window", 32, "--ahead", 2, "--draft-vocab", 20)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in a folder, whose tokens are words."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    words = tiny_metaspace_tokenizer([*"abcdefghijklmnopqrstuvwxyz"])
    words.add_special_tokens({"additional_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>"})
    words.chat_template = CHAT_TEMPLATE
    tiny_llama(seed=9, layers=4, vocabulary=len(words)).save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    dice = random.Random(0)
    made = [Dialogue(tuple(dice.randrange(26) for _ in range(24)), 6, 0.0) for _ in range(30)]
    write_dialogues(tmp_path / "data.jsonl", made)
    return tmp_path / "data.jsonl"


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["train", *map(str, arguments)])
    assert ended.value.code is None or isinstance(ended.value.code, int)
    return ended.value.code or 0


@pytest.mark.parametrize("name", KINDS)
def test_what_is_trained_drafts_and_changes_nothing(
    name: str, model: Path, data: Path, tmp_path: Path, capsys: Any
) -> None:
    kind, options = KINDS[name]
    out = tmp_path / "out"
    line = (kind, model, "--out", out, "--data", data, *QUICK, *options, "--backend", "transformers")
    assert command(*line) == 0
    shown = capsys.readouterr()
    assert "mean accepted length, chain of 4: " in shown.out
    assert f"--drafter {kind}:{out / 'drafter'}" in shown.out.replace("\n", "")
    assert "Training" in shown.err and "step " in shown.err and ", loss " in shown.err
    assert (out / "log.csv").read_text().startswith("step,name,value\n1,tokens,")
    if kind != "draft":
        about = about_head(out / "drafter")
        assert about["kind"] == kind and json.loads(about["recipe"])["draft_vocab"] == 20
    drafted = foredraft.load(str(model), f"{kind}:{out / 'drafter'}", backend="transformers")
    plain = foredraft.load(str(model), "none", backend="transformers")
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=20, temperature=temperature, seed=3)
        wanted = plain.generate("a b c", params, chat=False)
        found = drafted.generate("a b c", params, chat=False)
        assert (temperature > 0 and kind == "draft") or found.ids == wanted.ids
        assert found.stats.drafted > 0
    if kind != "draft":  # the folder of a draft model is not written over
        (before,) = (load_file(file) for file in (out / "drafter").glob("*.safetensors"))
        assert command(*line) == 0
        (after,) = (load_file(file) for file in (out / "drafter").glob("*.safetensors"))
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_text_is_written_first_if_there_is_none(model: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    assert command("eagle3", model, "--out", out, "--elicit", 12, *QUICK) == 0
    assert len(list((out / "text").glob("shard-*.jsonl"))) == 1
    assert "12 of 12 dialogues" in capsys.readouterr().err


def test_prompts_of_a_file_are_for_validation(model: Path, data: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "prompts.txt").write_text("a b c\nd e f\n")
    options = ("--validate", tmp_path / "prompts.txt", "--validate-every", 3)
    assert command("eagle3", model, "--out", tmp_path / "out", "--data", data, *QUICK, *options) == 0
    assert "Measuring accepted lengths on 2 prompts" in capsys.readouterr().err
    steps = [
        line.split(",")[0] for line in (tmp_path / "out" / "log.csv").read_text().splitlines() if "chain of" in line
    ]
    assert len(steps) > 1 and steps[0] == "3"


@pytest.mark.parametrize(("kind", "other"), [("eagle3", "medusa"), ("medusa", "eagle3")])
def test_training_goes_on_from_a_head_that_was_trained_before(
    kind: str, other: str, model: Path, data: Path, tmp_path: Path, capsys: Any
) -> None:
    assert command(kind, model, "--out", tmp_path / "first", "--data", data, *QUICK) == 0
    before = load_file(next((tmp_path / "first" / "drafter").glob("*.safetensors")))
    still = ("--start", tmp_path / "first" / "drafter", "--learning-rate", 1e-12)
    assert command(kind, model, "--out", tmp_path / "second", "--data", data, *QUICK, *still) == 0
    after = load_file(next((tmp_path / "second" / "drafter").glob("*.safetensors")))
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)  # bfloat16 rounds what so small a rate does
    assert command(other, model, "--out", tmp_path / "third", "--data", data, *QUICK, *still) == 2
    assert f"is of kind '{kind}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["eagle4"], "kind is 'eagle4', but must be one of eagle3, eagle, medusa, mtp, draft"),
        (["eagle3", "--elicit", "3"], "leave one of them out"),
        (["eagle3", "--passes", "0"], "passes is 0"),
        (["eagle3", "--window", "9999"], "window is 9999, but a batch has"),
        (["eagle3", "--learning-rate", "-1"], "learning_rate is -1"),
        (["eagle3", "--start", "nowhere"], "The head 'nowhere'"),
        (["draft", "--backend", "native"], "use --backend transformers, or --start REF"),
        (["draft", "--layers", "9", "--backend", "transformers"], "layers is 9"),
        (["eagle3", "--precision", "int8"], "precision is 'int8'"),
    ],
)
def test_a_wrong_option_is_refused(
    options: list[str], message: str, model: Path, data: Path, tmp_path: Path, capsys: Any
) -> None:
    kind, *rest = options
    assert command(kind, model, "--out", tmp_path / "out", "--data", data, *rest) == 2
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert message in shown
