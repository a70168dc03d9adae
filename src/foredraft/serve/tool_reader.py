"""Tool calls read from an answer's text as it comes.

Calls are written in the form of Hermes and Qwen, several in lines of their own:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import NamedTuple

TRIGGER = "<tool_call>"
"""What every call begins with."""

END = "}\n</tool_call>"
"""What follows its arguments."""


def beginning(name: str) -> str:
    """What stands between `TRIGGER` and the arguments of a call."""
    return f'\n{{"name": "{name}", "arguments": '


class ToolDelta(NamedTuple):
    """A piece of an answer: `content`, or a piece of a call. The first one of a call has its `id` and `name`."""

    content: str = ""
    call: int | None = None
    """Index of the call."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class ToolReader:
    """Splits an answer's text into what is said and what is called.

    What may yet become a call is held back until that is clear. Text that is not exactly a call stays content: grammars
    leave nothing between.

    Args:
        names: What may be called.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._beginnings = {TRIGGER + beginning(name) + "{": name for name in names}
        self._held = ""
        self._arguments: _Brackets | None = None  # of the call that is open
        self._closing = False
        self._between = False  # a call has just ended: a line's end before the next one is no content
        self.calls = 0
        """Calls that have begun."""

    def push(self, text: str) -> list[ToolDelta]:
        """What the next piece of text sets free."""
        self._held += text
        found: list[ToolDelta] = []
        while (delta := self._next()) is not None:
            found.append(delta)
        return found

    def finish(self) -> list[ToolDelta]:
        """What was held back, when no more text will come. A call that is not complete stays so."""
        rest, self._held = self._held, ""
        return [] if self._closing or not rest or (self._between and rest == "\n") else [ToolDelta(rest)]

    def _next(self) -> ToolDelta | None:
        """The next piece; `None` if more text is needed."""
        if self._arguments is not None and self._held:
            return self._read_arguments(self._arguments)
        if self._closing:
            if END.startswith(self._held) and self._held != END:
                return None
            self._held = self._held.removeprefix(END)
            self._closing, self._between = False, True
        return self._read_content() if self._held else None

    def _read_arguments(self, brackets: _Brackets) -> ToolDelta:
        count = next((n for n, c in enumerate(self._held, start=1) if brackets.closed_by(c)), len(self._held))
        if brackets.depth == 0:
            self._arguments, self._closing = None, True
        return ToolDelta(call=self.calls - 1, arguments=self._take(count))

    def _read_content(self) -> ToolDelta | None:
        for match in re.finditer("<", self._held):
            at = match.start()
            rest = self._held[at:]
            start = 0 if self._between and self._held[:at] == "\n" else at
            begun = next((text for text in self._beginnings if rest.startswith(text)), None)
            if begun is not None or any(text.startswith(rest) for text in self._beginnings):
                if start:
                    return self._content(start)
                return self._begin(at, begun) if begun is not None else None
        if self._between and self._held == "\n":
            return None
        return self._content(len(self._held))

    def _content(self, count: int) -> ToolDelta:
        self._between = False
        return ToolDelta(self._take(count))

    def _begin(self, at: int, text: str) -> ToolDelta:
        """The call whose beginning, `text`, stands at this place."""
        self._take(at + len(text))
        self._arguments = _Brackets()
        self._between = False
        self.calls += 1
        name = self._beginnings[text]
        return ToolDelta(call=self.calls - 1, id=f"call_{secrets.token_hex(12)}", name=name, arguments="{")

    def _take(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text


class _Brackets:
    """Looks for the end of a JSON object whose first bracket has been read."""

    def __init__(self) -> None:
        self.depth = 1
        self._quoted = self._escaped = False

    def closed_by(self, character: str) -> bool:
        """Read one more character; whether it is the object's last."""
        if self._quoted:
            self._quoted = character != '"' or self._escaped
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1
        return self.depth == 0
