"""Workloads: every format as people have it, what is wrong with a file told by line, and the bundled prompts."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from foredraft.bench.workloads import Item, Workload, load_workload
from foredraft.errors import InvalidInputError

DOCS = Path(__file__).parent.parent / "docs" / "workloads.md"
KINDS = {"chat", "code", "mathematics", "summarising", "qa", "translation", "editing", "extraction"}
QUESTION = {"question_id": 81, "category": "writing", "turns": ["Name a river.", "And its mouth?"], "reference": ["Po"]}
USER = {"role": "user", "content": "Name a tree."}


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Writes records (a line each), text or bytes into a file, and loads that."""

    def write_and_load(content: Any, name: str = "w.jsonl") -> Workload:
        if isinstance(content, list):
            content = "\n".join(json.dumps(record, ensure_ascii=False) for record in content)
        data = content.encode() if isinstance(content, str) else content
        (tmp_path / name).write_bytes(data)
        return load_workload(str(tmp_path / name))

    return write_and_load


def conversation(*messages: tuple[str, Any]) -> dict[str, Any]:
    return {"id": "c", "conversations": [{"from": speaker, "value": value} for speaker, value in messages]}


# Formats


def test_spec_bench_keeps_all_turns(load: Any) -> None:
    assert load([QUESTION]).items == (Item("81", "writing", ("Name a river.", "And its mouth?")),)


def test_mt_bench_without_a_reference_or_with_null_ones(load: Any) -> None:
    plain = {"question_id": 5, "category": "math", "turns": ["1 + 1?"]}
    items = load([plain, {**plain, "question_id": 6, "reference": [None]}]).items
    assert [item.turns for item in items] == [("1 + 1?",)] * 2


def test_humaneval_is_continued_as_it_is(load: Any) -> None:
    prompt = "\n\ndef f(x):\n    "  # white space at both ends is part of it
    record = {"task_id": "HumanEval/3", "prompt": prompt, "entry_point": "f", "test": "…"}
    assert load([record]).items == (Item("HumanEval/3", "code", (prompt,), raw=True),)


@pytest.mark.parametrize("record", [{"question": "2 + 2?", "answer": "#### 4"}, {"question": "2 + 2?"}])
def test_gsm8k(load: Any, record: dict[str, Any]) -> None:
    assert load([record, record]).items == (Item("1", "", ("2 + 2?",)), Item("2", "", ("2 + 2?",)))


def test_a_question_with_a_passage_is_not_asked_without_it(load: Any) -> None:
    with pytest.raises(InvalidInputError, match="an object with question, context, which is no known format"):
        load([{"question": "Who?", "context": "It was Ada."}])


def test_sharegpt_takes_what_the_human_wrote(load: Any) -> None:
    said = [("system", "Be brief."), ("human", "Hi"), ("gpt", "Hello."), ("human", " "), ("human", "Why?"), ("gpt", "")]
    assert load([conversation(*said)]).items == (Item("c", "", ("Hi", "Why?"), "Be brief."),)


def test_sharegpt_as_a_list_over_lines_without_silent_conversations(load: Any) -> None:
    records = [conversation(("gpt", "Hello?")), conversation(), conversation(("user", "Hi"))]
    assert load(json.dumps(records, indent=1)).items == (Item("c", "", ("Hi",)),)


def test_chat_messages_before_the_last_of_the_user_are_history(load: Any) -> None:
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    messages = [{"role": "developer", "content": "Be brief."}, *history, USER, {"role": "assistant", "content": "Oak."}]
    (item,) = load([{"messages": messages, "category": "trees"}]).items
    assert item == Item("1", "trees", ("Name a tree.",), "Be brief.", tuple(history))


def test_chat_without_a_system_message_and_with_a_later_one(load: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}, USER]
    (item,) = load([{"messages": messages}]).items
    assert (item.system, item.history, item.turns) == ("", tuple(messages[:2]), ("Name a tree.",))


def test_batch(load: Any) -> None:
    bodies = [
        {"messages": [USER], "max_tokens": 9},
        {"prompt": "Once", "max_tokens": 8},
        {"prompt": "So", "max_tokens": None},
    ]
    items = load([{"custom_id": f"r{n}", "method": "POST", "body": body} for n, body in enumerate(bodies)]).items
    assert items[0] == Item("r0", "", ("Name a tree.",), max_tokens=9)
    assert items[1:] == (Item("r1", "", ("Once",), raw=True, max_tokens=8), Item("r2", "", ("So",), raw=True))


def test_recorded_traffic(load: Any) -> None:
    parts = [{"type": "text", "text": "Name "}, {"type": "text", "text": "a tree."}]
    chat = {"messages": [{"role": "user", "content": parts}], "max_tokens": 5, "max_completion_tokens": 7}
    items = load([{"time": 1.5, "request": chat}, {"request": {"prompt": ["One", "Two"]}, "status": 200}]).items
    assert items[0] == Item("1", "", ("Name a tree.",), max_tokens=7)
    assert items[1:] == (Item("2", "", ("One",), raw=True), Item("2-2", "", ("Two",), raw=True))


def test_plain_prompts_by_line(load: Any) -> None:
    text = "\ufeffName a tree.\r\n\r\n  {x} is a set.\n[INST] 用一句话\u2028介绍长江。\rLast"
    turns = [item.turns[0] for item in load(text, "prompts.jsonl").items]
    assert turns == ["Name a tree.", "{x} is a set.", "[INST] 用一句话\u2028介绍长江。", "Last"]


def test_the_name_of_a_file_decides_nothing(load: Any) -> None:
    assert load([QUESTION], "w.txt").items == load([QUESTION], "w.gz").items == load([QUESTION]).items


def test_gzip_is_recognised_by_its_bytes(load: Any) -> None:
    packed = gzip.compress(json.dumps(QUESTION).encode())
    workload = load(packed, "w.json")
    assert workload.items == load([QUESTION]).items
    assert (workload.name, workload.sha256) == ("w.json", hashlib.sha256(packed).hexdigest())


def test_line_separators_of_unicode_within_json_end_no_line(load: Any) -> None:
    (item,) = load([{"turns": ["one\u2028two\x85three"]}]).items
    assert item.turns == ("one\u2028two\x85three",)


def test_records_of_several_formats_in_one_file(load: Any) -> None:
    assert [item.id for item in load([QUESTION, {"messages": [USER]}, {"question": "2 + 2?"}]).items] == [
        "81",
        "2",
        "3",
    ]


def test_ids_are_made_unique(load: Any) -> None:
    ids = ["a", "a-2", "a", "a", "a-2", "", True, 7, "7"]
    found = [item.id for item in load([{"id": own, "turns": ["Hi"]} for own in ids]).items]
    assert found == ["a", "a-2", "a-3", "a-4", "a-2-2", "6", "7", "7-2", "7-3"]


def test_every_line_in_the_documentation_loads(load: Any) -> None:
    shown = re.findall(r"^```(?:json|text)\n(.*?)^```", DOCS.read_text(encoding="utf-8"), re.M | re.S)
    items = [load(block).items for block in shown]
    assert [len(found) for found in items] == [1, 1, 1, 1, 1, 1, 2, 2]
    assert [len(found[0].turns) for found in items] == [2, 1, 1, 2, 1, 1, 1, 1]


# What is wrong with a file


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"id": 1, "text": "Hi"}, r"an object with id, text, which is no known format\. Known formats: Spec-Bench"),
        ({f"k{n}": n for n in range(20)}, r"k11, …, which"),
        ({}, "an object with no keys"),
        ("Hi", "this record is no JSON object but text"),
        ([QUESTION], "no JSON object but a list"),
        ({"turns": []}, "turns is .*one or more"),
        ({"turns": ["Hi", " \n"]}, "a turn is .*some text"),
        ({"turns": ["Hi", 5]}, "a turn must be text, but is a number"),
        ({"turns": "Hi"}, "turns must be a list, but is text"),
        ({"turns": ["Hi"], "category": 3}, "category must be text, but is a number"),
        ({"turns": ["half \ud83d"]}, "no valid Unicode after 'half "),
        ({"messages": [{"role": "assistant", "content": "\ud83d"}, USER]}, "no valid Unicode"),
        ({"task_id": "t", "prompt": None}, "prompt must be text, but is null"),
        ({"question": ""}, "a turn is ''"),
        ({"conversations": ["Hi"]}, "a conversation's message must be an object with from, but is text"),
        (conversation(("human", True)), "value must be text, but is true or false"),
        ({"messages": []}, "no message of the user"),
        ({"messages": [{"role": "system", "content": "Be brief."}]}, "no message of the user"),
        ({"messages": [{"role": "user"}]}, "a message must be an object with content, but is an object with role"),
        ({"messages": [{"role": "tool", "content": "4"}, USER]}, "role is 'tool', .*leave out"),
        ({"messages": [USER, {"role": "assistant", "content": None}, USER]}, "content must be text, but is null"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type is 'image_url', .*leave out"),
        ({"messages": [USER], "max_tokens": 0}, "max_tokens is 0"),
        ({"messages": [USER], "max_tokens": "64"}, "max_tokens is '64'"),
        ({"request": "GET /"}, "an object with messages or prompt, but this is text"),
        ({"body": {"input": "Hi"}}, "an object with messages or prompt, but this is an object with input"),
        ({"request": {"prompt": []}}, r"prompt is \[\]"),
        ({"request": {"prompt": [1, 2]}}, "prompt must be text, but is a number"),
    ],
)
def test_a_wrong_record_is_named(load: Any, record: Any, message: str) -> None:
    lines = f"{json.dumps(QUESTION)}\n\n{json.dumps(record)}\n"
    with pytest.raises(InvalidInputError, match=rf"^w\.jsonl, line 3: .*{message}"):
        load(lines)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"w\.jsonl has no prompts"),
        (" \n\t\n", "has no prompts"),
        ("[]", "has no prompts"),
        (gzip.compress(b"", mtime=0), "has no prompts"),
        ('{"turns": ["Hi"]}\n{"turns": ["H', "line 2: broken JSON"),
        ('{\n"turns": ["Hi"]\n}', "line 1: broken JSON .*whole JSON object on each line"),
        ('[{"turns": ["Hi"]},\n{"turns" ["Hi"]}]', "line 2: broken JSON"),
        ('[{"turns": ["Hi"]}, {"x": 1}]', "record 2: this record is an object with x"),
        ('["Hi"]', "record 1: this record is no JSON object but text"),
        ('{"id": ' + "9" * 5000 + ".", "line 1: broken JSON"),
        ('{"turns": ' + "[" * 200_000, "line 1: broken JSON"),
        ("Hi\nGrüße".encode("latin-1"), "line 2: this is no text in UTF-8"),
        ("Hi".encode("utf-16"), "line 1: this is no text in UTF-8"),
        ("Hi\nyou".encode("utf-16-le"), r"line 1: this is no text in UTF-8 \(a zero byte\)"),
        (gzip.compress(b'{"turns": ["Hi"]}', mtime=0)[:-9], "gzip file, is damaged"),
        (gzip.compress(b"Hi", mtime=0)[:10] + b"\xff" * 20, "gzip file, is damaged"),
        (b"\x1f\x8bno gzip at all", "gzip file, is damaged"),
    ],
)
def test_a_wrong_file_is_told_apart(load: Any, content: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        load(content)


@pytest.mark.parametrize("reference", ["no-such-file.jsonl", ".", "a\0b", ""])
def test_what_is_no_file(reference: str) -> None:
    with pytest.raises(InvalidInputError, match=r"Cannot read workload .*'bundled'"):
        load_workload(reference)


# A part of a workload


@pytest.fixture
def mixed() -> Workload:
    """Three categories of 5, 1 and 3 items, not in blocks."""
    return Workload("w", tuple(Item(str(n), category, ("Hi",)) for n, category in enumerate("aacabcaca")), "")


@pytest.mark.parametrize(
    ("limit", "categories", "ids"),
    [
        (None, (), "012345678"),
        (99, (), "012345678"),
        (1, (), "0"),
        (3, (), "024"),
        (5, (), "01245"),
        (6, (), "012345"),
        (7, (), "0123457"),
        (8, (), "01234567"),
        (None, ("b", "c"), "2457"),
        (3, ("a", "c"), "012"),
        (2, ("b",), "4"),
    ],
)
def test_spread(mixed: Workload, limit: int | None, categories: tuple[str, ...], ids: str) -> None:
    part = mixed.spread(limit, categories)
    assert "".join(item.id for item in part.items) == ids
    assert (part.name, part.sha256) == (mixed.name, mixed.sha256)


def test_a_smaller_limit_gives_a_part_of_a_larger_one(mixed: Workload) -> None:
    parts = [{item.id for item in mixed.spread(limit).items} for limit in range(1, 10)]
    assert all(less < more for less, more in pairwise(parts))


def test_an_unknown_category_is_answered_with_the_known(mixed: Workload) -> None:
    with pytest.raises(InvalidInputError, match="no category 'd': its categories are a, c, b"):
        mixed.spread(None, ["a", "d"])
    with pytest.raises(InvalidInputError, match="no category 'a': it has none"):
        Workload("w", (Item("1", "", ("Hi",)),), "").spread(3, ["a"])


@pytest.mark.parametrize("limit", [0, -1, 1.5, True])
def test_a_limit_is_a_number_of_items(mixed: Workload, limit: Any) -> None:
    with pytest.raises(InvalidInputError, match="limit is"):
        mixed.spread(limit)


# The bundled workload


@pytest.fixture(scope="module")
def bundled() -> Workload:
    return load_workload("bundled")


def is_chinese(item: Item) -> bool:
    """Whether the user writes in Chinese, which is not whether the text that is given does."""
    return "\u4e00" <= item.turns[0][0] <= "\u9fff"


def test_the_bundled_kinds(bundled: Workload) -> None:
    assert Counter(item.category for item in bundled.items) == dict.fromkeys(KINDS, 11)
    assert Counter(item.category for item in bundled.items if is_chinese(item)) == dict.fromkeys(KINDS, 3)
    assert {item.category for item in bundled.items if len(item.turns) == 2} == KINDS
    assert sum(len(item.turns) == 2 for item in bundled.items) == 17


def test_few_of_the_bundled_are_of_every_kind_and_language(bundled: Workload) -> None:
    few = bundled.spread(24).items
    assert Counter(item.category for item in few) == dict.fromkeys(KINDS, 3)
    assert {item.category for item in few if is_chinese(item)} == KINDS
    assert {item.category for item in few if not is_chinese(item)} == KINDS


def test_the_bundled_prompts_are_all_different(bundled: Workload) -> None:
    turns = [turn for item in bundled.items for turn in item.turns]
    assert len({turn[:40] for turn in turns}) == len(turns)
    assert [item.id for item in bundled.items] == [str(n) for n in range(1, 89)]


def test_the_documentation_counts_the_bundled_right(bundled: Workload) -> None:
    page = DOCS.read_text(encoding="utf-8")
    for kind in sorted(KINDS):
        items = [item for item in bundled.items if item.category == kind]
        words = sorted(len(re.findall(r"[一-鿿]|[^\s一-鿿]+", item.turns[0])) for item in items)
        two = sum(len(item.turns) == 2 for item in items)
        row = f"| 11 | {sum(map(is_chinese, items))} | {two} | {words[0]}, {words[5]}, {words[-1]} |"
        assert re.search(rf"^\| `{kind}` \| .* {re.escape(row)}$", page, re.M), row
