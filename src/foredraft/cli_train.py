"""`foredraft train-data`: text to train drafters on, written by the target itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.checks import require
from foredraft.cli_options import (
    BackendOption,
    DeviceOption,
    DtypeOption,
    KvOption,
    ModelArgument,
    ThreadsOption,
    WeightsOption,
    listed,
    number,
)
from foredraft.errors import InvalidInputError
from foredraft.terminal import counted, time_left

if TYPE_CHECKING:
    from foredraft.train.generation import Progress

_ELICITED = 1000  # prompts, if none are given
_EVERY = 16  # answers between two lines of progress where there is no terminal


def train_data(
    model: ModelArgument,
    out: Annotated[Path, typer.Option(help="Folder of the dialogues; one that was broken off is gone on with.")],
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help="A file of prompts (Spec-Bench, HumanEval, GSM8K, ShareGPT, chat JSONL, plain lines) or 'bundled'; "
            "repeatable."
        ),
    ] = None,
    elicit: Annotated[
        int | None,
        typer.Option(help=f"Let the model write so many prompts itself; the default, {_ELICITED}, without --prompts."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 384,
    temperatures: Annotated[
        str, typer.Option(help="Of the answers, in turn, with commas between; 0 is greedy decoding.")
    ] = "0,0.7,1",
    seed: Annotated[int, typer.Option(help="The same seed gives the same files.")] = 0,
    at_once: Annotated[int, typer.Option(help="Answers that share a forward.")] = 16,
    backend: BackendOption = "auto",
    weights: WeightsOption = "auto",
    threads: ThreadsOption = None,
    kv: KvOption = "f32",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
) -> None:
    """Let the model answer prompts, in batch: what drafters for it are trained on.

    Without prompts of yours the model writes them itself. Every 64 answers are kept as a file: a run that was broken
    off goes on when the same command is given again.
    """
    from foredraft.loading import EngineChoice, Loader
    from foredraft.train.dialogues import read_dialogues
    from foredraft.train.generation import Settings, generate_dialogues, target_key
    from foredraft.train.prompts import Elicit, read_prompts

    if prompts and elicit is not None:
        raise InvalidInputError("--prompts and --elicit are two ways to get prompts: leave one of them out.")
    heat = [number(float, text, "temperatures") for text in listed(temperatures)]
    settings = Settings(seed=seed, max_tokens=max_tokens, temperatures=tuple(heat))
    require("at_once", at_once, at_once >= 1, "an integer >= 1")
    wanted = Elicit(_ELICITED if elicit is None else elicit)
    engine = EngineChoice(backend, device, dtype, weights, threads, kv)
    with counted(_EVERY) as (notify, count), _saying_what_is_kept(out):

        def progress(step: Progress) -> None:
            count(step.items, step.total, "Answering", _line(step))

        target, tokenizer, files = Loader(None, engine, notify).model(model)
        asked = read_prompts(prompts, target, tokenizer, notify) if prompts else wanted
        notify("Answering")
        shards = generate_dialogues(
            target,
            tokenizer,
            asked,
            out,
            model=target_key(target, files),
            settings=settings,
            at_once=at_once,
            progress=progress,
        )
    made = read_dialogues(shards)
    tokens = sum(len(dialogue.answer) for dialogue in made)
    typer.echo(f"{out}: {len(made):,} dialogues with {tokens:,} tokens of answers")


def _line(step: Progress) -> str:
    speed = f", {step.tokens_per_second:.0f} tokens/s" if step.tokens else ""
    return f"{step.items} of {step.total} dialogues{speed}{time_left(step.seconds_left)}"


@contextmanager
def _saying_what_is_kept(folder: Path) -> Iterator[None]:
    """Whoever stops a run learns what of it is kept."""
    try:
        yield
    except KeyboardInterrupt:
        count = len(list(folder.glob("shard-*.jsonl")))
        kept = f"The files so far are kept ({count})" if count else "There was no whole file yet"
        typer.echo(f"\n{kept}: give the same command again to go on.", err=True)
        raise
