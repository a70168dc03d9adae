"""From the worker's events to OpenAI's objects: whole answers, chunks of a stream, figures."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from foredraft import __version__
from foredraft.serve.figures import Figures, trace, usage
from foredraft.serve.orders import Order
from foredraft.serve.token_texts import TokenTexts
from foredraft.serve.tool_reader import ToolDelta, ToolReader
from foredraft.types import Completion, Event, FinishEvent, RoundEvent, TokenEvent

_IMPOSSIBLE = -9999.0  # OpenAI's log-probability of what cannot be: JSON has no infinity


class Piece(NamedTuple):
    """What one round, or the end, adds to one answer."""

    text: str
    tokens: tuple[TokenEvent, ...]
    round: RoundEvent | None = None
    completion: Completion | None = None


@dataclass
class Choice:
    """One answer as it grows."""

    reader: ToolReader | None = None
    pieces: list[Piece] = field(default_factory=list)
    completion: Completion | None = None
    started: bool = False
    offset: int = 0
    last: TokenEvent | None = None
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    _open: list[TokenEvent] = field(default_factory=list)

    def add(self, event: Event) -> Piece | None:
        """Take an event; a piece is complete with its round, and with the end."""
        if isinstance(event, TokenEvent):
            self.last = event
            self._open.append(event)
            return None
        if isinstance(event, FinishEvent):
            self.completion = event.completion
            piece = Piece(event.text, (), completion=event.completion)
        else:
            piece = Piece("".join(token.text for token in self._open), tuple(self._open), event)
            self._open = []
        return piece

    def deltas(self, piece: Piece) -> list[dict[str, Any]]:
        """What a chat message gains by this piece: content, or parts of tool calls."""
        if self.reader is None:
            return [{"content": piece.text}] if piece.text else []
        found = list(self.reader.push(piece.text)) if piece.text else []
        if piece.completion is not None:
            found += self.reader.finish()
        return [self._delta(each) for each in found]

    def _delta(self, found: ToolDelta) -> dict[str, Any]:
        if found.call is None:
            return {"content": found.content}
        call: dict[str, Any] = {"index": found.call, "function": {"arguments": found.arguments}}
        if found.id is not None:
            call |= {"id": found.id, "type": "function"}
            call["function"]["name"] = found.name
            function = {"name": found.name, "arguments": ""}
            self.calls[found.call] = {"id": found.id, "type": "function", "function": function}
        self.calls[found.call]["function"]["arguments"] += found.arguments
        return {"tool_calls": [call]}

    @property
    def finish_reason(self) -> str:
        """By OpenAI's names."""
        assert self.completion is not None
        if self.completion.finish_reason == "length":
            return "length"
        return "tool_calls" if self.calls else "stop"


class Answers:
    """All answers to one request, told in one of the two formats.

    Args:
        order: What was asked.
        identity: `id`, `created`, `model` and `system_fingerprint`, which every object has.
        texts: The vocabulary.
        stop_tokens: Ids that end an answer and are no part of its text.
    """

    kind = ""
    chunk_kind = ""

    def __init__(
        self, order: Order, identity: Mapping[str, Any], texts: TokenTexts, stop_tokens: frozenset[int]
    ) -> None:
        self.order, self.texts = order, texts
        self._identity = dict(identity)
        self._stop_tokens = stop_tokens
        tools = order.tools
        self.choices = [Choice(tools.reader() if tools is not None else None) for _ in range(order.choices)]

    def add(self, index: int, event: Event) -> list[dict[str, Any]]:
        """Take an event of answer `index`; the chunks that it completes, if the request is a stream."""
        choice = self.choices[index]
        piece = choice.add(event)
        if piece is None:
            return []
        if self.order.stream:  # nothing is kept: what a round looked at may be large
            return self._chunks(index, choice, piece)
        choice.pieces.append(piece)
        return []

    def whole(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The object of a request that is no stream."""
        choices = [self._whole(index, choice) for index, choice in enumerate(self.choices)]
        return {**self._head(self.kind), "choices": choices, "usage": usage}

    def last_chunk(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The figures at the end of a stream."""
        return {**self._head(self.chunk_kind), "choices": [], "usage": usage}

    def usage(self, figures: Figures) -> dict[str, Any]:
        """Tokens by OpenAI's names, and what speculation did."""
        completions = [choice.completion for choice in self.choices if choice.completion is not None]
        return usage(sum(len(ask.prompt) for ask in self.order.asks), completions, figures)

    def _head(self, kind: str) -> dict[str, Any]:
        identity = self._identity
        return {"id": identity["id"], "object": kind, **{k: v for k, v in identity.items() if k != "id"}}

    def _chunk(self, index: int, content: Mapping[str, Any], **other: Any) -> dict[str, Any]:
        choice = {"index": index, "logprobs": None, "finish_reason": None, **content}
        chunk = {**self._head(self.chunk_kind), "choices": [choice], **other}
        return {**chunk, "usage": None} if self.order.include_usage else chunk

    def _ids(self, tokens: Iterable[TokenEvent]) -> dict[str, Any]:
        """Ids of an answer's tokens, the one that ends it included, if they were asked for."""
        return {"token_ids": [token.token for token in tokens]} if self.order.token_ids else {}

    def _traced(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        if not self.order.trace or not (piece.tokens or piece.text):
            return {}
        if piece.round is None:  # text that was held back until the end belongs to the last token
            last = choice.last
            assert last is not None
            return {"foredraft": {"tokens": [{"id": last.token, "text": piece.text, "origin": last.origin}]}}
        return {"foredraft": trace(piece.tokens, piece.round, self.texts)}

    def _told(self, tokens: Iterable[TokenEvent]) -> list[TokenEvent]:
        """Tokens whose log-probabilities are told: not the one that ends the answer."""
        ends = frozenset() if self.order.asks[0].params.ignore_eos else self._stop_tokens
        return [token for token in tokens if token.token not in ends]

    def _chunks(self, index: int, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError


class ChatAnswers(Answers):
    """`chat.completion` and its chunks."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def _chunks(self, index: int, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        chunks = []
        if not choice.started:
            choice.started = True
            chunks.append(self._chunk(index, {"delta": {"role": "assistant", "content": ""}}))
        deltas = choice.deltas(piece)
        extra = {"logprobs": self._logprobs(piece.tokens), **self._ids(piece.tokens)}
        traced = self._traced(choice, piece)
        if not deltas and (traced or extra.get("token_ids") or (extra["logprobs"] or {}).get("content")):
            deltas = [{}]
        for number, delta in enumerate(deltas):
            first = number == 0
            chunks.append(self._chunk(index, {"delta": delta, **(extra if first else {})}, **(traced if first else {})))
        if piece.completion is not None:
            chunks.append(self._chunk(index, {"delta": {}, "finish_reason": choice.finish_reason}))
        return chunks

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        deltas = [delta for piece in choice.pieces for delta in choice.deltas(piece)]
        content = "".join(delta.get("content", "") for delta in deltas)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.calls:
            message["content"] = content or None
            message["tool_calls"] = [call for _, call in sorted(choice.calls.items())]
        tokens = [token for piece in choice.pieces for token in piece.tokens]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(tokens),
            **self._ids(tokens),
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(self, tokens: Iterable[TokenEvent]) -> dict[str, Any] | None:
        count = self.order.logprobs
        if count is None:
            return None
        content = []
        for token in self._told(tokens):
            likeliest = _likeliest(token, count)
            entry = self._entry(token.token, (token.logprobs or {}).get(token.token, _IMPOSSIBLE))
            content.append({**entry, "top_logprobs": [self._entry(i, value) for i, value in likeliest]})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self.texts.bytes_of(token)
        return {"token": self.texts.text(token), "logprob": _finite(logprob), "bytes": list(raw)}


class TextAnswers(Answers):
    """`text_completion`, whole and in chunks."""

    kind = chunk_kind = "text_completion"

    def _echoed(self, index: int) -> str:
        return self.order.echo[index // self.order.n] if self.order.echo is not None else ""

    def _chunks(self, index: int, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        text, chunks = piece.text, []
        if not choice.started:
            choice.started = True
            text = self._echoed(index) + text
        logprobs, traced = self._logprobs(choice, piece.tokens), self._traced(choice, piece)
        ids = self._ids(piece.tokens)
        if text or traced or ids.get("token_ids") or (logprobs or {}).get("tokens"):
            chunks.append(self._chunk(index, {"text": text, "logprobs": logprobs, **ids}, **traced))
        if piece.completion is not None:
            chunks.append(self._chunk(index, {"text": "", "finish_reason": choice.finish_reason}))
        return chunks

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        tokens = [token for piece in choice.pieces for token in piece.tokens]
        return {
            "index": index,
            "text": self._echoed(index) + "".join(piece.text for piece in choice.pieces),
            "logprobs": self._logprobs(choice, tokens),
            **self._ids(tokens),
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(self, choice: Choice, tokens: Iterable[TokenEvent]) -> dict[str, Any] | None:
        count = self.order.logprobs
        if count is None:
            return None
        told: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in self._told(tokens):
            given = token.logprobs or {}
            own = (token.token, given.get(token.token, _IMPOSSIBLE))
            told["tokens"].append(self.texts.text(token.token))
            told["token_logprobs"].append(_finite(own[1]))
            likeliest = dict([*_likeliest(token, count), own])
            told["top_logprobs"].append({self.texts.text(i): _finite(value) for i, value in likeliest.items()})
            told["text_offset"].append(choice.offset)
            choice.offset += len(token.text)
        return told


def _likeliest(token: TokenEvent, count: int) -> list[tuple[int, float]]:
    ranked = sorted((token.logprobs or {}).items(), key=lambda pair: (-pair[1], pair[0]))
    return ranked[:count]


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE


def fingerprint(model: str, backend: str) -> str:
    """Changes when what computes the answers does."""
    return "fp_" + hashlib.sha256(f"{model}|{backend}|{__version__}".encode()).hexdigest()[:12]
