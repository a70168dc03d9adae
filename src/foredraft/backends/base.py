"""What every backend promises: score any draft in one forward, then hold exactly the committed tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from foredraft.backends.sublayers import Sublayers
from foredraft.errors import InvalidInputError, UnsupportedError
from foredraft.tree import is_straight
from foredraft.types import Draft

USE_INSTEAD = "Use 'suffix', 'recycling', 'ngram' or 'draft:REF'."
"""What drafts where a backend or a model cannot do what a drafter needs."""


Rows = Any
"""`[n, layers, H]`, as a backend has them: tensors, or arrays of float32."""


class Features:
    """What some layers make of the tokens of one sequence, kept from commit to commit for a head that drafts from it.

    Args:
        layers: Counted as transformers counts `hidden_states`: 0 is the embedding, i what layer i gives out (from 1),
            the number of layers what the final norm gives out.
        start: Tokens that were committed before, whose features are lost.
        most: So many of the last tokens are kept; `None` keeps all.
    """

    def __init__(self, layers: Sequence[int], start: int, most: int | None = None) -> None:
        self.layers = tuple(layers)
        self.start = start
        self._most, self._held = most, 0
        self._rows: list[Rows] = []
        self._pending: Rows | None = None

    def score(self, rows: Rows) -> None:
        """Rows `[N+1, layers, H]` of the root and the nodes of a forward, of which `commit` says what comes true."""
        self._pending = rows

    def commit(self, path: Sequence[int]) -> None:
        """Keep the root and the nodes of the path."""
        if self._pending is not None:
            rows = slice(1 + len(path)) if is_straight(path) else [0, *(node + 1 for node in path)]
            self.append(self._pending[rows])
        self._pending = None

    def append(self, rows: Rows) -> None:
        """Rows `[n, layers, H]` of tokens that are certain."""
        self._rows.append(rows)
        self._held += len(rows)
        while self._most is not None and self._held - len(self._rows[0]) >= self._most:
            self.start += len(self._rows[0])
            self._held -= len(self._rows.pop(0))

    def take(self) -> tuple[int, Tensor | None]:
        """Where in the text the rows begin that came since the last call, and these rows `[n, layers, H]`, if any."""
        if not self._rows:
            return self.start, None
        pieces = self._rows
        if isinstance(pieces[0], Tensor):
            rows = torch.cat(pieces)
        else:
            rows = torch.from_numpy(np.ascontiguousarray(np.concatenate(pieces)))
        end, self._rows, self._held = self.start + len(rows), [], 0
        rows = rows if self._most is None else rows[-self._most :]
        self.start = end
        return end - len(rows), rows


class KVCache(ABC):
    """The keys and values of one sequence in one backend."""

    features: list[Features]
    """Whoever wants to know what layers make of its tokens."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Number of committed tokens."""

    def keep_features(self, layers: Sequence[int], most: int | None = None) -> Features:
        """From now on, features of these layers for all tokens that are committed; see `Features`."""
        features = Features(layers, self.length, most)
        self.features.append(features)
        return features

    @property
    def wanted_layers(self) -> tuple[int, ...]:
        """Layers that any of `features` has, in order."""
        return tuple(sorted({layer for features in self.features for layer in features.layers}))

    def hand_out(self, layers: tuple[int, ...], states: Rows, *, certain: bool) -> None:
        """Give `states` `[n, layers, H]` of `wanted_layers` to all who asked; of certain tokens, or until a commit."""
        for features in self.features:
            same = features.layers == layers
            rows = states if same else states[:, [layers.index(layer) for layer in features.layers]]
            (features.append if certain else features.score)(rows)


class Query(NamedTuple):
    """What one sequence wants scored: its last emitted token, which is not cached yet, and a draft below it."""

    cache: KVCache
    root: int
    draft: Draft = Draft()
    known: int = 0
    """How many of root and nodes the last forward of this cache had, which nothing has followed: only the others are
    computed, and only they are given logits. For drafts that grow; with caches that nobody wants features of."""

    def begins_with(self, tokens: Sequence[int]) -> int:
        """How many of these tokens the root and the nodes after it are, as long as they follow one another."""
        for node, (own, other) in enumerate(zip((self.root, *self.draft.tokens), tokens, strict=False), start=-1):
            if own != other or (node >= 0 and self.draft.parents[node] != node - 1):
                return node + 1
        return min(1 + len(self.draft), len(tokens))


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do beyond chains."""

    trees: bool = False
    early_exit: bool = False
    features: bool = False
    """`KVCache.features`, `embed`, `head` and `head_rows`."""


class Backend(ABC):
    """A causal language model with per-sequence KV caches.

    A cache holds the committed tokens, which are all tokens so far but the root. `forward` scores the root and every
    node of a draft, each seeing the committed tokens and its own ancestors only; `commit` then keeps the root and the
    accepted path. Everything else about the cache is as if the rejected nodes had never been.

    A backend that can do `early_exit` also scores chains with the target's first layers and its head alone. What these
    layers computed is kept in the cache until the next forward, which takes it over where its draft begins so.
    """

    name: str
    config: Any
    """The transformers config of its decoder."""
    layers: int
    hidden_size: int
    vocab_size: int
    """Rows of logits that have a token (padding of the embedding is cut off)."""
    embedding_rows: int
    """Ids that the model takes, padding included."""
    context: int | None
    """Most tokens a sequence may have, if the model has such a limit."""
    stop_tokens: frozenset[int]
    """Ids that end an answer by the model's own settings."""
    capabilities: Capabilities
    device: torch.device = torch.device("cpu")
    """Where its logits are."""

    @abstractmethod
    def new_cache(self, room: int = 0) -> KVCache:
        """An empty cache for one sequence; it grows, and need not do so for the first `room` tokens."""

    @abstractmethod
    def prefill(self, cache: KVCache, tokens: Sequence[int]) -> None:
        """Append tokens to the cache without scoring them."""

    @abstractmethod
    def forward(self, queries: Sequence[Query]) -> list[Tensor]:
        """Logits `[N+1, V]` for each query: row 0 follows the root, row i + 1 follows node i of its draft.

        Of a query with `known` nodes the rows after these, `[N+1 - known, V]`.
        """

    @abstractmethod
    def commit(self, cache: KVCache, path: Sequence[int]) -> None:
        """Keep the root and the nodes of `path` of the last forward, and forget its other nodes."""

    @abstractmethod
    def truncate(self, cache: KVCache, length: int) -> None:
        """Forget committed tokens past the first `length`."""

    def copy(self, cache: KVCache, length: int, room: int = 0) -> KVCache:
        """A cache of its own with the first `length` committed tokens of another, and `room` as `new_cache` has it."""
        raise NotImplementedError(f"backend '{self.name}' cannot copy caches")

    def kv_bytes(self, tokens: int) -> int:
        """Memory for the keys and values of a sequence of so many tokens."""
        raise NotImplementedError(f"backend '{self.name}' does not tell what its caches take")

    @contextmanager
    def running(self) -> Iterator[None]:
        """What the engine has around all its rounds, for a backend that needs the machine to itself."""
        yield

    def apart(self, threads: int | None) -> None:  # noqa: B027  (most share no threads)
        """Run with threads of its own from now on, where they were shared with another backend."""

    def conditions(self) -> dict[str, str]:
        """What the time of a forward depends on besides the model and the CPU, by name: weights, threads, device."""
        return {}

    def refuse_early_exit(self, layers: int) -> None:
        """Raise unless `early_logits` works with this many layers.

        Raises:
            UnsupportedError: Not on this backend, or not with this model.
            InvalidInputError: The model does not have more layers than that.
        """
        raise self._cannot("early_exit", "to stop between layers")

    def early_logits(self, query: Query, layers: int) -> Tensor:
        """Logits `[1, V]` after the last token of the root and a chain, by the first `layers` layers and the head.

        Of tokens that were given in the call before, nothing is computed again.
        """
        raise NotImplementedError(f"backend '{self.name}' has no early exit")

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """Embeddings `[n, H]` in float32, as the first layer gets them."""
        raise NotImplementedError(f"backend '{self.name}' has no features")

    def head(self, states: Tensor) -> Tensor:
        """Logits `[n, V]` of states `[n, H]` that have been through the final norm, or should count as such."""
        raise NotImplementedError(f"backend '{self.name}' has no features")

    def head_rows(self, tokens: Sequence[int]) -> Tensor:
        """The head's weights `[n, H]` for these tokens, in float32."""
        raise NotImplementedError(f"backend '{self.name}' has no features")

    def final_norm(self) -> tuple[Tensor, float]:
        """Weight `[H]` of the final RMSNorm in float32, as it multiplies, and its epsilon."""
        raise NotImplementedError(f"backend '{self.name}' has no features")

    def layer_weights(self, layer: int) -> dict[str, Tensor] | None:
        """Weights of a layer (from 0), float32, by the last parts of their names in Llama: `q_proj` … `down_proj`.

        The norms are `input_layernorm` and `post_attention_layernorm`. `None` if the layer is not of that shape.
        """
        return None

    def sublayers(self) -> Sublayers:
        """The sublayers that `without` can leave out.

        Raises:
            UnsupportedError: None can be, on this backend or of this model.
        """
        raise self._cannot("layer_skip", "to leave out sublayers")

    def without(self, attention: Collection[int], mlp: Collection[int]) -> Backend:
        """A backend with caches of its own over the same weights, less the attention and the MLP of these layers.

        Args:
            attention: Layers, counted from 0; at least one must keep its attention.
            mlp: Layers.

        Raises:
            UnsupportedError: As `sublayers` does.
        """
        raise self._cannot("layer_skip", "to leave out sublayers")

    def quantized(self) -> Backend:
        """A backend with caches of its own over an 8-bit copy of the weights; what need not be copied is shared.

        Raises:
            UnsupportedError: There can be none on this backend or of this model, or it would gain nothing.
        """
        raise self._cannot("self_quant", "to hold the weights in 8 bits as well")

    def _cannot(self, drafter: str, what: str) -> UnsupportedError:
        return UnsupportedError(f"Drafter '{drafter}' needs {what}, which backend '{self.name}' cannot. {USE_INSTEAD}")


def require_inner_layer(layers: int, count: int) -> None:
    """Raise `InvalidInputError` unless a model of `count` layers can be left early after the first `layers`."""
    if not 1 <= layers < count:
        raise InvalidInputError(
            f"Drafter 'early_exit:{layers}' must leave the model after one of its layers 1 to {count - 1} "
            f"(it has {count}): try early_exit:{max(1, count // 3)}."
        )
