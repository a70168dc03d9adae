"""Self-generated dialogues: a kill costs no byte, the batch changes none, and what cannot be is told."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from foredraft.backends.base import Backend, Query
from foredraft.backends.transformers import TransformersBackend
from foredraft.cli import main
from foredraft.engine import Engine
from foredraft.errors import InvalidInputError, UnsupportedError
from foredraft.generation import Request
from foredraft.train import generation, prompts
from foredraft.train.dialogues import Dialogue, read_dialogues, write_dialogues
from foredraft.train.generation import Progress, Settings, generate_dialogues
from foredraft.train.prompts import Elicit, read_prompts
from foredraft.types import SamplingParams, TokenEvent
from tiny import CHAT_TEMPLATE, CountingBackend, native, tiny_llama, tiny_metaspace_tokenizer

PROMPTS = [[n + 1, n + 2, n + 3] for n in range(20)]
SHORT = Settings(seed=5, max_tokens=12)


class StoppedError(Exception):
    """In place of a kill."""


class StopsAt(CountingBackend):
    """Stops the run at its n-th forward."""

    def __init__(self, inner: Backend, forwards: int) -> None:
        super().__init__(inner)
        self._last = forwards

    def forward(self, queries: Sequence[Query]) -> list[Tensor]:
        if self.forwards == self._last:
            raise StoppedError
        return super().forward(queries)


@pytest.fixture(scope="module")
def words() -> Any:
    """A tokenizer of whole words, so that whatever a model with random weights writes is text; ChatML."""
    made = tiny_metaspace_tokenizer([*"abcdefghijklmnopqrstuvwxyz"])
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>"})
    made.chat_template = CHAT_TEMPLATE
    return made


@pytest.fixture(scope="module")
def speaker(words: Any) -> Backend:
    """A target that knows these words."""
    return native(tiny_llama(seed=9, vocabulary=len(words)))


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "SHARD", 8)


def make(target: Backend, tokenizer: Any, asked: Any, folder: Path, **other: Any) -> list[Path]:
    return generate_dialogues(target, tokenizer, asked, folder, model="tiny", **{"settings": SHORT, **other})


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# The engine


@pytest.mark.parametrize("at_once", [1, 3, 20, 50])
def test_no_more_than_at_once_share_a_forward_and_answers_are_the_same(target: Any, at_once: int) -> None:
    requests = [
        Request(prompt, SamplingParams(max_tokens=3 + n % 7, temperature=n % 2, seed=n))
        for n, prompt in enumerate(PROMPTS)
    ]
    together = ids_of(Engine(target), requests, None)
    counting = CountingBackend(target)
    most = 0
    forward = counting.forward

    def noting(queries: Sequence[Query]) -> list[Tensor]:
        nonlocal most
        most = max(most, len(queries))
        return forward(queries)

    counting.forward = noting  # type: ignore[method-assign]
    assert ids_of(Engine(counting), requests, at_once) == together
    assert most == min(at_once, len(requests))


def ids_of(engine: Engine, requests: Sequence[Request], at_once: int | None) -> list[list[int]]:
    ids: list[list[int]] = [[] for _ in requests]
    for index, event in engine.run(requests, at_once):
        if isinstance(event, TokenEvent):
            ids[index].append(event.token)
    return ids


@pytest.mark.parametrize("at_once", [0, -1, 1.5, True])
def test_at_once_must_be_a_count(target: Any, at_once: Any) -> None:
    with pytest.raises(InvalidInputError, match="at_once is"):
        next(Engine(target).run([Request([1])], at_once))


def test_with_at_once_too_all_requests_are_checked_before_the_first_starts(target: Any) -> None:
    counting = CountingBackend(target)
    with pytest.raises(InvalidInputError, match="prompt is empty"):
        next(Engine(counting).run([Request([1, 2]), Request([])], 1))
    assert counting.prefilled == counting.forwards == 0


# Generation


@pytest.mark.parametrize("elicited", [False, True], ids=["prompts", "elicited"])
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bytes(
    speaker: Backend, words: Any, tmp_path: Path, elicited: bool
) -> None:
    asked = Elicit(20) if elicited else PROMPTS
    counting = CountingBackend(speaker)
    make(counting, words, asked, tmp_path / "whole")
    chance = random.Random(0)
    for attempt in range(4):
        folder = tmp_path / str(attempt)
        with pytest.raises(StoppedError):
            make(StopsAt(speaker, chance.randrange(counting.forwards)), words, asked, folder)
        with suppress(StoppedError):
            make(StopsAt(speaker, chance.randrange(counting.forwards)), words, asked, folder)
        make(speaker, words, asked, folder)
        assert content(folder) == content(tmp_path / "whole")


@pytest.mark.parametrize("asked", [PROMPTS, Elicit(20)], ids=["prompts", "elicited"])
def test_one_at_once_gives_the_same_as_sixteen(speaker: Backend, words: Any, tmp_path: Path, asked: Any) -> None:
    for at_once in (1, 16):
        make(speaker, words, asked, tmp_path / str(at_once), at_once=at_once)
    assert content(tmp_path / "1") == content(tmp_path / "16")


def test_answers_are_those_of_the_engine_at_temperatures_in_turn(speaker: Backend, words: Any, tmp_path: Path) -> None:
    settings = Settings(max_tokens=9, temperatures=(0.0, 1.0))
    made = read_dialogues(make(speaker, words, PROMPTS, tmp_path, settings=settings), speaker.vocab_size)
    assert [list(dialogue.prompt) for dialogue in made] == PROMPTS
    assert [dialogue.temperature for dialogue in made] == [0.0, 1.0] * 10
    engine = Engine(speaker, stop_tokens={words.eos_token_id})
    greedy = ids_of(engine, [Request(prompt, SamplingParams(max_tokens=9)) for prompt in PROMPTS[::2]], None)
    assert [list(dialogue.answer) for dialogue in made[::2]] == greedy
    assert all(len(d.answer) == 9 or d.answer[-1] == words.eos_token_id for d in made)


def test_a_shard_that_is_there_is_not_made_again(speaker: Backend, words: Any, tmp_path: Path) -> None:
    shards = make(speaker, words, PROMPTS, tmp_path)
    assert [shard.name for shard in shards] == ["shard-00000.jsonl", "shard-00001.jsonl", "shard-00002.jsonl"]
    steps: list[Progress] = []
    counting = CountingBackend(speaker)
    assert make(counting, words, PROMPTS, tmp_path, progress=steps.append) == shards
    assert counting.forwards == 0
    assert [step[:4] for step in steps] == [(20, 20, 0, 0)]


def test_progress_counts_items_and_tokens(speaker: Backend, words: Any, tmp_path: Path) -> None:
    make(speaker, words, PROMPTS, tmp_path)
    (tmp_path / "shard-00001.jsonl").unlink()
    steps: list[Progress] = []
    made = read_dialogues(make(speaker, words, PROMPTS, tmp_path, progress=steps.append))
    assert (steps[0].items, steps[0].total, steps[0].seconds_left) == (8, 20, None)
    assert [step.made for step in steps] == [*range(9), 8]
    assert steps[-1][:3] == (20, 20, 8) and steps[-1].tokens == sum(len(d.answer) for d in made[8:16])
    assert steps[-1].seconds_left == 0 and steps[-1].tokens_per_second > 0


def test_elicited_prompts_are_messages_in_the_template_and_none_comes_twice(
    speaker: Backend, words: Any, tmp_path: Path
) -> None:
    made = read_dialogues(make(speaker, words, Elicit(60), tmp_path), len(words))
    assert len(made) == 60
    assert len({dialogue.prompt for dialogue in made}) == 60
    start, end = words.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    for dialogue in made:
        assert (dialogue.prompt.count(start), dialogue.prompt.count(end)) == (2, 1)


def test_who_writes_no_messages_is_told_to_give_prompts(
    speaker: Backend, words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "_SHORTEST", 10_000)
    monkeypatch.setattr(prompts, "_ATTEMPTS", 2)
    with pytest.raises(UnsupportedError, match=r"In 16 attempts .* give a file of prompts"):
        make(speaker, words, Elicit(20), tmp_path)


@pytest.mark.parametrize(
    "template", [None, "{{ messages[0]['content'] }}", "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"]
)
def test_without_a_template_that_tells_prompts_are_asked_for(
    speaker: Backend, tmp_path: Path, template: str | None
) -> None:
    bare = tiny_metaspace_tokenizer(["a", "b"])
    bare.chat_template = template
    with pytest.raises(UnsupportedError, match="--prompts FILE"):
        make(speaker, bare, Elicit(2), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"settings": Settings(seed=6, max_tokens=12)}, "seed is 5 there and 6 here"),
        ({"settings": Settings(seed=5, max_tokens=13)}, "max_tokens is 12 there and 13 here"),
        ({"asked": PROMPTS[1:]}, "prompts is .*'count': 20.* there and .*'count': 19"),
        ({"asked": Elicit(20)}, "elicited is None there"),
        ({"model": "other"}, "model is tiny there and other here"),
    ],
)
def test_a_folder_of_other_settings_is_left_as_it_is(
    speaker: Backend, words: Any, tmp_path: Path, other: dict[str, Any], message: str
) -> None:
    make(speaker, words, PROMPTS, tmp_path)
    before = content(tmp_path)
    with pytest.raises(InvalidInputError, match=message):
        generate_dialogues(
            speaker,
            words,
            other.get("asked", PROMPTS),
            tmp_path,
            model=other.get("model", "tiny"),
            settings=other.get("settings", SHORT),
        )
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "notes.txt").touch(), "has files, and no manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "Cannot read"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "is not that of dialogues"),
    ],
)
def test_a_folder_of_something_else_is_refused(
    speaker: Backend, words: Any, tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(tmp_path)
    before = content(tmp_path)
    with pytest.raises(InvalidInputError, match=message):
        make(speaker, words, PROMPTS, tmp_path)
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"temperatures": ()}, "temperatures is \\(\\)"),
        ({"temperatures": (0.0, -1.0)}, "temperature is -1.0"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Settings(**wrong)


def test_no_prompt_and_no_place_are_refused(speaker: Backend, words: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="prompts is"):
        make(speaker, words, [], tmp_path)
    with pytest.raises(InvalidInputError, match="outside the vocabulary"):
        make(speaker, words, [*PROMPTS, [1, 999]], tmp_path)
    with pytest.raises(InvalidInputError, match="at_once is 0"):
        make(speaker, words, PROMPTS, tmp_path, at_once=0)
    for wrong in ({"count": 0}, {"count": 1, "temperature": 0.0}, {"count": 1, "top_p": 0.0}):
        with pytest.raises(InvalidInputError):
            Elicit(**wrong)


def test_prompts_are_the_first_turns_of_any_workload(words: Any, tmp_path: Path) -> None:
    target = TransformersBackend(tiny_llama(seed=3, vocabulary=len(words), context=40))
    file = tmp_path / "prompts.jsonl"
    long = " ".join("a" * 60)
    records = [
        {"turns": ["a b", "c"]},
        {"prompt": "c d", "task_id": "x", "entry_point": "f"},
        {"turns": [long]},
    ]
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    told: list[str] = []
    found = read_prompts([str(file)], target, words, told.append)
    assert [words.decode(list(prompt)).count("<|im_start|>") for prompt in found] == [2, 0]
    assert told == ["1 prompts are left out: the model's context has no room for them"]
    file.write_text(json.dumps({"turns": [long]}))
    with pytest.raises(InvalidInputError, match="No prompt fits"):
        read_prompts([str(file)], target, words)


# Files


def test_dialogues_are_read_as_they_were_written(tmp_path: Path) -> None:
    dialogues = [Dialogue((1, 2, 3), 2, 0.0), Dialogue((7, 8), 1, 0.7)]
    file = tmp_path / "a.jsonl"
    write_dialogues(file, dialogues)
    assert json.loads(file.read_text().splitlines()[0]) == {"n_prompt": 2, "temperature": 0.0, "ids": [1, 2, 3]}
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(file.read_bytes()))
    (tmp_path / "manifest.json").write_text("{}")
    assert read_dialogues([file], 9) == read_dialogues([tmp_path / "b.jsonl.gz"]) == dialogues
    assert read_dialogues([tmp_path]) == dialogues * 2
    assert dialogues[0].prompt == (1, 2) and dialogues[0].answer == (3,)


GOOD = '{"n_prompt": 1, "temperature": 0, "ids": [1, 2]}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "broken JSON"),
        ("[1]", "no list of ids"),
        ('{"ids": [1, 2], "temperature": 0}', "no n_prompt"),
        ('{"ids": [1, 2]}', "no n_prompt and no temperature"),
        ('{"n_prompt": 2, "temperature": 0, "ids": [1, 2]}', "n_prompt is 2, but of 2 ids"),
        ('{"n_prompt": 0, "temperature": 0, "ids": [1, 2]}', "n_prompt is 0"),
        ('{"n_prompt": 1, "temperature": -1, "ids": [1, 2]}', "temperature is -1"),
        ('{"n_prompt": 1, "temperature": NaN, "ids": [1, 2]}', "temperature is nan"),
        ('{"n_prompt": 1, "temperature": 0, "ids": [1, "2"]}', "ids must be token ids"),
        ('{"n_prompt": 1, "temperature": 0, "ids": [1, 9]}', "token id 9 is outside .* ids are 0 to 8"),
    ],
)
def test_a_line_that_is_no_dialogue_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f"{GOOD}\n\n{line}\n")
    with pytest.raises(InvalidInputError, match=f"a.jsonl, line 3: .*{message}") as raised:
        read_dialogues([file], 9)
    assert "A line must be" in str(raised.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "torn.gz").write_bytes(gzip.compress(GOOD.encode())[:-9])
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("torn.gz", "binary", "nowhere"):
        with pytest.raises(InvalidInputError, match=f"Cannot read .*{name}"):
            read_dialogues([tmp_path / name])
    (tmp_path / "empty").touch()
    for nothing in ([tmp_path / "empty"], [tmp_path], []):
        with pytest.raises(InvalidInputError, match=r"no dialogues in .*foredraft train-data"):
            read_dialogues(nothing)


# The command


@pytest.fixture
def spoken(tmp_path: Path, words: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a model that speaks these words."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    tiny_llama(seed=9, vocabulary=len(words)).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["train-data", *map(str, arguments)])
    assert ended.value.code is None or isinstance(ended.value.code, int)
    return ended.value.code or 0


def test_the_command_writes_dialogues_and_goes_on(spoken: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    line = (spoken, "--out", out, "--elicit", 10, "--max-tokens", 8, "--seed", 1, "--temperatures", "0, 1")
    assert command(*line) == 0
    shown = capsys.readouterr()
    assert "10 dialogues with" in shown.out and "10 of 10 dialogues" in shown.err
    made = read_dialogues([out])
    assert [dialogue.temperature for dialogue in made] == [0.0, 1.0] * 5
    before = content(out)
    (out / "shard-00001.jsonl").unlink()
    assert command(*line, "--at-once", 3) == 0
    assert content(out) == before


def test_the_command_answers_prompts_from_files(spoken: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "one.txt").write_text("a b c\nd e f\n")
    (tmp_path / "two.txt").write_text("g h i\n")
    files = ("--prompts", tmp_path / "one.txt", "--prompts", tmp_path / "two.txt")
    assert command(spoken, "--out", tmp_path / "out", *files, "--max-tokens", 4) == 0
    assert len(read_dialogues([tmp_path / "out"])) == 3


def test_who_stops_the_command_is_told_what_is_kept(
    spoken: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []

    def stop(file: Path, dialogues: Sequence[Dialogue]) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(file)
        write_dialogues(file, dialogues)

    monkeypatch.setattr(generation, "write_dialogues", stop)
    assert command(spoken, "--out", tmp_path / "out", "--elicit", 20, "--max-tokens", 4) == 130
    assert "The files so far are kept (1): give the same command again to go on." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompts", "bundled", "--elicit", "3"], "leave one of them out"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--temperatures", "hot"], "temperatures has 'hot'"),
        (["--temperatures", "-1"], "temperature is -1.0"),
        (["--elicit", "0"], "elicit is 0"),
        (["--at-once", "0"], "at_once is 0"),
        (["--max-tokens", "0"], "max_tokens is 0"),
    ],
)
def test_a_wrong_option_is_refused(options: list[str], message: str, spoken: Path, tmp_path: Path, capsys: Any) -> None:
    assert command(spoken, "--out", tmp_path / "out", *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
