"""What a GGUF file holds: its metadata, and where each tensor lies. The tensors themselves stay in the file.

`gguf.GGUFReader` makes arrays of every piece of the vocabulary, which takes seconds; nothing here needs them. The
format is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from foredraft.backends.native.families import NotNativeError
from foredraft.backends.native.weights import Bytes
from foredraft.errors import ModelError

_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_KEPT = 4096  # entries of an array; longer ones are vocabularies and merges


class Place(NamedTuple):
    """A tensor in a file."""

    type: GGMLQuantizationType
    shape: tuple[int, ...]
    """`[rows, columns]` as in torch."""
    start: int
    """Byte of the file."""
    size: int
    """Bytes."""


class GgufFile:
    """A GGUF file, mapped into memory.

    Args:
        path: The file.

    Raises:
        ModelError: It is cut short, damaged, or no GGUF file; the message names the tensor if one is.
        NotNativeError: A tensor's type is not known.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Pages are copied if they are written to, which nobody does, so that kernels see arrays like any other.
        self._mapped: Any = np.memmap(path, dtype=np.uint8, mode="c")
        self._bytes: Bytes = np.asarray(self._mapped)
        header = _Header(self._bytes.data)
        try:
            self.metadata, tensors = header.read()
        except (struct.error, EOFError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} is damaged or cut short at byte {header.position} ({error}).") from error
        except _NotGgufError as error:
            raise ModelError(f"{path} is no GGUF file that can be read: {error}.") from error
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{path} is damaged: general.alignment is {alignment!r}.")
        start = -(-header.position // alignment) * alignment
        self.places = {name: self._place(name, *tensor, start) for name, tensor in tensors.items()}

    def _place(self, name: str, shape: tuple[int, ...], code: int, offset: int, start: int) -> Place:
        kind = GGMLQuantizationType(code) if code in set(GGMLQuantizationType) else None
        if kind is None or not _has_weights(kind):
            raise NotNativeError(
                str(self.path), f"its tensor '{name}' is of type {kind.name if kind else code}, which is not known"
            )
        block, size = GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block:
            raise ModelError(f"Tensor '{name}' of {self.path} is damaged: type {kind.name} cannot have shape {shape}.")
        place = Place(kind, shape, start + offset, math.prod(shape) // block * size)
        if place.start + place.size > len(self._bytes):
            raise ModelError(
                f"{self.path} is cut short: tensor '{name}' ends at byte {place.start + place.size}, but the file has "
                f"only {len(self._bytes)}. Fetch it again."
            )
        return place

    def bytes_of(self, name: str) -> Bytes:
        """A tensor as `[rows, bytes of a row]`, not copied; a vector is one row."""
        place = self.places[name]
        return self._bytes[place.start : place.start + place.size].reshape(math.prod(place.shape[:-1]), -1)

    def let_go(self, name: str) -> None:
        """Give the memory of a tensor back that was copied; it is read from the file again if it is asked for."""
        advice, place = getattr(mmap, "MADV_DONTNEED", None), self.places[name]
        first = -(-place.start // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages that are all its own
        size = (place.start + place.size) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if advice is not None and size > 0:
            self._mapped._mmap.madvise(advice, first, size)


@cache
def _has_weights(kind: GGMLQuantizationType) -> bool:
    """Whether numbers can be made of this type."""
    block = np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    try:
        return kind == GGMLQuantizationType.F64 or quants.dequantize(block, kind) is not None
    except NotImplementedError:
        return False


class _NotGgufError(Exception):
    """It begins with something else."""


class _Header:
    """Reads on from `position`; whatever is beyond the end raises `struct.error` or `EOFError`."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.position = 0

    def read(self) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int, int]]]:
        """Metadata by key, and of each tensor by name its shape, type and offset behind the header."""
        magic = self._take(4)
        if magic != b"GGUF":
            raise _NotGgufError(f"it begins with {magic!r}, not with the magic b'GGUF'")
        version = self._number("I")
        if version not in _VERSIONS:
            raise _NotGgufError(f"its version is {version}, but must be {' or '.join(map(str, _VERSIONS))}")
        tensors, entries = self._number("Q"), self._number("Q")
        metadata = {}
        for _ in range(entries):
            key = self._string()
            metadata[key] = self._value(self._number("I"))
        return metadata, dict(self._tensor() for _ in range(tensors))

    def _tensor(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        name = self._string()
        shape = tuple(self._number("Q") for _ in range(self._number("I")))[::-1]
        return name, (shape, self._number("I"), self._number("Q"))

    def _value(self, kind: int) -> Any:
        """A value; of an array of strings its length, which is all that is needed."""
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise _NotGgufError(f"a value in its metadata is of type {kind}, which there is not")
        entry, count = self._number("I"), self._number("Q")
        if entry == _STRING:
            self._skip_strings(count)
            return count
        if entry not in _NUMBERS:
            raise _NotGgufError(f"an array in its metadata is of type {entry}")
        size = struct.calcsize(f"<{_NUMBERS[entry]}")
        if count > _MOST_KEPT:
            self._take(count * size)
            return count
        return list(struct.unpack(f"<{count}{_NUMBERS[entry]}", self._take(count * size)))

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self.position)
        self.position += struct.calcsize(f"<{code}")
        return value

    def _take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self._data):
            raise EOFError(f"{size} bytes should follow")
        taken = bytes(self._data[self.position : end])
        self.position = end
        return taken

    def _string(self) -> str:
        return self._take(self._number("Q")).decode("utf-8")

    def _skip_strings(self, count: int) -> None:
        """Written out, since vocabularies have hundreds of thousands."""
        data, position, length = self._data, self.position, struct.Struct("<Q").unpack_from
        for _ in range(count):
            position += 8 + length(data, position)[0]
        if position > len(data):
            raise EOFError("a list of strings should follow")
        self.position = position
