"""A certificate as files: JSON for programs, a page for people."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2

from foredraft.proof.verify import Certificate

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("foredraft", "proof"), autoescape=True, trim_blocks=True, lstrip_blocks=True
)


def write(certificate: Certificate, folder: Path) -> tuple[Path, Path]:
    """Write `certificate.json` and `certificate.html` into the folder; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    record, page = folder / "certificate.json", folder / "certificate.html"
    record.write_text(json.dumps(certificate.to_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    page.write_text(_TEMPLATES.get_template("certificate.html").render(c=certificate), encoding="utf-8")
    return record, page
