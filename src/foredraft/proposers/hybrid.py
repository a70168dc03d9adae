"""Several drafters, one tree: duplicates merged by prefix, the likeliest nodes kept, whoever proposed them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foredraft.backends.base import KVCache
from foredraft.estimates import UNSCORED, Calibration
from foredraft.proposers.base import Drafter, Proposer, Verification
from foredraft.proposers.files import damaged, read_arrays, write_arrays
from foredraft.randomness import RandomSource
from foredraft.sampling import Law
from foredraft.tree import depths
from foredraft.types import Draft, Verdict


class Joint(Drafter):
    """A drafter made of others, and what is known of how often their nodes come true.

    Args:
        kind: What it is called without its parts; its file is named so.
        parts: The drafters, in the order in which equals are preferred.
        calibration: Of their nodes.
    """

    trees = True
    learns = True

    def __init__(self, kind: str, parts: Sequence[Drafter], calibration: Calibration) -> None:
        self.name = f"{kind}:" + "+".join(part.name for part in parts)
        self.parts = tuple(parts)
        self.calibration = calibration
        self._file = f"{kind}.safetensors"
        self._about = {"foredraft": kind, "version": "1"}

    def save(self, folder: Path) -> None:
        """Keep what each part learned, and the calibration in a file of its own."""
        for part in self.parts:
            part.save(folder)
        write_arrays(folder / self._file, self.calibration.arrays(), self._about)

    def load(self, folder: Path) -> None:
        """Take up what each part kept, and the calibration. That of other parts does no harm: it is by name."""
        for part in self.parts:
            part.load(folder)
        file = folder / self._file
        arrays = read_arrays(file, self._about)
        if arrays is not None and not self.calibration.take_up(arrays):
            raise damaged(file)


class JointProposer(Proposer):
    """One sequence's drafts out of those of several proposers, by name."""

    def __init__(self, parts: dict[str, Proposer]) -> None:
        self._parts = parts

    @property
    def forwards(self) -> int:  # type: ignore[override]
        """Forwards of all parts' draft models."""
        return sum(part.forwards for part in self._parts.values())

    def attach(self, cache: KVCache) -> None:
        """Hand the target's cache to every part."""
        for part in self._parts.values():
            part.attach(cache)

    def finish(self, tokens: Sequence[int]) -> None:
        """Tell every part."""
        for part in self._parts.values():
            part.finish(tokens)


class Hybrid(Joint):
    """Merges the drafts of several drafters into one tree.

    All nodes count as point masses: given the draft, every rule for point masses is exact, whatever made it. What is
    learned, how often nodes of a proposer and raw score are accepted, is shared by all requests.

    Args:
        parts: The drafters, in the order in which equals are preferred.
    """

    usage = "hybrid:A+B"
    when_nothing_is_accepted = "none of its drafters fits this text"

    def __init__(self, parts: Sequence[Drafter]) -> None:
        super().__init__("hybrid", parts, Calibration())
        self.draft_tokens = max(part.draft_tokens for part in parts)

    def proposer(self, law: Law, source: RandomSource) -> HybridProposer:
        """A proposer with one of each part."""
        return HybridProposer(self, {part.name: part.proposer(law, source) for part in self.parts})


@dataclass(slots=True)
class Node:
    """A node of the merged tree: its token, its place, the raw score each proposer gave it, all who did, and the best.

    Of the others, whoever scores the tree makes use: calibrated path probability, depth, what calibration went by, and
    whether it is known if the node came true.
    """

    token: int
    parent: int
    raw: dict[str, float]
    who: str = ""
    best: float = 0.0
    score: float = 0.0
    depth: int = 0
    context: str = ""
    judged: bool = False


class HybridProposer(JointProposer):
    """One sequence's merged drafts."""

    def __init__(self, hybrid: Hybrid, parts: dict[str, Proposer]) -> None:
        super().__init__(parts)
        self._calibration = hybrid.calibration
        self._raw: list[tuple[str, float]] = []

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The likeliest `budget` nodes of all parts' drafts, by calibrated path probability."""
        drafts = {name: part.propose(tokens, budget) for name, part in self._parts.items()}
        merged = merge(drafts)
        for node in merged:
            above = merged[node.parent].score if node.parent >= 0 else 1.0
            node.score = min(above, self._calibration(node.who, node.best))  # a path is no likelier than its beginning
        draft, nodes = likeliest(merged, budget)
        self._raw = [(node.who, node.best) for node in nodes]
        return draft

    def observe(self, verification: Verification, verdict: Verdict) -> None:
        """Calibrate, and let every part learn. Parts with a KV cache of their own see what was accepted of theirs."""
        for node, (who, raw) in enumerate(self._raw):
            self._calibration.note(who, raw, node in verdict.path)
        for part in self._parts.values():
            part.observe(verification, verdict)


def likeliest(nodes: Sequence[Node], budget: int) -> tuple[Draft, list[Node]]:
    """The draft of the `budget` nodes with the highest scores, none of which is above its parent's; and these nodes."""
    order: Sequence[int] = range(len(nodes))
    if len(nodes) > budget:
        order = sorted(sorted(order, key=lambda i: -nodes[i].score)[:budget])  # parents still come first
    place = {-1: -1, **{old: new for new, old in enumerate(order)}}
    chosen = [nodes[i] for i in order]
    draft = Draft(
        tokens=tuple(node.token for node in chosen),
        parents=tuple(place[node.parent] for node in chosen),
        scores=tuple(node.score for node in chosen),
        proposers=tuple(node.who for node in chosen),
    )
    return draft, chosen


def merge(drafts: dict[str, Draft]) -> list[Node]:
    """The union of the drafts' nodes by prefix, parents before children, earlier drafts' nodes first."""
    merged: list[Node] = []
    places: dict[tuple[int, int], int] = {}
    for name, draft in drafts.items():
        scores = draft.scores or [UNSCORED**depth for depth in depths(draft)[1:]]
        own: list[int] = []
        for token, parent, score in zip(draft.tokens, draft.parents, scores, strict=True):
            key = (own[parent] if parent >= 0 else -1, token)
            if key not in places:
                places[key] = len(merged)
                merged.append(Node(token, key[0], {}))
            own.append(places[key])
            merged[own[-1]].raw.setdefault(name, score)
    for node in merged:
        node.who, node.best = "+".join(node.raw), max(node.raw.values())
    return merged
