"""A certificate as files: JSON for programs, a page for people."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from foredraft.pages import make_folder, render, whole_file
from foredraft.proof.verify import Certificate


def write(certificate: Certificate, folder: Path) -> tuple[Path, Path]:
    """Write `certificate.json` and `certificate.html` into the folder; return their paths.

    Raises:
        InvalidInputError: They cannot be written there.
    """
    make_folder(folder)
    text = json.dumps(_finite(certificate.to_dict()), indent=2, ensure_ascii=False, allow_nan=False)
    record, page = folder / "certificate.json", folder / "certificate.html"
    with whole_file(record) as write_record, whole_file(page) as write_page:
        write_record(f"{text}\n")
        write_page(render("proof/certificate.html", c=certificate))
    return record, page


def _finite(value: Any) -> Any:
    """The value with `null` for the numbers that JSON does not have: the lead of a token over no token, for one."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
