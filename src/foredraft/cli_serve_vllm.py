"""`foredraft serve --engine vllm`: the same API, answered by a vLLM that is started for it."""

from __future__ import annotations

import shlex
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import typer

from foredraft.errors import InvalidInputError, UnsupportedError
from foredraft.terminal import progress

if TYPE_CHECKING:
    from foredraft.serve.asks import Limits
    from foredraft.serve.settings import ServerSettings


class Answering(NamedTuple):
    """What is started, and what drafts there."""

    program: str
    arguments: str
    drafter: str
    config: str | None


def serve_with_vllm(
    model: str, answering: Answering, settings: ServerSettings, limits: Limits, address: tuple[str, int], grace: float
) -> None:
    """Start vLLM and serve until a signal comes.

    Raises:
        InvalidInputError: Options that do not go together, or a wrong configuration.
        UnsupportedError: vLLM does not start, or httpx is missing.
    """
    if find_spec("httpx") is None:
        raise UnsupportedError('--engine vllm needs httpx, which is not installed: pip install "foredraft[serve]"')
    from foredraft.handover.engine import launch, run, supervised
    from foredraft.handover.proxy import Front
    from foredraft.loading import cache_folder
    from foredraft.serve.common import Page
    from foredraft.serve.page import page, policy
    from foredraft.serve.run import address as shown
    from foredraft.serve.run import bind, is_local

    if answering.config is not None and answering.drafter != "auto":
        raise InvalidInputError("--speculative-config says what drafts, and how: leave --drafter out.")
    listener = bind(*address)
    with progress() as notify:
        found = launch(
            model,
            settings.name,
            config=answering.config,
            drafter="none" if answering.drafter == "auto" else answering.drafter,
            draft_tokens=None,
            program=shlex.split(answering.program),
            more=shlex.split(answering.arguments),
            cache=cache_folder(),
            notify=notify,
        )
        notify("Starting vLLM")
    drafting = found.drafting

    def announce() -> None:
        how = f"{drafting.drafter} (method {drafting.method})" if not drafting.plain else "none"
        typer.echo(f"Serving {settings.name} at {shown(listener)} (engine vLLM, drafter {how})", err=True)
        if not is_local(listener) and not settings.api_keys:
            typer.echo(
                "Warning: other machines can connect, and no API key is asked for: see --api-key-file.", err=True
            )
        typer.echo(f"Stop with Ctrl+C: running requests then have {grace:g} s to finish.", err=True)

    front = Front(supervised(found), drafting, settings, limits, Page(page(), policy()))
    run(front, listener, grace=grace, announce=announce)
