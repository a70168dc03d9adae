"""The CPU engine as a backend: trees in one forward, with the same bits as token by token."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.backends.base import Backend, Capabilities, KVCache, Query, require_inner_layer
from foredraft.backends.native.cache import KV_TYPES, Early, NativeCache
from foredraft.backends.native.decoder import apply_head, forward
from foredraft.backends.native.kernels import Kernels
from foredraft.backends.native.rotary import Rotary
from foredraft.backends.native.tables import (
    NODE,
    SEQUENCE,
    Batch,
    Table,
    Workspace,
    grown_workspace,
    padded,
    tables_of,
)
from foredraft.backends.native.team import TORCH_THREADS, Team, physical_cores
from foredraft.backends.native.twins import in_8_bits, sublayers
from foredraft.backends.native.weights import BLOCK, Floats, Weights
from foredraft.backends.sublayers import Sublayers
from foredraft.errors import InvalidInputError
from foredraft.tree import depths
from foredraft.types import Draft

_PREFILL_CHUNK = 256  # tokens


class Part(NamedTuple):
    """The nodes of one query from `known` on."""

    query: Query
    known: int
    cache: NativeCache


class Tap(NamedTuple):
    """What a forward copies of its residual stream: of which layers, `[model's layers]` where to (or -1), and there."""

    layers: tuple[int, ...]
    places: NDArray[np.int64]
    rows: Floats
    """`[layers, n, width]`"""


class NativeBackend(Backend):
    """A decoder of the Llama shape on the CPU, by kernels that are made for this machine when it starts.

    A forward over n nodes costs little more than over one, and each node's logits have the same bits whatever is beside
    it, so greedy and seeded answers equal plain decoding's with nothing left to explain.

    Args:
        weights: The model.
        vocab_size: Logits past this are cut off (padding of the embedding); `None` keeps all.
        threads: How many; `None` takes the physical cores.
        kv_format: Of keys and values, `f32` or `bf16`.
        without_attention: Layers whose attention is left out (a shallow twin that drafts).
        without_mlp: Layers whose MLP is left out.
        kernels: Folder in which compiled kernels are kept; `None` compiles them in every process.

    Raises:
        InvalidInputError: `kv_format` is neither.
    """

    name = "native"
    capabilities = Capabilities(trees=True, early_exit=True, features=True)

    def __init__(
        self,
        weights: Weights,
        vocab_size: int | None = None,
        *,
        threads: int | None = None,
        kv_format: str = "f32",
        without_attention: Collection[int] = (),
        without_mlp: Collection[int] = (),
        kernels: Path | None = None,
    ) -> None:
        if kv_format not in KV_TYPES:
            raise InvalidInputError(f"The KV format is '{kv_format}', but must be one of {', '.join(KV_TYPES)}.")
        measures = weights.measures
        self.weights = weights
        self.kv_format = kv_format
        self.config = weights.config
        self.layers, self.hidden_size = measures.layers, measures.hidden
        self.vocab_size = min(vocab_size or measures.vocabulary, measures.vocabulary)
        self.embedding_rows = weights.embedding.rows
        self.context = measures.context
        self.stop_tokens = weights.stop_tokens
        self.team = Team(threads or physical_cores())
        self.kernels_folder = kernels
        self._kernels = Kernels(weights.formats, kv_format, folder=kernels)
        self._without = frozenset(without_attention), frozenset(without_mlp)
        self._tables = tables_of(weights, self._kernels, kv_format, without_attention, without_mlp)
        self._work: Workspace | None = None
        self._rotary = Rotary(weights.inverse_frequencies, weights.rotary_scale)
        self._no_tap = Tap((), np.full(measures.layers, -1), np.empty((0, 0, 0), dtype=np.float32))
        self._last_tapped = frozenset[tuple[int, ...]](), (self._no_tap.layers, self._no_tap.places)

    def new_cache(self, room: int = 0) -> NativeCache:
        """See `Backend`."""
        measures = self.weights.measures
        width, lanes = padded(measures.head_dim), self._kernels.cpu.lanes
        cache = NativeCache(measures.layers, measures.kv_heads, width, lanes, self.kv_format)
        if room:
            cache.reserve(room)
        return cache

    def copy(self, cache: KVCache, length: int, room: int = 0) -> NativeCache:
        """See `Backend`."""
        assert isinstance(cache, NativeCache) and length <= cache.committed
        fresh = self.new_cache(max(room, length))
        fresh.take(cache, length)
        return fresh

    def kv_bytes(self, tokens: int) -> int:
        """See `Backend`. Of rows that were never written the system has given no memory yet."""
        empty = self.new_cache()
        rows = empty.blocks(tokens) * self._kernels.cpu.lanes
        one = empty.values.shape[0] * empty.values.shape[1] * empty.values.shape[3] * empty.values.itemsize
        return 2 * rows * int(one)

    def prefill(self, cache: KVCache, tokens: Sequence[int]) -> None:
        """Append tokens to the cache without scoring them. In which pieces makes no difference to its bits."""
        assert isinstance(cache, NativeCache) and cache.early is None
        for start in range(0, len(tokens), _PREFILL_CHUNK):
            chunk = tokens[start : start + _PREFILL_CHUNK]
            part = Part(Query(cache, chunk[0], Draft.chain(chunk[1:])), 0, cache)
            tap = self._tap([part], len(chunk))
            self._run([part], 0, self.layers, tap=tap)
            self._hand_out([part], tap, certain=True)
            cache.committed += len(chunk)

    def forward(self, queries: Sequence[Query]) -> list[Tensor]:
        """Logits of each query, all in one pass over the weights; see `Backend`."""
        parts = [Part(query, query.known, _cache(query)) for query in queries]
        counts = [1 + len(query.draft.tokens) - query.known for query in queries]
        tap = self._tap(parts, sum(counts))
        for part in parts:
            if tap.layers:  # they are wanted of all layers, and what an early exit left has the last ones only
                part.cache.early = None
            if part.cache.early is not None:
                self._early_hidden(part.query, part.cache.early.layers)
        begun = {part.cache.early.layers for part in parts if part.cache.early is not None}
        if begun and (len(begun) > 1 or any(part.cache.early is None for part in parts)):
            return [logits for query in queries for logits in self.forward([query])]  # not at the same layer
        first = begun.pop() if begun else 0
        hidden = [part.cache.early.hidden for part in parts if part.cache.early is not None]
        logits = self._run(
            parts, first, self.layers, scored=True, given=np.concatenate(hidden) if hidden else None, tap=tap
        )
        for part in parts:
            part.cache.early = None
        self._hand_out(parts, tap, certain=False)
        found = torch.from_numpy(logits)[:, : self.vocab_size]
        return list(torch.split(found, counts))

    def commit(self, cache: KVCache, path: Sequence[int]) -> None:
        """Keep the root and the nodes of the path, moved together where siblings lay between them."""
        assert isinstance(cache, NativeCache)
        cache.keep(path)
        for features in cache.features:
            features.commit(path)

    def truncate(self, cache: KVCache, length: int) -> None:
        """Forget committed tokens past the first `length`."""
        assert isinstance(cache, NativeCache) and cache.early is None
        cache.committed = min(cache.committed, length)

    @contextmanager
    def running(self) -> Iterator[None]:
        """torch keeps to one thread meanwhile: what it does between forwards is little."""
        with TORCH_THREADS.one():
            yield

    def apart(self, threads: int | None) -> None:
        """See `Backend`; `None` takes as many threads as before."""
        self.team, self._work = Team(threads or self.team.threads), None

    def conditions(self) -> dict[str, str]:
        """See `Backend`."""
        weights = "+".join(sorted(self.weights.formats))
        return {"weights": weights, "kv": self.kv_format, "threads": str(self.team.threads)}

    def refuse_early_exit(self, layers: int) -> None:
        """See `Backend`."""
        require_inner_layer(layers, self.weights.measures.layers)

    def early_logits(self, query: Query, layers: int) -> Tensor:
        """See `Backend`."""
        assert query.draft.is_chain
        hidden = self._early_hidden(query, layers)[-1:]
        part = Part(query, len(query.draft.tokens), _cache(query))
        logits = self._run([part], layers, layers, scored=True, given=hidden)
        return torch.from_numpy(logits)[:, : self.vocab_size]

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """See `Backend`."""
        rows = self.weights.embedding[np.asarray(tokens, dtype=np.int64)].floats()
        return torch.from_numpy(rows)[:, : self.hidden_size] * self.weights.measures.embedding_scale

    def head(self, states: Tensor) -> Tensor:
        """See `Backend`."""
        x = np.zeros((len(states), self.weights.head.columns), dtype=np.float32)
        x[:, : self.hidden_size] = states.numpy()
        logits = np.empty((len(states), self.weights.measures.vocabulary), dtype=np.float32)
        self.team.run(apply_head, self._tables, x, logits)
        return torch.from_numpy(logits)[:, : self.vocab_size]

    def head_rows(self, tokens: Sequence[int]) -> Tensor:
        """See `Backend`."""
        rows = self.weights.head[np.asarray(tokens, dtype=np.int64)].floats()
        return torch.from_numpy(rows)[:, : self.hidden_size]

    def final_norm(self) -> tuple[Tensor, float]:
        """See `Backend`."""
        return torch.from_numpy(self.weights.norm[: self.hidden_size]), self.weights.measures.epsilon

    def layer_weights(self, layer: int) -> dict[str, Tensor] | None:
        """See `Backend`."""
        parts, m = self.weights.layers[layer], self.weights.measures
        if m.head_dim % BLOCK or m.hidden % BLOCK or m.mlp % BLOCK:  # padded: not worth unpadding to begin with
            return None
        names = ("q", "k", "v", "o", "gate", "up", "down")
        found = {f"{name}_proj": torch.from_numpy(getattr(parts, name).weight.floats()) for name in names}
        found["input_layernorm"] = torch.from_numpy(parts.attention_norm)
        found["post_attention_layernorm"] = torch.from_numpy(parts.mlp_norm)
        return found

    def sublayers(self) -> Sublayers:
        """See `Backend`."""
        return sublayers(self.weights)

    def without(self, attention: Collection[int], mlp: Collection[int]) -> NativeBackend:
        """See `Backend`."""
        return self._twin(self.weights, attention, mlp)

    def quantized(self) -> NativeBackend:
        """See `Backend`."""
        return self._twin(in_8_bits(self.weights))

    def _twin(self, weights: Weights, attention: Collection[int] = (), mlp: Collection[int] = ()) -> NativeBackend:
        """This backend over other weights or less sublayers. It shares the threads."""
        twin = NativeBackend(
            weights,
            self.vocab_size,
            threads=self.team.threads,
            kv_format=self.kv_format,
            without_attention=self._without[0].union(attention),
            without_mlp=self._without[1].union(mlp),
            kernels=self.kernels_folder,
        )
        twin.team = self.team
        return twin

    def _early_hidden(self, query: Query, layers: int) -> Floats:
        """Residual streams `[N+1, width]` after the first layers. Only what the cache does not have is computed."""
        cache, tokens = _cache(query), (query.root, *query.draft.tokens)
        known = cache.known(query, layers)
        before = cache.early.hidden if cache.early is not None else None
        if known < len(tokens):
            self._run([Part(query, known, cache)], 0, layers)
            assert self._work is not None
            fresh = self._work.x[: len(tokens) - known].copy()
            before = fresh if before is None else np.concatenate([before, fresh])
        assert before is not None
        cache.early = Early(layers, tokens, before)
        return before

    def _run(
        self,
        parts: Sequence[Part],
        first: int,
        last: int,
        *,
        scored: bool = False,
        given: Floats | None = None,
        tap: Tap | None = None,
    ) -> Floats:
        """Run layers on all parts; logits `[n, V]` where they are to be scored, none elsewhere."""
        batch = self._batch(parts)
        work = self._workspace(len(batch.nodes), int(batch.sequences["rows"].max()))
        if given is not None:
            work.x[: len(given)] = given
        logits = np.empty((len(batch.nodes) if scored else 0, self.weights.measures.vocabulary), dtype=np.float32)
        tap = tap or self._no_tap
        self.team.run(forward, self._tables, batch, work, first, last, tap.places, tap.rows, logits)
        return logits

    def _tap(self, parts: Sequence[Part], nodes: int) -> Tap:
        """Room for what anyone wants to know of the layers in a forward of so many nodes."""
        wanted = {features.layers for part in parts for features in part.cache.features}
        if not wanted:
            return self._no_tap
        layers, places = self._tapped(frozenset(wanted))
        return Tap(layers, places, np.zeros((len(layers), nodes, self.weights.embedding.columns), dtype=np.float32))

    def _tapped(self, wanted: frozenset[tuple[int, ...]]) -> tuple[tuple[int, ...], NDArray[np.int64]]:
        """All layers that are wanted, and their places. Looked up each round, it is told from the last time."""
        if self._last_tapped[0] != wanted:
            layers, places = tuple(sorted({layer for each in wanted for layer in each})), self._no_tap.places.copy()
            places[[layer - 1 for layer in layers if layer]] = [i for i, layer in enumerate(layers) if layer]
            self._last_tapped = wanted, (layers, places)
        return self._last_tapped[1]

    def _hand_out(self, parts: Sequence[Part], tap: Tap, *, certain: bool) -> None:
        """Give the caches what a forward copied, `[n, layers, H]`: the last layer's through the final norm."""
        if not tap.layers:
            return
        states = tap.rows[..., : self.hidden_size]
        if tap.layers[0] == 0:
            states[0] = self.embed([token for part in parts for token in (part.query.root, *part.query.draft.tokens)])
        if tap.layers[-1] == self.layers:
            weight, epsilon = self.final_norm()
            last = torch.from_numpy(states[-1])
            states[-1] = torch.nn.functional.rms_norm(last, weight.shape, weight, epsilon)
        states, first = states.transpose(1, 0, 2), 0
        for part in parts:
            end = first + 1 + len(part.query.draft.tokens)
            part.cache.hand_out(tap.layers, states[first:end], certain=certain)
            first = end

    def _batch(self, parts: Sequence[Part]) -> Batch:
        sequences = np.zeros(len(parts), dtype=SEQUENCE)
        tables: list[Table] = []
        seen: list[NDArray[np.int64]] = []
        for index, (query, known, cache) in enumerate(parts):
            base, count = cache.committed, 1 + len(query.draft.tokens)
            cache.reserve(base + count)
            depth, rows, straight = _shape(query.draft)
            nodes = np.zeros(count, dtype=NODE)
            nodes["token"], nodes["sequence"] = (query.root, *query.draft.tokens), index
            nodes["row"], nodes["position"], nodes["ancestors"] = np.arange(count) + base, depth + base, depth + 1
            nodes["straight"] = straight
            first = sum(len(table) for table in tables)
            tables.append(nodes[known:])
            seen.append(rows[known:] + base)
            sequences[index] = (first, first + count - known, base, base + count, *cache.where)
        nodes = np.concatenate(tables)
        ancestors = np.zeros((len(nodes), max(rows.shape[1] for rows in seen)), dtype=np.int64)
        for rows, sequence in zip(seen, sequences, strict=True):
            ancestors[sequence["first"] : sequence["last"], : rows.shape[1]] = rows
        return Batch(nodes, ancestors, sequences, *self._rotary.until(int(nodes["position"].max()) + 1))

    def _workspace(self, nodes: int, rows: int) -> Workspace:
        """Memory for this forward; it grows and is kept."""
        self._work = grown_workspace(self._work, self._tables, nodes, rows, self.team.threads)
        return self._work


def _cache(query: Query) -> NativeCache:
    assert isinstance(query.cache, NativeCache)
    return query.cache


def _shape(draft: Draft) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Depths of root and nodes, what each sees, and how much of that lies in a line from the root on.

    `[N+1]`, `[N+1, deepest + 1]` with the root first and the node itself last, and `[N+1]`.
    """
    if draft.is_chain:
        line = np.arange(len(draft) + 1)
        return line, np.broadcast_to(line, (len(line), len(line))), line + 1
    depth = np.array(depths(draft))
    seen = np.zeros((len(depth), depth.max() + 1), dtype=np.int64)
    for node, parent in enumerate(draft.parents, start=1):
        seen[node] = seen[parent + 1]
        seen[node, depth[node]] = node
    straight = np.cumprod(seen == np.arange(seen.shape[1]), axis=1).sum(axis=1).clip(max=depth + 1)
    return depth, seen, straight
