"""A run's folder: what is written is read again, what was torn does not count, what is damaged is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench_runs import CURVE, PEER, PLAIN, SUFFIX, measured, results, write
from foredraft.bench.figures import figures_of
from foredraft.bench.records import Cell
from foredraft.bench.results import Results, append_answer
from foredraft.errors import InvalidInputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of a few answers."""
    return write(results(items=1), tmp_path / "before")


def rewrite(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_run_is_read_as_it_was_written(folder: Path) -> None:
    made, found = results(items=1), Results.read(folder)
    assert (found.name, found.cells, found.measurements) == (made.name, made.cells, made.measurements)
    assert (found.settings, found.provenance, found.absent) == (made.settings, made.provenance, made.absent)
    assert found.curve is not None and found.curve.to_json() == CURVE.to_json()
    assert found.figures == made.figures and found.figures is found.figures


def test_a_run_that_has_just_begun_has_no_answers(tmp_path: Path) -> None:
    results(curve=None).write_settings(tmp_path / "new" / "run")
    found = Results.read(tmp_path / "new" / "run")
    assert found.measurements == () and found.curve is None and found.figures == []


def test_a_torn_last_line_does_not_count_and_is_cut_off_by_the_next_answer(folder: Path) -> None:
    file = folder / "answers.jsonl"
    *whole, last = file.read_bytes().splitlines(keepends=True)
    count = len(whole)
    for cut in (1, len(last) // 2, len(last) - 1):
        file.write_bytes(b"".join(whole) + last[:cut])
        assert len(Results.read(folder).measurements) == count
    append_answer(folder, results(items=1).measurements[-1])
    assert file.read_bytes() == b"".join(whole) + last
    file.write_bytes(last[:9])  # the first line was torn
    append_answer(folder, results(items=1).measurements[-1])
    assert file.read_bytes() == last


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "Expecting property name"),
        (b'"\xff"', "codec can't decode"),
        (b"[]", "no measurement of a benchmark"),
        (b'{"cell": "none"}', "no measurement of a benchmark"),
        (b"", "Expecting value"),
    ],
)
def test_a_damaged_line_is_named(line: bytes, why: str, folder: Path) -> None:
    file = folder / "answers.jsonl"
    first, _, *rest = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([first, line, *rest, b""]))
    with pytest.raises(InvalidInputError, match=f"answers.jsonl, line 2, is damaged .*{why}.*: restore"):
        Results.read(folder)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"cell": "other"}, "settings.json has no cell 'other'"),
        ({"item": 3}, "must be texts"),
        ({"repetition": 1.5}, "must be texts"),
        ({"turns": []}, "no turns"),
        ({"seconds": 0.01}, "ttft is .* and seconds 0.01"),
        ({"seconds": "1"}, "seconds '1'"),
        ({"ttft": float("nan")}, "ttft is nan"),
        ({"ids": [1, "2"]}, "ids must be integers"),
        ({"ids": [1]}, "rounds emitted .* tokens, and there are 1"),
    ],
)
def test_a_record_of_which_no_figure_can_be_made_is_named(change: dict[str, Any], why: str, folder: Path) -> None:
    file = folder / "answers.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    target = lines[0] if change.keys() & lines[0].keys() else lines[0]["turns"][0]
    target.update(change)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(InvalidInputError, match=f"answers.jsonl, line 1, is damaged .*{why}"):
        Results.read(folder)


def test_times_that_were_rounded_apart_are_the_same(folder: Path) -> None:
    turn = replace(results().measurements[0].turns[0], ttft=1 + 2**-52, seconds=1.0)
    append_answer(folder, measured(PLAIN, "rounded", turn))
    assert Results.read(folder).measurements[-1].turns == (turn,)
    [*_, found] = figures_of([measured(PLAIN, "rounded", turn), measured(SUFFIX, "rounded", turn)], [SUFFIX], None)
    assert found.speedup is not None and found.decode_speedup is None


def test_an_answer_that_is_there_twice_is_named(folder: Path) -> None:
    append_answer(folder, results(items=1).measurements[0])
    count = len(results(items=1).measurements)
    with pytest.raises(InvalidInputError, match=rf"line {count + 1}, is damaged \(an earlier line has the same cell"):
        Results.read(folder)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": 2}, "is of version 2, and this foredraft reads version 1"),
        ({"foredraft": "costs"}, "is not that of a benchmark"),
        ({"cells": [{"drafter": "none", "speed": 3}]}, "is damaged .TypeError"),
        ({"cells": 3}, "is damaged .TypeError"),
        ({"curve": {"rows": [1]}}, "is damaged .InvalidInputError: These are no costs"),
        ({"settings": 5}, "is damaged .TypeError"),
    ],
)
def test_settings_that_are_none_are_told(change: dict[str, Any], why: str, folder: Path) -> None:
    rewrite(folder / "settings.json", **change)
    with pytest.raises(InvalidInputError, match=f"settings.json {why}"):
        Results.read(folder)


def test_a_folder_without_a_run_is_told(folder: Path, tmp_path: Path) -> None:
    for wrong in (tmp_path, tmp_path / "missing", folder / "settings.json"):
        with pytest.raises(InvalidInputError, match=r"There is no run in .*give a folder that foredraft bench wrote"):
            Results.read(wrong)
    (folder / "settings.json").write_text("{")
    with pytest.raises(InvalidInputError, match=r"settings.json is damaged"):
        Results.read(folder)


def test_what_cannot_be_written_is_told(folder: Path, tmp_path: Path) -> None:
    run = results(items=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match="Cannot make the folder"):
        run.write_settings(tmp_path / "file")
    with pytest.raises(InvalidInputError, match="Cannot write"):
        append_answer(tmp_path / "missing", run.measurements[0])


def test_the_summary_has_every_figure_in_plain_values(folder: Path) -> None:
    run = Results.read(folder)
    found = json.loads(run.write_summary(folder).read_text(encoding="utf-8"))
    assert found["settings"] == run.settings and found["provenance"] == run.provenance
    assert [(f["cell"]["name"], f["category"]) for f in found["figures"]] == [
        (cell.name, category) for cell in (PLAIN, SUFFIX, PEER) for category in ("", "chat", "code")
    ]
    for shown, figures in zip(found["figures"], run.figures, strict=True):
        assert Cell(**{k: v for k, v in shown["cell"].items() if k != "name"}) == figures.cell
        assert shown["throughput"] == figures.throughput and shown["lengths"] == list(figures.lengths)
        assert shown["ttft"]["p90"] == figures.ttft.p90
        assert shown["speedup"] == (figures.speedup._asdict() if figures.speedup is not None else None)
        assert [each["rate"] for each in shown["by_position"]] == [each.rate for each in figures.by_position]
    [suffix] = [f for f in found["figures"] if f["cell"]["name"] == "suffix" and not f["category"]]
    prediction = suffix["prediction"]
    assert prediction["error"] == pytest.approx(prediction["speedup"] / prediction["measured"] - 1)
    assert prediction["explanation"].startswith("predicted ")
