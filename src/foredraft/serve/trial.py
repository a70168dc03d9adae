"""Compiles a grammar in a process of its own first: schemas are what clients send, and some take for ever.

A `multipleOf` of nine digits is enough. The compiler has limits, but not on everything, and it cannot be interrupted.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from foredraft.errors import InvalidInputError

_SECONDS = 5.0  # to start Python and to compile; usually a tenth of one
_MOST_MEMORY = 2 * 1024**3


def refuse_endless(grammar: str) -> None:
    """Raise `InvalidInputError` if the grammar takes too long or too much memory to compile, or kills the compiler.

    What else is wrong with it the compiler tells itself.
    """
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(command, input=grammar.encode(), capture_output=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode != 0:
        raise InvalidInputError(
            "The grammar takes too much time or memory to compile. Simplify the schema: smaller multipleOf and counts, "
            "fewer patterns on one value, fewer alternatives."
        )


class _Bytes:
    """A tokenizer of bytes and an end."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _main() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # there are no such limits on Windows, or lower ones
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(_Bytes())), sys.stdin.buffer.read().decode(), log_level=0)
    matcher.compute_bitmask()


if __name__ == "__main__":
    _main()
