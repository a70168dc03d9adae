"""Single tokens as text and bytes, for clients that look at log-probabilities."""

from __future__ import annotations

import json
from typing import Any

from foredraft.serve.spellings import BYTE, byte_alphabet
from foredraft.trace import Labels


class TokenTexts:
    """What each token of a vocabulary stands for."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._alphabet = byte_alphabet() if _is_byte_level(tokenizer) else {}
        self._special = frozenset(tokenizer.all_special_ids)
        self._known: dict[int, bytes] = {}
        self.labels = Labels(tokenizer)

    def bytes_of(self, token: int) -> bytes:
        """The bytes that the token adds to a text."""
        if token not in self._known:
            self._known[token] = self._bytes(self._tokenizer.convert_ids_to_tokens([token])[0] or "", token)
        return self._known[token]

    def text(self, token: int) -> str:
        r"""The token by itself; bytes that are no whole characters are written `bytes:\xe2\x80`, as OpenAI does."""
        raw = self.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _bytes(self, piece: str, token: int) -> bytes:
        if token in self._special:
            return piece.encode()
        if self._alphabet:
            known = all(character in self._alphabet for character in piece)
            return bytes(self._alphabet[c] for c in piece) if known else piece.encode()
        byte = BYTE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    return decoder is not None and "ByteLevel" in json.dumps(json.loads(decoder.__getstate__()))
