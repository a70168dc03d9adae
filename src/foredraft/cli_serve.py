"""`foredraft serve`: a model over HTTP."""

from __future__ import annotations

import logging
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from foredraft.checks import require
from foredraft.cli_options import (
    BackendOption,
    DeviceOption,
    DraftDeviceOption,
    DrafterOption,
    DraftThreadsOption,
    DtypeOption,
    KvOption,
    ModelArgument,
    RuleOption,
    SpeculativeConfigOption,
    ThreadsOption,
    VerboseOption,
    WeightsOption,
    configured,
    listed,
)
from foredraft.errors import InvalidInputError, UnsupportedError
from foredraft.terminal import progress

if TYPE_CHECKING:
    from socket import socket

    from foredraft.serve.asks import Limits
    from foredraft.serve.logs import LogFormat
    from foredraft.serve.methods import Methods
    from foredraft.serve.settings import ServerSettings

_ADDRESS, _DRAFTING, _LIMITS, _ACCESS, _LOG, _ENGINE = (
    "Address",
    "Drafting",
    "Limits",
    "Access",
    "Log",
    "Engine",
)
_VLLM = "vllm"
_RUNS = ("backend", "weights", "device", "dtype")
_PACKAGES = ("fastapi", "uvicorn", "sse_starlette", "prometheus_client", "llguidance")


def serve(
    model: ModelArgument,
    host: Annotated[
        str, typer.Option(help="Address to serve at; 0.0.0.0 is all of this machine.", rich_help_panel=_ADDRESS)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535, rich_help_panel=_ADDRESS)
    ] = 8000,
    served_name: Annotated[
        str | None,
        typer.Option(help="What the model is called in requests; the default is MODEL.", rich_help_panel=_ADDRESS),
    ] = None,
    drafter: DrafterOption = "auto",
    drafters: Annotated[
        str | None,
        typer.Option(
            help="Others that requests may choose, with commas between; the default is those that need nothing.",
            rich_help_panel=_DRAFTING,
        ),
    ] = None,
    rule: RuleOption = None,
    speculative_config: SpeculativeConfigOption = None,
    memory: Annotated[
        Path | None,
        typer.Option(
            help="Folder of what the drafter learned: read if there, written at the end.", rich_help_panel=_DRAFTING
        ),
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Most answers at once.", rich_help_panel=_LIMITS)] = 16,
    nodes: Annotated[
        int, typer.Option(help="Most drafted tokens of one forward, of all answers.", rich_help_panel=_LIMITS)
    ] = 64,
    prefill: Annotated[
        int, typer.Option(help="Most prompt tokens read between two rounds.", rich_help_panel=_LIMITS)
    ] = 128,
    kv_memory: Annotated[
        float | None,
        typer.Option(
            help="Most memory for keys and values, in GB; the default is half of what is free.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    max_queue: Annotated[int, typer.Option(help="Most requests that wait.", rich_help_panel=_LIMITS)] = 256,
    max_tokens: Annotated[
        int, typer.Option(help="Most tokens of answers whose requests name no limit.", rich_help_panel=_LIMITS)
    ] = 2048,
    max_body: Annotated[int, typer.Option(help="Most bytes of a request.", rich_help_panel=_LIMITS)] = 4 * 2**20,
    timeout: Annotated[
        float, typer.Option(help="Seconds that a request may take, waiting included.", rich_help_panel=_LIMITS)
    ] = 600.0,
    grace: Annotated[
        float, typer.Option(help="Seconds that running requests have to finish at the end.", rich_help_panel=_LIMITS)
    ] = 30.0,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Let in only who sends this key; repeatable. Others can see it: a file is better.",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with such keys, one a line.", rich_help_panel=_ACCESS)
    ] = None,
    open_metrics: Annotated[
        bool, typer.Option("--open-metrics", help="/metrics needs no key.", rich_help_panel=_ACCESS)
    ] = False,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Pages from there may ask, such as https://example.org; repeatable.", rich_help_panel=_ACCESS
        ),
    ] = None,
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="Lines for people, or JSON.", rich_help_panel=_LOG)
    ] = "text",
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Log what is asked and answered.", rich_help_panel=_LOG)
    ] = False,
    verbose: VerboseOption = False,
    engine: Annotated[
        Literal["foredraft", "vllm"],
        typer.Option(
            help="What answers: foredraft, or a vLLM that is started behind the same API.", rich_help_panel=_ENGINE
        ),
    ] = "foredraft",
    vllm: Annotated[
        str,
        typer.Option(help="With --engine vllm: the program, and arguments before 'serve'.", rich_help_panel=_ENGINE),
    ] = _VLLM,
    vllm_args: Annotated[
        str, typer.Option(help="With --engine vllm: further arguments for it, as in a shell.", rich_help_panel=_ENGINE)
    ] = "",
    backend: BackendOption = "auto",
    weights: WeightsOption = "auto",
    threads: ThreadsOption = None,
    draft_threads: DraftThreadsOption = None,
    draft_device: DraftDeviceOption = None,
    kv: KvOption = "f32",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
) -> None:
    """Serve a model over HTTP, as OpenAI's clients expect it, with speculative decoding and a page to watch it."""
    _require_packages()
    from foredraft.serve.access import read_keys
    from foredraft.serve.asks import Limits
    from foredraft.serve.run import bind
    from foredraft.serve.settings import ServerSettings

    require("grace", grace, grace >= 0, "a number of seconds >= 0")
    require("kv-memory", kv_memory, kv_memory is None or kv_memory > 0, "a number of GB > 0")
    limits = Limits(
        sequences=max_batch,
        nodes=nodes,
        prefill=prefill,
        kv_bytes=None if kv_memory is None else int(kv_memory * 1e9),
        waiting=max_queue,
        timeout=timeout,
    )
    settings = ServerSettings(
        name=served_name if served_name is not None else model,
        max_tokens=max_tokens,
        max_body=max_body,
        api_keys=read_keys(api_key or (), api_key_file),
        open_metrics=open_metrics,
        cors_origins=tuple(cors_origin or ()),
        log_prompts=log_prompts,
    )
    _log(log_format, verbose)
    ours = {
        "--drafters": drafters is not None,
        "--memory": memory is not None,
        "--nodes": nodes != Limits.nodes,
        "--prefill": prefill != Limits.prefill,
        "--kv-memory": kv_memory is not None,
        "--rule": rule is not None,
        "--threads": threads is not None,
        **{f"--{name}": value != "auto" for name, value in zip(_RUNS, (backend, weights, device, dtype), strict=True)},
        "--kv": kv != "f32",
        "--draft-threads": draft_threads is not None,
        "--draft-device": draft_device is not None,
    }
    if engine == "vllm":
        from foredraft.cli_serve_vllm import Answering, serve_with_vllm

        given = next((name for name, said in ours.items() if said), None)
        if given is not None:
            raise InvalidInputError(
                f"{given} is of foredraft's own engine: leave it out, or say it to vLLM (--vllm-args)."
            )
        answering = Answering(vllm, vllm_args, drafter, speculative_config)
        serve_with_vllm(model, answering, settings, limits, (host, port), grace)
        return
    if vllm_args or vllm != _VLLM:
        raise InvalidInputError("--vllm and --vllm-args are for --engine vllm: leave them out, or say that too.")
    drafter, draft_tokens, rule = configured(speculative_config, drafter, None, rule)
    with bind(host, port) as listener:  # a port in use is told before anything is loaded
        with progress() as notify:
            from foredraft.loading import EngineChoice, Loader
            from foredraft.serve.methods import Methods

            choice = EngineChoice(backend, device, dtype, weights, threads, kv, draft_threads, draft_device)
            loader = Loader(None, choice, notify)
            others = listed(drafters) if drafters is not None else None
            methods = Methods(
                loader,
                model,
                default=drafter,
                others=others,
                rule=rule,
                memory=memory,
                draft_tokens=draft_tokens,
            )
            notify("Warming up")
            _warm_up(methods)
        _run(methods, limits, settings, listener, grace)


def _run(methods: Methods, limits: Limits, settings: ServerSettings, listener: socket, grace: float) -> None:
    """Serve until a signal comes, and keep what was learned."""
    from foredraft.serve.app import create_app
    from foredraft.serve.common import Page
    from foredraft.serve.metrics import Metrics
    from foredraft.serve.page import page, policy
    from foredraft.serve.run import address, is_local, serve
    from foredraft.serve.worker import Worker

    def announce() -> None:
        echo = partial(typer.echo, err=True)
        limit, keys = worker.status().kv_limit, len(settings.api_keys)
        echo(f"Serving {settings.name} at {address(listener)} (backend {methods.model.backend.name})")
        echo(f"Drafter {methods.default}; requests may choose {', '.join(methods.drafters)}.")
        echo(f"Up to {limits.sequences} answers at once; keys and values may take {limit / 1e9:.2f} GB.")
        if not is_local(listener) and not keys:
            echo("Warning: other machines can connect, and no API key is asked for: see --api-key-file.")
        echo(f"Stop with Ctrl+C: running requests then have {grace:g} s to finish, a second Ctrl+C stops at once.")

    worker: Worker  # tells the metrics what happens, and they ask it how it is
    metrics = Metrics(
        lambda: worker.status(),
        lambda: worker.plain_tokens_per_second(),
        model=settings.name,
        backend=methods.model.backend.name,
    )
    worker = Worker(methods, limits, metrics)
    worker.start()
    try:
        app = create_app(worker, settings, metrics=metrics.render, page=Page(page(), policy()))
        serve(app, worker, listener, grace=grace, ready=announce)
    finally:
        worker.close()
        methods.save_memory()


def _warm_up(methods: Methods) -> None:
    """A short answer by each drafter, so that no request waits for what is compiled or allocated once."""
    from foredraft.engine import Engine
    from foredraft.generation import Request
    from foredraft.types import SamplingParams

    prompt = methods.model.encode("Good morning, good morning.", chat=False)
    for name in methods.drafters:
        setup = methods.setup(name)
        engine = Engine(setup.backend, setup.drafter, tokenizer=setup.tokenizer, costs=setup.costs)
        for _ in engine.run([Request(prompt, SamplingParams(max_tokens=8, temperature=1.0, seed=0, ignore_eos=True))]):
            pass


def _log(log_format: LogFormat, verbose: bool) -> None:
    """Lines on standard error, of requests and of what goes wrong."""
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    from foredraft.serve.logs import FORMATTERS

    disable_progress_bar()  # type: ignore[no-untyped-call]
    set_verbosity_error()  # type: ignore[no-untyped-call]
    handler = logging.StreamHandler()
    handler.setFormatter(FORMATTERS[log_format]())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("foredraft").setLevel(logging.INFO if verbose else logging.WARNING)
    logging.getLogger("foredraft.serve").setLevel(logging.DEBUG if verbose else logging.INFO)


def _require_packages() -> None:
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"The server needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            'pip install "foredraft[serve]"'
        )
