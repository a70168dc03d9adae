"""Token recycling: what the target found likely after a token last time is drafted after it next time."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import log2
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from foredraft.backends.base import Backend
from foredraft.proposers.base import Drafter, Proposer, Verification
from foredraft.proposers.files import damaged, read_arrays, write_arrays
from foredraft.randomness import RandomSource
from foredraft.sampling import Law
from foredraft.types import Draft, Verdict

WIDTH = 8  # candidates kept for each token
_BINS = 8  # of the probability that the target gave a candidate, each half of the one before
_PRIOR_TRIES = 4.0  # how many tries the target's own probability is worth before acceptances are seen


class Recycling(Drafter):
    """A table of the target's likeliest next tokens, fed by every verified node (Luo et al. 2024, arXiv 2408.08696).

    The table `[V, 8]` and the acceptance rates are shared by all requests of one drafter, and can be saved.

    Args:
        vocab_size: The target's.
    """

    name = usage = "recycling"
    trees = True
    learns = True
    draft_tokens = 8
    when_nothing_is_accepted = "the text is too varied for what earlier tokens suggested"

    def __init__(self, vocab_size: int) -> None:
        self.candidates = torch.full((vocab_size, WIDTH), -1, dtype=torch.int32)
        self.likelihoods = torch.zeros(vocab_size, WIDTH)
        self.hits = torch.zeros(WIDTH, _BINS)
        self.tries = torch.zeros(WIDTH, _BINS)
        # The same memory: single numbers are read and written faster by way of numpy.
        self._candidates, self._likelihoods = self.candidates.numpy(), self.likelihoods.numpy()
        self._hits, self._tries = self.hits.numpy(), self.tries.numpy()
        likeliest(torch.zeros(1, WIDTH), WIDTH)  # compiles what is to be compiled

    @classmethod
    def for_target(cls, target: Backend, argument: str = "") -> Recycling:
        """An empty table over the target's vocabulary."""
        return cls(target.vocab_size)

    def proposer(self, law: Law, source: RandomSource) -> RecyclingProposer:
        """A proposer over the shared table."""
        return RecyclingProposer(self)

    def rates(self, token: int) -> list[tuple[int, float]]:
        """The candidates after a token, each with the acceptance rate that its like have had."""
        found = []
        likelihoods, hits, tries = self._likelihoods[token].tolist(), self._hits, self._tries
        for rank, (x, likelihood) in enumerate(zip(self._candidates[token].tolist(), likelihoods, strict=True)):
            if x < 0:
                break
            at = rank, _bin(likelihood)
            rate = (float(hits[at]) + likelihood * _PRIOR_TRIES) / (float(tries[at]) + _PRIOR_TRIES)
            found.append((x, rate))
        return found

    def write(self, token: int, candidates: NDArray[np.int32], likelihoods: NDArray[np.float32]) -> None:
        """What the target finds likely after a token, the likeliest first, and how likely."""
        self._candidates[token, : len(candidates)] = candidates
        self._likelihoods[token, : len(candidates)] = likelihoods

    def note_outcome(self, token: int, successor: int) -> None:
        """Count which candidate after `token`, if any, came true."""
        candidates = self._candidates[token].tolist()
        if candidates[0] < 0:
            return
        for rank, (x, likelihood) in enumerate(zip(candidates, self._likelihoods[token].tolist(), strict=True)):
            at = rank, _bin(likelihood)
            self._tries[at] += 1
            self._hits[at] += x == successor

    def save(self, folder: Path) -> None:
        """Keep table and rates in `recycling.safetensors`."""
        write_arrays(folder / "recycling.safetensors", self._arrays(), self._about())

    def load(self, folder: Path) -> None:
        """Take up a kept table and its rates, in the place of those here."""
        file = folder / "recycling.safetensors"
        kept, own = read_arrays(file, self._about()), self._arrays()
        if kept is None:
            return
        shapes, wanted = ({n: (a.shape, a.dtype) for n, a in arrays.items()} for arrays in (kept, own))
        if shapes != wanted or not self._makes_sense(**kept):
            raise damaged(file)
        for name, array in kept.items():
            own[name].copy_(array)

    def _arrays(self) -> dict[str, torch.Tensor]:
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
        chosen: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        frontier: list[tuple[float, int, int]] = []  # (-score, token, parent)
        self._open(frontier, tokens[-1], -1, 1.0)
        while frontier and len(chosen) < budget:
            negative, token, parent = heapq.heappop(frontier)
            chosen.append(token)
            parents.append(parent)
            scores.append(-negative)
            self._open(frontier, token, len(chosen) - 1, -negative)
        return Draft(tuple(chosen), tuple(parents), scores=tuple(scores))

    def _open(self, frontier: list[tuple[float, int, int]], token: int, node: int, score: float) -> None:
        for candidate, rate in self._table.rates(token):
            heapq.heappush(frontier, (-score * rate, candidate, node))

    def observe(self, verification: Verification, verdict: Verdict) -> None:
        """Learn from every row, the rejected nodes' too; where a token stands twice, the accepted row is kept."""
        draft, path = verification.draft, verdict.path
        followed = [verification.root, *(draft.tokens[node] for node in path)]
        for token, successor in zip(followed, verdict.tokens, strict=False):
            self._table.note_outcome(token, successor)
        candidates, likelihoods = likeliest(verification.logits, WIDTH)
        accepted = [0, *(node + 1 for node in path)]
        rows = [row for row in range(len(candidates)) if row not in accepted] + accepted
        tokens = (verification.root, *draft.tokens)
        for row in rows:
            self._table.write(tokens[row], candidates[row], likelihoods[row])


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


def _bin(likelihood: float) -> int:
    """Bin 0 holds likelihoods above 1/2, bin 1 those above 1/4, and so on."""
    return min(int(-log2(max(likelihood, 1e-9))), _BINS - 1)
