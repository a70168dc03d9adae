"""The formats of workload files: what a record must hold to be of one, and the items that it gives.

docs/workloads.md shows a line of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from foredraft.checks import is_integer, require
from foredraft.errors import InvalidInputError

Record = Mapping[str, Any]
"""A JSON object of a file."""

_IDS = ("question_id", "task_id", "custom_id", "id")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_SHAREGPT_USER = ("human", "user")
_MOST_KEYS = 12  # of a record, in a message
_MOST_TEXT = 40  # characters of a text, in a message


@dataclass(frozen=True)
class Item:
    """One conversation to have with a model.

    `turns` are the user's messages, asked one after another; each answer stays in the history. `history` holds the
    messages before the first turn, each with `role` and `content`, without the `system` message at its head. A `raw`
    turn is to be continued as it is, without a chat template. `category` is the kind of text, empty if the file does
    not tell; `max_tokens` what a recorded request asked for.

    Raises:
        InvalidInputError: There is no turn, one is empty, a text is no valid Unicode, or `max_tokens` is no count.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    system: str = ""
    history: tuple[Mapping[str, str], ...] = ()
    raw: bool = False
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        require("turns", self.turns, len(self.turns) > 0, "one or more messages of the user")
        for turn in self.turns:
            require("a turn", turn, bool(turn.strip()), "some text")
        for text in (self.id, self.category, self.system, *self.turns, *(m["content"] for m in self.history)):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                near = text[max(error.start - _MOST_TEXT, 0) : error.end]
                raise InvalidInputError(f"a text is no valid Unicode after {near!r}: mend or leave it out.") from error
        good = self.max_tokens is None or (is_integer(self.max_tokens) and self.max_tokens >= 1)
        require("max_tokens", self.max_tokens, good, "an integer >= 1, or left out")

    @property
    def beginning(self) -> list[Mapping[str, str]]:
        """The messages before the first turn."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.history]


def items_of(record: Any, number: int) -> list[Item]:
    """The items of one record of a file, in whichever format it is.

    Args:
        record: A JSON value.
        number: Which record of its file it is: the id of one that has none.

    Returns:
        Mostly one; none for a ShareGPT conversation in which the user says nothing; several for a completion request
        with several prompts.

    Raises:
        InvalidInputError: It is in no known format, or lacks what its format needs.
    """
    if not isinstance(record, dict):
        raise InvalidInputError(f"this record is no JSON object but {_kind(record)}. Known formats: {KNOWN}.")
    form = next((form for form in _FORMATS if form.holds(record)), None)
    if form is None:
        raise InvalidInputError(f"this record is {_kind(record)}, which is no known format. Known formats: {KNOWN}.")
    ids = [record.get(key) for key in _IDS]
    label = next((str(own) for own in ids if is_integer(own) or (isinstance(own, str) and own)), str(number))
    category = record.get("category")
    return form.read(record, label, "" if category is None else _string(category, "category"))


def _question(record: Record, label: str, category: str) -> list[Item]:
    return [Item(label, category, tuple(_string(turn, "a turn") for turn in _list(record["turns"], "turns")))]


def _humaneval(record: Record, label: str, category: str) -> list[Item]:
    return [Item(label, category or "code", (_string(record["prompt"], "prompt"),), raw=True)]


def _gsm8k(record: Record, label: str, category: str) -> list[Item]:
    return [Item(label, category, (_string(record["question"], "question"),))]


def _sharegpt(record: Record, label: str, category: str) -> list[Item]:
    """What the human wrote; nothing of a conversation without it: collections from the web have some of these."""
    turns: list[str] = []
    system: list[str] = []
    for message in _list(record["conversations"], "conversations"):
        speaker = _field(message, "from", "a conversation's message")
        value = _string(_field(message, "value", "a conversation's message"), "value")
        if value.strip() and speaker in _SHAREGPT_USER:
            turns.append(value)
        elif value.strip() and speaker == "system":
            system.append(value)
    return [Item(label, category, tuple(turns), "\n\n".join(system))] if turns else []


def _recorded(record: Record, label: str, category: str) -> list[Item]:
    return _request(record["request"], label, category)


def _batch(record: Record, label: str, category: str) -> list[Item]:
    return _request(record["body"], label, category)


def _request(body: Any, label: str, category: str) -> list[Item]:
    """The items of the body of a chat request (`messages`) or of a completion request (`prompt`)."""
    if not isinstance(body, dict) or not body.keys() & {"messages", "prompt"}:
        raise InvalidInputError(f"a request must be an object with messages or prompt, but this is {_kind(body)}.")
    asked = body.get("max_completion_tokens")  # the newer name
    max_tokens = body.get("max_tokens") if asked is None else asked
    if "messages" in body:
        return [_chat(_list(body["messages"], "messages"), label, category, max_tokens)]
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    require("prompt", prompts, len(prompts) > 0, "text, or a list of texts")
    texts = [_string(prompt, "prompt") for prompt in prompts]
    return [Item(label, category, (text,), raw=True, max_tokens=max_tokens) for text in texts]


def _chat(messages: list[Any], label: str, category: str, max_tokens: Any) -> Item:
    """The last message of the user is the turn, what comes before it the history; what comes after it is dropped."""
    said = [{"role": _role(message), "content": _content(message)} for message in messages]
    last = max((place for place, message in enumerate(said) if message["role"] == "user"), default=None)
    if last is None:
        raise InvalidInputError("messages has no message of the user: there is nothing to answer.")
    first = 1 if said[0]["role"] == "system" else 0
    system = said[0]["content"] if first else ""
    return Item(label, category, (said[last]["content"],), system, tuple(said[first:last]), max_tokens=max_tokens)


def _role(message: Any) -> str:
    role = _string(_field(message, "role", "a message"), "role")
    require("role", role, role in _ROLES, f"one of {', '.join(_ROLES)}: leave out requests that call tools")
    return _ROLES[role]


def _content(message: Any) -> str:
    """A message's text, given as a string or as parts of type `text`, which are joined as they are."""
    content = _field(message, "content", "a message")
    if not isinstance(content, list):
        return _string(content, "content")
    for part in content:
        kind = _field(part, "type", "a part of content")
        require("type", kind, kind == "text", "'text': leave out requests with images, sound or files")
    return "".join(_string(_field(part, "text", "a part of content"), "text") for part in content)


def _field(found: Any, key: str, name: str) -> Any:
    if not isinstance(found, dict) or key not in found:
        raise InvalidInputError(f"{name} must be an object with {key}, but is {_kind(found)}.")
    return found[key]


def _list(found: Any, name: str) -> list[Any]:
    if not isinstance(found, list):
        raise InvalidInputError(f"{name} must be a list, but is {_kind(found)}.")
    return found


def _string(found: Any, name: str) -> str:
    if not isinstance(found, str):
        raise InvalidInputError(f"{name} must be text, but is {_kind(found)}.")
    return found


def _kind(found: Any) -> str:
    """What a JSON value is, in words, with an object's keys."""
    if isinstance(found, dict):
        more = ", …" if len(found) > _MOST_KEYS else ""
        return f"an object with {', '.join([*found][:_MOST_KEYS])}{more}" if found else "an object with no keys"
    names = {list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(found), "a number")


class _Format(NamedTuple):
    """A format's name, the keys that tell it, what reads a record of it, and the only keys there may be, if so."""

    name: str
    needs: frozenset[str]
    read: Callable[[Record, str, str], list[Item]]
    only: frozenset[str] | None = None

    def holds(self, record: Record) -> bool:
        """Whether a record is in this format, going by its keys."""
        return self.needs <= record.keys() and (self.only is None or record.keys() <= self.only)


_FORMATS = (
    _Format("Spec-Bench or MT-bench", frozenset({"turns"}), _question),
    _Format("HumanEval", frozenset({"task_id", "prompt"}), _humaneval),
    # A question that stands beside anything else, such as a passage, may need it.
    _Format("GSM8K", frozenset({"question"}), _gsm8k, only=frozenset({"question", "answer", "id", "category"})),
    _Format("ShareGPT", frozenset({"conversations"}), _sharegpt),
    _Format("chat", frozenset({"messages"}), _request),
    _Format("batch", frozenset({"body"}), _batch),
    _Format("recorded traffic", frozenset({"request"}), _recorded),
)

KNOWN = "; ".join(
    [f"{form.name} ({', '.join(sorted(form.needs))})" for form in _FORMATS] + ["plain prompts, one a line"]
)
"""All formats, for messages."""
