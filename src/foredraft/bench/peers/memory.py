"""The most memory that this process held since a moment."""

from __future__ import annotations

from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def reset_peak() -> None:
    """Begin anew: the peak becomes what is held now. Where the system has no such thing, nothing happens."""
    try:
        _CLEAR.write_text("5")  # see proc(5)
    except OSError:
        return


def peak() -> int:
    """Bytes of the peak, pages of mapped files included; without Linux's count of it, what is held now."""
    try:
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return int(psutil.Process().memory_info().rss)
