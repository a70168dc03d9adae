"""One model in several weight types: GGUF files that this project and llama.cpp both read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

TYPES = {"f32": "F32", "bf16": "BF16", "f16": "F16", "q8_0": "Q8_0", "q4_0": "Q4_0", "q4_1": "Q4_1"}
"""Names of the native engine's formats and GGUF's."""


def variant(source: Path, name: str, folder: Path) -> Path:
    """The model of `source` with all its matrices in the format `name`; made once, then found in `folder`."""
    target = folder / f"{source.stem}.{TYPES[name]}.gguf"
    if not target.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        reader: Any = GGUFReader(source)
        partial = target.with_suffix(".partial")
        _write(reader, TYPES[name], partial)
        partial.rename(target)
    return target


def _write(reader: Any, type_name: str, target: Path) -> None:
    kind = GGMLQuantizationType[type_name]
    writer: Any = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        subtype = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=subtype)
    for tensor in reader.tensors:
        floats = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if len(tensor.shape) < 2:
            writer.add_tensor(tensor.name, floats, raw_dtype=GGMLQuantizationType.F32)
        else:
            writer.add_tensor(tensor.name, quants.quantize(floats, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
