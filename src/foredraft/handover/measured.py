"""What was measured of drafters, from a folder of `foredraft bench` or a record of `foredraft tune --json`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.bench.figures import CellFigures, answers_of
from foredraft.bench.records import OWN, Rounds
from foredraft.bench.results import SETTINGS, Results
from foredraft.bench.theory import acceptance_for
from foredraft.costs import CostCurve, Costs
from foredraft.errors import InvalidInputError

TUNED = "tune.json"
"""What a record of `foredraft tune --json` is called in a folder."""
_KINDS = (
    f"a folder of `foredraft bench`, or a file (or a folder with {TUNED}) that `foredraft tune MODEL --json` printed"
)
_JOINED = 8  # of what has the number of its parts: the usual ones have as many


@dataclass(frozen=True)
class Acceptance:
    """How drafts of one drafter were accepted, and how deep they were.

    Args:
        rates: `a_i`, the share accepted of tokens at depth i, of rounds that accepted all before it.
        depths: `depths[d]` is the share of rounds whose draft was `d` tokens deep; 0 is a round without a draft.
    """

    rates: tuple[float, ...]
    depths: tuple[float, ...]

    def tokens(self, most: int) -> float:
        """Tokens that a round emits, if drafts are chains of at most so many tokens: `E[L]`."""
        reached = [0.0, *accumulate(self._rates(most), mul)]  # that all up to this depth are accepted
        gained = list(accumulate(reached))
        return 1.0 + math.fsum(share * gained[min(depth, most)] for depth, share in enumerate(self.depths))

    def drafted(self, most: int) -> float:
        """Tokens that a round drafts then."""
        return math.fsum(share * min(depth, most) for depth, share in enumerate(self.depths))

    @property
    def deepest(self) -> int:
        """The deepest draft that was seen."""
        return len(self.depths) - 1

    def _rates(self, most: int) -> list[float]:
        """The rates at the first `most` depths; those never seen are taken to be that of the last one seen."""
        last = self.rates[-1] if self.rates else 0.0
        return [self.rates[i] if i < len(self.rates) else last for i in range(most)]


@dataclass(frozen=True)
class Measured:
    """One drafter as it was measured. `draft_seconds` are of a draft, in plain steps: 0 where that is not known."""

    drafter: str
    draft_tokens: int
    speedup: float | None
    mean_accepted_length: float
    acceptance_rate: float | None
    acceptance: Acceptance
    trees: bool
    draft_steps: float

    @property
    def name(self) -> str:
        """As reports call it."""
        return f"{self.drafter} {self.draft_tokens}"


@dataclass(frozen=True)
class Record:
    """A run or a tuning: what was measured of which model, and what forwards cost there."""

    origin: str
    """What it is, for people."""
    model: str
    drafters: tuple[Measured, ...]
    """The fastest first."""
    costs: Costs | None
    plain_tokens_per_second: float | None = None

    def choose(self, drafter: str | None) -> Measured:
        """The drafter of this name, with the settings that did best; the fastest of all if none is named.

        Raises:
            InvalidInputError: None of this name was measured, or nothing was.
        """
        for measured in self.drafters:
            if drafter in (None, measured.drafter, measured.name):
                return measured
        known = ", ".join(dict.fromkeys(each.drafter for each in self.drafters)) or "none"
        wanted = "no drafter at all" if drafter is None else f"no drafter '{drafter}'"
        raise InvalidInputError(f"{self.origin} measured {wanted} of foredraft's own; it has: {known}.")


def read_record(path: Path) -> Record:
    """What a folder or file holds.

    Raises:
        InvalidInputError: It is neither of the two kinds, or damaged.
    """
    if (path / SETTINGS).is_file():
        return _of_bench(Results.read(path), path)
    file = path / TUNED if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"There is nothing measured in {path} ({error}): give {_KINDS}.") from error
    except ValueError as error:
        raise InvalidInputError(f"{file} is no whole JSON ({error}): give {_KINDS}.") from error
    if not isinstance(found, dict) or "drafters" not in found or "costs" not in found:
        raise InvalidInputError(f"{file} is no record of a tuning: give {_KINDS}.")
    return _of_tuning(found, file)


# A benchmark


def _of_bench(results: Results, path: Path) -> Record:
    found = [_of_cell(results, figures) for figures in results.figures if _counts(figures)]
    found.sort(key=lambda measured: -(measured.speedup or 0.0))
    plain = next((f for f in results.figures if f.cell.drafter == "none" and f.cell.engine == OWN), None)
    return Record(
        origin=f"the benchmark in {path}",
        model=str(results.settings.get("model", "")),
        drafters=tuple(found),
        costs=Costs({1: results.curve}) if results.curve is not None else None,
        plain_tokens_per_second=plain.throughput if plain is not None else None,
    )


def _counts(figures: CellFigures) -> bool:
    own = figures.cell.engine == OWN and figures.cell.drafter != "none"
    return own and not figures.category and figures.rounds > 0 and bool(figures.drafted)


def _of_cell(results: Results, figures: CellFigures) -> Measured:
    """Depth of drafts, and acceptance at each, are over all rounds."""
    cell = figures.cell
    answers = answers_of(results.measurements, cell).values()
    rounds = [turn.rounds for measurement in answers for turn in measurement.turns if turn.rounds is not None]
    depths = np.bincount(np.concatenate([np.asarray(each.depth, dtype=int) for each in rounds]))
    trees = any(nodes > depth for each in rounds for nodes, depth in zip(each.drafted, each.depth, strict=True))
    return Measured(
        drafter=cell.drafter,
        draft_tokens=cell.draft_tokens or default_draft_tokens(cell.drafter),
        speedup=figures.speedup.value if figures.speedup is not None else None,
        mean_accepted_length=figures.mean_accepted_length or 1.0,
        acceptance_rate=figures.acceptance_rate,
        acceptance=Acceptance(
            tuple(position.rate for position in figures.by_position), tuple((depths / depths.sum()).tolist())
        ),
        trees=trees,
        draft_steps=_draft_steps(rounds, results.curve),
    )


def _draft_steps(rounds: Sequence[Rounds], curve: CostCurve | None) -> float:
    """Seconds of drafting in a round, in plain steps."""
    count = sum(map(len, rounds))
    seconds = sum(sum(each.draft_seconds) for each in rounds) / count
    return seconds / curve.seconds(1) if curve is not None else 0.0


def default_draft_tokens(drafter: str) -> int:
    """Nodes of a draft where nobody says, by the drafter's name; 0 of plain decoding."""
    from foredraft.loading import DRAFTER_KINDS  # imports torch

    kind = DRAFTER_KINDS.get(drafter.partition(":")[0])
    usual = getattr(kind, "draft_tokens", None)
    return 0 if kind is None else usual if isinstance(usual, int) else _JOINED


# A tuning


def _of_tuning(found: Mapping[str, Any], file: Path) -> Record:
    try:
        trials = [*found["drafters"], *([found["confirmed"]] if found.get("confirmed") else [])]
        costs = Costs.from_json(found["costs"])
        measured = [_of_trial(trial, costs, int(found["context"])) for trial in trials]
        plain = float(found["plain_tokens_per_second"])
        model = str(found.get("model", ""))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInputError(f"{file} is damaged ({type(error).__name__}: {error}): tune again.") from error
    measured.sort(key=lambda each: -(each.speedup or 0.0))
    return Record(f"the tuning in {file}", model, tuple(measured), costs, plain)


def _of_trial(trial: Mapping[str, Any], costs: Costs, context: int) -> Measured:
    """A tuning has sums only, so all depths count alike: one rate, and drafts as deep as they were on average."""
    drafter, rounds = str(trial["drafter"]), int(trial["rounds"])
    nodes, length = int(trial["drafted"]) / rounds, int(trial["tokens"]) / rounds
    most = max(int(trial["draft_tokens"]), 1)
    share = min(nodes / most, 1.0)  # of rounds that drafted, if each that did drafted all it may
    alpha = acceptance_for(min(1.0 + (length - 1.0) / share, most + 1.0), most) if share > 0 else 0.0
    assert alpha is not None
    return Measured(
        drafter=drafter,
        draft_tokens=most,
        speedup=float(trial["speedup"]),
        mean_accepted_length=length,
        acceptance_rate=trial.get("acceptance_rate"),
        acceptance=Acceptance((alpha,), (1.0 - share, *[0.0] * (most - 1), share)),
        trees=drafter.partition(":")[0] not in ("ngram", "draft", "early_exit", "layer_skip", "self_quant"),
        draft_steps=float(trial["draft_ms"]) / 1e3 / costs.seconds(1, context),
    )
