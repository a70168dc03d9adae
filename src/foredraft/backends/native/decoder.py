"""The forward of a decoder of the Llama shape: one compiled function, run by all threads from first to last layer.

Each stage splits its rows, heads or nodes among the threads, and `wait` stands between stages. How they are split makes
no difference to a single bit of the result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from foredraft.backends.native.team import compiled, intrinsic, wait

# Compiled code is cached on disk with its constants: those of other files do not belong here.
_BLOCK = 32  # columns; the blocks of GGUF
_EXPAND = 0  # column of the table of kernels
_PANEL = 256 * 1024  # bytes
_ALIGNED = _BLOCK  # rows: no two threads write to one cache line, nor to one vector of the activation

unpack: Any = cgutils.unpack_tuple


@intrinsic
def _call(typing: Any, address: Any, arguments: Any) -> Any:
    """Call the kernel at an address; pointers are given as integers."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds = [context.get_value_type(kind) for kind in arguments.types]
        kernel = builder.inttoptr(values[0], ir.FunctionType(ir.VoidType(), kinds).as_pointer())
        builder.call(kernel, unpack(builder, values[1]))
        return context.get_dummy_value()

    return types.void(types.int64, arguments), generate


@intrinsic
def float_at(typing: Any, address: Any, index: Any) -> Any:
    """The number of that index behind an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        floats = builder.inttoptr(arguments[0], ir.FloatType().as_pointer())
        return builder.load(builder.gep(floats, [arguments[1]], source_etype=ir.FloatType()), typ=ir.FloatType())

    return types.float32(types.int64, types.int64), generate


@compiled
def at(array: Any, index: int) -> Any:
    """The address of a row of a matrix of floats."""
    return np.int64(array.ctypes.data) + np.int64(index) * np.int64(array.strides[0])


@compiled
def first_row(rows: int, thread: int, threads: int) -> int:
    """Where a thread's share of rows begins; the share after the last one begins at `rows`."""
    return min(rows, (rows + _ALIGNED - 1) // _ALIGNED * thread // threads * _ALIGNED)


@compiled
def linear(kernels: Any, layer: Any, x: Any, y: Any, nodes: int, first: int, last: int) -> None:
    """`y[node, row] = weight[row] . x[node] + bias[row]` for the rows from `first` to `last`.

    Nodes come in groups, and rows in panels that stay in the core's cache for all groups.
    """
    most = kernels.shape[1] - 1
    groups = (nodes + most - 1) // most
    height = last - first if groups == 1 else max(8, _PANEL // layer.row_bytes // 8 * 8)
    for top in range(first, last, max(1, height)):
        bottom = min(last, top + height)
        for group in range(groups):
            start, end = nodes * group // groups, nodes * (group + 1) // groups
            where = (at(x, start), x.shape[1], at(y, start), y.shape[1], top, bottom, layer.blocks)
            _call(kernels[layer.format, end - start], (layer.address, layer.row_bytes, *where))
    if layer.bias != 0:
        for node in range(nodes):
            for row in range(first, last):
                y[node, row] += float_at(layer.bias, row)


@compiled
def embed(tables: Any, batch: Any, x: Any, thread: int, threads: int) -> None:
    """Embeddings of the nodes' tokens into x `[n, width]`; each thread has the nodes that `norm` gives it."""
    decoder = tables.decoder[0]
    matrix = decoder.embedding
    for node in range(thread, len(batch.nodes), threads):
        token = batch.nodes[node].token
        row = (matrix.address, matrix.row_bytes, at(x, node), x.shape[1], token, token + 1, matrix.blocks)
        _call(tables.kernels[matrix.format, _EXPAND], row)
        if decoder.embedding_scale != 1:
            for i in range(decoder.hidden):
                x[node, i] *= decoder.embedding_scale


@compiled
def norm_row(decoder: Any, x: int, weight: int, out: int, width: int, count: int) -> None:
    """RMSNorm of `count` numbers, padded with zeros to `width`; all places are addresses."""
    _call(decoder.norm_kernel, (x, weight, out, width, np.float32(1) / np.float32(count), decoder.epsilon))


@compiled
def softmax_row(decoder: Any, scores: int, count: int, scale: Any) -> None:
    """`count` numbers at an address become the softmax of them times `scale`. Up to a vector behind is overwritten."""
    _call(decoder.softmax, (scores, count, scale))


@compiled
def norm(decoder: Any, x: Any, weight: int, out: Any, nodes: int, thread: int, threads: int) -> None:
    """RMSNorm of the rows of some nodes."""
    for node in range(thread, nodes, threads):
        norm_row(decoder, at(x, node), weight, at(out, node), decoder.width, decoder.hidden)


@compiled
def _add(x: Any, added: Any, nodes: int, first: int, last: int) -> None:
    for node in range(nodes):
        for i in range(first, last):
            x[node, i] += added[node, i]


@compiled
def _place_head(tables: Any, head: Any, weight: int, rotates: bool, cos: Any, sin: Any) -> None:
    """One head's q or k `[head_width]`: normed and rotated, where the layer does that."""
    decoder = tables.decoder[0]
    if weight != 0:
        address = np.int64(head.ctypes.data)
        norm_row(decoder, address, weight, address, decoder.head_width, decoder.head_dim)
    if rotates:
        for i in range(decoder.half):
            a, b = head[i], head[i + decoder.half]
            head[i] = a * cos[i] - b * sin[i]
            head[i + decoder.half] = b * cos[i] + a * sin[i]


@compiled
def _keys(decoder: Any, sequence: Any, layer: int, head: int) -> Any:
    """The address of a head's keys `[capacity / lanes, head_width, lanes]`."""
    plane = layer * decoder.kv_heads + head
    return sequence.keys + plane * sequence.capacity * decoder.head_width * decoder.kv_bytes


@compiled
def _values(decoder: Any, sequence: Any, layer: int, head: int) -> Any:
    """The address of a head's values `[capacity, head_width]`."""
    plane = layer * decoder.kv_heads + head
    return sequence.values + plane * sequence.capacity * decoder.head_width * decoder.kv_bytes


@intrinsic
def store_float(typing: Any, address: Any, index: Any, value: Any) -> Any:
    """Write the number of that index behind an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        floats = builder.inttoptr(arguments[0], ir.FloatType().as_pointer())
        place = builder.gep(floats, [arguments[1]], source_etype=ir.FloatType())
        builder.store(arguments[2], place)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), generate


@intrinsic
def store_bfloat16(typing: Any, address: Any, index: Any, value: Any) -> Any:
    """The same in bfloat16: rounded to the nearest, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        i16, i32 = ir.IntType(16), ir.IntType(32)
        shorts = builder.inttoptr(arguments[0], i16.as_pointer())
        bits = builder.bitcast(arguments[2], i32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(i32, 16)), ir.Constant(i32, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(i32, 0x7FFF)))
        place = builder.gep(shorts, [arguments[1]], source_etype=i16)
        builder.store(builder.trunc(builder.lshr(rounded, ir.Constant(i32, 16)), i16), place)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), generate


@compiled
def _keep(decoder: Any, address: int, step: int, head: Any) -> None:
    """Write one head's k or v into the cache, from `address` on, every `step` numbers."""
    for i in range(decoder.head_width):
        if decoder.kv_bytes == 4:
            store_float(address, i * step, head[i])
        else:
            store_bfloat16(address, i * step, head[i])


@compiled
def _place_heads(tables: Any, batch: Any, work: Any, index: int, thread: int, threads: int) -> None:
    """Norm and rotate all heads of q and k, and write k and v into the cache."""
    decoder, layer = tables.decoder[0], tables.layers[index]
    width, heads, lanes = decoder.head_width, decoder.heads, decoder.lanes
    for unit in range(thread, len(batch.nodes) * (heads + decoder.kv_heads), threads):
        i, head = unit // (heads + decoder.kv_heads), unit % (heads + decoder.kv_heads)
        node = batch.nodes[i]
        cos, sin = batch.cos[node.position], batch.sin[node.position]
        if head < heads:
            q = work.q[i, head * width : (head + 1) * width]
            _place_head(tables, q, layer.q_norm, layer.rotates, cos, sin)
        else:
            head -= heads
            k = work.k[i, head * width : (head + 1) * width]
            v = work.v[i, head * width : (head + 1) * width]
            _place_head(tables, k, layer.k_norm, layer.rotates, cos, sin)
            sequence = batch.sequences[node.sequence]
            key = node.row // lanes * lanes * width + node.row % lanes
            _keep(decoder, _keys(decoder, sequence, index, head) + key * decoder.kv_bytes, lanes, k)
            _keep(decoder, _values(decoder, sequence, index, head) + node.row * width * decoder.kv_bytes, 1, v)


@compiled
def _attend(tables: Any, batch: Any, work: Any, index: int, thread: int, threads: int) -> None:
    """Each node's heads look at the committed rows and at its ancestors'."""
    decoder = tables.decoder[0]
    most = tables.attention.shape[1] - 1
    scores, unit = work.scores[thread], 0
    for s in range(len(batch.sequences)):
        sequence = batch.sequences[s]
        nodes = sequence.last - sequence.first
        groups = (nodes + most - 1) // most
        for head in range(decoder.heads):
            for group in range(groups):
                if unit % threads == thread:
                    start = sequence.first + nodes * group // groups
                    end = sequence.first + nodes * (group + 1) // groups
                    _attend_group(tables, batch, work, index, sequence, head, start, end, scores)
                unit += 1


@compiled
def _attend_group(
    tables: Any, batch: Any, work: Any, index: int, sequence: Any, head: int, start: int, end: int, scores: Any
) -> None:
    """One head of some nodes of a sequence."""
    decoder, width = tables.decoder[0], tables.decoder[0].head_width
    kv_head = head * decoder.kv_heads // decoder.heads
    keys = (_keys(decoder, sequence, index, kv_head), width, (sequence.rows + decoder.lanes - 1) // decoder.lanes)
    q = (at(work.q, start) + 4 * head * width, work.q.shape[1])
    _call(tables.attention[0, end - start], (*q, *keys, at(scores, 0), scores.shape[1]))
    values = _values(decoder, sequence, index, kv_head)
    for first in range(start, end, decoder.mixed_at_once):
        last = min(end, first + decoder.mixed_at_once)
        _mix(tables, batch, first, last, sequence.committed, scores[first - start :], values, work.mixed, head * width)


@compiled
def _mix(
    tables: Any,
    batch: Any,
    first: int,
    last: int,
    committed: int,
    scores: Any,
    values: int,
    mixed: Any,
    column: int,
) -> None:
    """One head of a few nodes: the values of what each sees, weighted by the softmax of its scores.

    Its ancestors' scores are moved up behind the committed ones, where plain decoding has them.
    """
    decoder, width = tables.decoder[0], tables.decoder[0].head_width
    row_bytes, blocks = width * decoder.kv_bytes, width // _BLOCK
    for node in range(first, last):
        row, count = scores[node - first], committed + batch.nodes[node].ancestors
        for i in range(committed, count):
            row[i] = row[batch.ancestors[node, i - committed]]
        _call(decoder.softmax, (at(scores, node - first), count, decoder.attention_scale))
        mixed[node, column : column + width] = 0
    shared = batch.nodes[first].straight
    for node in range(first + 1, last):
        shared = min(shared, batch.nodes[node].straight)
    out = (at(mixed, first) + 4 * column, mixed.shape[1], blocks)
    rows = (at(scores, 0), scores.shape[1], values, row_bytes, committed + shared)
    _call(tables.attention[1, last - first], (*rows, *out))
    for node in range(first, last):
        target = (at(mixed, node) + 4 * column, mixed.shape[1], blocks)
        seen, done = batch.ancestors[node], shared
        while done < batch.nodes[node].ancestors:  # runs of rows that lie together
            end = done + 1
            while end < batch.nodes[node].ancestors and seen[end] == seen[done] + end - done:
                end += 1
            p = at(scores, node - first) + 4 * (committed + done)
            rows = (p, scores.shape[1], values + seen[done] * row_bytes, row_bytes, np.int64(end - done))
            _call(tables.attention[1, 1], (*rows, *target))
            done = end


@compiled
def attention(
    tables: Any, batch: Any, work: Any, index: int, inputs: Any, thread: int, threads: int, arrivals: Any, stage: int
) -> Any:
    """Add to `work.x` what a layer's attention makes of `inputs` `[n, columns of q]`; returns the next stage."""
    decoder, layer, kernels, nodes = tables.decoder[0], tables.layers[index], tables.kernels, len(batch.nodes)
    for part, out in ((layer.q, work.q), (layer.k, work.k), (layer.v, work.v)):
        begin, end = first_row(part.rows, thread, threads), first_row(part.rows, thread + 1, threads)
        linear(kernels, part, inputs, out, nodes, begin, end)
    stage = wait(threads, arrivals, stage)
    _place_heads(tables, batch, work, index, thread, threads)
    stage = wait(threads, arrivals, stage)
    _attend(tables, batch, work, index, thread, threads)
    stage = wait(threads, arrivals, stage)
    first, last = first_row(decoder.hidden, thread, threads), first_row(decoder.hidden, thread + 1, threads)
    linear(kernels, layer.o, work.mixed, work.added, nodes, first, last)
    _add(work.x, work.added, nodes, first, last)
    return wait(threads, arrivals, stage)


@compiled
def mlp(tables: Any, work: Any, index: int, nodes: int, thread: int, threads: int, arrivals: Any, stage: int) -> Any:
    """Add to `work.x` what a layer's MLP makes of its norm; returns the next stage."""
    decoder, layer, kernels = tables.decoder[0], tables.layers[index], tables.kernels
    norm(decoder, work.x, layer.mlp_norm, work.normed, nodes, thread, threads)
    stage = wait(threads, arrivals, stage)
    first, last = first_row(decoder.mlp, thread, threads), first_row(decoder.mlp, thread + 1, threads)
    linear(kernels, layer.gate, work.normed, work.gate, nodes, first, last)
    linear(kernels, layer.up, work.normed, work.up, nodes, first, last)
    for node in range(nodes):
        share = (at(work.gate, node), at(work.up, node), first, (last + _BLOCK - 1) // _BLOCK * _BLOCK)
        _call(decoder.gate, share)
    stage = wait(threads, arrivals, stage)
    first, last = first_row(decoder.hidden, thread, threads), first_row(decoder.hidden, thread + 1, threads)
    linear(kernels, layer.down, work.gate, work.added, nodes, first, last)
    _add(work.x, work.added, nodes, first, last)
    return wait(threads, arrivals, stage)


@compiled
def forward(
    thread: int,
    threads: int,
    arrivals: Any,
    tables: Any,
    batch: Any,
    work: Any,
    first_layer: int,
    last_layer: int,
    taps: Any,
    tapped: Any,
    logits: Any,
) -> None:
    """Run layers `first_layer` to `last_layer` on `work.x`.

    Before layer 0, x is the tokens' embeddings. `taps[layer]` is the index in `tapped` `[taps, n, width]` that what
    comes out of a layer is copied to, or -1. Where `logits` `[n, V]` has rows, the final norm and the head follow.
    """
    decoder, nodes, stage = tables.decoder[0], len(batch.nodes), 0
    first, last = first_row(decoder.hidden, thread, threads), first_row(decoder.hidden, thread + 1, threads)
    if first_layer == 0:
        embed(tables, batch, work.x, thread, threads)
        stage = wait(threads, arrivals, stage)
    for index in range(first_layer, last_layer):
        layer = tables.layers[index]
        if layer.has_attention:
            norm(decoder, work.x, layer.attention_norm, work.normed, nodes, thread, threads)
            stage = wait(threads, arrivals, stage)
            stage = attention(tables, batch, work, index, work.normed, thread, threads, arrivals, stage)
        if layer.has_mlp:
            stage = mlp(tables, work, index, nodes, thread, threads, arrivals, stage)
        if taps[index] >= 0:
            tapped[taps[index], :, first:last] = work.x[:nodes, first:last]
    if len(logits) > 0:
        norm(decoder, work.x, decoder.norm, work.normed, nodes, thread, threads)
        stage = wait(threads, arrivals, stage)
        begin, end = first_row(decoder.head.rows, thread, threads), first_row(decoder.head.rows, thread + 1, threads)
        linear(tables.kernels, decoder.head, work.normed, logits, nodes, begin, end)


@compiled
def apply_head(thread: int, threads: int, arrivals: Any, tables: Any, x: Any, logits: Any) -> None:
    """Logits `[n, V]` of states `[n, width]`, which are not normed here."""
    head = tables.decoder[0].head
    begin, end = first_row(head.rows, thread, threads), first_row(head.rows, thread + 1, threads)
    linear(tables.kernels, head, x, logits, len(x), begin, end)
