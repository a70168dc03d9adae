"""What a report shows, before it is a page or Markdown: the runs, how they compare, their settings side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from foredraft import __version__
from foredraft.bench import sentences
from foredraft.bench.comparison import Change, changes
from foredraft.bench.figures import CellFigures, Interval
from foredraft.bench.forms import NONE
from foredraft.bench.records import OWN, Cell
from foredraft.bench.results import Results
from foredraft.bench.theory import OFF

Kind = Literal["best", "own", "plain", "peer"]
_MOST = 12  # positions of a draft, and tokens of a round, that tables have columns for
_LONG = 12  # things of a list


class Setting(NamedTuple):
    """A setting, or a piece of provenance: its name, and its value in each run; long lists are shortened."""

    name: str
    values: tuple[str, ...]
    differs: bool
    """Whether the runs do not agree."""


@dataclass(frozen=True)
class Run:
    """A run as it is shown."""

    key: str
    """For the names of its places on the page."""
    name: str
    """Unlike that of any other run of the page."""
    results: Results
    head: sentences.Headline
    rows: tuple[CellFigures, ...]
    """Of all items; by temperature, and the fastest first."""
    categories: tuple[str, ...]
    by_category: Mapping[tuple[Cell, str], CellFigures]
    waiting: tuple[Cell, ...]
    """Cells without any answer yet."""

    @property
    def positions(self) -> int:
        """Positions of a draft that tables have columns for."""
        return min(max(len(row.by_position) for row in self.rows), _MOST)

    @property
    def longest(self) -> int:
        """Tokens of a round that tables have columns for."""
        return min(max(len(row.lengths) for row in self.rows), _MOST)

    @property
    def foreseeing(self) -> list[CellFigures]:
        """Those whose drafter drafts while the target verifies."""
        return [row for row in self.rows if row.foresight is not None]

    @property
    def cut(self) -> bool:
        """Whether some round emitted more."""
        return any(len(row.lengths) > self.longest for row in self.rows)

    @property
    def single(self) -> list[str]:
        """Categories of a single item: intervals are over its repetitions."""
        return sorted({c for (_, c), figures in self.by_category.items() if c and figures.items == 1})

    @property
    def off(self) -> list[CellFigures]:
        """Those whose predicted speedup is more than 10 % off."""
        return [row for row in self.rows if row.prediction is not None and abs(row.prediction.error) > OFF]

    def kind(self, row: CellFigures) -> Kind:
        """What a row is."""
        if row.cell.engine != OWN:
            return "peer"
        best = row is self.head.best and self.head.sure
        return "plain" if row.cell == row.cell.plain else "best" if best else "own"

    def row(self, cell: Cell) -> CellFigures | None:
        """The figures of a cell, if it has answers."""
        return next((row for row in self.rows if row.cell == cell), None)

    def speedup(self, cell: Cell, category: str) -> Interval | None:
        """A cell's speedup on one category."""
        found = self.by_category.get((cell, category))
        return found.speedup if found is not None else None


class Comparison(NamedTuple):
    """What became of the first run in another one."""

    run: Run
    title: str
    text: str
    changes: tuple[Change, ...]


class Page(NamedTuple):
    """All that a report shows."""

    runs: tuple[Run, ...]
    comparisons: tuple[Comparison, ...]
    """Each of the other runs against the first one."""
    cells: tuple[Cell, ...]
    """Of all runs."""
    settings: tuple[Setting, ...]
    provenance: tuple[Setting, ...]
    version: str = __version__


def page_of(results: Sequence[Results]) -> Page:
    """The views of these runs, of which there is at least one, each with at least one answer."""
    names = [each.name for each in results]
    if len(set(names)) < len(names):
        names = [f"{name} ({index})" for index, name in enumerate(names, 1)]
    runs = tuple(_run(each, f"run{i}", name) for i, (each, name) in enumerate(zip(results, names, strict=True), 1))
    return Page(
        runs,
        tuple(_comparison(runs[0], other) for other in runs[1:]),
        tuple(dict.fromkeys(row.cell for run in runs for row in run.rows)),
        _settings([each.settings for each in results]),
        _settings([each.provenance for each in results]),
    )


def _run(results: Results, key: str, name: str) -> Run:
    everything = [figures for figures in results.figures if not figures.category]
    answered = {figures.cell for figures in everything}
    return Run(
        key,
        name,
        results,
        sentences.headline(results),
        tuple(sorted(everything, key=lambda f: (f.cell.temperature, -f.throughput))),
        tuple(sorted({f.category for f in results.figures} - {""})),
        {(f.cell, f.category): f for f in results.figures},
        tuple(cell for cell in results.cells if cell not in answered and cell.engine not in results.absent),
    )


def _comparison(first: Run, other: Run) -> Comparison:
    found = changes(first.results, other.results)
    return Comparison(other, *sentences.compared(first.name, other.name, found), tuple(found))


def _settings(runs: Sequence[Mapping[str, Any]]) -> tuple[Setting, ...]:
    """All settings of these runs; those that differ come first."""
    flat = [dict(_flat(each)) for each in runs]
    names = dict.fromkeys(name for each in flat for name in each)
    found = []
    for name in names:
        values = [each.get(name) for each in flat]
        found.append(Setting(name, tuple(map(_said, values)), any(value != values[0] for value in values)))
    return tuple(sorted(found, key=lambda setting: not setting.differs))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """A name and a value for each thing that is in there."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _said(value: Any) -> str:
    """A value in words."""
    if isinstance(value, (list, tuple)):
        texts = [_said(item) for item in value]
        if len(texts) > _LONG:
            texts = [f"{len(texts)}: {texts[0]}", *texts[1 : _LONG // 2], "…", *texts[-_LONG // 2 :]]
        return ", ".join(texts) or NONE
    return ("yes" if value else "no") if isinstance(value, bool) else NONE if value is None else str(value)
