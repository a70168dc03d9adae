"""Several drafters, one tree: duplicates merged by prefix, the likeliest nodes kept, whoever proposed them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from foredraft.estimates import Calibration
from foredraft.proposers.base import Drafter, Proposer
from foredraft.proposers.files import damaged, read_arrays, write_arrays
from foredraft.randomness import RandomSource
from foredraft.sampling import Law


class Joint(Drafter):
    """A drafter made of others, and what is known of how often their nodes come true.

    Args:
        kind: What it is called without its parts; its file is named so.
        parts: The drafters, in the order in which equals are preferred.
        at_times: Whether some of them are asked in some rounds only.
    """

    trees = True
    learns = True

    def __init__(self, kind: str, parts: Sequence[Drafter], *, at_times: bool = False) -> None:
        from foredraft.proposers.joint import compile_kernels  # numba takes a while, and not all need it

        compile_kernels()
        names = [part.name for part in parts]
        self.name = f"{kind}:" + "+".join(names)
        self.parts = tuple(parts)
        self.calibration = Calibration(names, at_times=at_times)
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
        super().__init__("hybrid", parts)
        self.draft_tokens = max(part.draft_tokens for part in parts)
        self.forks = all(part.forks and not part.runs_model for part in parts)

    def proposer(self, law: Law, source: RandomSource) -> Proposer:
        """A proposer with one of each part."""
        from foredraft.proposers.joint import HybridProposer

        return HybridProposer([part.proposer(law, source) for part in self.parts], self.calibration)
