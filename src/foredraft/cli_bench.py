"""`foredraft bench`: every method on one workload, against plain decoding in the same run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from foredraft.cli_options import (
    BackendOption,
    DeviceOption,
    DraftDeviceOption,
    DraftThreadsOption,
    DtypeOption,
    KvOption,
    ModelArgument,
    SpeculativeConfigOption,
    ThreadsOption,
    WeightsOption,
    listed,
    number,
)
from foredraft.terminal import counted, figures_table, time_left

if TYPE_CHECKING:
    from foredraft.bench.figures import CellFigures
    from foredraft.bench.records import Cell
    from foredraft.bench.results import Results
    from foredraft.bench.runner import Step

_WIDE, _SPARED = 100, ("TPOT", "TTFT", "kept")  # columns of a terminal that has room for every figure, and these
_EVERY = 20  # answers between two lines of progress where there is no terminal


def bench(
    model: ModelArgument,
    workload: Annotated[
        str, typer.Option(help="'bundled', or a file: Spec-Bench, HumanEval, GSM8K, ShareGPT, chat JSONL, plain lines.")
    ] = "bundled",
    limit: Annotated[int | None, typer.Option(help="Items, spread over the categories; the default is all.")] = None,
    categories: Annotated[str, typer.Option(help="Only these, with commas between.")] = "",
    drafters: Annotated[
        str,
        typer.Option(
            help="With commas between; one may bring its draft tokens, as in 'suffix 2'. Plain decoding is always run."
        ),
    ] = "ngram,suffix,hybrid:suffix+recycling,auto",
    speculative_config: SpeculativeConfigOption = None,
    draft_tokens: Annotated[
        str, typer.Option(help="Most tokens of a draft, with commas between; the default suits each drafter.")
    ] = "",
    rules: Annotated[
        str, typer.Option(help="Acceptance rules at temperatures above 0; the default suits each drafter.")
    ] = "",
    temperatures: Annotated[str, typer.Option(help="With commas between; 0 is greedy decoding.")] = "0",
    peers: Annotated[
        str,
        typer.Option(
            help="Other engines, with commas between: transformers, transformers:prompt-lookup:4, "
            "transformers:assistant=REF, llama.cpp, llama.cpp:prompt-lookup:4, openvino, openvino:prompt-lookup."
        ),
    ] = "",
    url: Annotated[str | None, typer.Option(help="An OpenAI-compatible server to compare with.")] = None,
    gguf: Annotated[str | None, typer.Option(help="The model as GGUF, for peers that read nothing else.")] = None,
    repeat: Annotated[int, typer.Option(help="How often all is asked; drafters begin anew each time.")] = 1,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 128,
    seed: Annotated[int, typer.Option(help="Of sampled answers.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the run; one that was broken off is gone on with.")] = Path(
        "bench"
    ),
    backend: BackendOption = "auto",
    weights: WeightsOption = "auto",
    threads: ThreadsOption = None,
    draft_threads: DraftThreadsOption = None,
    draft_device: DraftDeviceOption = None,
    kv: KvOption = "f32",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
) -> None:
    """Measure every method on one workload, against plain decoding in the same run, and write a report.

    Items are asked in turn, each of all methods in another order. Every answer is written down at once: a run that was
    broken off goes on when the same command is given again.
    """
    from foredraft.bench.peers import PeerSpec, parse_peer
    from foredraft.bench.plan import Plan, cells_of
    from foredraft.bench.report import write_report
    from foredraft.bench.runner import run
    from foredraft.bench.workloads import load_workload
    from foredraft.loading import EngineChoice

    specs = [parse_peer(peer) for peer in listed(peers)]
    if url is not None:
        specs.append(PeerSpec("url", url) if url.startswith("http") else parse_peer(f"url:{url}"))
    heats = [number(float, text, "temperatures") for text in listed(temperatures)]
    cells = cells_of(
        listed(drafters),
        draft_tokens=[number(int, text, "draft-tokens") for text in listed(draft_tokens)],
        rules=listed(rules),
        temperatures=heats,
        peers=specs,
    )
    if speculative_config is not None:
        cells = tuple(dict.fromkeys((*cells, *_configured_cells(speculative_config, heats))))
    plan = Plan(
        model=model,
        workload=load_workload(workload).spread(limit, listed(categories)),
        cells=cells,
        max_tokens=max_tokens,
        repeat=repeat,
        seed=seed,
        engine=EngineChoice(backend, device, dtype, weights, threads, kv, draft_threads, draft_device),
        gguf=gguf,
    )
    with counted(_EVERY) as (notify, count), _saying_what_is_kept(out):

        def progress(step: Step) -> None:
            count(step.done, step.total, f"{step.cell}, {step.item}" if step.cell else "Done", _line(step))

        results = run(plan, out, notify=notify, progress=progress)
        notify("Writing the report")
        write_report([results], out / "report.html", out / "report.md")
    _show(Console(highlight=False), results)
    typer.echo(f"written: {out / 'report.html'}, report.md, summary.json and answers.jsonl")


def _configured_cells(config: str, temperatures: Sequence[float]) -> list[Cell]:
    """What vLLM's JSON asks for, at every temperature."""
    from foredraft.bench.records import Cell
    from foredraft.handover.incoming import incoming

    found = incoming(config)
    return [Cell(found.drafter, found.draft_tokens, found.rule or "", temperature) for temperature in temperatures]


@contextmanager
def _saying_what_is_kept(folder: Path) -> Iterator[None]:
    """Whoever stops a run learns that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt:
        kept = "The answers so far are kept" if (folder / "answers.jsonl").exists() else "There was no answer yet"
        typer.echo(f"\n{kept}: give the same command again to go on.", err=True)
        raise


def _line(step: Step) -> str:
    return f"{step.done} of {step.total} answers{time_left(step.seconds_left)}"


def _show(console: Console, results: Results) -> None:
    """A line for every cell, and the sentences of the report's head."""
    from foredraft.bench.sentences import headline

    rows = [_row(figures) for figures in results.figures if not figures.category]
    columns = list(rows[0]) if console.width >= _WIDE else [name for name in rows[0] if name not in _SPARED]
    table = figures_table(*columns)
    for column in table.columns:
        column.no_wrap = True
    table.columns[0].justify = "left"
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    console.print(table)
    head = headline(results)
    console.print(Text(f"\n{head.title}", style="bold"), soft_wrap=True)
    for sentence in filter(None, (head.gain, head.text, head.peer)):
        console.print(sentence, soft_wrap=True, markup=False)
    for engine, why in results.absent.items():
        console.print(f"Not run: {engine} ({why})", soft_wrap=True, markup=False)


def _row(figures: CellFigures) -> dict[str, str]:
    speedup, tpot = figures.speedup, figures.tpot
    compared = figures.equal + figures.different
    return {
        "method": figures.cell.name,
        "speedup": "1.00x" if speedup is None else f"{speedup.value:.2f}x",
        "95 %": "" if speedup is None else f"{speedup.low:.2f}–{speedup.high:.2f}",
        "tokens/s": f"{figures.throughput:.1f}",
        "TPOT": "–" if tpot is None else f"{1e3 * tpot.median:.1f} ms",
        "TTFT": f"{1e3 * figures.ttft.median:.0f} ms",
        "a forward": "–" if figures.mean_accepted_length is None else f"{figures.mean_accepted_length:.2f}",
        "kept": "–" if figures.acceptance_rate is None else f"{figures.acceptance_rate:.0%}",
        "same": "" if not compared else f"{figures.equal}/{compared}",
    }
