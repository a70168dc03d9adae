"""The engine's inner loops: products of a few rows with a matrix of any format, and what stands between them.

Every sum has one accumulator for each lane and adds in the order of the columns, so a result has the same bits however
many rows, nodes or threads there are: batch-invariant by construction.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import llvm_version_info
from numpy.typing import NDArray

from foredraft.backends.native import vector
from foredraft.backends.native.vector import (
    FLOAT,
    HALF,
    I8,
    I16,
    I32,
    I64,
    POINTER,
    Cpu,
    Emitter,
    host,
    loaded,
    object_code,
)
from foredraft.backends.native.weights import BLOCK, FORMATS

logger = logging.getLogger(__name__)

_EXPAND = 0  # where a number of nodes stands elsewhere
_AT_ONCE = 2  # vectors of a row's weights that are made before they are multiplied: the next is ready when one is done


class Kernels:
    """Kernels for this CPU and some formats. A process compiles each only once; with a `folder`, a machine does.

    `matrices` `[formats, most_nodes + 1]` has the addresses of each format's `expand`, then of its `linear` for each
    number of nodes; `attention` `[2, most_nodes + 1]` those of `scores` and `weighted` over keys and values in
    `kv_format`.
    """

    def __init__(
        self, formats: Iterable[str], kv_format: str = "f32", cpu: Cpu | None = None, folder: Path | None = None
    ) -> None:
        self.cpu = cpu or host()
        self._others = _engine(self.cpu, f"others_{kv_format}", folder)
        most = most_nodes(self.cpu)
        self.matrices: NDArray[np.int64] = np.zeros((len(FORMATS), most + 1), dtype=np.int64)
        for name in sorted({"f32", *formats}):
            engine = _engine(self.cpu, name, folder)
            for nodes in range(most + 1):
                self.matrices[FORMATS[name].code, nodes] = engine.get_function_address(f"{name}_{nodes}")
        self.attention: NDArray[np.int64] = np.zeros((2, most + 1), dtype=np.int64)
        for nodes in range(1, most + 1):
            self.attention[0, nodes] = self.address(f"scores_{nodes}")
        for nodes in range(1, most_mixed(self.cpu) + 1):
            self.attention[1, nodes] = self.address(f"weighted_{nodes}")

    def address(self, name: str) -> int:
        """Of a kernel that is not in the tables: `softmax`, `norm`, `silu` or `gelu_tanh`."""
        return int(self._others.get_function_address(name))


@cache
def _engine(cpu: Cpu, name: str, folder: Path | None) -> Any:
    """The kernels of a format, or the others; from a file of `folder` if they were made before."""
    file = folder / f"{name}-{_version(cpu)}.o" if folder is not None else None
    code = _kept(file)
    if code is None:
        module = ir.Module(name)
        if name in FORMATS:
            _of_format(module, cpu, name)
        else:
            _others(module, cpu, name.removeprefix("others_"))
        code = object_code(module, cpu)
        _keep(file, code)
    return loaded(code, cpu)


@cache
def _version(cpu: Cpu) -> str:
    """Changes with whatever the machine code depends on: this code, the compiler and the CPU."""
    digest = hashlib.sha256(repr((cpu, llvm_version_info)).encode())
    for source in (Path(__file__), Path(vector.__file__)):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


def _kept(file: Path | None) -> bytes | None:
    """Machine code behind its own digest: anything else would crash."""
    try:
        found = file.read_bytes() if file is not None else b""
    except OSError:
        return None
    digest, code = found[:32], found[32:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def _keep(file: Path | None, code: bytes) -> None:
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as fresh:
            fresh.write(hashlib.sha256(code).digest() + code)
        Path(fresh.name).replace(file)
    except OSError as error:  # it is made anew next time
        logger.warning("The kernels cannot be kept in %s (%s)", file.parent, error)


def most_nodes(cpu: Cpu) -> int:
    """Nodes that one pass over a matrix serves; more are served in groups. Six leave 16 registers room for two rows."""
    return 8 if cpu.registers == 32 else 6


def rows_at_once(name: str, nodes: int, registers: int) -> int:
    """Rows of the matrix whose products with all nodes fit into the registers, beside what they are made of.

    For each row these are its next weights, and what these share if there are many registers: of 16 that would leave a
    row alone, and a second one saves more than it costs to read the shared ones again. No more than four rows: the
    memory likes one stream better than many.
    """
    shared = _SHARED.get(name, 0) if registers == 32 else 0
    return max(1, min(4, registers // (nodes + _AT_ONCE + shared)))


def most_mixed(cpu: Cpu) -> int:
    """Nodes that `weighted` serves at once: it has four sums for each."""
    return 4 if cpu.registers == 32 else 2


# Some of a block's 32 weights, one vector for each of the lanes that they begin with


def _f32(e: Emitter, block: Any, lanes: Sequence[int]) -> list[Any]:
    return [e.load(e.at(block, 4 * lane)) for lane in lanes]


def _bf16(e: Emitter, block: Any, lanes: Sequence[int]) -> list[Any]:
    return [_bfloat16(e, e.at(block, 2 * lane)) for lane in lanes]


def _bfloat16(e: Emitter, pointer: Any) -> Any:
    """One vector: the upper halves of float32."""
    bits = e.build.zext(e.load(pointer, e.lanes_of(I16)), e.lanes_of(I32))
    return e.build.bitcast(e.build.shl(bits, ir.Constant(e.lanes_of(I32), [16] * e.lanes)), e.vector)


def _f16(e: Emitter, block: Any, lanes: Sequence[int]) -> list[Any]:
    halves = [e.load(e.at(block, 2 * lane), e.lanes_of(HALF)) for lane in lanes]
    return [e.build.fpext(half, e.vector) for half in halves]


def _half(e: Emitter, pointer: Any) -> Any:
    return e.splat(e.build.fpext(e.load(pointer, HALF), FLOAT))


def _q8_0(e: Emitter, block: Any, lanes: Sequence[int]) -> list[Any]:
    scale = _half(e, block)
    whole = [e.load(e.at(block, 2 + lane), e.lanes_of(I8)) for lane in lanes]
    return [e.build.fmul(e.build.sitofp(part, e.vector), scale) for part in whole]


def _nibbles(e: Emitter, sixteen_bytes: Any, lanes: Sequence[int]) -> list[Any]:
    """Weights 0 to 15 are the low halves of the bytes, 16 to 31 the high ones."""
    found = []
    for lane in lanes:
        packed = e.load(e.at(sixteen_bytes, lane % 16), e.lanes_of(I8))
        low = lane < BLOCK // 2
        operand = ir.Constant(e.lanes_of(I8), [15 if low else 4] * e.lanes)
        nibble = e.build.and_(packed, operand) if low else e.build.lshr(packed, operand)
        found.append(e.build.sitofp(e.build.zext(nibble, e.lanes_of(I32)), e.vector))
    return found


def _q4_0(e: Emitter, block: Any, lanes: Sequence[int]) -> list[Any]:
    scale, middle = _half(e, block), e.constant(8.0)
    return [e.build.fmul(e.build.fsub(nibble, middle), scale) for nibble in _nibbles(e, e.at(block, 2), lanes)]


def _q4_1(e: Emitter, block: Any, lanes: Sequence[int]) -> list[Any]:
    scale, least = _half(e, block), _half(e, e.at(block, 2))
    return [e.build.fadd(e.build.fmul(nibble, scale), least) for nibble in _nibbles(e, e.at(block, 4), lanes)]


_WEIGHTS: dict[str, Callable[[Emitter, Any, Sequence[int]], list[Any]]] = {
    "f32": _f32,
    "bf16": _bf16,
    "f16": _f16,
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
}
_SHARED = {"q8_0": 1, "q4_0": 1, "q4_1": 2}
"""Vectors that all weights of a block are made with; the other formats have none."""


def _lanes(e: Emitter) -> range:
    """All that vectors of a block begin with."""
    return range(0, BLOCK, e.lanes)


# Matrix kernels


def _of_format(module: ir.Module, cpu: Cpu, name: str) -> None:
    _expand(module, cpu, name)
    for nodes in range(1, most_nodes(cpu) + 1):
        _linear(module, cpu, name, nodes)


def _expand(module: ir.Module, cpu: Cpu, name: str) -> None:
    """`(matrix, bytes of a row, y, stride of y, first, last, blocks)`: rows as float32, `y[row - first]`."""
    e = Emitter(module, cpu, f"{name}_{_EXPAND}", [POINTER, I64, POINTER, I64, I64, I64, I64])
    matrix, row_bytes, y, y_stride, first, last, blocks = e.arguments
    with e.loop(first, last) as (row, _):
        source = e.at(matrix, e.build.mul(row, row_bytes))
        target = e.at(y, e.times(e.build.mul(e.build.sub(row, first), y_stride), 4))
        with e.loop(e.integer(0), blocks) as (block, _):
            here = e.at(source, e.times(block, FORMATS[name].block_bytes))
            for lane, weights in zip(_lanes(e), _WEIGHTS[name](e, here, _lanes(e)), strict=True):
                e.store(weights, e.at(e.at(target, e.times(block, 4 * BLOCK)), 4 * lane))
    e.build.ret_void()


def _linear(module: ir.Module, cpu: Cpu, name: str, nodes: int) -> None:
    """`(matrix, bytes of a row, x, stride of x, y, stride of y, first, last, blocks)`.

    `y[node, row] = matrix[row] . x[node]` for the rows from `first` to `last`; strides in floats.
    """
    e = Emitter(module, cpu, f"{name}_{nodes}", [POINTER, I64, POINTER, I64, POINTER, I64, I64, I64, I64])
    first, last = e.arguments[6:8]
    e.groups(first, last, rows_at_once(name, nodes, cpu.registers), partial(_rows, e, name, nodes))
    e.build.ret_void()


def _rows(e: Emitter, name: str, nodes: int, row: Any, rows: int) -> None:
    """Some rows times all nodes. Each weight is loaded and converted once, each product has its own accumulator."""
    matrix, row_bytes, x, x_stride, y, y_stride, _, _, blocks = e.arguments
    size = FORMATS[name].block_bytes
    sources = [e.at(matrix, e.build.mul(e.build.add(row, e.integer(i)), row_bytes)) for i in range(rows)]
    inputs = [e.at(x, e.times(x_stride, 4 * node)) for node in range(nodes)]
    ahead = e.at(sources[0], e.times(row_bytes, 2 * rows))  # where the rows after the next begin
    with e.loop(e.integer(0), blocks, [e.constant(0.0)] * (rows * nodes)) as (block, sums):
        here = [e.at(source, e.times(block, size)) for source in sources]
        for line in range(0, size * rows, 64):
            e.prefetch(e.at(ahead, e.build.add(e.times(block, size * rows), e.integer(line))))
        for first in range(0, len(_lanes(e)), _AT_ONCE):
            lanes = _lanes(e)[first : first + _AT_ONCE]
            weights = [_WEIGHTS[name](e, pointer, lanes) for pointer in here]
            for part, lane in enumerate(lanes):
                for node in range(nodes):
                    value = e.load(e.at(e.at(inputs[node], e.times(block, 4 * BLOCK)), 4 * lane))
                    for i in range(rows):
                        at = node * rows + i
                        sums[at] = e.multiply_add(weights[i][part], value, sums[at])
    for start in range(0, len(sums), e.lanes):
        chunk = sums[start : start + e.lanes]
        _store_sums(e, e.sums(chunk), start, len(chunk), rows, (y, y_stride, row))


def _store_sums(e: Emitter, sums: Any, start: int, count: int, rows: int, where: tuple[Any, Any, Any]) -> None:
    """Each node's run of rows goes to its own place."""
    y, y_stride, row = where
    position = start
    while position < start + count:
        node, i = divmod(position, rows)
        run = min(rows - i, start + count - position)
        offset = e.build.add(e.build.mul(y_stride, e.integer(node)), e.build.add(row, e.integer(i)))
        lanes = range(position - start, position - start + run)
        e.store(e.pick(sums, sums, lanes), e.at(y, e.times(offset, 4)))
        position += run


# The others


def _others(module: ir.Module, cpu: Cpu, kv_format: str) -> None:
    _softmax(module, cpu)
    for nodes in range(1, most_nodes(cpu) + 1):
        _scores(module, cpu, kv_format, nodes)
    for nodes in range(1, most_mixed(cpu) + 1):
        _weighted(module, cpu, kv_format, nodes)
    for name in ("silu", "gelu_tanh"):
        _gate(module, cpu, name)
    _norm(module, cpu)


def _softmax(module: ir.Module, cpu: Cpu) -> None:
    """`(s, count, scale)`: `s` becomes its softmax, the scores times `scale`.

    Up to a vector behind the last score is overwritten.
    """
    e = Emitter(module, cpu, "softmax", [POINTER, I64, FLOAT])
    scores, count, scale = e.arguments
    padded = e.build.add(count, e.integer(e.lanes - 1))
    e.store(e.constant(float("-inf")), e.at(scores, e.times(count, 4)))
    with e.loop(e.integer(0), padded, [e.constant(float("-inf"))], e.lanes) as (i, best):
        best[0] = e.maximum(e.load(e.at(scores, e.times(i, 4))), best[0])
    highest = best[0]
    for half in (2**power for power in reversed(range(e.lanes.bit_length() - 1))):
        highest = e.maximum(highest, e.pick(highest, highest, [(lane + half) % e.lanes for lane in range(e.lanes)]))
    factor = e.splat(scale)
    with e.loop(e.integer(0), padded, [e.constant(0.0)], e.lanes) as (i, total):
        place = e.at(scores, e.times(i, 4))
        score = e.load(place)
        power = e.exp(e.build.fmul(e.build.fsub(score, highest), factor))
        power = e.build.select(e.build.fcmp_ordered("==", score, e.constant(float("-inf"))), e.constant(0.0), power)
        e.store(power, place)
        total[0] = e.build.fadd(total[0], power)
    share = e.reciprocal(e.splat(e.build.extract_element(e.sums(total), ir.Constant(I32, 0))))
    with e.loop(e.integer(0), padded, step=e.lanes) as (i, _):
        place = e.at(scores, e.times(i, 4))
        e.store(e.build.fmul(e.load(place), share), place)
    e.build.ret_void()


def _scores(module: ir.Module, cpu: Cpu, name: str, nodes: int) -> None:
    """`(q, stride of q, keys, head_width, blocks, scores, stride of scores)`: `scores[node, row] = q[node] . key[row]`.

    Keys lie in blocks of as many rows as there are lanes, `[blocks, head_width, lanes]`: a lane is a row, and nothing
    has to be summed across lanes.
    """
    e = Emitter(module, cpu, f"scores_{nodes}", [POINTER, I64, POINTER, I64, I64, POINTER, I64])
    together = max(1, min(8, (cpu.registers - 4) // nodes))
    e.groups(e.integer(0), e.arguments[4], together, partial(_score_blocks, e, name, nodes))
    e.build.ret_void()


def _score_blocks(e: Emitter, name: str, nodes: int, block: Any, together: int) -> None:
    q, q_stride, keys, head_width, _, scores, stride = e.arguments
    size = FORMATS[name].block_bytes * e.lanes // BLOCK  # bytes of one dimension of a block's keys
    inputs = [e.at(q, e.times(q_stride, 4 * node)) for node in range(nodes)]
    places = [e.build.add(block, e.integer(i)) for i in range(together)]
    read = e.load if name == "f32" else partial(_bfloat16, e)
    sources = [e.at(keys, e.times(e.build.mul(place, head_width), size)) for place in places]
    with e.loop(e.integer(0), head_width, [e.constant(0.0)] * (nodes * together)) as (i, sums):
        here = [read(e.at(source, e.times(i, size))) for source in sources]
        for node in range(nodes):
            value = e.splat(e.load(e.at(inputs[node], e.times(i, 4)), FLOAT))
            for at, key in enumerate(here, start=node * together):
                sums[at] = e.multiply_add(value, key, sums[at])
    for at, total in enumerate(sums):
        node, i = divmod(at, together)
        offset = e.build.add(e.times(stride, node), e.times(places[i], e.lanes))
        e.store(total, e.at(scores, e.times(offset, 4)))


def _weighted(module: ir.Module, cpu: Cpu, name: str, nodes: int) -> None:
    """`(p, stride of p, values, bytes of a row, count, out, stride of out, blocks)`.

    Adds `p[node, row] values[row]` to `out[node]`, one row after the other.
    """
    e = Emitter(module, cpu, f"weighted_{nodes}", [POINTER, I64, POINTER, I64, I64, POINTER, I64, I64])
    e.groups(e.integer(0), e.arguments[-1], 2, partial(_weighted_columns, e, name, nodes))
    e.build.ret_void()


def _weighted_columns(e: Emitter, name: str, nodes: int, block: Any, width: int) -> None:
    p, stride, values, row_bytes, count, out, out_stride, _ = e.arguments
    size, parts = FORMATS[name].block_bytes, BLOCK // e.lanes * width
    rows = [e.at(out, e.times(e.build.mul(out_stride, e.integer(node)), 4)) for node in range(nodes)]
    places = [e.at(e.at(row, e.times(block, 4 * BLOCK)), 4 * e.lanes * i) for row in rows for i in range(parts)]
    weights = [e.at(p, e.times(stride, 4 * node)) for node in range(nodes)]
    with e.loop(e.integer(0), count, [e.load(place) for place in places]) as (i, sums):
        source = e.at(e.at(values, e.build.mul(i, row_bytes)), e.times(block, size))
        blocks = [e.at(source, b * size) for b in range(width)]
        value = [vector for block in blocks for vector in _WEIGHTS[name](e, block, _lanes(e))]
        for node in range(nodes):
            weight = e.splat(e.load(e.at(weights[node], e.times(i, 4)), FLOAT))
            for at, v in enumerate(value, start=node * parts):
                sums[at] = e.multiply_add(weight, v, sums[at])
    for place, total in zip(places, sums, strict=True):
        e.store(total, place)


def _gate(module: ir.Module, cpu: Cpu, name: str) -> None:
    """`(gate, up, first, last)`: gate becomes activation(gate) up. Both activations are g times a sigmoid."""
    e = Emitter(module, cpu, name, [POINTER, POINTER, I64, I64])
    gate, up, first, last = e.arguments
    with e.loop(first, last, step=e.lanes) as (i, _):
        place = e.at(gate, e.times(i, 4))
        g = e.load(place)
        slope = e.constant(-1.0)
        if name == "gelu_tanh":  # -2 sqrt(2 / pi) (1 + 0.044715 g^2)
            slope = e.multiply_add(e.build.fmul(g, g), e.constant(-0.0713548162726), e.constant(-1.5957691216057))
        sigmoid = e.reciprocal(e.build.fadd(e.constant(1.0), e.exp(e.build.fmul(g, slope))))
        e.store(e.build.fmul(e.build.fmul(g, sigmoid), e.load(e.at(up, e.times(i, 4)))), place)
    e.build.ret_void()


def _norm(module: ir.Module, cpu: Cpu) -> None:
    """`(x, weight, out, padded count, 1 / count, epsilon)`: RMSNorm of a vector whose padding is zero."""
    e = Emitter(module, cpu, "norm", [POINTER, POINTER, POINTER, I64, FLOAT, FLOAT])
    x, weight, out, count, share, epsilon = e.arguments
    with e.loop(e.integer(0), count, [e.constant(0.0)], e.lanes) as (i, total):
        value = e.load(e.at(x, e.times(i, 4)))
        total[0] = e.multiply_add(value, value, total[0])
    square = e.build.extract_element(e.sums(total), ir.Constant(I32, 0))
    mean = e.build.fadd(e.build.fmul(square, share), epsilon)
    factor = e.splat(e.build.fdiv(ir.Constant(FLOAT, 1.0), e.call("llvm.sqrt.f32", FLOAT, mean)))
    with e.loop(e.integer(0), count, step=e.lanes) as (i, _):
        value = e.build.fmul(e.load(e.at(x, e.times(i, 4))), factor)
        e.store(e.build.fmul(value, e.load(e.at(weight, e.times(i, 4)))), e.at(out, e.times(i, 4)))
    e.build.ret_void()
