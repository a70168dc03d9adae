"""What a run comes to, in words: the sentences at the head of its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from foredraft.bench import forms
from foredraft.bench.comparison import MEASURES, Change, clear
from foredraft.bench.figures import (
    CellFigures,
    Interval,
    answers_of,
    interval,
    promises_same_text,
    ratio,
    throughput_parts,
)
from foredraft.bench.records import OWN, Cell
from foredraft.bench.results import Results


@dataclass(frozen=True)
class Headline:
    """The first thing that a report says, and what stands in large figures below it."""

    title: str
    gain: str
    """How sure it is that the fastest method gains."""
    text: str
    """Whether all text was the same."""
    peer: str
    """How it compares with the fastest peer; empty without one."""
    best: CellFigures | None
    """The fastest of foredraft's methods, plain decoding apart; of those that surely gain, if there are any."""
    sure: bool
    """Whether it does."""
    fastest_peer: CellFigures | None
    over_peer: Interval | None
    equal: int
    different: int
    """Of the answers whose text must be that of plain decoding."""


def headline(results: Results) -> Headline:
    """The sentences about one run."""
    everything = [figures for figures in results.figures if not figures.category]
    own = [(f.speedup, f) for f in everything if f.cell.engine == OWN and f.speedup is not None]
    sure = [each for each in own if each[0].low > 1]  # what may well be an accident is no headline
    best = max(sure or own, key=lambda each: each[0].value, default=(None, None))[1]
    promised = [f for f in everything if promises_same_text(f.cell)]
    equal, different = sum(f.equal for f in promised), sum(f.different for f in promised)
    wanted = best.cell.temperature if best is not None else 0.0
    peers = [f for f in everything if f.cell.engine != OWN and f.cell.temperature == wanted]
    peer = max(peers, key=lambda f: f.throughput, default=None)
    over = over_cell(results, best.cell if best is not None else Cell("none"), peer.cell) if peer is not None else None
    return Headline(
        title=_title(best, everything),
        gain=_gain(best, len(own), len(sure)),
        text=_text(equal, different),
        peer=_peer(best, peer, over),
        best=best,
        sure=bool(sure),
        fastest_peer=peer,
        over_peer=over,
        equal=equal,
        different=different,
    )


def over_cell(results: Results, cell: Cell, other: Cell) -> Interval | None:
    """Throughput of a cell over that of another, on the items and repetitions that both have."""
    groups = [answers_of(results.measurements, each) for each in (cell, other)]
    return interval(groups, throughput_parts, ratio)


def _title(best: CellFigures | None, everything: Sequence[CellFigures]) -> str:
    if best is None or best.speedup is None:
        fastest = max(everything, key=lambda f: f.throughput)
        return f"{fastest.cell.name}: {fastest.throughput:.1f} tokens/s"
    if best.speedup.value <= 1:
        closest = f"{best.cell.name} came closest, at {forms.times(best.speedup.value)}"
        return f"Nothing was faster than plain decoding here; {closest}"
    if best.speedup.low <= 1:
        leads = f"{best.cell.name} leads with {forms.times(best.speedup.value)}"
        return f"No method is surely faster than plain decoding here; {leads}"
    return f"{best.cell.name} is {forms.times(best.speedup.value)} as fast as plain decoding"


def _gain(best: CellFigures | None, methods: int, sure: int) -> str:
    if best is None or best.speedup is None:
        return "There is nothing to compare it with: plain decoding and one method more are needed for a speedup."
    of = f"It is the fastest of {methods} ways of drafting"
    if methods == 1:
        of = "It is the only way of drafting here"
    elif sure == 1:
        of = f"It is the only one of {methods} ways of drafting that surely gains"
    elif 1 < sure < methods:
        of = f"It is the fastest of the {sure} ways of drafting, of {methods}, that surely gain"
    reach = (
        f"; the 95\N{NO-BREAK SPACE}% interval of its speedup is {_span(best.speedup)}" if _span(best.speedup) else ""
    )
    return f"{of}: {best.throughput:.1f} tokens per second{reach}."


def _text(equal: int, different: int) -> str:
    answers = equal + different
    if not answers:
        return "No answer had a plain one beside it whose text it must have."
    if not different:
        return f"All {answers:,} answers that must have the text of plain decoding have it, token for token."
    return (
        f"{different:,} of {answers:,} answers differ from plain decoding where they must not: foredraft verify tells "
        "near-ties of the arithmetic from defects."
    )


def _peer(best: CellFigures | None, peer: CellFigures | None, over: Interval | None) -> str:
    if peer is None or over is None:
        return ""
    own = "it" if best is not None else "plain decoding"
    speed = f"{forms.times(over.value)} the speed of {peer.cell.name}, the fastest of the other engines"
    return f"{own.capitalize()} has {speed}{f' ({_span(over)})' if _span(over) else ''}."


def equality(figures: CellFigures) -> tuple[str, bool]:
    """What it means that a cell's answers are, or are not, those of plain decoding; and whether that is a fault."""
    cell = figures.cell
    if cell == cell.plain:
        return "what the others are compared with", False
    if not figures.equal + figures.different:
        return "not compared: plain decoding has no such answers", False
    if not figures.different:
        return "the same text, token for token", False
    if promises_same_text(cell):
        return "different text: a near-tie, or a defect", True
    if cell.engine != OWN:
        return "another engine" + ("'s arithmetic" if cell.temperature == 0 else "'s draws"), False
    return ("another law (lossy rule)" if cell.rule.startswith("lossy") else "same law, other draws"), False


def compared(first: str, second: str, found: Sequence[Change]) -> tuple[str, str]:
    """The sentence over a comparison of two runs of these names, and what follows it."""
    speed = MEASURES[0]
    known = [(change.cell.name, ratio) for change in found if (ratio := change.ratios[speed]) is not None]
    if not known:
        return f"“{first}” and “{second}” have no answers in common", "No cell was given the same items in both runs."
    words = [clear(ratio, 1) for _, ratio in known]
    name, most = max(known, key=lambda each: abs(log(each[1].value)))
    title = f"{name} is {forms.times(most.value)} as fast in “{second}” as in “{first}”"
    if not any(words):
        title = f"No clear change of speed from “{first}” to “{second}”"
    counts = (
        f"{words.count('better')} are faster, {words.count('worse')} slower, {words.count('')} without a clear change"
    )
    must = [change for change in found if change.must_be_equal]
    equal, different = sum(c.equal for c in must), sum(c.different for c in must)
    text = f"{different:,} of {equal + different:,} answers that the same model would give alike are different."
    if not different:
        text = f"All {equal:,} answers that the same model gives alike are the same in both."
    return (
        title,
        f"Of {len(known)} methods that both have, {counts} (by 95 % intervals). {text if must else ''}".strip(),
    )


def _span(value: Interval) -> str:
    return f"{value.low:.2f} to {value.high:.2f}" if value.low < value.high else ""
