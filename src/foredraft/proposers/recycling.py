"""Token recycling: what the target found likely after a token last time is drafted after it next time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foredraft.backends.base import Backend
from foredraft.proposers.base import OFFER, Drafter, Proposer, Verification, drafted
from foredraft.proposers.files import damaged, read_arrays, write_arrays
from foredraft.proposers.forks import Fork, PeekFork, Plan
from foredraft.randomness import RandomSource
from foredraft.sampling import Law
from foredraft.types import Draft, Verdict

WIDTH = 8  # candidates kept for each token
_FEW = 8
"""Rows of a verification that it learns from if it is one of several: many rows are another drafter's long copy."""


class Recycling(Drafter):
    """A table of the target's likeliest next tokens, fed by every verified node (Luo et al. 2024, arXiv 2408.08696).

    The table `[V, 8]` and the acceptance rates are shared by all requests of one drafter, and can be saved.

    Args:
        vocab_size: The target's.
    """

    name = usage = "recycling"
    trees = True
    forks = True
    learns = True
    draft_tokens = 8
    most_rows: int | None = None
    """Of a verification, from which it learns; `None` is all of them."""
    when_nothing_is_accepted = "the text is too varied for what earlier tokens suggested"

    def __init__(self, vocab_size: int) -> None:
        self.candidates = torch.full((vocab_size, WIDTH), -1, dtype=torch.int32)
        self.likelihoods = torch.zeros(vocab_size, WIDTH)
        from foredraft.proposers import recycling_kernels  # numba takes a while, and not all need it

        self.kernels: Any = recycling_kernels
        self.hits = torch.zeros(WIDTH, recycling_kernels.BINS)
        self.tries = torch.zeros(WIDTH, recycling_kernels.BINS)
        self.arrays: Any = tuple(tensor.numpy() for tensor in self._tensors().values())
        """Candidates, likelihoods, hits and tries: the same memory, as compiled code takes it."""
        self._compile()

    def _compile(self) -> None:
        """Run every kernel once, so that compiling them falls into loading and not into the first request."""
        table: Any = [array[:1].copy() for array in self.arrays[:2]] + [array.copy() for array in self.arrays[2:]]
        none, root = np.zeros((2, 1), dtype=np.int32)
        self.kernels.grow(*table, 0, np.zeros(1, dtype=OFFER))
        self.kernels.learn(*table, root, none[:0], none[:0], *likeliest(torch.zeros(1, WIDTH), WIDTH))

    @classmethod
    def for_target(cls, target: Backend, argument: str = "") -> Recycling:
        """An empty table over the target's vocabulary."""
        return cls(target.vocab_size)

    def at_times(self) -> None:
        """See `Drafter`."""
        self.most_rows = _FEW

    def proposer(self, law: Law, source: RandomSource) -> RecyclingProposer:
        """A proposer over the shared table."""
        return RecyclingProposer(self)

    def save(self, folder: Path) -> None:
        """Keep table and rates in `recycling.safetensors`."""
        write_arrays(folder / "recycling.safetensors", self._tensors(), self._about())

    def load(self, folder: Path) -> None:
        """Take up a kept table and its rates, in the place of those here."""
        file = folder / "recycling.safetensors"
        kept, own = read_arrays(file, self._about()), self._tensors()
        if kept is None:
            return
        shapes, wanted = ({n: (a.shape, a.dtype) for n, a in arrays.items()} for arrays in (kept, own))
        if shapes != wanted or not self._makes_sense(**kept):
            raise damaged(file)
        for name, array in kept.items():
            own[name].copy_(array)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in ("candidates", "likelihoods", "hits", "tries")}

    def _makes_sense(
        self, candidates: torch.Tensor, likelihoods: torch.Tensor, hits: torch.Tensor, tries: torch.Tensor
    ) -> bool:
        known = (candidates >= -1) & (candidates < len(self.candidates))
        shares = (likelihoods >= 0) & (likelihoods <= 1)
        counts = (hits >= 0) & (hits <= tries) & tries.isfinite()
        return bool(known.all() and shares.all() and counts.all())

    def _about(self) -> dict[str, str]:
        return {"foredraft": "recycling", "version": "1", "vocabulary": str(len(self.candidates))}


class RecyclingProposer(Proposer):
    """Reads one sequence's drafts out of the shared table."""

    watches = True

    def __init__(self, table: Recycling) -> None:
        self._table = table

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The `budget` likeliest nodes of the tree that the table spans, by the product of rates along the path."""
        nodes = np.zeros(budget, dtype=OFFER)
        return drafted(nodes[: self.offer(tokens, budget, nodes, np.zeros(1 + budget))])

    def offer(
        self, tokens: Sequence[int], budget: int, nodes: NDArray[Any], costs: NDArray[np.float64], least: float = 0.0
    ) -> int:
        """The same at all costs: its first nodes are the best ones, whatever their number."""
        return int(self._table.kernels.grow(*self._table.arrays, tokens[-1], nodes[:budget]))

    def peek(self, tokens: Sequence[int], budget: int) -> Draft:
        """The same: it reads the table only."""
        return self.propose(tokens, budget)

    def fork(self, tokens: Sequence[int], draft: Draft, plan: Plan) -> Fork:
        """See `Proposer`."""
        return PeekFork(self, tokens, draft, plan)

    def observe(self, verification: Verification, verdict: Verdict) -> None:
        """Learn from every row, the rejected nodes' too."""
        tokens, path, emitted = (verification.root, *verification.draft.tokens), verdict.path, verdict.tokens
        most = self._table.most_rows
        if most is not None and len(tokens) > most:
            tokens, path = tokens[:most], tuple(node for node in path if node < most - 1)
            emitted = emitted[: len(path) + 1]
        rows = [np.array(values, dtype=np.int32) for values in (tokens, path, emitted)]
        logits = verification.logits[: len(tokens)]
        self._table.kernels.learn(*self._table.arrays, *rows, *likeliest(logits, WIDTH))


def likeliest(logits: torch.Tensor, count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Ids and probabilities `[n, count]` of the largest logits `[n, V]`, the largest first; fewer if there are no more.

    On a CPU the probabilities are estimates.
    """
    count = min(count, logits.shape[-1])
    if logits.device.type == "cpu":
        from foredraft.proposers import recycling_kernels as kernels  # numba takes a while, and not all need it

        return kernels.likeliest(logits.float().numpy(), count)
    best = logits.float().topk(count)
    shares = (best.values - logits.float().logsumexp(-1, keepdim=True)).exp()
    return best.indices.to("cpu", torch.int32).numpy(), shares.cpu().numpy()
