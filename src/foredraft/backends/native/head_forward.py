"""The forward of a head that goes on from its own output, a step or a whole path, made of the decoder's stages."""

from __future__ import annotations

from typing import Any

import numpy as np

from foredraft.backends.native.decoder import at, attention, embed, first_row, linear, mlp, norm, norm_row, softmax_row
from foredraft.backends.native.team import compiled, wait
from foredraft.ranking_kernels import rank, rank_with_noise

_FLOAT = 4  # bytes


@compiled
def _normed(decoder: Any, x: Any, weight: int, out: Any) -> None:
    """A row `[width]` through a norm, or as it is where there is none."""
    if weight != 0:
        norm_row(decoder, x.ctypes.data, weight, out.ctypes.data, decoder.width, decoder.hidden)
    else:
        out[:] = x


@compiled
def _norm_features(tables: Any, head: Any, features: Any, nodes: int, thread: int, threads: int) -> None:
    """Norm the features `[n, layers * width]` all together, or each layer's by itself, where the head does that."""
    decoder, width = tables.decoder[0], tables.decoder[0].width
    for node in range(thread, nodes, threads):
        row = at(features, node)
        if head.features_norm != 0:
            norm_row(decoder, row, head.features_norm, row, head.layers * width, head.layers * decoder.hidden)
        if head.layer_norms != 0:
            for layer in range(head.layers):
                part = _FLOAT * layer * width
                norm_row(decoder, row + part, head.layer_norms + part, row + part, width, decoder.hidden)


@compiled
def _join(
    tables: Any, head: Any, work: Any, room: Any, nodes: int, thread: int, threads: int, arrivals: Any, stage: int
) -> Any:
    """`work.x` becomes the residual, of states and the embeddings in `room.joined`; returns the next stage."""
    decoder, width = tables.decoder[0], tables.decoder[0].width
    for node in range(thread, nodes, threads):
        state, normed = room.states[node], room.joined[node, width:]
        _normed(decoder, state, head.state_norm, normed)
        work.x[node] = normed if head.normed_residual else state
    stage = wait(threads, arrivals, stage)
    if head.joins:
        first, last = first_row(decoder.hidden, thread, threads), first_row(decoder.hidden, thread + 1, threads)
        linear(tables.kernels, head.join, room.joined, work.x, nodes, first, last)
        stage = wait(threads, arrivals, stage)
        if head.input_norm != 0:
            norm(decoder, work.x, head.input_norm, work.normed, nodes, thread, threads)
            stage = wait(threads, arrivals, stage)
    return stage


@compiled
def _step(
    tables: Any,
    head: Any,
    batch: Any,
    work: Any,
    room: Any,
    from_features: bool,
    logits: Any,
    thread: int,
    threads: int,
    arrivals: Any,
    stage: int,
) -> Any:
    """See `head_forward`; returns the next stage, whose beginning all threads have to wait for."""
    decoder, kernels, nodes, width = tables.decoder[0], tables.kernels, len(batch.nodes), tables.decoder[0].width
    embed(tables, batch, work.added, thread, threads)
    for node in range(thread, nodes, threads):
        _normed(decoder, work.added[node], head.embedding_norm, room.joined[node, :width])
    if from_features and head.fuses:
        _norm_features(tables, head, room.features, nodes, thread, threads)
        stage = wait(threads, arrivals, stage)
        first, last = first_row(decoder.hidden, thread, threads), first_row(decoder.hidden, thread + 1, threads)
        linear(kernels, head.fuse, room.features, room.states, nodes, first, last)
        stage = wait(threads, arrivals, stage)
    stage = _join(tables, head, work, room, nodes, thread, threads, arrivals, stage)
    inputs = room.joined
    if head.joins:
        inputs = work.normed if head.input_norm != 0 else work.x
    stage = attention(tables, batch, work, 0, inputs, thread, threads, arrivals, stage)
    stage = mlp(tables, work, 0, nodes, thread, threads, arrivals, stage)
    for node in range(thread, nodes, threads):
        _normed(decoder, work.x[node], head.norm, work.normed[node])
        room.states[node] = work.normed[node] if head.norm_output else work.x[node]
    stage = wait(threads, arrivals, stage)
    begin, end = first_row(decoder.head.rows, thread, threads), first_row(decoder.head.rows, thread + 1, threads)
    linear(kernels, decoder.head, work.normed[nodes - len(logits) :], logits, len(logits), begin, end)
    return stage


@compiled
def _read(head: Any, batch: Any, features: Any, tokens: Any, room: Any) -> None:
    """The batch becomes these tokens, one after the other, and the room has the features before them."""
    sequence, states = batch.sequences[0], room.features if head.fuses else room.states
    width, hidden = states.shape[1] // head.layers, features.shape[2]
    for i in range(len(batch.nodes)):
        node = batch.nodes[i]
        node.token, node.sequence = tokens[i], 0
        node.row = node.position = sequence.committed + i
        node.ancestors = node.straight = i + 1
        for j in range(i + 1):
            batch.ancestors[i, j] = sequence.committed + j
        for layer in range(head.layers):
            states[i, layer * width : layer * width + hidden] = features[i, layer]


@compiled
def head_forward(
    thread: int,
    threads: int,
    arrivals: Any,
    tables: Any,
    heads: Any,
    batch: Any,
    work: Any,
    room: Any,
    features: Any,
    tokens: Any,
    logits: Any,
) -> None:
    """One step of a head for some nodes: their tokens and the states above them become the states after them.

    Where there are `tokens`, these are the nodes, one after the other, and the states above them are read of `features`
    `[n, layers, H]`, or, if the head has a matrix for that, made of them. Else the states are those in `room.states`.
    New ones take their place, and `logits` `[m, V]` are of the last m.
    """
    head, reads, stage = heads[0], len(tokens) > 0, 0
    if reads:
        if thread == 0:
            _read(head, batch, features, tokens, room)
        stage = wait(threads, arrivals, stage)
    _step(tables, head, batch, work, room, reads, logits, thread, threads, arrivals, stage)


@compiled
def _offer(decoder: Any, logits: Any, path: Any, ids: Any, growth: Any, offers: Any) -> None:
    """Offer the likeliest tokens after the end of the path, and go on to the first of them if that pays."""
    width = min(growth.width, len(ids))
    columns, chances = np.empty(width, dtype=np.int64), np.empty(width, dtype=np.float32)
    row = logits[0, : len(ids)]
    softmax_row(decoder, at(logits, 0), len(ids), np.float32(1 / growth.temperature))
    if len(growth.keys) > 0:
        rank_with_noise(row, ids, growth.keys[path.depth], columns, chances)
        chances /= chances.sum()
    else:
        rank(row, columns, chances)
    parent, first, above = path.end, path.offered, path.chance
    for i in range(min(width, growth.beside, len(offers) - first)):
        offer = offers[first + i]
        offer.token, offer.parent, offer.score = ids[columns[i]], parent, above * chances[i]
        path.offered += 1
    path.depth += 1
    path.end, path.chance = first, above * chances[0]
    path.open = path.offered < len(offers) and path.depth < growth.deepest and path.chance >= growth.least


@compiled
def _move_on(batch: Any, end: Any, room: Any, path: Any, offers: Any) -> None:
    """The one node of `end` becomes the last of the path, below what `batch` has."""
    count, sequence, node, depth = len(batch.nodes), end.sequences[0], end.nodes[0], path.depth
    if depth == 1:
        before = batch.sequences[0]
        sequence.first, sequence.last, sequence.committed = 0, 1, before.committed + count
        sequence.keys, sequence.values, sequence.capacity = before.keys, before.values, before.capacity
        room.states[0] = room.states[count - 1]
    sequence.rows = sequence.committed + depth
    node.token, node.sequence = offers[path.end].token, 0
    node.row = node.position = sequence.rows - 1
    node.ancestors = node.straight = depth
    end.ancestors[0, depth - 1] = sequence.rows - 1


@compiled
def head_path(
    thread: int,
    threads: int,
    arrivals: Any,
    tables: Any,
    heads: Any,
    batch: Any,
    end: Any,
    work: Any,
    room: Any,
    logits: Any,
    features: Any,
    tokens: Any,
    ids: Any,
    growth: Any,
    paths: Any,
    offers: Any,
) -> None:
    """Read features `[n, layers, H]` and the tokens after them, and go on by the likeliest token after the likeliest.

    Offered are rows of `OFFER`. `batch` and `end` are room for what is read and for the one node that the path ends in,
    `logits` is `[1, V + SLACK]`; `ids` are the tokens of its columns.
    """
    decoder, head, path, stage = tables.decoder[0], heads[0], paths[0], 0
    if thread == 0:
        _read(head, batch, features, tokens, room)
    stage = wait(threads, arrivals, stage)
    stage = _step(tables, head, batch, work, room, True, logits, thread, threads, arrivals, stage)
    while True:
        stage = wait(threads, arrivals, stage)
        if thread == 0:
            _offer(decoder, logits, path, ids, growth, offers)
            if path.open:
                _move_on(batch, end, room, path, offers)
        stage = wait(threads, arrivals, stage)
        if not path.open:
            break
        stage = _step(tables, head, end, work, room, False, logits, thread, threads, arrivals, stage)
