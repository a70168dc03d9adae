"""Small benchmark runs, made up: for tests of what is computed from them and of how it is shown."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from foredraft.bench.records import Cell, Measurement, Rounds, Turn
from foredraft.bench.results import Results, append_answer
from foredraft.costs import CostCurve

PLAIN, SUFFIX = Cell("none"), Cell("suffix")
PEER = Cell("prompt-lookup", 4, engine="llama.cpp")
CURVE = CostCurve([1, 2, 4, 8], [16, 512], [[0.010, 0.011, 0.013, 0.018], [0.012, 0.013, 0.016, 0.021]])


def made(
    accepted: Sequence[int], depth: Sequence[int] | int = 0, *, verify: float = 0.01, ended: bool = False
) -> Rounds:
    """Rounds that accepted so many tokens of drafts so deep and added one each, but the last one not if it `ended`."""
    count = len(accepted)
    depths = (depth,) * count if isinstance(depth, int) else tuple(depth)
    return Rounds(
        drafted=depths,
        depth=depths,
        accepted=tuple(accepted),
        emitted=tuple(n + 1 - (ended and i == count - 1) for i, n in enumerate(accepted)),
        draft_forwards=(0,) * count,
        draft_seconds=(0.001,) * count,
        verify_seconds=(verify,) * count,
        accept_seconds=(0.0005,) * count,
    )


def answer(rounds: Rounds, *, prefill: float = 0.05, other: float = 0.0, first: int = 100, prompt: int = 20) -> Turn:
    """The turn of these rounds: ids count up from `first`, and `other` seconds are in no round."""
    columns = (rounds.draft_seconds, rounds.verify_seconds, rounds.accept_seconds)
    tokens = sum(rounds.emitted)
    return Turn(
        prompt_tokens=prompt,
        ids=tuple(range(first, first + tokens)),
        text="text",
        ttft=prefill + sum(column[0] for column in columns),
        seconds=prefill + other + sum(map(sum, columns)),
        target_forwards=len(rounds),
        draft_forwards=0,
        drafted=sum(rounds.drafted),
        accepted=sum(rounds.accepted),
        rounds=rounds,
    )


def measured(cell: Cell, item: str, *turns: Turn, repetition: int = 0, category: str = "chat") -> Measurement:
    """An item answered by a cell."""
    return Measurement(cell.name, repetition, item, category, turns, 512_000_000)


def write(run: Results, folder: Path) -> Path:
    """The run as a folder."""
    run.write_settings(folder)
    for each in run.measurements:
        append_answer(folder, each)
    return folder


def results(
    name: str = "before",
    *,
    cells: Sequence[Cell] = (PLAIN, SUFFIX, PEER),
    categories: Sequence[str] = ("chat", "code"),
    items: int = 3,
    factor: float = 1.0,
    seed: int = 1,
    **about: object,
) -> Results:
    """A run of two repetitions; what drafts takes `factor` times as long, and later cells longer than earlier ones."""
    chance = random.Random(seed)
    found = []
    for repetition in range(2):
        for number in range(items * len(categories)):
            category = categories[number % len(categories)]
            accepted = [chance.choice((0, 0, 1, 2, 4)) for _ in range(12)]
            tokens = sum(accepted) + len(accepted)
            for index, cell in enumerate(cells):
                plain = cell.drafter == "none"
                rounds = made(
                    [0] * tokens if plain else accepted,
                    0 if plain else 4,
                    verify=0.01 if plain else (0.011 + 0.001 * index) * factor,
                )
                turn = answer(rounds, other=0.002 * chance.random())
                if cell.engine != PLAIN.engine:
                    turn = Turn(turn.prompt_tokens, turn.ids, turn.text, turn.ttft, turn.seconds)
                found.append(measured(cell, f"item-{number}", turn, repetition=repetition, category=category))
    settings = {"model": "tiny", "workload": "bundled", "max_tokens": 64, "temperatures": [0], "seeds": {"first": 7}}
    provenance = {"foredraft": "0.1.0", "machine": {"cpu": "two cores", "threads": 2}}
    known = {"settings": settings, "provenance": provenance, "absent": {"openvino": "not installed"}, "curve": CURVE}
    return Results(name, cells=tuple(cells), measurements=tuple(found), **{**known, **about})  # type: ignore[arg-type]
