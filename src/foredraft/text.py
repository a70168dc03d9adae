"""From token ids to text that may be shown: whole characters only, and nothing that may belong to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

_UNFINISHED = "\ufffd"  # what an incomplete UTF-8 sequence decodes to


class TextTokenizer(Protocol):
    """The part of a tokenizer that text needs."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> Any:
        """Ids of the text."""
        ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = ...) -> Any:
        """Text of the ids."""
        ...


class TextStream:
    """Text of a growing list of ids, piece by piece, ending before the first stop string.

    The pieces joined equal `tokenizer.decode(ids, skip_special_tokens=True)`, up to the stop string if one came.
    Each push decodes a short window of recent ids, so a long answer costs no more per token than a short one.
    """

    def __init__(self, tokenizer: TextTokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids: list[int] = []
        self._start = 0  # the window begins one settled piece back: some tokenizers drop a leading space
        self._settled = 0  # ids whose text has been taken
        self._held = ""  # text that may be the beginning of a stop string

    def push(self, token: int) -> tuple[str, bool]:
        """Add a token; return the text it sets free and whether a stop string is complete."""
        self._ids.append(token)
        piece = self._unsettled()
        if piece.endswith(_UNFINISHED) and not any(stop in self._held + piece for stop in self._stop):
            return "", False
        if piece:  # else a special token: its successor must be decoded with what came before
            self._start, self._settled = self._settled, len(self._ids)
        return self._release(piece)

    def flush(self) -> str:
        """The text still held back, when no more tokens will come."""
        text, stopped = self._release(self._unsettled())
        return text if stopped else text + self._held

    def _unsettled(self) -> str:
        whole = self._decode(self._ids[self._start :])
        return whole[len(self._decode(self._ids[self._start : self._settled])) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""

    def _release(self, piece: str) -> tuple[str, bool]:
        text = self._held + piece
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            return text[: min(found)], True
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def word_ids(tokenizer: TextTokenizer, words: Sequence[str]) -> list[list[int]]:
    """The usual token ids of each word, at the beginning of a text and after a space."""
    spellings = [spelling for word in words for spelling in (word, f" {word}")]
    ids = [[int(i) for i in tokenizer.encode(text, add_special_tokens=False)] for text in spellings]
    return [word for n, word in enumerate(ids) if word and word not in ids[:n]]
