"""A certificate as files: JSON for programs, a page for people."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jinja2

from foredraft.proof.verify import Certificate

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("foredraft", "proof"), autoescape=True, trim_blocks=True, lstrip_blocks=True
)


def write(certificate: Certificate, folder: Path) -> tuple[Path, Path]:
    """Write `certificate.json` and `certificate.html` into the folder; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    record, page = folder / "certificate.json", folder / "certificate.html"
    text = json.dumps(_finite(certificate.to_dict()), indent=2, ensure_ascii=False, allow_nan=False)
    record.write_text(f"{text}\n", encoding="utf-8")
    page.write_text(_TEMPLATES.get_template("certificate.html").render(c=certificate), encoding="utf-8")
    return record, page


def _finite(value: Any) -> Any:
    """The value with `null` for the numbers that JSON does not have: the lead of a token over no token, for one."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
