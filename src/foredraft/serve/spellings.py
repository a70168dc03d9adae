"""The bytes that each token of a tokenizer stands for, which is what a grammar reads."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from foredraft.proposers.translation import Codec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNFINISHED = "\ufffd"  # what a part of a character decodes to
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how SentencePiece spells bytes that it has no piece for
_NEWLINE = "Ċ"  # how byte-level BPE spells it


class Spellings:
    """What tokens say in the middle of a text.

    Args:
        tokenizer: Any: byte-level BPE, SentencePiece's kind, or another one that decodes.
        size: Ids to spell, those from 0 on. A model may have more of them than its tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
        codec = Codec(tokenizer)
        names = {i: token for token, i in tokenizer.get_vocab().items() if i < size and i not in codec.special}
        spelled = _of_byte_level(names) if _is_byte_level(tokenizer) else _of_texts(names, codec)
        self.bytes: list[bytes | None] = [spelled.get(i) for i in range(size)]
        """`[size]`; `None` for ids that are no text: special tokens, padding, pieces that nobody can spell."""
        self.drops_space = _drops_space(tokenizer, spelled)
        """Whether decoding takes off the space that the first token of a text begins with."""


def byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level tokenizers write bytes: printable ones stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    newline = tokenizer.get_vocab().get(_NEWLINE)
    return newline is not None and tokenizer.decode([newline]) == "\n"


def _of_byte_level(names: dict[int, str]) -> dict[int, bytes]:
    """Every character of a token is a byte (Radford et al. 2019, GPT-2); added tokens may have others, as they are."""
    byte_of = byte_alphabet()
    return {
        i: bytes(byte_of[c] for c in name) if all(c in byte_of for c in name) else name.encode()
        for i, name in names.items()
    }


def _of_texts(names: dict[int, str], codec: Codec) -> dict[int, bytes]:
    spelled: dict[int, bytes] = {}
    texts = codec.texts(sorted(names))
    for i, name in names.items():
        text = texts.get(i, "")
        if text and _UNFINISHED not in text:
            spelled[i] = text.encode()
        elif byte := BYTE.fullmatch(name):
            spelled[i] = bytes.fromhex(byte[1])
    return spelled


def _drops_space(tokenizer: PreTrainedTokenizerBase, spelled: dict[int, bytes]) -> bool:
    word = next((i for i, text in sorted(spelled.items()) if text[:1] == b" " and text.strip().isalnum()), None)
    if word is None:
        return False
    text: Any = tokenizer.decode([word])
    return not str(text).startswith(" ")
