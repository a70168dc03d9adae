"""Vector code by hand: LLVM's instructions for so many lanes as this CPU has, in an order that no optimiser changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir

FLOAT, HALF = ir.FloatType(), ir.HalfType()
I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
POINTER, VOID = ir.PointerType(), ir.VoidType()

_LOG2_E = 1.4426950408889634
_LN_2_HIGH, _LN_2_LOW = 0.693359375, -2.12194440e-4  # their sum is ln 2; the first has few bits, so products are exact
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LOWEST, _HIGHEST = -87.0, 88.0  # e^x is a normal float32 within these


class Cpu(NamedTuple):
    """What the code is made for."""

    name: str
    features: str
    lanes: int
    """Floats of a vector."""
    registers: int
    """Vectors that the CPU holds at once."""
    fused: bool
    """Whether it multiplies and adds in one instruction."""


def host() -> Cpu:
    """This machine's CPU."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    name, flags = llvm.get_host_cpu_name(), features.flatten()
    if features.get("avx512f") and features.get("avx512vl") and features.get("avx512bw"):
        return Cpu(name, flags, lanes=16, registers=32, fused=True)
    if features.get("avx2"):
        return Cpu(name, flags, lanes=8, registers=16, fused=bool(features.get("fma")))
    arm = llvm.get_process_triple().startswith(("aarch64", "arm64"))
    return Cpu(name, flags, lanes=4, registers=32 if arm else 16, fused=arm)


class Emitter:
    """Writes one function. Values are those of llvmlite; offsets and pointers are in bytes."""

    def __init__(
        self, module: ir.Module, cpu: Cpu, name: str, arguments: Sequence[ir.Type], returns: ir.Type = VOID
    ) -> None:
        self.module, self.cpu, self.lanes = module, cpu, cpu.lanes
        self.vector = ir.VectorType(FLOAT, cpu.lanes)
        self.function = ir.Function(module, ir.FunctionType(returns, arguments), name)
        self.function.attributes.add("nounwind")
        self.arguments = self.function.args
        self.build = ir.IRBuilder(self.function.append_basic_block())

    def integer(self, value: int) -> Any:
        """A 64-bit constant."""
        return ir.Constant(I64, value)

    def constant(self, value: float) -> Any:
        """A vector of one number."""
        return ir.Constant(self.vector, [value] * self.lanes)

    def splat(self, scalar: Any) -> Any:
        """A vector of one value."""
        one = self.build.insert_element(ir.Constant(self.vector, ir.Undefined), scalar, ir.Constant(I32, 0))
        return self.build.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, self.lanes), [0] * self.lanes))

    def at(self, pointer: Any, offset: Any) -> Any:
        """The pointer so many bytes on."""
        offset = self.integer(offset) if isinstance(offset, int) else offset
        return self.build.gep(pointer, [offset], source_etype=I8)

    def times(self, value: Any, factor: int) -> Any:
        """An integer times a constant."""
        return self.build.mul(value, self.integer(factor))

    def load(self, pointer: Any, kind: ir.Type | None = None) -> Any:
        """A vector of floats, or of `kind`, from anywhere."""
        return self.build.load(pointer, typ=kind or self.vector, align=1)

    def store(self, value: Any, pointer: Any) -> None:
        """The other way."""
        self.build.store(value, pointer, align=1)

    def lanes_of(self, kind: ir.Type) -> ir.VectorType:
        """A vector of another type with as many lanes."""
        return ir.VectorType(kind, self.lanes)

    def call(self, name: str, result: ir.Type, *arguments: Any) -> Any:
        """One of LLVM's own functions."""
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(result, [a.type for a in arguments]), name)
        return self.build.call(function, arguments)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """Vectors `a b + c`, rounded once where the CPU can, twice elsewhere."""
        if self.cpu.fused:
            return self.call(f"llvm.fma.v{self.lanes}f32", self.vector, a, b, c)
        return self.build.fadd(self.build.fmul(a, b), c)

    def prefetch(self, pointer: Any) -> None:
        """Ask for the cache line of an address that will be read soon; it need not exist."""
        read, soon, data = ir.Constant(I32, 0), ir.Constant(I32, 3), ir.Constant(I32, 1)
        self.call("llvm.prefetch.p0", VOID, pointer, read, soon, data)

    @contextmanager
    def loop(
        self, first: Any, last: Any, carried: Sequence[Any] = (), step: int = 1
    ) -> Iterator[tuple[Any, list[Any]]]:
        """Whole steps from `first` while they end by `last`.

        Gives the index and the values carried from turn to turn: assign their new values into the list. After the loop,
        index and list hold where it ended.
        """
        build, before = self.build, self.build.block
        head, body, done = (self.function.append_basic_block() for _ in range(3))
        build.branch(head)
        build.position_at_end(head)
        index, phis = build.phi(I64), [build.phi(value.type) for value in carried]
        for phi, value in zip([index, *phis], [first, *carried], strict=True):
            phi.add_incoming(value, before)
        following = build.add(index, self.integer(step))
        build.cbranch(build.icmp_signed("<=", following, last), body, done)
        build.position_at_end(body)
        values: list[Any] = list(phis)
        yield index, values
        for phi, value in zip([index, *phis], [following, *values], strict=True):
            phi.add_incoming(value, build.block)
        build.branch(head)
        build.position_at_end(done)
        values[:] = phis

    def groups(self, first: Any, last: Any, size: int, body: Callable[[Any, int], None]) -> None:
        """`body(index, size)` for whole groups from `first` to `last`, then `body(index, 1)` for each that is left."""
        with self.loop(first, last, step=size) as (index, _):
            body(index, size)
        if size > 1:
            with self.loop(index, last) as (index, _):
                body(index, 1)

    def sums(self, vectors: Sequence[Any]) -> Any:
        """One vector whose lane i is the sum of the lanes of `vectors[i]`, at most as many as there are lanes.

        Halves are added to halves until one lane is left. Which vectors are summed beside does not change the order.
        """
        missing = (1 << (len(vectors) - 1).bit_length()) - len(vectors)
        level, group = [*vectors, *[self.constant(0.0)] * missing], self.lanes
        while group > 1:
            group //= 2
            pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
            level = [self._halves_added(pair[0], pair[-1], group, len(pair)) for pair in pairs]
        return level[0]

    def _halves_added(self, a: Any, b: Any, half: int, count: int) -> Any:
        width = a.type.count
        starts = [vector * width + group for vector in range(count) for group in range(0, width, 2 * half)]
        low = [start + lane for start in starts for lane in range(half)]
        return self.build.fadd(self.pick(a, b, low), self.pick(a, b, [lane + half for lane in low]))

    def pick(self, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        """Some lanes of two vectors laid end to end."""
        return self.build.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))

    def maximum(self, a: Any, b: Any) -> Any:
        """Lane by lane."""
        return self.build.select(self.build.fcmp_ordered(">", a, b), a, b)

    def reciprocal(self, a: Any) -> Any:
        """1 / a."""
        return self.build.fdiv(self.constant(1.0), a)

    def exp(self, x: Any) -> Any:
        """e^x within 2 units in the last place, after Cephes' `expf`; what is below -87 counts as -87."""
        build = self.build
        x = self.maximum(x, self.constant(_LOWEST))
        x = build.select(build.fcmp_ordered("<", x, self.constant(_HIGHEST)), x, self.constant(_HIGHEST))
        scaled = self.multiply_add(x, self.constant(_LOG2_E), self.constant(0.5))
        whole = self.call(f"llvm.floor.v{self.lanes}f32", self.vector, scaled)
        r = self.multiply_add(whole, self.constant(-_LN_2_HIGH), x)
        r = self.multiply_add(whole, self.constant(-_LN_2_LOW), r)
        p = self.constant(_EXP[0])
        for coefficient in _EXP[1:]:
            p = self.multiply_add(p, r, self.constant(coefficient))
        p = self.multiply_add(p, build.fmul(r, r), build.fadd(r, self.constant(1.0)))
        integers = self.lanes_of(I32)
        exponent = build.add(build.fptosi(whole, integers), ir.Constant(integers, [127] * self.lanes))
        exponent = build.shl(exponent, ir.Constant(integers, [23] * self.lanes))
        return build.fmul(p, build.bitcast(exponent, self.vector))


def object_code(module: ir.Module, cpu: Cpu) -> bytes:
    """The machine code of a module's functions."""
    machine = _machine(cpu)
    code: bytes = machine.emit_object(_optimised(llvm.parse_assembly(str(module)), machine))
    return code


def loaded(code: bytes, cpu: Cpu) -> Any:
    """An execution engine with those functions. They live as long as it does."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine(cpu))
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


def _machine(cpu: Cpu) -> Any:
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=cpu.name, features=cpu.features, opt=3, jit=True)


def _optimised(module: Any, machine: Any) -> Any:
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_unrolling = options.loop_vectorization = options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module
