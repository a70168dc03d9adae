"""Several drafters, one tree: duplicates merged by prefix, the likeliest nodes kept, whoever proposed them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path

import torch

from foredraft.backends.base import KVCache
from foredraft.proposers.base import Drafter, Proposer, Verification
from foredraft.proposers.files import damaged, read_arrays, write_arrays
from foredraft.randomness import RandomSource
from foredraft.sampling import Law
from foredraft.tree import depths
from foredraft.types import Draft, Verdict

_BINS = 24  # of a node's raw score, two for each halving
_PRIOR_TRIES = 8.0  # how many tries a raw score is worth before acceptances are seen
_NOTHING = ([0.0] * _BINS, [0.0] * _BINS)
_ABOUT = {"foredraft": "hybrid", "version": "1"}
_UNSCORED = 0.6  # acceptance taken for each node of a draft without scores


class Hybrid(Drafter):
    """Merges the drafts of several drafters into one tree.

    All nodes count as point masses: given the draft, every rule for point masses is exact, whatever made it. What is
    learned, how often nodes of a proposer and raw score are accepted, is shared by all requests.

    Args:
        parts: The drafters, in the order in which equals are preferred.
    """

    usage = "hybrid:A+B"
    trees = True
    learns = True
    when_nothing_is_accepted = "none of its drafters fits this text"

    def __init__(self, parts: Sequence[Drafter]) -> None:
        self.parts = tuple(parts)
        self.name = "hybrid:" + "+".join(part.name for part in parts)
        self.draft_tokens = max(part.draft_tokens for part in parts)
        self.calibration = Calibration()

    def proposer(self, law: Law, source: RandomSource) -> HybridProposer:
        """A proposer with one of each part."""
        return HybridProposer(self, {part.name: part.proposer(law, source) for part in self.parts})

    def save(self, folder: Path) -> None:
        """Keep what each part learned, and the calibration in `hybrid.safetensors`."""
        for part in self.parts:
            part.save(folder)
        write_arrays(folder / "hybrid.safetensors", self.calibration.arrays(), _ABOUT)

    def load(self, folder: Path) -> None:
        """Take up what each part kept, and the calibration. That of other parts does no harm: it is by name."""
        for part in self.parts:
            part.load(folder)
        file = folder / "hybrid.safetensors"
        arrays = read_arrays(file, _ABOUT)
        if arrays is not None and not self.calibration.take_up(arrays):
            raise damaged(file)


class Calibration:
    """How often nodes were accepted, by who proposed them and by raw score."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[list[float], list[float]]] = {}  # hits and tries, by bin

    def __call__(self, who: str, raw: float) -> float:
        """The acceptance to expect of a node."""
        hits, tries = self._counts.get(who, _NOTHING)
        at = _bin(raw)
        return (hits[at] + _PRIOR_TRIES * raw) / (tries[at] + _PRIOR_TRIES)

    def note(self, who: str, raw: float, accepted: bool) -> None:
        """Count one verified node."""
        hits, tries = self._counts.setdefault(who, ([0.0] * _BINS, [0.0] * _BINS))
        tries[_bin(raw)] += 1
        hits[_bin(raw)] += accepted

    def arrays(self) -> dict[str, torch.Tensor]:
        """Hits and tries `[2, bins]` by proposer."""
        return {who: torch.tensor(counts) for who, counts in self._counts.items()}

    def take_up(self, arrays: dict[str, torch.Tensor]) -> bool:
        """Go on from what `arrays` gave, if these can be that. Returns whether they can."""
        for counts in arrays.values():
            if counts.shape != (2, _BINS) or not counts.isfinite().all():
                return False
            if (counts[0] < 0).any() or (counts[0] > counts[1]).any():
                return False
        self._counts = {who: (counts[0].tolist(), counts[1].tolist()) for who, counts in arrays.items()}
        return True


@dataclass
class _Node:
    """A node of the merged tree: its token, its place, and the raw score each proposer gave it."""

    token: int
    parent: int
    raw: dict[str, float]
    score: float = 0.0

    @property
    def who(self) -> str:
        return "+".join(self.raw)

    @property
    def best(self) -> float:
        return max(self.raw.values())


class HybridProposer(Proposer):
    """One sequence's merged drafts."""

    def __init__(self, hybrid: Hybrid, parts: dict[str, Proposer]) -> None:
        self._calibration = hybrid.calibration
        self._parts = parts
        self._raw: list[tuple[str, float]] = []

    @property
    def forwards(self) -> int:  # type: ignore[override]
        """Forwards of all parts' draft models."""
        return sum(part.forwards for part in self._parts.values())

    def attach(self, cache: KVCache) -> None:
        """Hand the target's cache to every part."""
        for part in self._parts.values():
            part.attach(cache)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The likeliest `budget` nodes of all parts' drafts, by calibrated path probability."""
        drafts = {name: part.propose(tokens, budget) for name, part in self._parts.items()}
        merged = merge(drafts)
        for node in merged:
            above = merged[node.parent].score if node.parent >= 0 else 1.0
            node.score = min(above, self._calibration(node.who, node.best))  # a path is no likelier than its beginning
        kept = sorted(range(len(merged)), key=lambda i: -merged[i].score)[:budget]
        order = sorted(kept)  # parents still come first: none is scored below its children
        place = {-1: -1, **{old: new for new, old in enumerate(order)}}
        nodes = [merged[i] for i in order]
        self._raw = [(node.who, node.best) for node in nodes]
        return Draft(
            tokens=tuple(node.token for node in nodes),
            parents=tuple(place[node.parent] for node in nodes),
            scores=tuple(node.score for node in nodes),
            proposers=tuple(node.who for node in nodes),
        )

    def observe(self, verification: Verification, verdict: Verdict) -> None:
        """Calibrate, and let every part learn. Parts with a KV cache of their own see what was accepted of theirs."""
        for node, (who, raw) in enumerate(self._raw):
            self._calibration.note(who, raw, node in verdict.path)
        for part in self._parts.values():
            part.observe(verification, verdict)

    def finish(self, tokens: Sequence[int]) -> None:
        """Tell every part."""
        for part in self._parts.values():
            part.finish(tokens)


def merge(drafts: dict[str, Draft]) -> list[_Node]:
    """The union of the drafts' nodes by prefix, parents before children, earlier drafts' nodes first."""
    merged: list[_Node] = []
    places: dict[tuple[int, int], int] = {}
    for name, draft in drafts.items():
        scores = draft.scores or [_UNSCORED**depth for depth in depths(draft)[1:]]
        own: list[int] = []
        for token, parent, score in zip(draft.tokens, draft.parents, scores, strict=True):
            key = (own[parent] if parent >= 0 else -1, token)
            if key not in places:
                places[key] = len(merged)
                merged.append(_Node(token, key[0], {}))
            own.append(places[key])
            merged[own[-1]].raw.setdefault(name, score)
    return merged


def _bin(raw: float) -> int:
    return min(int(-2 * log2(max(raw, 1e-9))), _BINS - 1)
