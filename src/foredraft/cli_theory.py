"""`foredraft theory`: what speculation should gain by the formula, and what this machine allows at most."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from foredraft.checks import require
from foredraft.errors import InvalidInputError
from foredraft.terminal import figures_table, progress

if TYPE_CHECKING:
    from foredraft.bench.limits import Limits
    from foredraft.loading import EngineChoice
    from foredraft.models import Notify

_MOST = 64
"""Most tokens of a draft, as everywhere."""
_SHOWN = 16
_RATES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def theory(
    model: Annotated[
        str | None, typer.Argument(help="With --machine: bundled name, folder, .gguf file, or hub id (org/name).")
    ] = None,
    alpha: Annotated[
        float | None, typer.Option("--alpha", help="Acceptance: probability that a drafted token is accepted.")
    ] = None,
    draft_tokens: Annotated[
        int | None, typer.Option("-k", "--draft-tokens", help="Drafted tokens of a round; the default is the best.")
    ] = None,
    draft_cost: Annotated[
        float, typer.Option(help="What drafting a token costs, in plain steps: 0.02 is a fiftieth of a target forward.")
    ] = 0.0,
    verify_curve: Annotated[
        Path | None,
        typer.Option(
            help="What verifying costs by rows: a file of foredraft's costs, of tune --json, or CSV or JSON of rows "
            "with v or ms. Without it, any number of rows costs as much as one."
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="With --verify-curve: tokens cached; the default is the fewest measured.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="An SVG file to draw speedup and break-even into.")] = None,
    machine: Annotated[
        bool, typer.Option("--machine", help="Measure memory and arithmetic here, and what they allow MODEL at most.")
    ] = False,
    measured: Annotated[
        float | None, typer.Option(help="With --machine MODEL: tokens/s that you measured, to compare with the limit.")
    ] = None,
    backend: Annotated[str, typer.Option(help="What would run MODEL: auto, native or transformers.")] = "auto",
    weights: Annotated[str, typer.Option(help="For native: auto (as stored), f32, bf16 or q8.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="On a CPU; the default is the number of physical cores.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="For transformers: auto, float32, bfloat16 or float16.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Say what speculation should gain by the formula, how much to draft, and when it pays; and the machine's limit."""
    _refuse_what_does_not_fit(model, alpha, machine, measured, plot, verify_curve, context)
    report: dict[str, Any] = {}
    if alpha is not None:
        from foredraft.bench.theory import free
        from foredraft.bench.verify_curve import read_verify_curve

        v = free if verify_curve is None else partial(read_verify_curve(verify_curve).v, context=context)
        report["theory"] = _theory(alpha, draft_tokens, draft_cost, v, plot)
    if machine:
        from foredraft.loading import EngineChoice

        engine = EngineChoice(backend, device, dtype, weights, threads)
        with progress() as notify:
            report["machine"] = _limits(model, alpha, measured, engine, notify)
    if as_json:
        typer.echo(json.dumps(report, ensure_ascii=False))
        return
    console = Console(highlight=False)
    if "theory" in report:
        _show_theory(console, report["theory"], verify_curve)
        if plot is not None:
            console.print(Text(f"written: {plot}", style="dim"), soft_wrap=True)
    if "machine" in report:
        _show_machine(console, report["machine"])


def _refuse_what_does_not_fit(
    model: str | None,
    alpha: float | None,
    machine: bool,
    measured: float | None,
    plot: Path | None,
    verify_curve: Path | None,
    context: int | None,
) -> None:
    if alpha is None and not machine:
        raise InvalidInputError("Give --alpha, the acceptance of drafted tokens (such as 0.8), or --machine.")
    if model is not None and not machine:
        raise InvalidInputError(f"A model such as '{model}' belongs to --machine, which measures its limit.")
    if measured is not None and model is None:
        raise InvalidInputError("--measured is compared with the limit of a model: give --machine MODEL.")
    if plot is not None and alpha is None:
        raise InvalidInputError("--plot draws what --alpha gains: give --alpha.")
    if context is not None and (verify_curve is None or context < 0):
        raise InvalidInputError(f"context is {context}, but must be an integer >= 0, for a --verify-curve.")


def _theory(
    alpha: float, k: int | None, draft_cost: float, v: Callable[[int], float], plot: Path | None
) -> dict[str, Any]:
    """All figures of the formula, for JSON; the plot is drawn on the way."""
    from foredraft.bench.theory import best_k, break_even, expected_tokens, round_cost, speedup
    from foredraft.pages import whole_file

    best = best_k(alpha, draft_cost, v, _MOST)
    k = best if k is None else k
    require("k", k, 0 <= k <= _MOST, f"an integer in [0, {_MOST}]")

    def figures(rate: float, n: int) -> dict[str, float | int | None]:
        return {
            "k": n,
            "alpha": rate,
            "expected_tokens": expected_tokens(rate, n),
            "cost": round_cost(n, draft_cost, v),
            "speedup": speedup(rate, n, draft_cost, v),
            "break_even": break_even(n, draft_cost, v) if n else None,
        }

    rates = sorted({*_RATES, alpha})
    found = {
        "draft_cost": draft_cost,
        **figures(alpha, k),
        "best": figures(alpha, best),
        "by_k": [figures(alpha, n) for n in sorted({*range(1, _SHOWN + 1), *({k, best} - {0})})],
        "by_alpha": [{**figures(r, k), "best": figures(r, best_k(r, draft_cost, v, _MOST))} for r in rates],
    }
    with whole_file(plot) if plot is not None else nullcontext() as write:
        if write is not None:
            from foredraft.bench.theory_plot import draw

            write(draw(alpha, k, draft_cost, v, most=_MOST))
    return found


def _limits(
    model: str | None, alpha: float | None, measured: float | None, engine: EngineChoice, notify: Notify
) -> dict[str, Any]:
    """What was measured of the machine, and what that allows the model; for JSON."""
    from foredraft.bench.limits import Limits, measure_machine, reads_of
    from foredraft.loading import cache_folder
    from foredraft.models import resolve

    reads = reads_of(resolve(model, cache_folder(), notify), engine) if model is not None else None
    dtype = reads.dtype if reads is not None else None
    seen = measure_machine(engine.device, threads=engine.threads, dtype=dtype, notify=notify)
    if reads is None:
        return asdict(seen)
    limits = Limits(seen.bandwidth, seen.arithmetic, reads.bytes_per_token, reads.parameters)
    return asdict(seen) | {"model": model, **_limits_dict(limits, alpha, measured)}


def _limits_dict(limits: Limits, alpha: float | None, measured: float | None) -> dict[str, Any]:
    rates = _RATES if alpha is None else sorted({*_RATES, alpha})
    shares = {} if measured is None else {"measured": measured, "share_of_plain": limits.share(measured)}
    if measured is not None and alpha is not None:
        shares["share_of_speculative"] = limits.share(measured, alpha)
    return {
        "bytes_per_token": limits.bytes_per_token,
        "parameters": limits.parameters,
        "free_width": limits.free_width,
        "plain_tokens_per_second": limits.plain,
        "speculative": [{"alpha": rate, **limits.speculative(rate)._asdict()} for rate in rates],
        **shares,
    }


def _show_theory(console: Console, found: dict[str, Any], verify_curve: Path | None) -> None:
    """The answer in words, then by drafted tokens and by acceptance."""
    from foredraft.bench.theory_plot import percent

    k, best, alpha = found["k"], found["best"], percent(found["alpha"])
    verifying = "verifying is free" if verify_curve is None else f"verifying costs as in {verify_curve}"
    console.print(f"K = {k}, acceptance {alpha}, draft cost {found['draft_cost']:g}, {verifying}\n", soft_wrap=True)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row("tokens of a round", f"{found['expected_tokens']:.2f}", "expected, the target's own one included")
    table.add_row("cost of a round", f"{found['cost']:.2f}", "plain steps, drafting and verifying")
    table.add_row("speedup", f"{found['speedup']:.2f}x", "over plain decoding", style="bold")
    if k:
        table.add_row("break-even", _rate(found["break_even"]), "acceptance above which that pays")
    most = f"with K = {best['k']}{', the most there is' if best['k'] == _MOST else ''}"
    table.add_row("best", f"{best['speedup']:.2f}x", most if best["k"] else "plain decoding: do not draft")
    table.columns[1].justify = "right"
    console.print(table)

    by_k = figures_table("K", "tokens", "cost", "speedup", "break-even", "")
    for row in found["by_k"]:
        figures = f"{row['expected_tokens']:.2f}", f"{row['cost']:.2f}", f"{row['speedup']:.2f}x"
        mark = "best" if row["k"] == best["k"] else ""
        style = "bold" if row["k"] in (k, best["k"]) else None
        by_k.add_row(str(row["k"]), *figures, _rate(row["break_even"]), mark, style=style)
    console.print(f"\nBy drafted tokens, at {alpha}:\n")
    console.print(by_k)

    by_alpha = figures_table("acceptance", "tokens", "speedup", "best K", "its speedup")
    for row in found["by_alpha"]:
        figures = f"{row['expected_tokens']:.2f}", f"{row['speedup']:.2f}x", str(row["best"]["k"])
        style = "bold" if row["alpha"] == found["alpha"] else None
        by_alpha.add_row(percent(row["alpha"]), *figures, f"{row['best']['speedup']:.2f}x", style=style)
    console.print(f"\nBy acceptance, with K = {k} and with the best K:\n")
    console.print(by_alpha)


def _show_machine(console: Console, found: dict[str, Any]) -> None:
    """The limits in words, then what speculation could reach within them."""
    from foredraft.bench.theory_plot import percent

    threads = f", {found['threads']} thread{'s' * (found['threads'] > 1)}" if found["threads"] else ""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row("memory", f"{found['bandwidth'] / 1e9:,.1f} GB/s", f"reading, {found['device']}{threads}")
    table.add_row("arithmetic", f"{found['arithmetic'] / 1e9:,.0f} GFLOP/s", f"matrix product, {found['dtype']}")
    if "model" in found:
        table.add_row("weights", f"{found['bytes_per_token'] / 1e6:,.1f} MB", f"read for a token of {found['model']}")
        table.add_row("free width", f"{found['free_width']:.1f}", "rows that cost no more than one, at the limit")
        table.add_row("plain decoding", f"{found['plain_tokens_per_second']:,.1f} tokens/s", "at the limit")
    if "measured" in found:
        share = f"{found['share_of_plain']:.0%} of that limit"
        if "share_of_speculative" in found:
            share += f", {found['share_of_speculative']:.0%} of that with drafts"
        table.add_row("measured", f"{found['measured']:,.1f} tokens/s", share, style="bold")
    console.print()
    console.print(table)
    if "model" not in found:
        return
    wide = figures_table("acceptance", "K", "tokens/s at the limit")
    for row in found["speculative"]:
        wide.add_row(percent(row["alpha"]), str(row["k"]), f"{row['tokens_per_second']:,.1f}")
    console.print("\nWith the best number of drafted tokens, and drafts that cost nothing:\n")
    console.print(wide)


def _rate(break_even: float | None) -> str:
    return "never" if break_even is None else f"{break_even:.1%}"
