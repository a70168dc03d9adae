"""The report as Markdown, for pasting in an issue: the page's figures without its charts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from foredraft.bench import forms
from foredraft.bench.comparison import MEASURES, clear
from foredraft.bench.figures import CellFigures
from foredraft.bench.sentences import equality
from foredraft.bench.views import Comparison, Page, Run, Setting
from foredraft.types import ForesightStats

_SIGNS = {"better": "▲ ", "worse": "▼ ", "": ""}


def markdown(page: Page) -> str:
    """The whole report."""
    several = len(page.runs) > 1
    parts = [*_comparisons(page)] if several else []
    for run in page.runs:
        parts += [f"## {_text(f'{run.name}: ' if several else '')}{_text(run.head.title)}", *_run(run)]
    parts += [f"### Settings{' that differ' if several else ''}", *_settings(page)]
    return "\n\n".join(parts) + f"\n\nMade by foredraft {page.version}.\n"


def _comparisons(page: Page) -> Iterator[str]:
    for each in page.comparisons:
        yield f"## {_text(each.title)}"
        yield _text(each.text)
        yield _changes(each)
        yield f"Each figure of {_text(each.run.name)} over that of {_text(page.runs[0].name)}. ▲ is better, ▼ worse."


def _changes(comparison: Comparison) -> str:
    rows = []
    for change in comparison.changes:
        ratios = [(change.ratios.get(measure), measure.better) for measure in MEASURES]
        texts = [f"{_SIGNS[clear(ratio, better)]}{forms.interval(ratio)}" for ratio, better in ratios]
        same = f"{forms.count(change.equal)} of {forms.count(change.equal + change.different)}"
        rows.append([_text(change.cell.name), *texts, same])
    return _table(["method", *(measure.title for measure in MEASURES), "same text"], rows)


def _run(run: Run) -> Iterator[str]:
    rows = run.rows
    yield _text(" ".join(filter(None, (run.head.gain, run.head.text, run.head.peer))))
    columns = ["method", "speedup (95 %)", "after the first token", "tokens/s", "tokens per forward", "accepted"]
    yield _table(
        [*columns, "median TTFT", "median TPOT", "memory", "equal", "different", "meaning"],
        [
            [
                _text(row.cell.name),
                forms.interval(row.speedup),
                forms.interval(row.decode_speedup),
                forms.decimal(row.throughput, 1),
                forms.decimal(row.mean_accepted_length),
                forms.percent(row.acceptance_rate),
                forms.milliseconds(row.ttft.median),
                forms.milliseconds(row.tpot.median if row.tpot is not None else None),
                forms.megabytes(row.peak_memory),
                forms.count(row.equal),
                forms.count(row.different),
                equality(row)[0],
            ]
            for row in rows
        ],
    )
    if run.categories and (faster := [row for row in rows if row.speedup is not None]):
        yield "### Speedup by category"
        shown = [[forms.interval(run.speedup(row.cell, c)) for c in run.categories] for row in faster]
        yield _named(["method", *map(_text, run.categories)], faster, shown)
    if run.positions:
        drafting = [row for row in rows if row.by_position]
        yield "### Acceptance by position in the draft"
        rates = [[forms.percent(each.rate) for each in row.by_position[: run.positions]] for row in drafting]
        yield _named(["method", *map(str, range(1, run.positions + 1))], drafting, rates)
    if foreseeing := [(row, row.foresight) for row in rows if row.foresight is not None]:
        yield "### Drafted while the target verified"
        shown = [_foresight(found) for _, found in foreseeing]
        columns = ["method", "rounds", "foreseen", "late", "branches a round", "drafting a round", "waited a round"]
        yield _named([*columns, "foreseen by accepted tokens"], [row for row, _ in foreseeing], shown)
    if counted := [row for row in rows if row.lengths]:
        yield "### Rounds by the tokens that they emitted"
        lengths = [[forms.count(number) for number in row.lengths[: run.longest]] for row in counted]
        yield _named(["method", *map(str, range(1, run.longest + 1))], counted, lengths)
    if whole := [row for row in rows if row.split is not None]:
        yield "### Where the time of a token goes"
        parts = [[forms.milliseconds(part / row.tokens) for part in row.split or ()] for row in whole]
        yield _named(["method", "prefill", "draft", "verify", "accept", "other"], whole, parts)
    if predicted := [(row, row.prediction) for row in rows if row.prediction is not None]:
        yield "### Predicted and measured speedup after the first token"
        figures = [[forms.times(p.speedup), forms.times(p.measured), forms.signed(p.error)] for _, p in predicted]
        yield _named(["method", "predicted", "measured", "error"], [row for row, _ in predicted], figures)
    if run.off:
        yield "\n".join(
            f"- {_text(row.cell.name)}: {_text(row.prediction.explanation)}." for row in run.off if row.prediction
        )
    if run.results.absent:
        yield "### Peers that could not run"
        yield "\n".join(f"- {_text(peer)}: {_text(why)}" for peer, why in run.results.absent.items())


def _foresight(found: ForesightStats) -> list[str]:
    by_accepted = ", ".join(f"{k}: {forms.percent(hits / n)}" for k, (hits, n) in found.by_accepted.items())
    return [
        forms.count(found.rounds),
        forms.percent(found.hit_rate),
        forms.percent(found.late / found.rounds),
        forms.decimal(found.branches / found.rounds, 1),
        forms.milliseconds(found.hidden_seconds / found.rounds),
        forms.milliseconds(found.waited_seconds / found.rounds),
        by_accepted,
    ]


def _settings(page: Page) -> Iterator[str]:
    """All of them; of several runs those that differ."""
    names = ["", *(_text(run.name) for run in page.runs)]
    shown = [s for s in (*page.settings, *page.provenance) if s.differs or len(page.runs) == 1]
    yield _table(names, [_setting(s) for s in shown]) if shown else "None."


def _setting(setting: Setting) -> list[str]:
    return [_text(setting.name), *map(_text, setting.values)]


def _named(columns: Sequence[str], rows: Sequence[CellFigures], cells: Iterable[Sequence[str]]) -> str:
    """A table whose rows are methods; short ones are filled up."""
    full = ([_text(row.cell.name), *each] for row, each in zip(rows, cells, strict=True))
    return _table(columns, [[*each, *[forms.NONE] * (len(columns) - len(each))] for each in full])


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(columns) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, rule, *rows))


def _text(text: str) -> str:
    """A text that Markdown shows as it is, in a table too."""
    return re.sub(r"([\\`*_\[\]<>&|~#$@])", r"\\\1", re.sub(r"\s+", " ", text)).strip()
