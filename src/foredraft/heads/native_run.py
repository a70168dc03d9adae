"""Heads run by the native engine, with the kernels and threads of the target beside them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.backends.native.backend import NativeBackend
from foredraft.backends.native.head import NativeHead
from foredraft.backends.native.team import Team
from foredraft.backends.native.weights import Floats
from foredraft.heads.packing import packed
from foredraft.heads.recurrent import RecurrentHead
from foredraft.heads.running import Growth, HeadRun

logger = logging.getLogger(__name__)


class NativeRun(HeadRun):
    """A run by the native engine.

    Args:
        head: Shared by all sequences.
        ids: `[V_draft]` the target's ids of the columns of its logits; what is past them is cut off.
    """

    def __init__(self, head: NativeHead, ids: NDArray[np.int64]) -> None:
        super().__init__()
        self._head, self._ids = head, ids
        self._cache = head.new_cache()
        self._states: Floats = np.empty((0, 0), dtype=np.float32)

    @property
    def states(self) -> Tensor:
        """See `HeadRun`."""
        return torch.from_numpy(self._states)[:, : self._head.weights.decoder.measures.hidden]

    def commit(self, features: Tensor, tokens: Sequence[int]) -> Tensor:
        """See `HeadRun`."""
        self._paths = []
        self._states, logits = self._head.commit(self._cache, features.numpy(), tokens)
        self.committed = self._cache.committed
        return torch.from_numpy(logits)[:, : len(self._ids)]

    def expand(self, parents: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """See `HeadRun`."""
        above = self._states[[parent + 1 for parent in parents]]
        states, logits = self._head.expand(self._cache, above, tokens, *self._paths_to(parents))
        self._states = np.concatenate([self._states, states])
        return torch.from_numpy(logits)[:, : len(self._ids)]

    def path(self, features: Tensor, tokens: Sequence[int], growth: Growth, offers: NDArray[Any]) -> tuple[int, int]:
        """See `HeadRun`."""
        self._paths = []
        found = self._head.path(self._cache, features.numpy(), tokens, self._ids, growth, offers)
        self.committed = self._cache.committed
        return found


def native_runs(
    head: RecurrentHead, target: NativeBackend, form: str, threads: int | None = None
) -> Callable[[], HeadRun]:
    """See `runs.runs_of`."""
    weights = packed(head, target, form)
    logger.info("The copy of the head for the native engine takes %.1f MB in %s", weights.own_bytes / 1e6, form)
    team = target.team if threads is None else Team(threads)
    native = NativeHead(weights, team, target.kernels_folder)
    ids = np.arange(target.vocab_size) if head.draft_ids is None else head.draft_ids.numpy()
    return lambda: NativeRun(native, ids)
