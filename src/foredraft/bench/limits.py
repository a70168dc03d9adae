"""The physical limit: how fast this machine reads memory and multiplies, and what that allows a model at most."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from foredraft.backends.checkpoint import available_memory, pick_device, pick_dtype
from foredraft.backends.native import reading
from foredraft.backends.native.families import NotNativeError
from foredraft.backends.native.team import physical_cores
from foredraft.backends.native.tensors import bytes_when_read
from foredraft.bench.theory import MOST, expected_tokens
from foredraft.checks import is_integer, is_number, require
from foredraft.errors import UnsupportedError
from foredraft.loading import EngineChoice
from foredraft.models import ModelFiles, Notify

_BUFFER = 2**30  # bytes: far more than any cache holds
_SIZES, _GPU_SIZES = (512, 2048), (8192,)  # of square matrices: small ones find a busy machine's quiet moments


@dataclass(frozen=True)
class Machine:
    """What a device was seen to do at its best."""

    device: str
    threads: int | None
    """Of a CPU."""
    dtype: str
    """Of the matrix product."""
    bandwidth: float
    """Bytes read from memory in a second."""
    arithmetic: float
    """Operations of a matrix product in a second, a multiplication and an addition being two."""


class Best(NamedTuple):
    """The fastest chain: its drafted tokens, and the tokens a second that it emits."""

    k: int
    tokens_per_second: float


@dataclass(frozen=True)
class Limits:
    """What a machine allows a model: no forward is quicker than reading its weights, nor than multiplying by them.

    Keys and values, norms and everything else come on top, and drafting is taken to be free, so this is a bound.

    Raises:
        InvalidInputError: A figure is not positive.
    """

    bandwidth: float
    """Bytes a second."""
    arithmetic: float
    """Operations a second."""
    bytes_per_token: float
    """Of weights that a forward reads, however many rows it has."""
    parameters: float
    """Weights that a row is multiplied with."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(name, value, is_number(value) and value > 0, "a number > 0")

    def seconds(self, rows: float = 1) -> float:
        """Of a forward at least: `max(bytes / bandwidth, 2 x parameters x rows / arithmetic)`."""
        return max(self.bytes_per_token / self.bandwidth, 2 * self.parameters * rows / self.arithmetic)

    @property
    def free_width(self) -> float:
        """Rows at which both take as long: fewer are not quicker. Below 1 even one row is bound by arithmetic."""
        return self.bytes_per_token / self.bandwidth * self.arithmetic / (2 * self.parameters)

    @property
    def plain(self) -> float:
        """Tokens a second of plain decoding."""
        return 1 / self.seconds()

    def speculative(self, alpha: float) -> Best:
        """The fastest chain whose tokens are accepted with probability `alpha`.

        Beyond the free width a row costs its full share and gains less than the one before, so no wider one is faster.
        """
        widest = min(max(math.ceil(self.free_width), 1), MOST)
        found = [Best(n - 1, expected_tokens(alpha, n - 1) / self.seconds(n)) for n in range(1, widest + 1)]
        return max(found, key=lambda best: best.tokens_per_second)

    def share(self, tokens_per_second: float, alpha: float | None = None) -> float:
        """What share of the limit a measured speed is: that of plain decoding, or of the fastest chain at `alpha`."""
        good = is_number(tokens_per_second) and tokens_per_second > 0
        require("tokens_per_second", tokens_per_second, good, "a number > 0")
        return tokens_per_second / (self.plain if alpha is None else self.speculative(alpha).tokens_per_second)


class Reads(NamedTuple):
    """What a forward of a model reads and multiplies with, and the type that it multiplies in."""

    bytes_per_token: int
    parameters: int
    dtype: torch.dtype


def reads_of(files: ModelFiles, engine: EngineChoice) -> Reads:
    """What forwards read of a model, run as `engine` says; only the headers of its files are looked at.

    Raises:
        UnsupportedError: It is of a kind of which that is not known.
        ModelError: The files are damaged or incomplete.
    """
    try:
        opened = reading.open_native(files.path)
    except NotNativeError as error:
        raise UnsupportedError(f"What {files.reference} reads for a token is not known: {error.reason}.") from error
    parameters = bytes_when_read(opened.config, opened.tensors, "f32") // 4
    if engine.not_native is None:
        return Reads(bytes_when_read(opened.config, opened.tensors, engine.weights), parameters, torch.float32)
    dtype = pick_dtype(engine.dtype, pick_device(engine.device))
    if not isinstance(dtype, torch.dtype):  # the checkpoint's own
        stored = getattr(opened.config, "dtype", None)
        dtype = stored if isinstance(stored, torch.dtype) else torch.float32
    return Reads(parameters * dtype.itemsize, parameters, dtype)


def measure_machine(
    device: str = "auto",
    *,
    threads: int | None = None,
    dtype: torch.dtype | None = None,
    seconds: float = 1.0,
    buffer: int | None = None,
    sizes: Sequence[int] = (),
    notify: Notify = lambda _: None,
    clock: Callable[[], float] = perf_counter,
) -> Machine:
    """Read a large buffer and multiply matrices, again and again; the quickest of each counts.

    Args:
        device: As of `load`.
        threads: On a CPU; `None` takes the physical cores.
        dtype: Of the matrices; `None` is float32.
        seconds: For each of the two.
        buffer: Bytes; `None` takes 1 GiB, or a quarter of the free memory where that is less.
        sizes: Rows of the square matrices; none takes what suits the device.
        notify: Told what is measured.
        clock: Seconds.

    Raises:
        InvalidInputError: An argument is out of range, or there is no such device.
    """
    place = pick_device(device)
    on_cpu = place.type == "cpu"
    require("threads", threads, threads is None or (is_integer(threads) and threads >= 1), "an integer >= 1")
    require("seconds", seconds, is_number(seconds) and seconds > 0, "a number > 0")
    buffer = min(_BUFFER, available_memory(place) // 4) if buffer is None else buffer
    threads, dtype = (threads or physical_cores()) if on_cpu else None, dtype or torch.float32
    with torch.inference_mode(), _torch_threads(threads):
        notify(f"Reading {buffer / 2**20:.0f} MiB of memory")
        bandwidth = _fastest([_reading(place, buffer)], seconds, clock)
        notify("Multiplying matrices")
        sizes = sizes or (_SIZES if on_cpu else _GPU_SIZES)
        arithmetic = _fastest(_products(place, dtype, sizes), seconds, clock)
    return Machine(str(place), threads, str(dtype).removeprefix("torch."), bandwidth, arithmetic)


class _Work(NamedTuple):
    amount: float
    """Of bytes or operations."""
    run: Callable[[], object]
    """Does it, and waits until it is done."""


def _reading(device: torch.device, size: int) -> _Work:
    """Reads so many bytes once, which takes longer than adding them up."""
    numbers = torch.ones(max(size // 4, 1), device=device)
    return _Work(numbers.nbytes, lambda: float(numbers.sum()))


def _products(device: torch.device, dtype: torch.dtype, sizes: Sequence[int]) -> list[_Work]:
    """Square products. On a CPU also by oneDNN, as torch's BLAS keeps to older instructions on some of them."""
    packs = device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    works = []
    for size in sizes:
        a = torch.ones(size, size, device=device, dtype=dtype)
        works.append(_Work(2 * size**3, partial(_product, a)))
        if packs:
            works.append(_Work(2 * size**3, partial(F.linear, *[a.to_mkldnn()] * 2)))
    return works


def _product(a: Tensor) -> float:
    return float((a @ a)[0, 0])


def _fastest(works: Sequence[_Work], seconds: float, clock: Callable[[], float]) -> float:
    """The most that one of these did in a second, of all its turns but the first."""
    for work in works:
        work.run()
    best, started = 0.0, clock()
    while True:
        for work in works:
            begun = clock()
            work.run()
            best = max(best, work.amount / max(clock() - begun, 1e-9))
        if clock() - started >= seconds:
            return best


@contextmanager
def _torch_threads(threads: int | None) -> Iterator[None]:
    """So many of torch's own, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
