"""OpenAI's tools for any chat model: how they are told to it, and the grammar of its calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foredraft.errors import InvalidInputError
from foredraft.serve.grammar import CompiledGrammar, Grammars, Tag
from foredraft.serve.tool_reader import END, TRIGGER, ToolReader, beginning

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MOST_TOOLS = 128
_CHOICES = ("none", "auto", "required")

_EXPLANATION = """You can call tools. Each line between <tools> and </tools> describes one:
<tools>
{tools}
</tools>
To call a tool, write its name and its arguments, which must fit its parameters, in this form:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>
What it returns follows between <tool_response> and </tool_response>."""


def _no_parameters() -> dict[str, Any]:
    return {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may call.

    Args:
        name: Letters, digits, `_` and `-`, at most 64, and none of `none`, `auto`, `required`.
        description: For the model.
        parameters: JSON schema of its arguments, an object.
        strict: Whether a schema with parts that cannot be enforced is refused; else those are left out of account.

    Raises:
        InvalidInputError: The name or the schema's type is another.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=_no_parameters)
    strict: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name in _CHOICES:
            raise InvalidInputError(
                f"A tool's name has 1 to 64 letters, digits, '_' and '-', and is none of {', '.join(_CHOICES)}, "
                f"but this one is {self.name!r:.80}."
            )
        kind = self.parameters.get("type", "object")
        if kind != "object":
            raise InvalidInputError(f"Parameters of tool '{self.name}' have type {kind!r:.80}, but must be an object.")

    @property
    def function(self) -> dict[str, Any]:
        """As OpenAI writes it, and templates expect it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class ToolCalls:
    """The tools of one request.

    Args:
        tools: What the model may call.
        choice: `none`, `auto` (it may answer in words instead), `required`, or the name of the one it must call once.
        parallel: Whether it may call several at once.

    Raises:
        InvalidInputError: Too many tools, two of one name, or a choice that there is not.
    """

    def __init__(self, tools: Sequence[Tool], choice: str, *, parallel: bool = True) -> None:
        names = [tool.name for tool in tools]
        if len(names) > _MOST_TOOLS:
            raise InvalidInputError(f"There are {len(names)} tools, but at most {_MOST_TOOLS} are allowed.")
        twice = next((name for n, name in enumerate(names) if name in names[:n]), None)
        if twice is not None:
            raise InvalidInputError(f"Two tools are named '{twice}'. Names must differ.")
        if choice not in (*_CHOICES, *names):
            raise InvalidInputError(f"tool_choice names '{choice}', but the tools are: {', '.join(names) or 'none'}.")
        if choice == "required" and not tools:
            raise InvalidInputError("tool_choice is 'required', but there are no tools. Give some, or leave it out.")
        self._choice = choice
        self._shown = () if choice == "none" else tuple(tools)
        self._callable = tuple(tool for tool in self._shown if choice in ("auto", "required", tool.name))
        self._several = parallel and choice not in names

    def messages(
        self, messages: Sequence[Mapping[str, Any]], template: str | None
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """What goes into a chat template.

        A template that teaches tools in our form is given them. For any other they are explained in the system message,
        and calls and results in the history are written out as text.

        Args:
            messages: OpenAI's, `tool_calls` and results of tools among them.
            template: The model's.

        Returns:
            The messages and the template's `tools`.
        """
        if _teaches(template):
            tools = [tool.function for tool in self._shown]
            return [_with_parsed_arguments(message) for message in messages], tools or None
        written = _written_out(messages)
        if self._shown:
            lines = "\n".join(json.dumps(tool.function, ensure_ascii=False) for tool in self._shown)
            written = _with_system_text(written, _EXPLANATION.format(tools=lines))
        return written, None

    def grammar(self, grammars: Grammars) -> CompiledGrammar | None:
        """What the answer must belong to; `None` if no tool can be called.

        A call's arguments always fit the tool's schema. With `auto` any text may come before the first call, or no call
        at all; else the answer is nothing but calls.

        Raises:
            InvalidInputError: The schema of a tool is refused; the message names the tool.
        """
        if not self._callable:
            return None
        tags = [
            Tag(beginning(tool.name), {"type": "object", **tool.parameters}, END, tool.strict)
            for tool in self._callable
        ]
        try:
            return grammars.tagged(TRIGGER, tags, free=self._choice == "auto", repeat=self._several)
        except InvalidInputError:
            for tool, tag in zip(self._callable, tags, strict=True):
                try:
                    grammars.json_schema(tag.schema, strict=tag.strict)
                except InvalidInputError as error:
                    raise InvalidInputError(f"Parameters of tool '{tool.name}': {error}") from None
            raise

    def reader(self) -> ToolReader:
        """Reads one answer."""
        return ToolReader([tool.name for tool in self._callable])


def _teaches(template: str | None) -> bool:
    """Whether a template knows tools in our form. Qwen3-Coder's has the same tags around calls that are no JSON."""
    return (
        template is not None and all(part in template for part in ("tools", TRIGGER)) and "<function=" not in template
    )


def _text(content: object) -> str:
    """Of a message's content: a string, parts of text, or nothing."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def _with_parsed_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Templates write a call's arguments as JSON themselves; OpenAI's are a string of it."""
    parsed = {**message, "content": _text(message.get("content"))}
    if message.get("tool_calls"):
        parsed["tool_calls"] = [{**call, "function": _function(call)} for call in message["tool_calls"]]
    return parsed


def _function(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        parsed = arguments  # the client's own text: then the model sees it as it is
    return {"name": function["name"], "arguments": parsed}


def _written_out(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The history in roles that every template knows. Results go into one message of the user, with what he says next.

    Many templates refuse two messages of one role in a row.
    """
    written: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        role, text = message["role"], _text(message.get("content"))
        if role == "assistant" and message.get("tool_calls"):
            text = "\n".join([*([text] if text else []), *(_written_call(call) for call in message["tool_calls"])])
        elif role == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
        if after_result and role in ("tool", "user"):
            written[-1]["content"] += f"\n{text}"
        else:
            written.append({"role": "user" if role == "tool" else role, "content": text})
        after_result = role == "tool"
    return written


def _written_call(call: Mapping[str, Any]) -> str:
    return f"{TRIGGER}\n{json.dumps(_function(call), ensure_ascii=False)}\n</tool_call>"


def _with_system_text(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    if messages and messages[0]["role"] in ("system", "developer"):
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
