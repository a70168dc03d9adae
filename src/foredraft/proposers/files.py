"""What drafters keep between runs: named arrays in one file, whole or not at all, with a version and the vocabulary."""

from __future__ import annotations

import tempfile
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from foredraft.errors import ModelError


def write_arrays(
    file: Path, arrays: dict[str, Tensor], about: dict[str, str], *, what: str = "what was learned"
) -> None:
    """Write arrays and what they are; a failure leaves an older file as it was.

    Raises:
        ModelError: The folder cannot be written (a full disk, say).
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as staging:
            fresh = Path(staging) / file.name
            save_file({name: array.contiguous() for name, array in arrays.items()}, fresh, metadata=about)
            fresh.replace(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"Cannot keep {what} in {file} ({error}): check the folder and the free space.") from error


def read_arrays(file: Path, about: dict[str, str]) -> dict[str, Tensor] | None:
    """The arrays of a file that `write_arrays` wrote with the same `about`; `None` if there is no such file.

    What arrays they are and what they hold is for the caller to check (`damaged`).

    Raises:
        ModelError: The file cannot be read, is of another version, or was learned for another target.
    """
    try:
        file.open("rb").close()  # safe_open would call whatever cannot be opened not found
        with safe_open(file, framework="pt") as stored:
            found = stored.metadata() or {}
            different = next((f"{k} is {found.get(k)}, not {v}" for k, v in about.items() if found.get(k) != v), None)
            if different is not None:
                raise ModelError(f"{file} does not fit here: {different}. Remove it to start anew.")
            return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  (not a dict)
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError) as error:
        raise ModelError(f"Cannot read {file} ({error}). Remove it to start anew.") from error


def damaged(file: Path) -> ModelError:
    """The error for a file whose arrays are not what they should be."""
    return ModelError(f"{file} is damaged. Remove it to start anew.")
