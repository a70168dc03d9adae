"""Keys and values that were computed before: a conversation's next turn need not read its history again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foredraft.backends.base import Backend, KVCache

_LEAST = 16  # tokens: of fewer, reading again costs less than looking
_WASTE = 1.25  # times what a cache needs: above, it is copied into one of its size when it is kept

Tokens = NDArray[np.int64]


class Source(NamedTuple):
    """A cache and the tokens that are committed in it."""

    tokens: Tokens
    cache: KVCache


@dataclass(eq=False)
class _Kept:
    tokens: Tokens
    cache: KVCache
    bytes: int
    used: int  # when, counted in uses of any


class Prefixes:
    """Caches of answers that have ended, the least recently used forgotten first.

    Only committed tokens are in a cache, so what it holds is what reading them again would give.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._kept: list[_Kept] = []
        self._uses = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes(self) -> int:
        """Memory of all that is kept."""
        return sum(kept.bytes for kept in self._kept)

    def keep(self, tokens: Sequence[int], cache: KVCache, room: int) -> None:
        """Keep a cache for later prompts. It holds the first of these tokens, as many as are committed in it.

        What it makes superfluous is forgotten: shorter beginnings of the same text.

        Args:
            tokens: All tokens of the answer, prompt included.
            cache: Its cache, which nobody else uses from now on.
            room: Tokens that the cache has room for.
        """
        held = np.array(tokens[: cache.length], dtype=np.int64)
        if len(held) < _LEAST:
            return
        self._kept = [kept for kept in self._kept if _common(kept.tokens, held) < len(kept.tokens)]
        size = self._backend.kv_bytes(len(held))
        if self._backend.kv_bytes(room) > _WASTE * size:
            cache = self._backend.copy(cache, len(held))
        self._kept.append(_Kept(held, cache, size, self._next()))

    def begin(self, prompt: Sequence[int], room: int, running: Sequence[Source] = ()) -> tuple[KVCache, int]:
        """A cache for a prompt, with as much of it as any other cache has, and how many tokens that is.

        Args:
            prompt: Its last token is never cached: it is the root of the first round.
            room: Tokens that the cache should have room for.
            running: Caches that are in use, which are copied.
        """
        wanted = np.array(prompt[:-1], dtype=np.int64)
        own = [Source(kept.tokens, kept.cache) for kept in self._kept]
        sources = [*own, *running]
        commons = [_common(source.tokens, wanted) for source in sources]
        most = max(commons, default=0)
        if most < _LEAST:
            return self._backend.new_cache(room), 0
        best = commons.index(most)
        if best < len(own):
            self._kept[best].used = self._next()
        return self._backend.copy(sources[best].cache, most, room), most

    def shrink(self, most: int) -> None:
        """Forget what was not used for longest until no more than so many bytes are kept."""
        self._kept.sort(key=lambda kept: kept.used)
        while self._kept and self.bytes > most:
            self._kept.pop(0)

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()

    def _next(self) -> int:
        self._uses += 1
        return self._uses


def _common(tokens: Tokens, others: Tokens) -> int:
    """How many tokens two texts begin with in common."""
    count = min(len(tokens), len(others))
    differ = np.flatnonzero(tokens[:count] != others[:count])
    return int(differ[0]) if len(differ) else count
