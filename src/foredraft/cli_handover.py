"""`foredraft handover`: what was measured here, as configuration for vLLM, SGLang or llama.cpp's server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli_options import ModelArgument, listed, number
from foredraft.terminal import progress

if TYPE_CHECKING:
    from foredraft.handover.check import Parallel
    from foredraft.handover.expected import Machine
    from foredraft.handover.measured import Record
    from foredraft.models import ModelFiles, Notify

handover_app = typer.Typer(
    help="Write the configuration of another engine from what was measured here.", no_args_is_help=True
)

FromOption = Annotated[
    Path | None,
    typer.Option(
        "--from", help="What was measured: a folder of foredraft bench, or a record of foredraft tune --json."
    ),
]
HandedDrafterOption = Annotated[
    str | None, typer.Option("--drafter", help="Which drafter; the default is the fastest of the record.")
]
TokensOption = Annotated[
    int | None, typer.Option("--draft-tokens", help="Tokens of a draft; the default is the best by the record.", min=1)
]
TensorOption = Annotated[int, typer.Option("--tensor-parallel", help="Devices that share each layer.")]
PipelineOption = Annotated[int, typer.Option("--pipeline-parallel", help="Groups of devices with some layers each.")]
DataOption = Annotated[int, typer.Option("--data-parallel", help="Copies of the model.")]
OutOption = Annotated[Path, typer.Option("--out", help="Folder to write into.")]


@handover_app.command()
def vllm(
    model: ModelArgument,
    source: FromOption = None,
    out: OutOption = Path("handover"),
    drafter: HandedDrafterOption = None,
    draft_tokens: TokensOption = None,
    tensor_parallel: TensorOption = 1,
    pipeline_parallel: PipelineOption = 1,
    data_parallel: DataOption = 1,
    gpu: Annotated[
        str | None, typer.Option(help="Name of the card, such as H100: gains are reckoned for it, as a bound.")
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(help="What forwards cost there: tune --json, or CSV of rows and ms; the default is the record's."),
    ] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes to reckon with, with commas between.")] = "1,2,4,8,16,32,64",
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Write the number of tokens by batch size, not one for all.")
    ] = False,
    vllm_version: Annotated[str, typer.Option(help="Of vLLM: 0.32 or 0.33.")] = "0.33",
    served_model: Annotated[
        str | None, typer.Option(help="What vLLM loads, if not MODEL: a folder or hub id of the same weights.")
    ] = None,
) -> None:
    """Write vLLM's speculative config, the command, a Kubernetes manifest, a Ray Serve app, and a page about them."""
    from foredraft.handover.check import Parallel
    from foredraft.handover.facts import facts_of
    from foredraft.handover.plan import planned
    from foredraft.handover.write import PAGE, write

    sizes = [number(int, text, "batch") for text in listed(batch)]
    parallel = Parallel(tensor_parallel, pipeline_parallel, data_parallel)
    with progress() as notify:
        record = _record(source, model)
        files = _files(model, always=gpu is not None)
        machine = _machine(record, costs, gpu, files, parallel)
        chosen = record.choose(drafter).drafter if record is not None else drafter
        plan = planned(
            served_model or _loadable(model, files, out, notify),
            record,
            drafter,
            name=model,
            machine=machine,
            batches=sizes,
            parallel=parallel,
            version=vllm_version,
            draft_tokens=draft_tokens,
            draft=_head(chosen, model, files, out),
            gpu=gpu,
            schedule=schedule,
        )
        plan.check(facts_of(plan.model))
        written = write(plan, out)
    for gain in plan.gains:
        tokens = f"{gain.draft_tokens} draft tokens" if gain.draft_tokens else "drafting does not pay"
        typer.echo(f"batch {gain.batch:>3}: {gain.gain:.2f}x expected, {tokens}")
    if plan.translation.stands_in is not None:
        typer.echo(f"Not the same: {plan.translation.stands_in}.", err=True)
    typer.echo(f"written: {out / PAGE} and {', '.join(path.name for path in written if path.name != PAGE)}")


@handover_app.command()
def sglang(
    model: ModelArgument,
    source: FromOption = None,
    out: OutOption = Path("handover"),
    drafter: HandedDrafterOption = None,
    draft_tokens: TokensOption = None,
    tensor_parallel: TensorOption = 1,
    pipeline_parallel: PipelineOption = 1,
    data_parallel: DataOption = 1,
) -> None:
    """Write the command that starts SGLang's server, and what of the drafter is not carried over."""
    _other("sglang", model, source, out, drafter, draft_tokens, (tensor_parallel, pipeline_parallel, data_parallel))


@handover_app.command(name="llama.cpp")
def llama_cpp(
    model: ModelArgument,
    source: FromOption = None,
    out: OutOption = Path("handover"),
    drafter: HandedDrafterOption = None,
    draft_tokens: TokensOption = None,
) -> None:
    """Write the command that starts llama.cpp's server, and what of the drafter is not carried over."""
    _other("llama.cpp", model, source, out, drafter, draft_tokens, (1, 1, 1))


def _other(
    engine: str,
    model: str,
    source: Path | None,
    out: Path,
    drafter: str | None,
    draft_tokens: int | None,
    sizes: tuple[int, int, int],
) -> None:
    from foredraft.handover.check import Parallel
    from foredraft.handover.others import llama_cpp, sglang
    from foredraft.handover.plan import planned, quoted
    from foredraft.handover.write import write_texts

    with progress() as notify:
        record, parallel = _record(source, model), Parallel(*sizes)
        files = _files(model)
        plan = planned(model, record, drafter, parallel=parallel, draft_tokens=draft_tokens)
        name = plan.translation.drafter
        if engine == "sglang":
            make, reference = sglang, _loadable(model, files, out, notify)
        else:
            make, reference = llama_cpp, str(files.path) if files is not None else model
        found = make(reference, name, plan.draft_tokens, parallel, _head(name, model, files, out))
        texts = {f"{engine}.md": found.page(), f"{engine}.sh": f"#!/bin/sh\nexec {quoted(found.command)}\n"}
        written = write_texts(texts, out)
    if found.stands_in is not None:
        typer.echo(f"Not the same: {found.stands_in}.", err=True)
    typer.echo(f"written: {' and '.join(map(str, written))}")


def _record(source: Path | None, model: str) -> Record | None:
    """What was measured; that it is of another model is said, as two names may mean the same one."""
    from foredraft.handover.measured import read_record

    if source is None:
        return None
    record = read_record(source)
    if record.model not in ("", model):
        typer.echo(f"Note: {record.origin} is of '{record.model}', and this is for '{model}'.", err=True)
    return record


def _files(model: str, always: bool = False) -> ModelFiles | None:
    """The model's files; `None` of a hub id, for which nothing is fetched unless it must be known."""
    from foredraft.handover.write import files_here
    from foredraft.loading import cache_folder
    from foredraft.models import resolve

    return resolve(model, cache_folder()) if always else files_here(model, cache_folder())


def _loadable(model: str, files: ModelFiles | None, out: Path, notify: Notify) -> str:
    from foredraft.handover.write import loadable

    return model if files is None else loadable(files, out / "model", notify)


def _head(drafter: str | None, model: str, files: ModelFiles | None, out: Path) -> str | None:
    """Where the head lies that the drafter does not name."""
    from foredraft.handover.write import own_head
    from foredraft.models import ModelFiles

    if drafter not in ("eagle3", "mtp"):
        return None
    return own_head(files or ModelFiles(model, Path(model)), drafter, out)


def _machine(
    record: Record | None, costs: Path | None, gpu: str | None, files: ModelFiles | None, parallel: Parallel
) -> Machine | None:
    """Where gains are reckoned for: the named card, the given curve, or the record's own machine."""
    from foredraft.bench.limits import reads_of
    from foredraft.bench.verify_curve import read_verify_curve
    from foredraft.costs import Costs
    from foredraft.handover.expected import card_machine, measured_machine
    from foredraft.loading import EngineChoice

    if gpu is not None:
        assert files is not None
        return card_machine(gpu, reads_of(files, EngineChoice()).parameters, parallel)
    if costs is not None:
        return measured_machine(Costs({1: read_verify_curve(costs)}), str(costs))
    if record is not None and record.costs is not None:
        return measured_machine(record.costs, record.origin)
    return None
