"""A head that goes on from its own output, run beside its target by the same kernels and threads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foredraft.backends.native.cache import NativeCache
from foredraft.backends.native.head_forward import head_forward, head_path
from foredraft.backends.native.kernels import Kernels
from foredraft.backends.native.rotary import Rotary
from foredraft.backends.native.tables import (
    LINEAR,
    NODE,
    SEQUENCE,
    SLACK,
    Batch,
    Table,
    Tables,
    Workspace,
    address,
    grown_workspace,
    linear_row,
    padded,
    tables_of,
)
from foredraft.backends.native.team import Team
from foredraft.backends.native.weights import Floats, Linear, Weights

_KV = "f32"
_AT_ONCE = 256  # committed tokens
_NO_FEATURES, _NO_TOKENS = np.zeros((0, 0, 0), dtype=np.float32), np.zeros(0, dtype=np.int64)
_PATH = np.dtype(
    [*((name, np.int64) for name in ("offered", "end", "depth", "open")), ("chance", np.float64)], align=True
)
"""A path that grows: nodes offered so far, the one at its end and its depth, whether it goes on, how likely it is."""
_HEAD = np.dtype(
    [
        *((name, LINEAR) for name in ("fuse", "join")),
        *(
            (name, np.int64)  # addresses, 0 for none, but for the first
            for name in (
                "layers",
                "features_norm",
                "layer_norms",
                "embedding_norm",
                "state_norm",
                "input_norm",
                "norm",
            )
        ),
        *((name, np.bool_) for name in ("fuses", "joins", "normed_residual", "norm_output")),
    ],
    align=True,
)


class HeadWeights(NamedTuple):
    """What `heads.recurrent` describes, as the kernels read it: rows are padded, `width` is the hidden size's."""

    decoder: Weights
    """The target's embedding, the head's block as its only layer, and the output matrix. Its norms before attention and
    at the end count for nothing: those below do."""
    layers: int
    """Of the target, whose features it reads."""
    fuse: Linear | None = None
    """From features `[layers * width]` to the first state; `None` if they are that already."""
    join: Linear | None = None
    """From embedding and state `[2 * width]` to the residual; `None` if attention reads both and the state is it."""
    features_norm: Floats | None = None
    """`[layers * width]`, over all features."""
    layer_norms: Floats | None = None
    """`[layers, width]`, over those of each layer."""
    embedding_norm: Floats | None = None
    state_norm: Floats | None = None
    input_norm: Floats | None = None
    """Between `join` and attention."""
    norm: Floats | None = None
    """Before the output matrix."""
    normed_residual: bool = False
    norm_output: bool = False
    """Whether the next step starts from the normed state."""
    own_head: bool = False
    """Whether the output matrix is its own, and not the target's."""

    @property
    def own_bytes(self) -> int:
        """Of its own matrices."""
        block = [part.weight for part in self.decoder.layers[0] if isinstance(part, Linear)]
        others = [part.weight for part in (self.fuse, self.join) if part is not None]
        head = [self.decoder.head] if self.own_head else []
        return sum(matrix.data.nbytes for matrix in (*block, *others, *head))


class _Room(NamedTuple):
    """What a step works in besides `Workspace`."""

    features: Floats
    """`[n, layers * width]`"""
    states: Floats
    """`[n, width]`"""
    joined: Floats
    """`[n, 2 * width]`: embedding and state."""


class Step(NamedTuple):
    """What a step gives: states `[m, width]` and logits `[m, V]` of the last m nodes."""

    states: Floats
    logits: Floats


class NativeHead:
    """Steps of a head over caches that others keep. One call at a time.

    Args:
        weights: The head's.
        team: The target's threads.
        kernels: Folder in which compiled kernels are kept, if any.
    """

    def __init__(self, weights: HeadWeights, team: Team, kernels: Path | None = None) -> None:
        self.weights = weights
        self._team = team
        extra = {part.weight.format for part in (weights.fuse, weights.join) if part is not None}
        self._kernels = Kernels(weights.decoder.formats | extra, _KV, folder=kernels)
        self._tables: Tables = tables_of(weights.decoder, self._kernels, _KV)
        self._head = _head_table(weights)
        self._rotary = Rotary(weights.decoder.inverse_frequencies)
        self._work: tuple[Workspace, _Room] | None = None
        # What is read, and the end of a path, which moves on.
        self._nodes, self._seen = np.zeros(_AT_ONCE, dtype=NODE), np.zeros((_AT_ONCE, _AT_ONCE), dtype=np.int64)
        self._end_node, self._end_seen = np.zeros(1, dtype=NODE), np.zeros((1, _AT_ONCE), dtype=np.int64)
        self._sequences, self._end_sequence = np.zeros((2, 1), dtype=SEQUENCE)
        self._paths = np.zeros(1, dtype=_PATH)
        self._logits = np.empty((1, weights.decoder.head.rows + SLACK), dtype=np.float32)

    def new_cache(self) -> NativeCache:
        """An empty cache for one sequence."""
        measures = self.weights.decoder.measures
        return NativeCache(1, measures.kv_heads, padded(measures.head_dim), self._kernels.cpu.lanes, _KV)

    def commit(self, cache: NativeCache, features: Floats, tokens: Sequence[int]) -> Step:
        """Read features `[n, layers, H]` and the tokens after them; the step after the last of them.

        They take the place of all drafted nodes in the cache.
        """
        for start in range(0, len(tokens), _AT_ONCE):
            rows = np.ascontiguousarray(features[start : start + _AT_ONCE])
            batch, work, room = self._line(cache, len(rows))
            step = self._run(batch, work, room, 1, rows, np.array(tokens[start : start + _AT_ONCE]))
            cache.committed += len(rows)
        return step

    def path(
        self,
        cache: NativeCache,
        features: Floats,
        tokens: Sequence[int],
        ids: NDArray[np.int64],
        growth: Any,
        offers: NDArray[Any],
    ) -> tuple[int, int]:
        """`commit`, and from there on by the likeliest token after the likeliest token, in one call.

        Args:
            cache: As for `commit`.
            features: Likewise.
            tokens: Likewise.
            ids: Tokens that the columns of the logits stand for.
            growth: Where the path goes, and how far; `heads.running.Growth`.
            offers: Room for rows of `OFFER`.

        Returns:
            The nodes offered, and the steps taken.
        """
        rest = max(0, len(tokens) - _AT_ONCE)
        if rest:
            self.commit(cache, features[:rest], tokens[:rest])
            features, tokens = features[rest:], tokens[rest:]
        batch, *room = self._line(cache, len(tokens), growth.deepest)
        end = batch._replace(nodes=self._end_node, ancestors=self._end_seen, sequences=self._end_sequence)
        self._paths[0] = (0, -1, 0, 0, 1.0)
        shared = self._tables, self._head, batch, end, *room, self._logits, features, np.array(tokens), ids
        self._team.run(head_path, *shared, growth, self._paths, offers)
        cache.committed += len(tokens)
        return int(self._paths["offered"][0]), int(self._paths["depth"][0])

    def expand(
        self,
        cache: NativeCache,
        states: Floats,
        tokens: Sequence[int],
        paths: Sequence[Sequence[int]],
        depths: Sequence[int],
    ) -> Step:
        """Go a token further from each of the states `[n, width]`.

        Args:
            cache: Behind its committed rows are the drafted nodes, in the order in which they were expanded.
            states: After what is above each node.
            tokens: Of the nodes.
            paths: `[n, deepest]` the drafted nodes down to each, itself last and up to the end.
            depths: `[n]` how many these are.
        """
        batch = self._batch(cache, tokens, np.array(paths), np.array(depths))
        work, room = self._room(len(batch.nodes), int(batch.sequences["rows"][0]))
        room.states[: len(tokens)] = states
        return self._run(batch, work, room, len(tokens), _NO_FEATURES, _NO_TOKENS)

    def _line(self, cache: NativeCache, count: int, more: int = 0) -> tuple[Batch, Workspace, _Room]:
        """Room for so many tokens one after the other, which the kernel fills in, and for `more` behind them."""
        base = cache.committed
        rows = base + count + more
        cache.reserve(rows)
        self._sequences[0] = (0, count, base, base + count, *cache.where)
        batch = Batch(self._nodes[:count], self._seen, self._sequences, *self._rotary.until(rows))
        return batch, *self._room(count, rows)

    def _batch(
        self, cache: NativeCache, tokens: Sequence[int], seen: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> Batch:
        """Nodes each of which sees the first `counts` of the uncommitted rows `seen` `[n, deepest]`, itself last."""
        base, rows = cache.committed, int(seen.max()) + 1 + cache.committed
        cache.reserve(rows)
        nodes = np.zeros(len(tokens), dtype=NODE)
        nodes["token"], nodes["ancestors"], nodes["position"] = tokens, counts, base + counts - 1
        nodes["row"] = seen[np.arange(len(tokens)), counts - 1] + base
        straight = np.logical_and.accumulate(seen == np.arange(seen.shape[1]), axis=1).sum(axis=1)
        nodes["straight"] = np.minimum(straight, counts)
        sequences = np.array([(0, len(tokens), base, rows, *cache.where)], dtype=SEQUENCE)
        return Batch(nodes, seen + base, sequences, *self._rotary.until(base + int(counts.max())))

    def _room(self, nodes: int, rows: int) -> tuple[Workspace, _Room]:
        """Memory for so many nodes, and for caches of so many rows; it grows and is kept."""
        have = self._work[0] if self._work is not None else None
        work = grown_workspace(have, self._tables, nodes, rows, self._team.threads)
        if self._work is None or work is not have:
            most, width = work.x.shape
            room = _Room(*(np.zeros((most, parts * width), dtype=np.float32) for parts in (self.weights.layers, 1, 2)))
            self._work = work, room
        return self._work

    def _run(
        self,
        batch: Batch,
        work: Workspace,
        room: _Room,
        scored: int,
        features: Floats,
        tokens: NDArray[np.int64],
    ) -> Step:
        count = len(batch.nodes)
        logits = np.empty((scored, self.weights.decoder.head.rows), dtype=np.float32)
        self._team.run(head_forward, self._tables, self._head, batch, work, room, features, tokens, logits)
        return Step(room.states[count - scored : count].copy(), logits)


def _head_table(weights: HeadWeights) -> Table:
    table = np.zeros(1, dtype=_HEAD)
    values: dict[str, Any] = {
        "layers": weights.layers,
        "fuses": weights.fuse is not None,
        "joins": weights.join is not None,
        "normed_residual": weights.normed_residual,
        "norm_output": weights.norm_output,
    }
    for name in ("fuse", "join"):
        part = getattr(weights, name)
        if part is not None:
            values[name] = linear_row(part)
    for name in ("features_norm", "layer_norms", "embedding_norm", "state_norm", "input_norm", "norm"):
        values[name] = address(getattr(weights, name))
    for name, value in values.items():
        table[name] = value
    return table
