"""`foredraft train` and `train-data`: drafters for a model, and text to train them on, written by the model itself."""

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
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from foredraft.backends.base import Backend
    from foredraft.heads.files import Head
    from foredraft.models import Notify
    from foredraft.terminal import Count
    from foredraft.train.dialogues import Dialogue
    from foredraft.train.generation import Progress
    from foredraft.train.loop import Progress as TrainingProgress

_ELICITED = 1000  # prompts, if none are given
_KEPT = ("shard-*.jsonl", "features-*.safetensors", "checkpoint.pt")
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


def train(
    kind: Annotated[str, typer.Argument(help="eagle3, eagle, medusa, mtp or draft.")],
    model: ModelArgument,
    out: Annotated[Path, typer.Option(help="Folder of the run; one that was broken off is gone on with.")],
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Dialogues as foredraft train-data writes them, or the folder of such; repeatable."),
    ] = None,
    elicit: Annotated[
        int | None,
        typer.Option(help=f"Let the model write so many dialogues first; the default, {_ELICITED}, without --data."),
    ] = None,
    validate: Annotated[
        str | None,
        typer.Option(help="A file of prompts to measure accepted lengths on; the default keeps some dialogues for it."),
    ] = None,
    limit: Annotated[int, typer.Option(help="Prompts to validate on, spread over the file's categories.")] = 24,
    validate_every: Annotated[int, typer.Option(help="Steps between validations; 0 has one at the end.")] = 0,
    passes: Annotated[int, typer.Option(help="How often all text is seen.")] = 3,
    ahead: Annotated[int, typer.Option(help="Tokens ahead to train for: steps of training-time test, or heads.")] = 4,
    draft_vocab: Annotated[int, typer.Option(help="Tokens that can be drafted (not eagle, sequential mtp).")] = 8192,
    form: Annotated[str, typer.Option(help="For mtp: sequential, independent or cascaded.")] = "sequential",
    layers: Annotated[int, typer.Option(help="For draft: layers of the target to begin with; 0 takes a third.")] = 0,
    start: Annotated[
        str | None,
        typer.Option(
            help="What to begin with: a head of the same kind, trained before; for draft a smaller model of the same "
            "vocabulary."
        ),
    ] = None,
    loss: Annotated[str, typer.Option(help="For draft: forward-kl, reverse-kl or jsd.")] = "forward-kl",
    learning_rate: Annotated[float, typer.Option(help="The highest one.")] = 1e-3,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a batch.")] = 2048,
    accumulate: Annotated[int, typer.Option(help="Batches that make one step.")] = 1,
    window: Annotated[int, typer.Option(help="Longest piece of a dialogue.")] = 512,
    precision: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    seed: Annotated[int, typer.Option(help="The same seed gives the same drafter on the same machine.")] = 0,
    backend: BackendOption = "auto",
    weights: WeightsOption = "auto",
    threads: ThreadsOption = None,
    kv: KvOption = "f32",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
) -> None:
    """Train a drafter for the model: Medusa, MTP, EAGLE heads, or a smaller copy of itself.

    It learns from what the model itself writes. Whatever is stopped goes on when the same command is given again: text,
    features and training, to the same weights. The drafter lies in OUT/drafter; draft with it by --drafter
    KIND:OUT/drafter.
    """
    from foredraft.loading import EngineChoice, Loader
    from foredraft.train.generation import target_key
    from foredraft.train.loop import Schedule
    from foredraft.train.recipe import Recipe
    from foredraft.train.run import Text, train_drafter

    if data and elicit is not None:
        raise InvalidInputError("--data and --elicit are two ways to get text: leave one of them out.")
    schedule = Schedule(learning_rate=learning_rate, accumulate=accumulate, validate_every=validate_every)
    recipe = Recipe(
        kind=kind,
        passes=passes,
        batch_tokens=batch_tokens,
        window=window,
        ahead=ahead,
        draft_vocab=draft_vocab,
        form=form,
        layers=layers,
        loss=loss,
        precision=precision,
        seed=seed,
        schedule=schedule,
    )
    engine = EngineChoice(backend, device, dtype, weights, threads, kv)
    with counted(_EVERY) as (notify, count), _saying_what_is_kept(out / "text", out / "features", out):
        target, tokenizer, files = Loader(None, engine, notify).model(model)
        key = target_key(target, files)
        held_out = _held_out(validate, limit, target, tokenizer)
        beginning = _beginning(kind, start, target, device, notify) if start is not None else None
        dialogues = _dialogues(data, elicit, out / "text", key, target, tokenizer, seed, notify, count)
        trained = train_drafter(
            target,
            Text.of(dialogues, held_out),
            recipe,
            out,
            model=key,
            reference=files.reference,
            tokenizer=tokenizer,
            start=beginning,
            notify=notify,
            progress=lambda step: count(step.step, step.steps, "Training", _step_line(step)),
            count=lambda done, total: count(done, total, "Reading", f"{done} of {total} dialogues read"),
        )
    for name, value in trained.figures.items():
        typer.echo(f"mean accepted length, {name}: {value:.2f}")
    typer.echo(f"{trained.parameters / 1e6:.1f} M parameters, {trained.tokens:,} tokens seen")
    typer.echo(f"written: {trained.folder} (--drafter {kind}:{trained.folder})")


def _dialogues(
    data: list[Path] | None,
    elicit: int | None,
    folder: Path,
    key: str,
    target: Backend,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    notify: Notify,
    count: Count,
) -> list[Dialogue]:
    """Those of the files, or as many as the target is to write."""
    from foredraft.train.dialogues import read_dialogues
    from foredraft.train.generation import Settings, generate_dialogues
    from foredraft.train.prompts import Elicit

    if data:
        return read_dialogues(data, target.vocab_size)
    notify("Writing text to learn from")
    wanted = Elicit(_ELICITED if elicit is None else elicit)
    shards = generate_dialogues(
        target,
        tokenizer,
        wanted,
        folder,
        model=key,
        settings=Settings(seed=seed),
        progress=lambda step: count(step.items, step.total, "Answering", _line(step)),
    )
    return read_dialogues(shards)


def _beginning(kind: str, reference: str, target: Backend, device: str, notify: Notify) -> PreTrainedModel | Head:
    """A trained head, or what a draft model begins as, in float32."""
    from foredraft.backends.transformers import TransformersBackend
    from foredraft.loading import EngineChoice, Loader
    from foredraft.proposers.trained import head_of

    if kind != "draft":
        return head_of(kind, reference, target, notify)
    backend = Loader(None, EngineChoice("transformers", device, "float32"), notify).model(reference)[0]
    assert isinstance(backend, TransformersBackend)
    model: PreTrainedModel = backend.model
    return model


def _held_out(
    validate: str | None, limit: int, target: Backend, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[int, ...]] | None:
    """Prompts of a file to validate on, if there is one."""
    from foredraft.bench.workloads import load_workload
    from foredraft.train.prompts import prompts_of

    if validate is None:
        return None
    return prompts_of(load_workload(validate).spread(limit).items, target, tokenizer)


def _step_line(step: TrainingProgress) -> str:
    pace = f"{step.tokens_per_second:,.0f} tokens/s"
    return f"step {step.step} of {step.steps}, loss {step.losses['loss']:.3f}, {pace}{time_left(step.seconds_left)}"


def _line(step: Progress) -> str:
    speed = f", {step.tokens_per_second:.0f} tokens/s" if step.tokens else ""
    return f"{step.items} of {step.total} dialogues{speed}{time_left(step.seconds_left)}"


@contextmanager
def _saying_what_is_kept(*folders: Path) -> Iterator[None]:
    """Whoever stops a run learns what of it is kept: shards, features, a checkpoint."""
    try:
        yield
    except KeyboardInterrupt:
        count = sum(len(list(folder.glob(name))) for folder in folders for name in _KEPT)
        kept = f"The files so far are kept ({count})" if count else "There was no whole file yet"
        typer.echo(f"\n{kept}: give the same command again to go on.", err=True)
        raise
