"""The benchmark's runs: what is asked and how often, going on after a break, counts, and what is refused."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foredraft.bench import methods, runner
from foredraft.bench.methods import OwnMethod
from foredraft.bench.peers import Peer, PeerError, PeerRequest, PeerSpec
from foredraft.bench.plan import Plan, cells_of
from foredraft.bench.records import Cell, Turn
from foredraft.bench.results import ANSWERS, Results
from foredraft.bench.runner import Step, run
from foredraft.bench.workloads import Item, Workload
from foredraft.cli import main
from foredraft.errors import ForedraftError, InvalidInputError
from foredraft.loading import EngineChoice
from tiny import CountingBackend

ITEMS = (
    Item("a", "chat", ("hello hello",)),
    Item("b", "chat", ("hell", "again"), system="be kind"),
    Item("c", "code", ("for i in",), raw=True),
    Item("d", "code", ("x",), max_tokens=5),
)
WORKLOAD = Workload("four", ITEMS, "0" * 64)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What forwards cost is measured in a moment."""
    monkeypatch.setattr(runner, "_CURVE_SECONDS", 0.0)
    monkeypatch.setattr(runner, "_CURVE_ROWS", (1, 2, 4))


@pytest.fixture
def plan(tiny_folder: Path) -> Plan:
    return Plan(
        model=str(tiny_folder),
        workload=WORKLOAD,
        cells=cells_of(["suffix", "recycling"], temperatures=[0.0, 1.0]),
        max_tokens=12,
        repeat=2,
        engine=EngineChoice(backend="native", threads=1),
    )


@pytest.fixture
def measured(plan: Plan, tmp_path: Path) -> Results:
    return run(plan, tmp_path / "run", cache=tmp_path)


def test_every_item_is_asked_of_every_cell_as_often_as_wanted(measured: Results, plan: Plan) -> None:
    keys = Counter(m.key for m in measured.measurements)
    assert set(keys.values()) == {1}
    assert set(keys) == {(c.name, r, i.id) for c in plan.cells for r in (1, 2) for i in ITEMS}


def test_what_is_read_back_is_what_was_measured(measured: Results, tmp_path: Path) -> None:
    again = Results.read(tmp_path / "run")
    assert again.measurements == measured.measurements and again.cells == measured.cells
    assert again.curve is not None and again.provenance["workload_sha256"] == WORKLOAD.sha256
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert len(summary["figures"]) == len(measured.cells) * 3  # all, chat, code
    assert not (tmp_path / "run" / "memory").exists()


def test_methods_take_turns(measured: Results) -> None:
    orders: dict[tuple[int, str], list[str]] = {}
    for m in measured.measurements:
        orders.setdefault((m.repetition, m.item), []).append(m.cell)
    assert len({tuple(order) for order in orders.values()}) > 1
    assert all(len(set(order)) == len(order) == 6 for order in orders.values())


def test_text_is_that_of_plain_decoding_at_every_temperature(measured: Results) -> None:
    for figures in measured.figures:
        if not figures.category and figures.cell != figures.cell.plain:
            assert (figures.equal, figures.different) == (10, 0)  # five turns, twice


def test_repetitions_have_seeds_of_their_own(measured: Results) -> None:
    drawn = {m.key: m.turns[0].ids for m in measured.measurements if m.cell == "none T=1"}
    assert drawn["none T=1", 1, "a"] != drawn["none T=1", 2, "a"]


def test_turns_keep_their_history(measured: Results) -> None:
    two = next(m for m in measured.measurements if m.item == "b")
    first, second = two.turns
    assert second.prompt_tokens > first.prompt_tokens + first.tokens
    alone = next(m for m in measured.measurements if m.item == "a")
    assert first.prompt_tokens > alone.turns[0].prompt_tokens  # the system message
    assert len(alone.turns) == 1


def test_a_request_for_fewer_tokens_is_heard(measured: Results) -> None:
    assert {m.turns[0].tokens for m in measured.measurements if m.item == "d"} <= set(range(1, 6))


def test_drafters_begin_anew_with_each_repetition(measured: Results) -> None:
    accepted: dict[int, int] = Counter()
    for m in measured.measurements:
        if m.cell == "recycling":
            accepted[m.repetition] += sum(turn.accepted or 0 for turn in m.turns)
    assert accepted[1] == accepted[2]


def test_forwards_and_tokens_agree_with_an_independent_count(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by a backend around the target, and by the tokenizer's ids of the text."""
    seen: list[CountingBackend] = []
    load = methods.OnceLoader.model

    def counted(self: Any, reference: str) -> Any:
        if not seen:
            target, tokenizer, files = load(self, reference)
            seen.append(CountingBackend(target))
            self.found = seen[0], tokenizer, files
        return self.found

    monkeypatch.setattr(methods.OnceLoader, "model", counted)
    counts: list[tuple[int, int]] = []
    answer = OwnMethod.answer

    def watched(self: OwnMethod, prompt: Any) -> Turn:
        before = len(seen[0].drafts)
        turn = answer(self, prompt)
        counts.append((len(seen[0].drafts) - before, turn.target_forwards or -1))
        return turn

    monkeypatch.setattr(OwnMethod, "answer", watched)
    results = run(replace(plan, repeat=1), tmp_path / "run", cache=tmp_path)
    assert counts and all(hook == told for hook, told in counts)
    for m in results.measurements:
        for turn in m.turns:
            assert turn.rounds is not None and turn.tokens == sum(turn.rounds.emitted) == len(turn.ids)


class StoppedError(Exception):
    """The run is broken off."""


@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_was_broken_off_goes_on_and_measures_nothing_twice(plan: Plan, tmp_path: Path, seed: int) -> None:
    folder, source = tmp_path / "run", random.Random(seed)
    total = len(plan.cells) * len(ITEMS) * plan.repeat
    stops = sorted(source.sample(range(1, total), 2))

    def until(stop: int) -> Callable[[Step], None]:
        def progress(step: Step) -> None:
            assert step.total == total
            if step.done == stop:
                raise StoppedError

        return progress

    for stop in stops:
        with pytest.raises(StoppedError):
            run(plan, folder, cache=tmp_path, progress=until(stop))
        torn = (folder / ANSWERS).open("a")
        torn.write('{"cell": "suf')  # as a kill may leave it
        torn.close()
    results = run(plan, folder, cache=tmp_path)
    keys = [m.key for m in results.measurements]
    assert len(keys) == len(set(keys)) == total
    whole = run(plan, tmp_path / "whole", cache=tmp_path)

    def told(results: Results) -> dict[Any, Any]:
        return {m.key: [(t.ids, t.drafted, t.accepted) for t in m.turns] for m in results.measurements}

    assert told(results) == told(whole)  # drafters went on from what they had learned


def test_a_finished_run_is_not_measured_again(measured: Results, plan: Plan, tmp_path: Path) -> None:
    before = (tmp_path / "run" / ANSWERS).read_bytes()
    assert run(plan, tmp_path / "run", cache=tmp_path).measurements == measured.measurements
    assert (tmp_path / "run" / ANSWERS).read_bytes() == before


def test_another_run_in_the_folder_is_refused(measured: Results, plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"other settings \(max_tokens\)"):
        run(replace(plan, max_tokens=13), tmp_path / "run", cache=tmp_path)
    with pytest.raises(InvalidInputError, match=r"\(cells\)"):
        run(replace(plan, cells=plan.cells[:2]), tmp_path / "run", cache=tmp_path)


def test_a_folder_with_other_files_is_refused(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "one.txt").write_text("dear")
    with pytest.raises(InvalidInputError, match="has files, and none of a run"):
        run(plan, tmp_path / "letters", cache=tmp_path)


def test_what_does_not_fit_is_told_before_anything_is_measured(plan: Plan, tmp_path: Path) -> None:
    cells = (*plan.cells, Cell("suffix", rule="token", temperature=1.0))
    with pytest.raises(ForedraftError, match="rule 'token' does not accept"):
        run(replace(plan, cells=cells), tmp_path / "run", cache=tmp_path)
    assert not (tmp_path / "run").exists()


def test_a_prompt_longer_than_the_context_is_left_out_and_told(plan: Plan, tmp_path: Path) -> None:
    long = Workload("long", (*ITEMS[:1], Item("long", "", ("word " * 2000,))), "1" * 64)
    told: list[str] = []
    results = run(replace(plan, workload=long), tmp_path / "run", cache=tmp_path, notify=told.append)
    assert {m.item for m in results.measurements} == {"a"}
    assert any("Item long is left out" in message for message in told)


# Peers


class FakePeer(Peer):
    """Answers with fixed ids, and fails at a request of its choice."""

    name = "fake"
    drafters = ("none",)
    fails_at = -1
    asked = 0

    def answer(self, request: PeerRequest) -> Turn:
        self.asked += 1
        if self.asked == self.fails_at:
            raise PeerError("it fell over")
        return Turn(len(request.ids), (1, 2, 3), "abc", 0.1, 0.3)


def test_a_peer_is_asked_the_same(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = FakePeer(options=None)  # type: ignore[arg-type]
    monkeypatch.setattr(runner, "open_peer", lambda *_: peer)
    cells = cells_of(["none"], peers=[PeerSpec("fake")])
    results = run(replace(plan, cells=cells, repeat=1), tmp_path / "run", cache=tmp_path)
    own, theirs = ([m for m in results.measurements if (m.cell == "none") is mine] for mine in (True, False))
    assert {m.item for m in own} == {m.item for m in theirs} == {i.id for i in ITEMS}
    prompts = {m.item: m.turns[0].prompt_tokens for m in own}
    assert all(m.turns[0].prompt_tokens == prompts[m.item] for m in theirs)
    assert "fake" in results.provenance


def test_a_peer_that_cannot_start_is_named_and_the_rest_goes_on(plan: Plan, tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(*_: Any) -> Peer:
        raise PeerError("fake: it is not installed: pip install fake")

    monkeypatch.setattr(runner, "open_peer", refuse)
    cells = cells_of(["none"], peers=[PeerSpec("fake")])
    results = run(replace(plan, cells=cells), tmp_path / "run", cache=tmp_path)
    assert results.absent == {"fake": "fake: it is not installed: pip install fake"}
    assert {m.cell for m in results.measurements} == {"none"}


def test_a_peer_that_is_there_when_a_run_goes_on_is_asked_then(plan: Plan, tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(*_: Any) -> Peer:
        raise PeerError("fake: it is not installed")

    cells = cells_of(["none"], peers=[PeerSpec("fake")])
    for opened in (refuse, lambda *_: FakePeer(options=None)):  # type: ignore[arg-type]
        monkeypatch.setattr(runner, "open_peer", opened)
        results = run(replace(plan, cells=cells, repeat=1), tmp_path / "run", cache=tmp_path)
    assert not results.absent and sum(m.cell == "fake: none" for m in results.measurements) == 4


def test_a_peer_that_fails_on_the_way_keeps_its_answers(plan: Plan, tmp_path: Path, monkeypatch: Any) -> None:
    peer = FakePeer(options=None)  # type: ignore[arg-type]
    peer.fails_at = 5  # the first was to warm up, the next three are for two items
    monkeypatch.setattr(runner, "open_peer", lambda *_: peer)
    cells = cells_of(["none"], peers=[PeerSpec("fake")])
    results = run(replace(plan, cells=cells, repeat=1), tmp_path / "run", cache=tmp_path)
    assert sum(m.cell == "fake: none" for m in results.measurements) == 2
    assert "it fell over" in results.absent["fake"]
    assert sum(m.cell == "none" for m in results.measurements) == 4


# Cells


def test_cells_are_the_product_of_the_lists() -> None:
    cells = cells_of(["ngram", "none"], draft_tokens=[2, 4], rules=["walk"], temperatures=[0.0, 0.5])
    names = ["none", "ngram 2", "ngram 4", "none T=0.5", "ngram 2 walk T=0.5", "ngram 4 walk T=0.5"]
    assert [cell.name for cell in cells] == names


def test_a_drafter_may_bring_its_number_of_tokens_and_auto_takes_none() -> None:
    cells = cells_of(["suffix 2", "ngram", "auto"], draft_tokens=[4, 8])
    assert [cell.name for cell in cells] == ["none", "suffix 2", "ngram 4", "ngram 8", "auto"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"drafters": ["sufix"]}, "Did you mean 'suffix'"),
        ({"drafters": ["ngram"], "rules": ["best"]}, "no acceptance rule 'best'"),
        ({"drafters": ["ngram"], "temperatures": [-1.0]}, "temperature"),
        ({"drafters": ["ngram", "suffix", "recycling", "lookahead"], "draft_tokens": list(range(1, 65))}, "cells"),
        ({"drafters": ["ngram two"]}, "as in 'suffix 2'"),
        ({"drafters": ["ngram 0"]}, "'none' is plain decoding"),
        ({"drafters": ["ngram"], "draft_tokens": [65]}, "draft_tokens is 65"),
    ],
)
def test_wrong_lists_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        cells_of(**wrong)


# The command


def bench(tiny_folder: Path, out: Path, *options: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", str(tiny_folder), "--out", str(out), "--limit", "2", "--max-tokens", "6", *options])
    assert ended.value.code is None or isinstance(ended.value.code, int)
    return ended.value.code or 0


def test_the_command_measures_shows_and_writes(
    tiny_folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    assert bench(tiny_folder, tmp_path / "run", "--drafters", "suffix", "--categories", "chat,code") == 0
    shown = capsys.readouterr()
    assert "suffix" in shown.out and re.search(r" (\d+)/\1 ", shown.out) and "report.html" in shown.out
    assert "4 of 4 answers" in shown.err
    for file in ("report.html", "report.md", "summary.json", "answers.jsonl", "settings.json"):
        assert (tmp_path / "run" / file).stat().st_size > 0


def test_a_terminal_shows_a_bar(
    tiny_folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes this for a terminal
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    assert bench(tiny_folder, tmp_path / "run", "--drafters", "suffix", "--categories", "chat") == 0
    assert "of 4 answers" in capsys.readouterr().err


def test_who_stops_a_run_is_told_that_nothing_is_lost(
    tiny_folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    answer, asked = OwnMethod.answer, []

    def stop(self: OwnMethod, prompt: Any) -> Turn:
        asked.append(prompt)
        if len(asked) == 4:  # two to warm up, one answer
            raise KeyboardInterrupt
        return answer(self, prompt)

    monkeypatch.setattr(OwnMethod, "answer", stop)
    assert bench(tiny_folder, tmp_path / "run", "--drafters", "suffix", "--categories", "chat") == 130
    assert "The answers so far are kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workload", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--categories", "chats"], "no category 'chats'"),
        (["--draft-tokens", "two"], "draft-tokens has 'two'"),
        (["--peers", "lama.cpp"], "Did you mean 'llama.cpp'"),
        (["--repeat", "0"], "repeat is 0"),
    ],
)
def test_a_wrong_option_is_refused(
    options: list[str], message: str, tiny_folder: Path, tmp_path: Path, capsys: Any
) -> None:
    assert bench(tiny_folder, tmp_path / "run", *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
