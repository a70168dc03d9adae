"""How Python functions over arrays are compiled, by numba, which is imported only where something is."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _njit(function: _Function, **options: bool) -> _Function:
    """As numpy divides: a check for zero at each division is more code to wait for."""
    njit: Any = importlib.import_module("numba").njit  # numba has no type hints
    return njit(error_model="numpy", **options)(function)  # type: ignore[no-any-return]


def inner(function: _Function) -> _Function:
    """Compiled for other compiled code alone: without the wrappers for Python, whose compilation takes long."""
    return _njit(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def entry(function: _Function) -> _Function:
    """Compiled, and kept on disk where that is possible; a read-only or full disk costs only the next start's time."""
    try:
        kernel = _njit(function, cache=True)
    except RuntimeError:  # there is no folder to keep it in
        return _njit(function)

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        try:
            return kernel(*arguments)
        except OSError:  # compiled, but not kept: it has not run yet
            return kernel(*arguments)

    return run  # type: ignore[return-value]
