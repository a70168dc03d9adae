"""How likely drafted nodes are to be accepted, before they are verified: raw scores, calibrated by what came true."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

UNSCORED = 0.6  # acceptance taken for each token of a draft without scores, until more is known


class Calibration:
    """How often nodes came true, by who proposed them, raw score, and what else was known of them.

    An estimate starts from the wider one and moves from there to the share of hits as these become many: from the raw
    score to the proposers' own record, to their record in like circumstances (the context), and from the workload's
    records to the request's. `deciding_kernels` does so.

    Args:
        names: Of the proposers; where several proposed a node, these count as a proposer of their own.
        at_times: Whether some of them, which are often right, are asked in some rounds only. What they leave out when
            they are asked is less likely than what the others proposed without them, and counts apart.
    """

    def __init__(self, names: Sequence[str], *, at_times: bool = False) -> None:
        from foredraft.deciding_kernels import BINS, CONTEXTS  # numba takes a while, and not all need it

        self.counts: NDArray[np.float64] = np.zeros((1 << len(names) + at_times, CONTEXTS, BINS, 2))
        """Hits and tries, by set of proposers (bit p for the p-th one; behind these one that says whether those were
        asked who are at times), context (0 is all of them) and bin."""
        sets = [_members(names, who) for who in range(1 << len(names))]
        self.whose = tuple(map("+".join, sets)) + tuple("+".join([*who, "asked"]) for who in sets if at_times)
        """What each of these is called."""
        self._others: dict[str, Any] = {}  # taken up, of proposers that are not here

    def arrays(self) -> dict[str, torch.Tensor]:
        """Hits and tries `[2, bins]` by proposer, and by proposer and context."""
        seen = {key: torch.from_numpy(counts.T.copy()) for key, counts in self._by_key() if counts.any()}
        return {**self._others, **seen}

    def take_up(self, arrays: Mapping[str, torch.Tensor]) -> bool:
        """Go on from what `arrays` gave, if these can be that. Returns whether they can."""
        for counts in arrays.values():
            if counts.shape != (2, self.counts.shape[2]) or not counts.isfinite().all():
                return False
            if (counts[0] < 0).any() or (counts[0] > counts[1]).any():
                return False
        self._others = dict(arrays)
        for key, own in self._by_key():
            own[:] = self._others.pop(key).numpy().T if key in self._others else 0.0
        return True

    def _by_key(self) -> Iterator[tuple[str, NDArray[np.float64]]]:
        for who, contexts in zip(self.whose[1:], self.counts[1:], strict=True):
            for context, counts in enumerate(contexts):
                yield f"{who}@run{context - 1}" if context else who, counts


def _members(names: Sequence[str], who: int) -> list[str]:
    return [name for part, name in enumerate(names) if who >> part & 1]
