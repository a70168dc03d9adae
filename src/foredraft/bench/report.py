"""The report of one run or of several: one page that needs nothing else, and the same figures as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from markupsafe import Markup

from foredraft.bench import canvas, charts, forms, sentences
from foredraft.bench.comparison import MEASURES, clear
from foredraft.bench.figures import CellFigures, Interval, answers_of
from foredraft.bench.markdown import markdown as as_markdown
from foredraft.bench.records import OWN, Position
from foredraft.bench.results import Results
from foredraft.bench.views import Comparison, Run, page_of
from foredraft.errors import InvalidInputError
from foredraft.pages import render, whole_file

_DEEPEST = 12  # positions of a draft in the chart
_RARE = 20  # rounds: what fewer of them tell is left out of it


def write_report(results: Sequence[Results], html: Path, markdown: Path) -> None:
    """Write the report of these runs: of several also what became of the first one in the others.

    Raises:
        InvalidInputError: There is no run, or one without any answer, or the files cannot be written.
    """
    if not results:
        raise InvalidInputError("There is no run to report: give at least one.")
    for each in results:
        if not each.measurements:
            raise InvalidInputError(f"The run {each.name} has no answers yet: let it run first.")
    with whole_file(html) as write_html, whole_file(markdown) as write_markdown:
        page = page_of(results)
        drawn = canvas.available()  # the tables have all figures, so a page without charts is better than none
        write_html(
            render(
                "bench/report.html",
                page=page,
                charts={run.key: dict(_charts(run)) if drawn else {} for run in page.runs},
                changed={c.run.key: _changed(page.runs[0], c) if drawn else "" for c in page.comparisons},
                drawn=drawn,
                measures=MEASURES,
                form=forms,
                equality=sentences.equality,
                clear=clear,
                rare=_RARE,
            )
        )
        write_markdown(as_markdown(page))


def _charts(run: Run) -> Iterator[tuple[str, Markup]]:
    """All that there are figures for, by name."""
    rows = run.rows
    faster = [row for _, row in sorted(((-r.speedup.value, r) for r in rows if r.speedup), key=lambda pair: pair[0])]
    if faster:
        shown = [charts.Row(row.cell.name, row.speedup, run.kind(row)) for row in rows if row.speedup is not None]
        yield "speedup", charts.speedups(run.key, "Speedup over plain decoding", shown, "plain decoding")
    if kinds := _by_category(run, [row for row in faster if row.cell.engine == OWN][: charts.SERIES]):
        yield "category", charts.by_category(run.key, kinds, run.categories)
    if drafting := [row for row in (*faster, *rows) if row.by_position]:
        found = {row.cell.name: _often(row.by_position) for row in drafting}
        yield "position", charts.acceptance(run.key, dict(list(found.items())[: charts.SERIES]))
    if counted := {row.cell.name: row.lengths for row in rows if len(row.lengths) > 1}:
        yield "lengths", charts.histograms(run.key, counted)
    yield from _waiting(run)
    if splits := {row.cell.name: (row.split, row.tokens) for row in rows if row.split is not None}:
        yield "split", charts.splits(run.key, splits)
    predicted = [(row.cell.name, row.prediction) for row in rows if row.prediction is not None]
    if predicted:
        yield "prediction", charts.predictions(run.key, {name: (p.measured, p.speedup) for name, p in predicted})


def _by_category(run: Run, rows: Sequence[CellFigures]) -> dict[str, dict[str, Interval]]:
    """Speedups by method and category, of those that have any."""
    found = {row.cell.name: {c: run.speedup(row.cell, c) for c in run.categories} for row in rows}
    known = {name: {c: value for c, value in each.items() if value is not None} for name, each in found.items()}
    return {name: each for name, each in known.items() if each}


def _waiting(run: Run) -> Iterator[tuple[str, Markup]]:
    """The charts of the times of single answers."""
    answers = {row.cell.name: answers_of(run.results.measurements, row.cell).values() for row in run.rows}
    turns = {name: [turn for m in each for turn in m.turns] for name, each in answers.items()}
    firsts = {name: [turn.ttft for turn in each] for name, each in turns.items()}
    yield "ttft", charts.spreads(f"{run.key} ttft", "Time to first token", firsts)
    tpots = {name: [turn.tpot for turn in each if turn.tpot is not None] for name, each in turns.items()}
    if any(tpots.values()):
        later = {name: each for name, each in tpots.items() if each}
        yield "tpot", charts.spreads(f"{run.key} tpot", "Time per token after the first", later)


def _often(positions: Sequence[Position]) -> Sequence[Position]:
    """Those that were tried often, and the first one in any case."""
    often = [each for each in positions[:_DEEPEST] if each.tried >= _RARE]
    return often or positions[:1]


def _changed(first: Run, comparison: Comparison) -> Markup:
    """The chart of the ratios of throughput."""
    speed, kinds = MEASURES[0], {"better": "best", "worse": "worse", "": "own"}
    known = [(change.cell.name, change.ratios[speed]) for change in comparison.changes]
    rows = [charts.Row(name, ratio, kinds[clear(ratio, speed.better)]) for name, ratio in known if ratio is not None]
    title = f"Tokens per second in {comparison.run.name} over those in {first.name}"
    return charts.speedups(f"{comparison.run.key} changed", title, rows, first.name) if rows else Markup()
