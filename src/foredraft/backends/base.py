"""What every backend promises: score any draft in one forward, then hold exactly the committed tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from foredraft.types import Draft


class KVCache(ABC):
    """The keys and values of one sequence in one backend."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Number of committed tokens."""


class Query(NamedTuple):
    """What one sequence wants scored: its last emitted token, which is not cached yet, and a draft below it."""

    cache: KVCache
    root: int
    draft: Draft = Draft()


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do beyond chains."""

    trees: bool = False


class Backend(ABC):
    """A causal language model with per-sequence KV caches.

    A cache holds the committed tokens, which are all tokens so far but the root. `forward` scores the root and every
    node of a draft, each seeing the committed tokens and its own ancestors only; `commit` then keeps the root and the
    accepted path. Everything else about the cache is as if the rejected nodes had never been.
    """

    name: str
    vocab_size: int
    """Rows of logits that have a token (padding of the embedding is cut off)."""
    context: int | None
    """Most tokens a sequence may have, if the model has such a limit."""
    stop_tokens: frozenset[int]
    """Ids that end an answer by the model's own settings."""
    capabilities: Capabilities

    @abstractmethod
    def new_cache(self) -> KVCache:
        """An empty cache for one sequence."""

    @abstractmethod
    def prefill(self, cache: KVCache, tokens: Sequence[int]) -> None:
        """Append tokens to the cache without scoring them."""

    @abstractmethod
    def forward(self, queries: Sequence[Query]) -> list[Tensor]:
        """Logits `[N+1, V]` for each query: row 0 follows the root, row i + 1 follows node i of its draft."""

    @abstractmethod
    def commit(self, cache: KVCache, path: Sequence[int]) -> None:
        """Keep the root and the nodes of `path` of the last forward, and forget its other nodes."""

    @abstractmethod
    def truncate(self, cache: KVCache, length: int) -> None:
        """Forget committed tokens past the first `length`."""
