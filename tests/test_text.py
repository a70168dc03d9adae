"""Streamed text never splits a character, never shows a stop string, and is in sum what the tokenizer decodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.text import TextStream
from tiny import tiny_metaspace_tokenizer, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
UNFINISHED = "\ufffd"
FAMILY = "👨‍👩‍👧‍👦"  # four people and three joiners


def ids_of(text: str | bytes) -> list[int]:
    """Ids of a text; of bytes, one for each."""
    if isinstance(text, str):
        return list(TOKENIZER(text)["input_ids"])
    return [TOKENIZER.convert_tokens_to_ids(byte_token(byte)) for byte in text]


def byte_token(byte: int) -> str:
    """The letter that stands for a byte in byte-level BPE (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shifted = [b for b in range(256) if b not in plain]
    return chr(byte) if byte in plain else chr(256 + shifted.index(byte))


def stream(ids: Sequence[int], stop: Sequence[str] = (), tokenizer: Any = TOKENIZER) -> tuple[list[str], int | None]:
    """The pieces of all ids, and how many ids it took to complete a stop string (`None` if none was)."""
    text = TextStream(tokenizer, stop)
    pieces = []
    for count, token in enumerate(ids, start=1):
        piece, stopped = text.push(token)
        pieces.append(piece)
        if stopped:
            return pieces, count
    return [*pieces, text.flush()], None


def decode(ids: Sequence[int], tokenizer: Any = TOKENIZER) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


# Characters


@pytest.mark.parametrize("text", ["你好，世界", "café", "🙂", FAMILY, f"a{FAMILY}b 中", "नमस्ते", "𝔘𝔫𝔦"])
def test_a_character_is_never_split(text: str) -> None:
    ids = ids_of(text.encode())  # one byte a token: the worst case
    pieces, _ = stream(ids)
    assert "".join(pieces) == text
    assert UNFINISHED not in "".join(pieces)
    shown = ""
    for count, piece in enumerate(pieces[:-1], start=1):  # as soon as a character is whole it is shown
        shown += piece
        whole = text.encode()[:count].decode(errors="ignore")
        assert shown == whole


def test_characters_split_by_merges_are_whole_too() -> None:
    text = f"hello the {FAMILY} in 中文"
    ids = ids_of(text)
    assert len(ids) < len(text.encode())  # merges are at work
    assert "".join(stream(ids)[0]) == text


@given(st.text(max_size=40))
def test_any_text_comes_out_whole(text: str) -> None:
    pieces, _ = stream(ids_of(text))
    assert "".join(pieces) == decode(ids_of(text)) == text


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40))
def test_pieces_joined_are_what_the_tokenizer_decodes(ids: list[int]) -> None:
    pieces, _ = stream(ids)  # all bytes, whole characters or not, and special tokens anywhere
    assert "".join(pieces) == decode(ids)


@given(st.binary(max_size=30))
def test_invalid_bytes_come_out_as_the_tokenizer_decodes_them(data: bytes) -> None:
    assert "".join(stream(ids_of(data))[0]) == decode(ids_of(data))


def test_a_character_cut_off_by_the_end_is_flushed() -> None:
    ids = ids_of("中".encode()[:2])
    pieces, _ = stream(ids)
    assert pieces[:-1] == ["", ""] and pieces[-1] == decode(ids) != ""


def test_special_tokens_have_no_text_even_inside_a_character() -> None:
    start = TOKENIZER.convert_tokens_to_ids("<|im_start|>")
    first, *rest = ids_of("中".encode())
    assert "".join(stream([first, start, *rest, start])[0]) == "中"


def test_the_space_between_words_survives_a_tokenizer_that_drops_it_at_the_beginning() -> None:
    tokenizer = tiny_metaspace_tokenizer(["one", "two"])
    one, two, end = tokenizer.convert_tokens_to_ids(["▁one", "▁two", "</s>"])
    for ids in ([one, two, one], [one, end, two], [end, one, end, end, two, one]):
        assert "".join(stream(ids, tokenizer=tokenizer)[0]) == decode(ids, tokenizer)


def test_the_window_stays_short() -> None:
    longest = 0

    class Watched:
        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
            nonlocal longest
            longest = max(longest, len(token_ids))
            return str(TOKENIZER.decode(token_ids, skip_special_tokens=skip_special_tokens))

    stream(ids_of("a long answer " * 50 + FAMILY), tokenizer=Watched())
    assert longest <= 16


# Stop strings


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the first of the stop strings."""
    return text[: min((at for s in stop if (at := text.find(s)) >= 0), default=len(text))]


@pytest.mark.parametrize(
    ("text", "stop", "left"),
    [
        ("one END two", ["END"], "one "),
        ("one ENEND two", ["END"], "one EN"),
        ("aaab", ["aab"], "a"),
        ("ababac", ["abac"], "ab"),
        ("one two", ["three", "two", "one"], ""),
        ("abcd", ["bcd", "cd", "d"], "a"),
        ("no stop here", ["END"], "no stop here"),
        ("it ends with EN", ["END"], "it ends with EN"),
        ("你好，世界", ["，世"], "你好"),
        (f"x{FAMILY}y", ["‍👩"], "x👨"),
        ("END", ["END"], ""),
    ],
)
def test_text_ends_before_the_first_stop_string(text: str, stop: list[str], left: str) -> None:
    assert cut(text, stop) == left  # the reference itself
    for ids in (ids_of(text), ids_of(text.encode())):
        pieces, count = stream(ids, stop)
        assert "".join(pieces) == left
        assert (count is None) == (left == text)


@given(
    text=st.text(alphabet="ab ⭐", max_size=30),
    stop=st.lists(st.text(alphabet="ab ⭐", min_size=1, max_size=5), max_size=4),
    by_bytes=st.booleans(),
)
def test_stop_strings_cut_where_a_search_of_the_text_would(text: str, stop: list[str], by_bytes: bool) -> None:
    ids = ids_of(text.encode() if by_bytes else text)
    pieces, count = stream(ids, stop)
    assert "".join(pieces) == cut(decode(ids[:count]), stop)
    # and it came with the first token that completed any of them:
    texts = [decode(ids[:n]).rstrip(UNFINISHED) for n in range(1, len(ids) + 1)]
    assert count == next((n for n, t in enumerate(texts, start=1) if any(s in t for s in stop)), None)


@given(
    text=st.text(alphabet="abc", max_size=30),
    stop=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_no_more_is_held_back_than_may_begin_a_stop_string(text: str, stop: list[str]) -> None:
    pieces, count = stream(ids_of(text.encode()), stop)
    shown = ""
    for n, piece in enumerate(pieces[: len(text)], start=1):
        shown += piece
        if n == count:
            break
        held = text[len(shown) : n]
        assert text[:n] == shown + held
        assert held == "" or any(len(held) < len(s) and s.startswith(held) for s in stop)
