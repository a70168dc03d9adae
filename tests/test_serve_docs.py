"""The examples of docs/serving.md, run as they stand against the server that it tells to start."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from test_serve_process import Served, serving

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(sys.platform == "win32", reason="the examples are for a POSIX shell"),
]

TEXT = (Path(__file__).parent.parent / "docs" / "serving.md").read_text(encoding="utf-8")
BLOCKS = [
    (language, code)
    for language, code in re.findall(r"^```(console|py|js)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    if language != "console" or code.startswith("curl")
]
RUN = {"console": "sh", "py": sys.executable, "js": "node"}
ENDING = {"console": ".sh", "py": ".py", "js": ".mjs"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving("smollm2-135m") as served:
        yield served


def test_there_are_examples_of_every_kind() -> None:
    assert {language for language, _ in BLOCKS} == set(RUN) and len(BLOCKS) >= 9


@pytest.mark.parametrize(("language", "code"), BLOCKS, ids=[f"{kind}-{n}" for n, (kind, _) in enumerate(BLOCKS)])
def test_an_example_runs_as_it_stands(language: str, code: str, served: Served, tmp_path: Path) -> None:
    wanted = {"console": "curl", "py": sys.executable, "js": "node"}[language]
    if shutil.which(wanted) is None:
        pytest.skip(f"needs {wanted}, and there is none here")
    file = tmp_path / f"example{ENDING[language]}"
    file.write_text(code.replace("http://127.0.0.1:8000", served.url), encoding="utf-8")
    done = subprocess.run([RUN[language], str(file)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
    if language == "console":
        assert '"error"' not in done.stdout
