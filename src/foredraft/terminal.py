"""What the command line shows people: progress, coloured answers, tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from foredraft.types import FinishEvent, SamplingParams, TokenEvent

if TYPE_CHECKING:
    from foredraft.api import Model
    from foredraft.explanation import Explanation
    from foredraft.inspection import ModelFacts
    from foredraft.models import Notify
    from foredraft.proof.verify import Certificate
    from foredraft.tune import Tuning
    from foredraft.types import Completion, Origin, Stats

Count = Callable[[int, int, str, str], None]
"""Told how much is done, of how much, what is being done, and a line about it."""

_LONG = 2048  # tokens of a prompt that takes so long to read that one wants to know how far it is
SAME_TEXT = ("greedy", "seed-exact")
"""Rules under which speculation gives the text of plain decoding, not only its law."""
STYLES: dict[Origin, str] = {"draft": "green", "correction": "bold yellow", "bonus": "underline cyan"}
MEANING: dict[Origin, str] = {
    "draft": "proposed by the drafter and accepted",
    "correction": "the target's token where a draft was rejected",
    "bonus": "the target's token after all of a draft",
}


@contextmanager
def progress() -> Iterator[Notify]:
    """Sentences about what is going on, on standard error: a spinner in a terminal, lines elsewhere."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda message: console.print(f"{message} …")
        return
    with console.status("Starting …") as status:
        yield lambda message: status.update(f"{message} …")


@contextmanager
def counted(every: int) -> Iterator[tuple[Notify, Count]]:
    """What is going on and how far it is, on standard error: a bar in a terminal, elsewhere a line `every` so often."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield (lambda message: console.print(f"{message} …")), _lines(console, every)
        return
    columns = TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[left]}")
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("Starting", total=None, left="")

        def notify(message: str) -> None:
            bar.update(task, description=f"{message} …")

        def count(done: int, total: int, doing: str, line: str) -> None:
            bar.update(task, description=doing, completed=done, total=total, left=line)

        yield notify, count


def _lines(console: Console, every: int) -> Count:
    told = -every

    def count(done: int, total: int, doing: str, line: str) -> None:
        nonlocal told
        if done - told >= every or done == total or done < told:  # the last: something else is counted now
            told = done
            console.print(line)

    return count


def time_left(seconds: float | None) -> str:
    """To stand at the end of a line: empty while it is not known."""
    if seconds is None:
        return ""
    minutes, seconds = divmod(round(seconds), 60)
    return f", {f'{minutes} min {seconds:02}' if minutes else seconds} s left"


def stream(model: Model, text: str, params: SamplingParams, chat: bool | None, out: Console) -> Completion:
    """Show an answer as it comes, its tokens coloured by origin where that is a terminal."""
    completion = None
    events = model.stream(text, params, chat=chat, progress=lambda done, total: _show_reading(notify, done, total))
    with progress() as notify:
        first = next(events)  # the prompt is read before it
    for event in chain([first], events):
        if isinstance(event, TokenEvent):
            _show(out, event.text, STYLES[event.origin])
        elif isinstance(event, FinishEvent):
            _show(out, f"{event.text}\n")
            completion = event.completion
    assert completion is not None
    return completion


def _show_reading(notify: Notify, done: int, total: int) -> None:
    if total > _LONG:
        notify(f"Reading the prompt: {done:,} of {total:,} tokens")


def _show(out: Console, text: str, style: str = "") -> None:
    if out.is_terminal:
        out.print(Text(text, style=style), end="")
    else:  # as it is: rich would expand tabs and drop control characters
        out.file.write(text)
        out.file.flush()


def show_certificate(console: Console, result: Certificate) -> None:
    """Every check in a table, every difference in a line, and the conclusion."""
    table = Table("check", "", "result", "", box=None, header_style="bold", padding=(0, 2, 0, 0))

    def add(check: str, detail: str, figure: str, passed: bool) -> None:
        table.add_row(check, detail, figure, "passed" if passed else "FAILED", style=None if passed else "red")

    for law in result.enumerated:
        add(f"law of {law.rule}", f"{law.kind}, {law.cases} cases", f"TV {law.total_variation:.1e}", law.passed)
    for row in result.equality:
        near = len(row.differences) - row.defects
        figure = f"{row.defects} defects, {near} near-ties"
        add("same text", f"{row.setting}: {row.prompts} prompts, {row.tokens} tokens", figure, not row.defects)
    if result.sampled is not None:
        test = result.sampled
        add("sampled law", f"{test.samples} answers, {test.cells} cells", f"p-value {test.p_value:.2g}", test.passed)
    console.print(table)
    for row in result.equality:
        for d in row.differences:
            console.print(
                f"{row.setting}, prompt {d.prompt + 1}, token {d.position + 1}: plain {d.plain_token}, speculative "
                f"{d.other_token}, lead {d.gap:.2e}, drift {d.drift:.2e}: {d.verdict}"
            )
    if result.server is not None:
        rows = Table("", "there", "here", box=None, header_style="bold", padding=(0, 2, 0, 0))
        for row in result.server["rows"]:
            rows.add_row(row["name"], row["there"], row["here"])
        console.print()
        console.print(rows)
    verdict = "passed" if result.passed else "FAILED"
    if result.server is not None:
        console.print(Text(f"\n{verdict}: the answers of {result.server['url']}"))
        return
    console.print(
        Text(f"\n{verdict}: speculation with {result.settings['drafter']} and rule {result.settings['rule']}")
    )


def show_model(console: Console, facts: ModelFacts) -> None:
    """What a model's files hold, and what runs them."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("file" if facts.path.endswith(".gguf") else "folder", facts.path)
    table.add_row("architecture", facts.architecture)
    table.add_row("parameters", f"{facts.parameters / 1e6:,.1f} million")
    table.add_row("tensors", ", ".join(f"{count} {kind}" for kind, count in facts.tensors.items()))
    table.add_row("weights", f"{facts.bytes / 1e6:,.1f} MB")
    if facts.bytes_per_token is not None:
        table.add_row("read for a token", f"{facts.bytes_per_token / 1e6:,.1f} MB")
    table.add_row("context", "unlimited" if facts.context is None else f"{facts.context} tokens")
    table.add_row("backend on a CPU", facts.backend)
    console.print(table)
    if facts.not_native is not None:
        console.print(f"\nNot native: {facts.not_native}.", soft_wrap=True, markup=False)


def show_tuning(console: Console, found: Tuning) -> None:
    """The curve with its bars, by context and batch, how the drafters did, and what to do."""
    curve, context = found.costs.curve, found.context
    table = figures_table("rows n", "ms", "v(n)", "break-even", "")
    longest = curve.seconds(curve.rows[-1], context)
    for n in curve.rows:
        seconds, cost = curve.seconds(n, context), curve.v(n, context)
        rate = curve.break_even(n, context) if n > 1 else None
        enough = "–" if n == 1 else "never" if rate is None else f"{rate:.0%}"
        table.add_row(str(n), f"{1e3 * seconds:.1f}", f"{cost:.2f}", enough, _bar(seconds / longest))
    table.columns[-1].justify = "left"
    console.print(f"A forward after {context} tokens: the root and n - 1 drafted tokens\n", soft_wrap=True)
    console.print(table)
    explained = (
        "A round of n rows takes as long as v(n) plain steps, so it must emit more tokens than that to gain.",
        "With a chain of n - 1 drafted tokens it does where the target accepts more of them than break-even.",
    )
    console.print("", *explained, "", sep="\n", soft_wrap=True)
    console.print(_by_context(found))
    console.print("\nThere n counts the rows of each sequence of a batch.\n", soft_wrap=True)
    console.print(_trials(found))
    console.print(
        "\ntimed: against plain decoding; best: by its costs, with at most so many draft tokens", soft_wrap=True
    )
    console.print(f"plain decoding: {found.plain_tokens_per_second:.1f} tokens/s")
    console.print(Text(f"\n{found.recommendation}", style="bold"), soft_wrap=True)


def _by_context(found: Tuning) -> Table:
    """The costs in plain steps of the same batch, by batch, context and rows of each sequence."""
    rows = [n for n in (2, 4, 8, 16, 32) if n in found.costs.curve.rows]
    table = figures_table("sequences", "context", *(f"v({n})" for n in rows))
    for size, curve in found.costs.curves.items():
        for context in curve.contexts:
            steps = (f"{curve.v(size * n, context):.2f}" if size * n in curve.rows else "" for n in rows)
            table.add_row(str(size), str(context), *steps)
    return table


def _trials(found: Tuning) -> Table:
    table = figures_table("drafter", "accepted", "per forward", "draft ms", "timed", "best", "with")
    table.columns[0].justify, table.columns[0].no_wrap = "left", True
    for t in found.trials:
        rate = "–" if t.acceptance_rate is None else f"{t.acceptance_rate:.0%}"
        figures = (f"{t.mean_accepted_length:.2f}", f"{t.draft_ms:.2f}", f"{t.speedup:.2f}x", f"{t.expected:.2f}x")
        table.add_row(t.drafter, rate, *figures, f"{t.best_draft_tokens}")
    return table


def figures_table(*columns: str) -> Table:
    """A table without lines, its columns set to the right."""
    table = Table(*columns, box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in table.columns:
        column.justify = "right"
    return table


def _bar(share: float, width: int = 24) -> str:
    """A horizontal bar of at most `width` characters, to an eighth of one."""
    eighths = max(round(share * width * 8), 1)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def show_figures(out: Console, completion: Completion, plain: Completion | None) -> None:
    """Legend, verdict and table: on standard error, or after the answer where that is a terminal as well."""
    console = out if out.is_terminal else Console(stderr=True, highlight=False)
    console.print()
    if out.is_terminal:
        for origin, style in STYLES.items():
            count = completion.origins.count(origin)
            console.print(Text.assemble((origin, style), " " * (10 - len(origin)), f"{count:>4}  {MEANING[origin]}"))
    for warning in completion.warnings:
        console.print(Text(f"Warning: {warning}", style="yellow"))
    if plain is not None:
        console.print(Text(f"\nidentical to plain decoding: {_verdict(completion, plain)}", style="bold"))
    console.print(_figures(completion.stats, plain.stats if plain is not None else None))


def show_explanation(out: Console, shown: Explanation) -> None:
    """What was tried, what it cost and gained, and what could gain more: where the figures went."""
    console = out if out.is_terminal else Console(stderr=True, highlight=False)
    console.print(
        f"\nA plain step takes {shown.plain_ms:.1f} ms ({shown.plain_tokens_per_second:.1f} tokens/s), each drafted "
        f"node {shown.node_ms:.2f} ms more. A first drafted token pays if it is right more than {shown.break_even:.0%} "
        f"of the time. {shown.plain_rounds} of {shown.rounds} rounds were plain.\n",
        soft_wrap=True,
    )
    columns = ("part", "asked", "ms a draft", "verified", "accepted", "rate", "right in all", "tokens/s with it alone")
    table = Table(*columns, box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    for part in shown.parts:
        rate = "–" if part.acceptance_rate is None else f"{part.acceptance_rate:.0%}"
        counts = f"{part.verified:.0f}", f"{part.accepted:.0f}", rate, str(part.foreseen)
        table.add_row(part.name, str(part.asked), f"{part.draft_ms:.2f}", *counts, f"{part.tokens_per_second:.1f}")
    console.print(table)
    if shown.advice:
        console.print("\nWhat could gain more:")
    for line in shown.advice:
        console.print(Text(f"- {line}"), soft_wrap=True)


def _verdict(completion: Completion, plain: Completion) -> str:
    if plain.ids == completion.ids:
        return f"yes ({len(plain.ids)} tokens)"
    if completion.stats.rule not in SAME_TEXT:
        law = "another law" if completion.stats.rule.startswith("lossy") else "the same law, other draws"
        return f"not expected (rule '{completion.stats.rule}': {law})"
    pairs = zip(plain.ids, completion.ids, strict=False)
    shorter = min(len(plain.ids), len(completion.ids))
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    return f"no (first difference at token {first + 1} of {len(plain.ids)})"


def _figures(stats: Stats, plain: Stats | None) -> Table:
    columns = [("plain", plain)] if plain is not None else []
    columns.append((stats.drafter, stats))
    table = Table("", *(name for name, _ in columns), box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("tokens/s", *(f"{s.tokens_per_second:.1f}" for _, s in columns))
    table.add_row("TTFT", *(f"{s.ttft_ms:.0f} ms" for _, s in columns))
    table.add_row("TPOT", *("–" if s.tpot_ms is None else f"{s.tpot_ms:.1f} ms" for _, s in columns))
    table.add_row("target forwards", *(str(s.target_forwards) for _, s in columns))
    table.add_row("of them plain", *(str(s.plain_rounds) for _, s in columns))
    table.add_row("mean accepted length", *(f"{s.mean_accepted_length:.2f}" for _, s in columns))
    rates = ("–" if s.acceptance_rate is None else f"{s.acceptance_rate:.0%}" for _, s in columns)
    table.add_row("acceptance rate", *rates)
    if stats.foresight is not None:
        seen = (("–" if s.foresight is None else f"{s.foresight.hit_rate:.0%}") for _, s in columns)
        table.add_row("rounds foreseen", *seen)
        hidden = (("–" if s.foresight is None else f"{1e3 * s.foresight.hidden_seconds:.0f} ms") for _, s in columns)
        table.add_row("drafted meanwhile", *hidden)
    if plain is not None:
        table.add_row("speedup", "1.00x", f"{stats.tokens_per_second / plain.tokens_per_second:.2f}x", style="bold")
    return table
