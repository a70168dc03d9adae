"""Every code block in README, CONTRIBUTING and docs that can run does run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = ("git ", "make ", "pip ")  # would install, or run this suite inside itself

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]


def blocks(language: str) -> list[Any]:
    found: list[Any] = []
    for page in PAGES:
        for match in re.finditer(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
            found.append(pytest.param(match[1], id=f"{page.stem}-{len(found)}"))
    return found


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", blocks("python"))
def test_python_block_runs(code: str) -> None:
    run([sys.executable, "-c", code])


@pytest.mark.parametrize("code", blocks("sh"))
def test_commands_run(code: str) -> None:
    for line in code.splitlines():
        command = shlex.split(line, comments=True)
        if not command or line.startswith(NOT_RUN):
            continue
        assert command[0] == "foredraft", f"this suite does not know how to run: {line}"
        run([sys.executable, "-m", *command])
