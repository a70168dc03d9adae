"""What runs a head: torch, or, beside a target on the native engine, the same kernels and threads."""

from __future__ import annotations

from collections.abc import Callable

from foredraft.backends.base import Backend
from foredraft.heads.model_layer import ModelLayerCache, ModelLayerHead
from foredraft.heads.recurrent import RecurrentHead
from foredraft.heads.running import HeadCache, HeadRun


def runs_of(
    head: RecurrentHead, target: Backend, form: str = "q8_0", threads: int | None = None
) -> Callable[[], HeadRun]:
    """What begins a run of a head, one for each sequence.

    Args:
        head: For this target. Where the native engine runs it, it does so with a copy of the weights as they are now.
        target: What it drafts for.
        form: What the native engine holds the head's matrices in, a name of `weights.FORMATS`.
        threads: Of the native engine, for the head alone; `None` shares those of the target.
    """
    if isinstance(head, ModelLayerHead):
        return lambda: ModelLayerCache(head, target)
    if target.name == "native":
        from foredraft.backends.native.backend import NativeBackend  # numba takes a while, and not all need it
        from foredraft.heads.native_run import native_runs

        if isinstance(target, NativeBackend):
            return native_runs(head, target, form, threads)
    return lambda: HeadCache(head, target)
