"""The forward of a head that goes on from its own output: one compiled function, made of the decoder's stages."""

from __future__ import annotations

from typing import Any

from foredraft.backends.native.decoder import at, attention, embed, first_row, linear, mlp, norm, norm_row
from foredraft.backends.native.team import compiled, wait

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
def head_forward(
    thread: int,
    threads: int,
    arrivals: Any,
    tables: Any,
    heads: Any,
    batch: Any,
    work: Any,
    room: Any,
    from_features: bool,
    logits: Any,
) -> None:
    """One step of a head for some nodes: their tokens and the states above them become the states after them.

    It begins with the states in `room.states`, or, if the head has a matrix for them, with those that it makes
    `from_features`; it ends with new ones in their place, and `logits` `[m, V]` of the last m.
    """
    decoder, head, kernels = tables.decoder[0], heads[0], tables.kernels
    nodes, width, stage = len(batch.nodes), decoder.width, 0
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
