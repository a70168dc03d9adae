"""Tools: what the model is told, what its answer may be, and its calls read from any pieces of text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.errors import InvalidInputError
from foredraft.serve.grammar import Grammars
from foredraft.serve.tool_reader import ToolDelta, ToolReader
from foredraft.serve.tools import Tool, ToolCalls
from tiny import CHAT_TEMPLATE

WEATHER = Tool(
    name="weather",
    description="How it is outside.",
    parameters={
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"city": {"enum": ["Oslo", "Rome"]}},
    },
)
CLOCK = Tool(name="clock")
TOOLS = [WEATHER, CLOCK]

OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


def possible(grammars: Grammars, tokenizer: Any, calls: ToolCalls, text: str) -> bool:
    """Whether the text may be a whole answer."""
    grammar = calls.grammar(grammars)
    assert grammar is not None
    mask = grammar.start(0)
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    return all(bool(mask(ids[:n])[token]) for n, token in enumerate(ids))


# What the answer may be


@pytest.mark.parametrize(
    ("choice", "parallel", "right", "wrong"),
    [
        ("auto", True, ["", "Hell.", OSLO, f"Hell <x>\n{NOW}", f"{OSLO}\n{NOW}\n{NOW}"], [f"{OSLO} x"]),
        ("auto", False, ["", "Hell.", OSLO, f"Hell{NOW}"], [f"{OSLO}\n{NOW}"]),
        ("required", True, [OSLO, NOW, f"{OSLO}\n{NOW}"], ["", "Hell.", f"Hell {OSLO}"]),
        ("required", False, [OSLO, NOW], ["", f"{OSLO}\n{NOW}"]),
        ("clock", True, [NOW], ["", OSLO, f"{NOW}\n{NOW}"]),
    ],
)
def test_answers_that_a_choice_allows(
    grammars: Grammars, tokenizer: Any, choice: str, parallel: bool, right: list[str], wrong: list[str]
) -> None:
    calls = ToolCalls(TOOLS, choice, parallel=parallel)
    for text in right:
        assert possible(grammars, tokenizer, calls, text), text
    bad = [OSLO.replace("Oslo", "Bonn"), OSLO.replace("weather", "other"), NOW.replace("{}", '{"a": 1}'), OSLO[:-1]]
    for text in (*wrong, *bad):
        assert not possible(grammars, tokenizer, calls, text), text


def test_a_model_that_goes_on_and_on_is_stopped(grammars: Grammars, tokenizer: Any) -> None:
    calls = ToolCalls(TOOLS, "required")
    assert possible(grammars, tokenizer, calls, "\n".join([NOW] * 16))
    assert not possible(grammars, tokenizer, calls, "\n".join([NOW] * 17))


def test_none_calls_nothing_and_shows_nothing(grammars: Grammars) -> None:
    calls = ToolCalls(TOOLS, "none")
    assert calls.grammar(grammars) is None
    messages = [{"role": "user", "content": "Hell"}]
    assert calls.messages(messages, CHAT_TEMPLATE) == (messages, None)
    assert calls.reader().push(NOW) == [ToolDelta(NOW)]
    assert ToolCalls([], "auto").grammar(grammars) is None


def test_schemas_that_cannot_be_enforced_name_the_tool(grammars: Grammars) -> None:
    negative = {"type": "object", "properties": {"a": {"not": {}}}}
    strict = Tool(name="strict", parameters=negative, strict=True)
    with pytest.raises(InvalidInputError, match=r"Parameters of tool 'strict': .* not supported"):
        ToolCalls([CLOCK, strict], "auto").grammar(grammars)
    assert ToolCalls([CLOCK, Tool(name="lenient", parameters=negative)], "auto").grammar(grammars) is not None


def test_schemas_that_are_too_large_together_are_refused(grammars: Grammars) -> None:
    large = {"type": "object", "properties": {"a": {"enum": ["x" * 40_000]}}}
    with pytest.raises(InvalidInputError, match="together more than 64 KB"):
        ToolCalls([Tool(name=name, parameters=large) for name in "ab"], "auto").grammar(grammars)


@pytest.mark.parametrize(
    ("tools", "choice", "reason"),
    [
        ([CLOCK, WEATHER, CLOCK], "auto", "Two tools are named 'clock'"),
        ([CLOCK], "weather", "names 'weather', but the tools are: clock"),
        ([], "clock", "the tools are: none"),
        ([], "required", "there are no tools"),
        ([Tool(name=f"t{n}") for n in range(129)], "auto", "129 tools, but at most 128"),
    ],
)
def test_tools_that_cannot_be_are_refused(tools: list[Tool], choice: str, reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        ToolCalls(tools, choice)


@pytest.mark.parametrize("name", ["", "a b", "é", "x" * 65, "auto", 'a"', "a\n"])
def test_names_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match="A tool's name has 1 to 64 letters"):
        Tool(name=name)


def test_arguments_are_an_object() -> None:
    with pytest.raises(InvalidInputError, match="'f' have type 'string'"):
        Tool(name="f", parameters={"type": "string"})


# What the model is told

HERMES = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "Weather"}, {"type": "text", "text": " and time?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}},
            {"id": "2", "type": "function", "function": {"name": "clock", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
    {"role": "tool", "tool_call_id": "2", "content": "noon"},
    {"role": "user", "content": "And Rome?"},
]


def test_a_template_that_knows_tools_gets_them() -> None:
    messages, tools = ToolCalls(TOOLS, "auto").messages(HISTORY, HERMES)
    assert tools == [WEATHER.function, CLOCK.function]
    assert tools[0]["function"]["parameters"] == WEATHER.parameters
    called = [call["function"] for call in messages[2]["tool_calls"]]
    assert called == [{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "clock", "arguments": {}}]
    assert messages[2]["content"] == ""
    assert messages[3:] == HISTORY[3:]


@pytest.mark.parametrize("template", [None, CHAT_TEMPLATE, "{{ tools }}[TOOL_CALLS]", HERMES + "<function=f>"])
def test_any_other_template_gets_text(template: str | None) -> None:
    messages, tools = ToolCalls(TOOLS, "auto").messages(HISTORY, template)
    assert tools is None
    system, *rest = messages
    assert system["content"].startswith("Be kind.\n\nYou can call tools.")
    lines = re.findall(r"^\{\"type.*$", system["content"], flags=re.MULTILINE)
    assert [json.loads(line) for line in lines] == [WEATHER.function, CLOCK.function]
    assert rest == [
        {"role": "user", "content": "Weather and time?"},
        {"role": "assistant", "content": f"{OSLO}\n{NOW}"},
        {
            "role": "user",
            "content": "<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>\nAnd Rome?",
        },
    ]


def test_without_a_system_message_there_is_one() -> None:
    messages, _ = ToolCalls([CLOCK], "required").messages([{"role": "user", "content": "Hell"}], None)
    assert [message["role"] for message in messages] == ["system", "user"]


def test_arguments_that_are_no_json_stay_as_they_are() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{oops"}}
    history = [{"role": "assistant", "content": "Well.", "tool_calls": [call]}]
    messages, _ = ToolCalls([], "auto").messages(history, None)
    assert messages[0]["content"].startswith("Well.\n<tool_call>\n") and "{oops" in messages[0]["content"]


def test_the_history_is_not_changed() -> None:
    before = json.dumps(HISTORY)
    for template in (None, HERMES):
        ToolCalls(TOOLS, "auto").messages(HISTORY, template)
    assert json.dumps(HISTORY) == before


# Its calls read


def joined(deltas: Sequence[ToolDelta]) -> tuple[str, list[tuple[str | None, str]]]:
    """Content, and each call's name and arguments."""
    content = "".join(delta.content for delta in deltas)
    count = max((delta.call for delta in deltas if delta.call is not None), default=-1) + 1
    calls: list[tuple[str | None, str]] = []
    for n in range(count):
        pieces = [delta for delta in deltas if delta.call == n]
        assert pieces[0].name is not None and re.fullmatch(r"call_[0-9a-f]{24}", pieces[0].id or "")
        assert all(piece.name is None and piece.id is None for piece in pieces[1:])
        calls.append((pieces[0].name, "".join(piece.arguments for piece in pieces)))
    return content, calls


def read(pieces: Sequence[str]) -> tuple[str, list[tuple[str | None, str]]]:
    reader = ToolReader(["weather", "clock"])
    deltas = [delta for piece in pieces for delta in reader.push(piece)] + reader.finish()
    return joined(deltas)


TRICKY = '<tool_call>\n{"name": "weather", "arguments": {"a": "}\\"]{", "b": [{"c": "\\\\"}], "é": {}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("", "", []),
        ("Hell < 3 <tool", "Hell < 3 <tool", []),
        (OSLO, "", [("weather", '{"city": "Oslo"}')]),
        (f"{OSLO}\n{NOW}", "", [("weather", '{"city": "Oslo"}'), ("clock", "{}")]),
        (f"Well:\n{NOW}\n", "Well:\n", [("clock", "{}")]),
        (TRICKY, "", [("weather", '{"a": "}\\"]{", "b": [{"c": "\\\\"}], "é": {}}')]),
        (f"{NOW}\n\nHell", "\n\nHell", [("clock", "{}")]),
        (NOW.replace("clock", "other"), NOW.replace("clock", "other"), []),
        (OSLO[:56], "", [("weather", '{"city": "O')]),
        (OSLO[:20], OSLO[:20], []),
        (OSLO[:-3], "", [("weather", '{"city": "Oslo"}')]),
    ],
)
def test_content_and_calls(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read([text]) == (content, calls) == read(list(text))


@given(
    parts=st.lists(st.sampled_from([OSLO, NOW, TRICKY, "Hell", "\n", "<", "<tool_call>", "}", '"', OSLO[:40]])),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_any_pieces_say_the_same(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    at = [0, *sorted(cuts), len(text)]
    assert read([text[a:b] for a, b in pairwise(at)]) == read([text]) == read(list(text))


def test_arguments_come_as_they_are_written_and_nothing_else_is_late() -> None:
    reader = ToolReader(["clock", "weather"])
    assert reader.push("Hell") == [ToolDelta("Hell")]
    assert reader.push(" <") == [ToolDelta(" ")]
    assert reader.push("tool_call>\n") == [] and reader.calls == 0
    (begun,) = reader.push('{"name": "weather", "arguments": {')
    assert (begun.call, begun.name, begun.arguments) == (0, "weather", "{")
    assert reader.push('"ci') == [ToolDelta(call=0, arguments='"ci')]
    assert reader.push('ty": "<"}') == [ToolDelta(call=0, arguments='ty": "<"}')]
    assert reader.push("}\n</tool_call>") == [] and reader.finish() == []
    assert reader.calls == 1
