"""What drafters learned is kept in a folder: as it was, or refused, and it never changes the text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import foredraft
from foredraft.backends.transformers import TransformersBackend
from foredraft.engine import Engine
from foredraft.errors import InvalidInputError, ModelError, UnsupportedError
from foredraft.estimates import Calibration
from foredraft.proposers.base import Drafter
from foredraft.proposers.hybrid import Hybrid
from foredraft.proposers.recycling import Recycling
from foredraft.proposers.ssd import Ssd
from foredraft.proposers.suffix import Suffix
from foredraft.types import SamplingParams
from tiny import DRAFTER_MAKERS, drafter_over, generate, without_clock

PROMPT = [1, 2, 3, 4, 1, 2, 3, 4]
PARAMS = SamplingParams(max_tokens=40)
Arrays = dict[str, torch.Tensor]


def joined(target: TransformersBackend) -> Hybrid:
    return Hybrid([Suffix.for_target(target), Recycling.for_target(target)])


def make(target: TransformersBackend, name: str) -> Drafter:
    drafter = joined(target) if name == "hybrid" else drafter_over(target, name)
    assert drafter is not None
    return without_clock(drafter) if isinstance(drafter, Ssd) else drafter


@pytest.mark.parametrize("name", [*DRAFTER_MAKERS, "hybrid"])
def test_who_learns_keeps_it_and_the_others_write_nothing(
    name: str, target: TransformersBackend, tmp_path: Path
) -> None:
    first, second = make(target, name), make(target, name)
    folder = tmp_path / "not there yet"
    second.load(folder)  # of the first run: there is nothing, and that is fine
    before = generate(Engine(target, first), PROMPT, PARAMS)
    first.save(folder)
    assert folder.exists() == first.learns
    second.load(folder)
    after = generate(Engine(target, second), PROMPT, PARAMS)
    assert after.ids == before.ids
    assert (after.stats.target_forwards < before.stats.target_forwards) == first.learns


def test_a_hybrid_keeps_a_file_for_each_part_and_its_calibration(target: TransformersBackend, tmp_path: Path) -> None:
    hybrid, fresh = joined(target), joined(target)
    generate(Engine(target, hybrid), PROMPT, PARAMS)
    hybrid.save(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {f"{n}.safetensors" for n in ("suffix", "recycling", "hybrid")}
    fresh.load(tmp_path)
    assert (fresh.calibration.counts == hybrid.calibration.counts).all() and fresh.calibration.counts.any()


def test_a_calibration_of_other_parts_is_kept_for_them() -> None:
    """By name, in whatever order they stand: who drafts with others in the meantime loses nothing."""
    learned, other, again = Calibration(["a", "b"]), Calibration(["b", "c"]), Calibration(["a", "b"])
    learned.counts[1:, :2, 5] = 1.0, 2.0
    assert other.take_up(learned.arrays())
    assert (other.counts[1] == learned.counts[2]).all() and not other.counts[2:].any()
    assert again.take_up(other.arrays())
    assert (again.counts == learned.counts).all()


def test_a_part_takes_up_what_it_learned_in_a_hybrid(target: TransformersBackend, tmp_path: Path) -> None:
    hybrid, alone = joined(target), Suffix.for_target(target)
    generate(Engine(target, hybrid), PROMPT, PARAMS)
    hybrid.save(tmp_path)
    alone.load(tmp_path)
    assert alone.global_tree.count([1, 2, 3]) > 0


def put(name: str, index: tuple[int, ...], value: float) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        arrays[name][index] = value

    return change


def without_hits(arrays: Arrays) -> None:
    del arrays["hits"]


def narrower(arrays: Arrays) -> None:
    arrays.update({name: array[:, :4].contiguous() for name, array in arrays.items()})


def another_name(arrays: Arrays) -> None:
    arrays["rates"] = torch.zeros(1)


def floats(arrays: Arrays) -> None:
    arrays["candidates"] = arrays["candidates"].float()


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("recycling", put("candidates", (3, 0), 64)),
        ("recycling", put("candidates", (3, 0), -2)),
        ("recycling", put("likelihoods", (3, 0), float("nan"))),
        ("recycling", put("likelihoods", (3, 0), 1.5)),
        ("recycling", put("hits", (0, 0), 1e9)),
        ("recycling", put("tries", (0, 0), float("inf"))),
        ("recycling", without_hits),
        ("recycling", narrower),
        ("recycling", another_name),
        ("recycling", floats),
        ("hybrid", put("suffix", (0, 0), -1)),
        ("hybrid", put("suffix", (1, 0), -1)),
        ("hybrid", put("suffix", (1, 0), float("inf"))),
        ("hybrid", narrower),
    ],
)
def test_a_file_that_holds_something_else_is_refused(
    part: str, change: Callable[[Arrays], None], target: TransformersBackend, tmp_path: Path
) -> None:
    hybrid = joined(target)
    generate(Engine(target, hybrid), PROMPT, PARAMS)
    hybrid.save(tmp_path)
    file = tmp_path / f"{part}.safetensors"
    with safe_open(file, framework="pt") as stored:
        about = stored.metadata()
    arrays = load_file(file)
    change(arrays)
    save_file(arrays, file, metadata=about)
    with pytest.raises(ModelError, match=rf"{part}\.safetensors is damaged\. Remove it to start anew\."):
        joined(target).load(tmp_path)


def test_a_file_that_cannot_be_opened_is_not_taken_for_none(
    target: TransformersBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelError, match=r"Cannot read .*recycling\.safetensors \(.*Permission denied"):
        Recycling.for_target(target).load(tmp_path)


# `foredraft.load`


@pytest.mark.parametrize("drafter", ["suffix", "recycling", "hybrid:ngram+recycling"])
def test_a_later_process_goes_on_from_the_memory(drafter: str, tiny_folder: Path, tmp_path: Path) -> None:
    memory = tmp_path / "a" / "b"
    answers = []
    for _ in range(2):
        model = foredraft.load(tiny_folder, drafter, memory=memory)
        answers.append(model.generate("hell the hell", PARAMS))
        model.save_memory()
    assert answers[0].ids == answers[1].ids == model.plain().generate("hell the hell", PARAMS).ids
    assert answers[1].stats.target_forwards < answers[0].stats.target_forwards


def test_a_drafter_that_is_loaded_already_has_a_memory_too(tiny_folder: Path, tmp_path: Path) -> None:
    vocabulary = foredraft.load(tiny_folder).backend.vocab_size
    foredraft.load(tiny_folder, Recycling(vocabulary), memory=tmp_path).save_memory()
    assert (tmp_path / "recycling.safetensors").is_file()


@pytest.mark.parametrize("drafter", ["ngram", "none", None, "draft:/no/such/draft", "layer_skip"])
def test_a_memory_for_who_learns_nothing_is_refused_before_anything_is_loaded(drafter: Any, tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError, match=r"learns nothing .* Use suffix\[:SETTINGS\], recycling, auto\[:A\+B\] or hybrid:A\+B\."
    ):
        foredraft.load("/no/such/model", drafter, memory=tmp_path)


def test_a_file_as_memory_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInputError, match="file is a file, but must be a folder"):
        foredraft.load("/no/such/model", "suffix", memory=tmp_path / "file")


def test_without_a_memory_there_is_nowhere_to_save(tiny_folder: Path) -> None:
    with pytest.raises(InvalidInputError, match="loaded without a memory: pass memory=FOLDER"):
        foredraft.load(tiny_folder, "suffix").save_memory()
