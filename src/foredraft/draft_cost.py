"""What a drafter's drafts cost, learned from the last of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from foredraft.checks import is_number, require

_WINDOW = 64  # drafts


class DraftCost:
    """Seconds of one drafter's drafts, as `per_draft + per_node * nodes`, from its last 64 drafts.

    A draft that took more than three times as long as usual counts as three times: the first one may have had to
    compile something, and any may have been interrupted.
    """

    def __init__(self, drafts: Sequence[Sequence[float]] = ()) -> None:
        for draft in drafts:
            good = len(draft) == 2 and all(is_number(x) and x >= 0 for x in draft)
            require("draft", draft, good, "its nodes and seconds, numbers >= 0")
        self._drafts = deque([(float(n), float(s)) for n, s in drafts], maxlen=_WINDOW)
        self._fitted: tuple[float, float] | None = None
        self._since = 0  # drafts noted since the fit

    def note(self, nodes: int, seconds: float) -> None:
        """Learn from a draft of so many nodes, an empty one included. What cannot be a time is passed over."""
        if math.isfinite(seconds) and seconds >= 0:
            self._drafts.append((float(nodes), seconds))
            self._since += 1

    @property
    def per_draft(self) -> float:
        """Seconds of a draft, whatever its size."""
        return self._fit()[0]

    @property
    def per_node(self) -> float:
        """Seconds of each node."""
        return self._fit()[1]

    def seconds(self, nodes: float | None = None) -> float:
        """Seconds of a draft of so many nodes; `None` is as many as its drafts have had on average."""
        per_draft, per_node = self._fit()
        if nodes is None:
            nodes = sum(n for n, _ in self._drafts) / len(self._drafts) if self._drafts else 0.0
        return per_draft + per_node * nodes

    def to_json(self) -> list[list[float]]:
        """The drafts it was learned from, each `[nodes, seconds]`."""
        return [list(draft) for draft in self._drafts]

    def _fit(self) -> tuple[float, float]:
        """The two costs; new ones once an eighth of the drafts is new, as a fit takes longer than some drafts do."""
        if self._fitted is None or (self._since and self._since * 8 >= len(self._drafts)):
            self._fitted = self._least_squares() if self._drafts else (0.0, 0.0)
            self._since = 0
        return self._fitted

    def _least_squares(self) -> tuple[float, float]:
        nodes, seconds = np.array(self._drafts).T
        seconds = np.minimum(seconds, 3.0 * np.median(seconds))
        mean, spread = nodes.mean(), nodes.var()
        if spread == 0:  # nothing tells the two apart: as for a draft model, all goes to the nodes
            return (0.0, float(seconds.mean() / mean)) if mean > 0 else (float(seconds.mean()), 0.0)
        slope = max(float(((nodes - mean) * (seconds - seconds.mean())).mean() / spread), 0.0)
        slope = min(slope, float(seconds.mean() / mean))
        return float(seconds.mean() - slope * mean), slope
