"""What a run is to measure: a model, a workload, and the cells that a user's lists of drafters and settings make."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

from foredraft.acceptance import RULES
from foredraft.bench.peers import PeerSpec
from foredraft.bench.records import Cell
from foredraft.bench.workloads import Workload
from foredraft.checks import is_integer, is_number, require
from foredraft.errors import InvalidInputError
from foredraft.loading import EngineChoice, parse_drafter

_MOST_CELLS = 200


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run of the benchmark.

    Args:
        model: Reference of the target.
        workload: What is asked.
        cells: Methods to compare; plain decoding at every temperature is among them.
        max_tokens: Most tokens of an answer.
        repeat: How often everything is asked; each time drafters begin anew, and learn over the items.
        seed: Of sampling; repetitions, items and turns have seeds of their own that follow from it.
        engine: What runs the target and its draft models.
        gguf: A GGUF file of the target, for peers that read nothing else.
        api_key: For peers at a URL; it is written nowhere.

    Raises:
        InvalidInputError: A value is outside its range.
    """

    model: str
    workload: Workload
    cells: tuple[Cell, ...]
    max_tokens: int = 128
    repeat: int = 1
    seed: int = 0
    engine: EngineChoice = field(default_factory=EngineChoice)
    gguf: str | None = None
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("max_tokens", "repeat"):
            value = getattr(self, name)
            require(name, value, is_integer(value) and value >= 1, "an integer >= 1")
        require("seed", self.seed, is_integer(self.seed) and 0 <= self.seed < 2**63, "an integer in [0, 2**63)")

    def settings(self) -> dict[str, Any]:
        """What a run must have alike to be the same run, as plain JSON values."""
        return {
            "model": self.model,
            "workload": self.workload.name,
            "items": [item.id for item in self.workload.items],
            "max_tokens": self.max_tokens,
            "repeat": self.repeat,
            "seed": self.seed,
            **asdict(self.engine),
            "gguf": self.gguf,
        }

    def seed_of(self, repetition: int, item: str, turn: int) -> int:
        """The seed of one answer, the same in every cell."""
        digest = hashlib.sha256(f"{self.seed}|{repetition}|{item}|{turn}".encode()).digest()
        return int.from_bytes(digest[:7], "big")


def cells_of(
    drafters: Sequence[str],
    *,
    draft_tokens: Sequence[int] = (),
    rules: Sequence[str] = (),
    temperatures: Sequence[float] = (0.0,),
    peers: Sequence[PeerSpec] = (),
) -> tuple[Cell, ...]:
    """Every drafter with every number of draft tokens, rule and temperature; and every peer at every temperature.

    At temperature 0 all rules are one, so rules multiply the others only. Plain decoding is added where it is missing,
    and has no draft tokens and no rule.

    Raises:
        InvalidInputError: A name is unknown, a value outside its range, or there are more cells than anybody waits for.
    """
    for drafter in drafters:
        parse_drafter(drafter)
    for rule in rules:
        if rule not in RULES:
            raise InvalidInputError(f"There is no acceptance rule '{rule}'; known: {', '.join(RULES)}.")
    for temperature in temperatures:
        good = is_number(temperature) and temperature >= 0
        require("a temperature", temperature, good, "a number >= 0")
    found: dict[Cell, None] = {}
    for temperature in temperatures:
        found[Cell("none", temperature=temperature)] = None
        drafting = [drafter for drafter in drafters if drafter != "none"]
        chosen = rules if temperature and rules else ("",)
        for drafter, tokens, rule in product(drafting, draft_tokens or (None,), chosen):
            found[Cell(drafter, tokens, rule, temperature)] = None
        for peer in peers:
            found[peer.cell(temperature)] = None
    if len(found) > _MOST_CELLS:
        raise InvalidInputError(f"These lists make {len(found)} cells, and {_MOST_CELLS} is the most: shorten them.")
    return tuple(found)
