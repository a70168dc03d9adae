"""Where a run's figures come from: versions, machine, and the very files."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil

from foredraft import __version__
from foredraft.backends.base import Backend
from foredraft.models import ModelFiles, sha256_of

_PACKAGES = ("torch", "transformers", "numba", "numpy")


def provenance_of(target: Backend, files: ModelFiles) -> dict[str, Any]:
    """Of a run over this target: date, versions, machine, backend, and the model's hash."""
    from foredraft.backends.native.vector import host

    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "foredraft": __version__,
        "python": platform.python_version(),
        **dict(_versions()),
        "system": platform.platform(),
        "cpu": host().name,
        "cores": psutil.cpu_count(logical=False),
        "threads_of_cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": round(psutil.getloadavg()[0], 2),
        "gpu": _gpu(),
        "backend": target.name,
        **{f"backend_{name}": value for name, value in target.conditions().items()},
        "model_sha256": sha256_of(files.weights),
    }


def _versions() -> Iterable[tuple[str, str]]:
    for package in _PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
