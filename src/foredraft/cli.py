"""The command line: parses, calls, prints. Whatever is slow to import is imported inside the commands."""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

from foredraft import __version__
from foredraft.checks import require
from foredraft.cli_bench import bench
from foredraft.cli_handover import handover_app
from foredraft.cli_options import (
    BackendOption,
    DeviceOption,
    DraftDeviceOption,
    DrafterOption,
    DraftThreadsOption,
    DraftTokensOption,
    DtypeOption,
    KvOption,
    ModelArgument,
    NoChatOption,
    PromptArgument,
    RuleOption,
    SpeculativeConfigOption,
    ThreadsOption,
    VerboseOption,
    WeightsOption,
    configured,
)
from foredraft.cli_report import report
from foredraft.cli_serve import serve
from foredraft.cli_theory import theory
from foredraft.cli_train import train, train_data
from foredraft.errors import ForedraftError, InvalidInputError
from foredraft.terminal import (
    SAME_TEXT,
    progress,
    show_certificate,
    show_explanation,
    show_figures,
    show_model,
    show_tuning,
    stream,
)
from foredraft.types import SamplingParams

if TYPE_CHECKING:
    from foredraft.api import Model
    from foredraft.models import Notify
    from foredraft.proof.verify import Certificate
    from foredraft.types import Completion

app = typer.Typer(
    help="Lossless speculative decoding: faster generation from the language model you already have.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(
    help="List the bundled models, fetch one, or show what a model is.", invoke_without_command=True
)
app.add_typer(models_app, name="models")
app.add_typer(handover_app, name="handover")
app.command()(bench)
app.command()(report)
app.command()(serve)
app.command()(theory)
app.command()(train)
app.command()(train_data)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. What a user can cause ends with one sentence and status 2."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of other libraries would break our own progress lines
    try:
        app(arguments, prog_name="foredraft")
    except ForedraftError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(Text(f"Error: {error}", style="red"))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has had enough
        sys.stderr.close()
        sys.exit(141)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"foredraft {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of the whole program."""


@app.command()
def generate(
    model: ModelArgument,
    prompt: PromptArgument,
    drafter: DrafterOption = "auto",
    draft_tokens: DraftTokensOption = None,
    speculative_config: SpeculativeConfigOption = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy decoding.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens that hold this much probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens less likely than this share of the likeliest.")] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1, makes every token seen so far less likely.")
    ] = 1.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Taken off a token's logit for each use in the answer.")
    ] = 0.0,
    presence_penalty: Annotated[float, typer.Option(help="Taken off once if the answer has the token.")] = 0.0,
    logit_bias: Annotated[
        list[str] | None, typer.Option(help="ID=VALUE: added to that token's logit; repeatable.")
    ] = None,
    bad_word: Annotated[list[str] | None, typer.Option(help="Never write this; repeatable.")] = None,
    min_tokens: Annotated[int, typer.Option(help="Do not end before this many tokens.")] = 0,
    logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: log-probabilities of each token and of the N likeliest, N up to 20."),
    ] = None,
    rule: RuleOption = None,
    lossy_typical: Annotated[
        bool, typer.Option("--lossy-typical", help="Accept whatever is likely enough. LOSSY: the text changes.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the random source; the same seed gives the same text.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    no_chat: NoChatOption = False,
    memory: Annotated[
        Path | None,
        typer.Option(
            help="Folder of what auto, suffix, recycling or a hybrid learned: read if there, written at the end."
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run plain decoding too, check that the text is the same, show both.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="With auto or ssd: show what was tried, what it cost and gained.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
    backend: BackendOption = "auto",
    weights: WeightsOption = "auto",
    threads: ThreadsOption = None,
    draft_threads: DraftThreadsOption = None,
    draft_device: DraftDeviceOption = None,
    kv: KvOption = "f32",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    color: Annotated[Literal["auto", "always", "never"], typer.Option(help="Colour the tokens by origin.")] = "auto",
    verbose: VerboseOption = False,
) -> None:
    """Generate text with speculative decoding: faster, and exactly what the model would have said anyway."""
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        logit_bias=_parse_bias(logit_bias or ()),
        bad_words=tuple(bad_word or ()),
        min_tokens=min_tokens,
        logprobs=logprobs,
        seed=seed,
        stop=tuple(stop or ()),
    )
    text = _read_prompt(prompt)
    drafter, draft_tokens, rule = configured(speculative_config, drafter, draft_tokens, rule)
    if explain and drafter.partition(":")[0] not in ("auto", "ssd", "saguaro"):
        raise InvalidInputError(
            f"--explain tells what auto or ssd decided, but the drafter is '{drafter}': leave one of them out."
        )
    chat = False if no_chat else None
    with progress() as notify:
        chosen = _parse_rule(rule, lossy_typical)
        options = {
            "draft_tokens": draft_tokens,
            "rule": chosen,
            **_engine(backend, weights, threads, kv, device, dtype, draft_threads, draft_device),
        }
        loaded = _load(model, drafter, notify, verbose=verbose, memory=memory, **options)
        if compare:
            notify("Warming up")
            for each in (loaded, loaded.plain()):
                # Not with the prompt itself: drafters that learn would know the answer's beginning.
                each.generate("Good morning.", SamplingParams(max_tokens=4, ignore_eos=True), chat=chat)
    out = Console(
        force_terminal={"auto": None, "always": True, "never": False}[color],
        no_color=True if color == "never" else None,
        highlight=False,
        soft_wrap=True,
    )
    with _memory_saved(loaded):
        completion = loaded.generate(text, params, chat=chat) if as_json else stream(loaded, text, params, chat, out)
        plain = None
        if compare:
            with progress() as notify:
                notify("Plain decoding, to compare")
                # The seed that was used, so that sampled runs can be repeated too.
                plain = loaded.plain().generate(text, completion.settings, chat=chat)
        if as_json:
            kept = {"memory": str(memory) if memory is not None else None}
            settings = {"model": model, "drafter": drafter, "chat": not no_chat, **kept, **options}
            report = _report(completion, plain, settings)
            if explain:
                report["explanation"] = _explained(loaded, completion)
            typer.echo(json.dumps(report, ensure_ascii=False))
        else:
            show_figures(out, completion, plain)
            if explain:
                _show_explained(out, loaded, completion)
    if plain is not None and plain.ids != completion.ids and completion.stats.rule in SAME_TEXT:
        raise typer.Exit(1)


@app.command()
def verify(
    model: ModelArgument,
    drafter: DrafterOption = "auto",
    draft_tokens: DraftTokensOption = None,
    rule: RuleOption = None,
    prompts: Annotated[Path | None, typer.Option(help="Your own prompts, one a line.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to compare for each prompt.")] = 48,
    samples: Annotated[int, typer.Option(help="Answers to draw in the sampled test; 0 leaves it out.")] = 300,
    out: Annotated[Path | None, typer.Option(help="Folder for certificate.json and certificate.html.")] = None,
    control: Annotated[
        str | None, typer.Option("--break", help="Make a known mistake; the proof must then fail. 'list' shows them.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Compare the greedy answers of an OpenAI-compatible server of the same model instead."),
    ] = None,
    backend: BackendOption = "auto",
    weights: WeightsOption = "auto",
    threads: ThreadsOption = None,
    draft_threads: DraftThreadsOption = None,
    draft_device: DraftDeviceOption = None,
    kv: KvOption = "f32",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    verbose: VerboseOption = False,
) -> None:
    """Prove that speculation changes nothing: enumerated laws, equal text, a sampled test, and a certificate.

    With --url a server's answers are compared with plain decoding here, and its acceptance and speed with those of
    --drafter, if that is given. The exit status is 1 if anything failed, as it must with --break.
    """
    from foredraft.proof import certificate as files
    from foredraft.proof.controls import CONTROLS
    from foredraft.proof.verify import PROMPTS
    from foredraft.proof.verify import verify as run

    if control == "list":
        for known in CONTROLS.values():
            typer.echo(f"{known.name:<18} {known.mistake}")
        return
    texts = list(PROMPTS) if prompts is None else _read_lines(prompts)
    with progress() as notify:
        options = {
            "draft_tokens": draft_tokens,
            "rule": rule,
            **_engine(backend, weights, threads, kv, device, dtype, draft_threads, draft_device),
        }
        if url is not None:
            result = _verify_served(model, url, drafter, control, texts, max_tokens, options, notify, verbose)
        else:
            loaded = _load(model, drafter, notify, verbose=verbose, **options)
            result = run(loaded, prompts=texts, max_tokens=max_tokens, samples=samples, control=control, notify=notify)
    console = Console(highlight=False)
    show_certificate(console, result)
    if out is not None:
        record, page = files.write(result, out)
        console.print(f"written: {record} and {page.name}", soft_wrap=True)
    if not result.passed:
        raise typer.Exit(1)


def _verify_served(
    model: str,
    url: str,
    drafter: str,
    control: str | None,
    texts: Sequence[str],
    max_tokens: int,
    options: dict[str, Any],
    notify: Notify,
    verbose: bool,
) -> Certificate:
    """The certificate of a server; `auto`, which drafts otherwise than any server, is no prediction for one."""
    from foredraft.handover.compare import verify_served

    if control is not None:
        raise InvalidInputError("--break makes mistakes in foredraft, not in a server: leave --url or --break out.")
    drafts = drafter.partition(":")[0] not in ("auto", "none")
    loaded = _load(model, drafter if drafts else "none", notify, verbose=verbose, **options)
    drafting = loaded if drafts else None
    return verify_served(loaded, url, drafting=drafting, prompts=texts, max_tokens=max_tokens, notify=notify)


@app.command()
def trace(
    model: ModelArgument,
    prompt: PromptArgument,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("trace.html"),
    drafter: DrafterOption = "auto",
    draft_tokens: DraftTokensOption = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 96,
    temperature: Annotated[float, typer.Option(help="0 is greedy decoding.")] = 0.0,
    rule: RuleOption = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random source.")] = None,
    no_chat: NoChatOption = False,
    backend: BackendOption = "auto",
    weights: WeightsOption = "auto",
    threads: ThreadsOption = None,
    draft_threads: DraftThreadsOption = None,
    draft_device: DraftDeviceOption = None,
    kv: KvOption = "f32",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    verbose: VerboseOption = False,
) -> None:
    """Write a page that shows each round: what was drafted, what the target made of it, and the text it gave."""
    from foredraft.pages import whole_file
    from foredraft.trace import record, render

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    text = _read_prompt(prompt)
    chosen = _parse_rule(rule, False)
    options = {
        "draft_tokens": draft_tokens,
        "rule": chosen,
        **_engine(backend, weights, threads, kv, device, dtype, draft_threads, draft_device),
    }
    with whole_file(out) as write, progress() as notify:
        loaded = _load(model, drafter, notify, verbose=verbose, **options)
        notify("Generating")
        shown = record(loaded, text, params, chat=False if no_chat else None, name=model)
        write(render(shown))
    stats = shown.completion.stats
    typer.echo(f"written: {out} ({stats.tokens} tokens in {stats.target_forwards} rounds)")


@app.command()
def tune(
    model: ModelArgument,
    prompts: Annotated[Path | None, typer.Option(help="Your own prompts, one a line.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    seconds: Annotated[float, typer.Option(help="Time for measuring forwards, prefill apart.")] = 20.0,
    plot: Annotated[Path | None, typer.Option(help="An SVG file to draw the curve into.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
    backend: BackendOption = "auto",
    weights: WeightsOption = "auto",
    threads: ThreadsOption = None,
    kv: KvOption = "f32",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    verbose: VerboseOption = False,
) -> None:
    """Measure what forwards cost here, keep it for later runs, and say which drafter pays on your texts."""
    from foredraft.calibration import keep
    from foredraft.curve_plot import draw
    from foredraft.loading import cache_folder
    from foredraft.pages import whole_file
    from foredraft.tune import PROMPTS
    from foredraft.tune import tune as run

    params = SamplingParams(max_tokens=max_tokens)
    require("seconds", seconds, 0 < seconds < math.inf, "a number > 0")
    texts = list(PROMPTS) if prompts is None else _read_lines(prompts)
    if not texts:
        raise InvalidInputError(f"{prompts} has no prompts: give one a line.")
    with whole_file(plot) if plot is not None else nullcontext() as write, progress() as notify:
        options = _engine(backend, weights, threads, kv, device, dtype)
        loaded = _load(model, "none", notify, verbose=verbose, **options)
        found = run(loaded, prompts=texts, params=params, seconds=seconds, notify=notify)
        file = keep(found.costs, cache_folder())
        if write is not None:
            write(draw(found.costs, f"{model}, backend {loaded.backend.name}"))
    kept = {"file": str(file) if file is not None else None}
    if as_json:
        typer.echo(json.dumps({"model": model, **found.to_dict(), **kept}, ensure_ascii=False))
        return
    console = Console(highlight=False)
    show_tuning(console, found)
    for where, what in ((file, "kept for later runs"), (plot, "written")):
        if where is not None:
            console.print(Text(f"{what}: {where}", style="dim"), soft_wrap=True)


@app.command()
def tune_skip(
    model: ModelArgument,
    texts: Annotated[
        Path, typer.Argument(help="A file of prompts like yours, one a line: the model answers them first.")
    ],
    out: Annotated[Path, typer.Option(help="Where to write the skip set.")] = Path("skip-set.json"),
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    steps: Annotated[int, typer.Option(help="Most sets to try.")] = 200,
    seconds: Annotated[float, typer.Option(help="Most time to search.")] = 300.0,
    backend: BackendOption = "auto",
    weights: WeightsOption = "auto",
    threads: ThreadsOption = None,
    kv: KvOption = "f32",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
) -> None:
    """Search which sublayers drafts can leave out, on your own text; for --drafter layer_skip:FILE."""
    prompts = _read_lines(texts)
    with progress() as notify:
        options = _engine(backend, weights, threads, kv, device, dtype)
        loaded = _load(model, "suffix", notify, verbose=False, **options)
        from foredraft.proposers.skip_search import search_skip_set

        notify("Answering the prompts")
        params = SamplingParams(max_tokens=max_tokens)
        ids = [loaded.encode(prompt) for prompt in prompts]
        answered = [[*prompt, *loaded.generate(prompt, params).ids] for prompt in ids]
        notify("Searching")
        found = search_skip_set(loaded.backend, answered, steps=steps, seconds=seconds, notify=notify)
    found.write(out)
    typer.echo(
        f"{out}: without attention {list(found.attention)} and MLP {list(found.mlp)} drafts read {found.share:.0%} of "
        f"the weights and agree on {found.agreement:.0%} of {found.tokens} tokens; expected {found.speedup:.2f}x"
    )
    if found.speedup < 1:
        typer.echo("Leaving out sublayers does not pay with this model: use another drafter, such as suffix.")


@models_app.callback()
def list_models(context: typer.Context) -> None:
    """List the bundled models; `pull` fetches one, `show` tells what a model is."""
    if context.invoked_subcommand is not None:
        return
    from foredraft.loading import cache_folder
    from foredraft.models import BUNDLED, bundled_path

    table = Table("name", "model", "licence", "size", "here", box=None, header_style="bold")
    for known in BUNDLED.values():
        here = bundled_path(known, cache_folder()).is_file()
        table.add_row(known.name, known.title, known.license, f"{known.size / 1e6:.0f} MB", "yes" if here else "no")
    Console().print(table)
    Console(stderr=True).print("\nFetch one: foredraft models pull NAME", style="dim", highlight=False)


@models_app.command()
def pull(name: Annotated[str, typer.Argument(help="A bundled model's name.")]) -> None:
    """Fetch a bundled model, check it, and print where it lies."""
    from foredraft.loading import cache_folder
    from foredraft.models import BUNDLED, fetch_bundled

    if name not in BUNDLED:
        raise InvalidInputError(f"There is no bundled model '{name}'; known: {', '.join(BUNDLED)}.")
    with progress() as notify:
        path = fetch_bundled(BUNDLED[name], cache_folder(), notify)
    typer.echo(path)


@models_app.command()
def show(
    model: ModelArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Show what a model is: architecture, types of its tensors, bytes read for a token, and what runs it."""
    from foredraft.inspection import inspect_model
    from foredraft.loading import cache_folder
    from foredraft.models import resolve

    with progress() as notify:
        facts = inspect_model(resolve(model, cache_folder(), notify))
    if as_json:
        typer.echo(json.dumps(facts.to_dict(), ensure_ascii=False))
    else:
        show_model(Console(highlight=False), facts)


def _explained(model: Model, completion: Completion) -> dict[str, Any]:
    """What the drafter decided, at the costs of the answer's end."""
    from foredraft.explanation import explain
    from foredraft.proposers.auto import Auto
    from foredraft.proposers.ssd import Ssd

    if isinstance(model.drafter, Auto):
        return explain(model.drafter, completion.stats, len(completion.ids)).to_dict()
    assert isinstance(model.drafter, Ssd)
    return {"ssd": model.drafter.explanation()}


def _show_explained(out: Console, model: Model, completion: Completion) -> None:
    from foredraft.explanation import explain
    from foredraft.proposers.auto import Auto
    from foredraft.proposers.ssd import Ssd

    if isinstance(model.drafter, Auto):
        show_explanation(out, explain(model.drafter, completion.stats, len(completion.ids)))
    elif isinstance(model.drafter, Ssd):
        console = out if out.is_terminal else Console(stderr=True, highlight=False)
        console.print(Text(f"\n{model.drafter.explanation()}"), soft_wrap=True)


def _read_prompt(prompt: str) -> str:
    """The prompt, or what standard input has if it is a dash."""
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"The prompt on standard input is not valid Unicode ({error.reason}).") from error
    if not text.strip():
        raise InvalidInputError("The prompt is empty: give some text.")
    return text


def _load(model: str, drafter: str, notify: Notify, *, verbose: bool, **options: Any) -> Model:
    from foredraft.api import load
    from foredraft.loading import parse_drafter

    parse_drafter(drafter)  # a wrong name is told before anything is loaded
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()  # type: ignore[no-untyped-call]
    set_verbosity_error()  # type: ignore[no-untyped-call]
    handler = RichHandler(console=Console(stderr=True), show_path=False, show_time=False)
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s", handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)
    return load(model, drafter, notify=notify, **options)


@contextmanager
def _memory_saved(model: Model) -> Iterator[None]:
    """Save what was learned, if there is a memory: last of all, and also when the user has had enough."""
    enough: BaseException | None = None
    try:
        yield
    except (KeyboardInterrupt, BrokenPipeError) as error:
        enough = error
    if model.memory is not None:
        model.save_memory()
    if enough is not None:
        raise enough


def _engine(
    backend: str,
    weights: str,
    threads: int | None,
    kv: str,
    device: str,
    dtype: str,
    draft_threads: int | None = None,
    draft_device: str | None = None,
) -> dict[str, Any]:
    """The options that say what runs the models, by `load`'s names."""
    names = ("backend", "weights", "threads", "kv", "device", "dtype", "draft_threads", "draft_device")
    return dict(zip(names, (backend, weights, threads, kv, device, dtype, draft_threads, draft_device), strict=True))


def _parse_bias(pairs: Sequence[str]) -> dict[int, float]:
    bias = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise InvalidInputError(f"logit-bias is '{pair}', but must be ID=VALUE, such as 314=-5.") from None
    return bias


def _parse_rule(rule: str | None, lossy_typical: bool) -> str | None:
    from foredraft.acceptance import RULES

    if lossy_typical:
        if rule is not None:
            raise InvalidInputError(f"--lossy-typical is a rule of its own: leave --rule {rule} out.")
        return "lossy-typical"
    if rule is not None and rule in RULES and RULES[rule].lossy:
        raise InvalidInputError(f"Rule '{rule}' changes the text: ask for it by --{rule}.")
    return rule


def _read_lines(file: Path) -> list[str]:
    """The lines of a text file that say something."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"Cannot read {file} ({error}): give a text file.") from error
    return [line for line in text.splitlines() if line.strip()]


def _report(completion: Completion, plain: Completion | None, settings: dict[str, Any]) -> dict[str, Any]:
    """The JSON object of `--json`."""
    report = {
        "text": completion.text,
        "ids": completion.ids,
        "finish_reason": completion.finish_reason,
        "settings": {**settings, **vars(completion.settings)},
        "versions": {
            "foredraft": __version__,
            "python": platform.python_version(),
            **{package: version(package) for package in ("torch", "transformers")},
        },
        "stats": completion.stats.to_dict(),
        "warnings": completion.warnings,
        "logprobs": completion.logprobs,
    }
    if plain is not None:
        report["compare"] = {"identical": plain.ids == completion.ids, "ids": plain.ids, "stats": plain.stats.to_dict()}
    return report
