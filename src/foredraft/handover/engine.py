"""`foredraft serve --engine vllm`: from options to the command that starts vLLM, and its life behind our routes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.errors import UnsupportedError
from foredraft.handover.check import check_config, method_of
from foredraft.handover.edge import Drafting
from foredraft.handover.facts import draft_facts_of, facts_of
from foredraft.handover.keys import RULES
from foredraft.handover.plan import planned
from foredraft.handover.process import Supervised
from foredraft.handover.proxy import Front, create_proxy
from foredraft.handover.reading import read_config
from foredraft.handover.vllm import compact
from foredraft.handover.write import files_here, loadable
from foredraft.models import Notify, file_key
from foredraft.serve.run import serve

_STARTS = 3  # that end before vLLM answered, after which it is given up


@dataclass(frozen=True)
class Launch:
    """What vLLM is started with."""

    command: tuple[str, ...]
    url: str
    drafting: Drafting


def launch(
    model: str,
    name: str,
    *,
    config: str | None,
    drafter: str,
    draft_tokens: int | None,
    program: Sequence[str],
    more: Sequence[str],
    cache: Path,
    notify: Notify = lambda _: None,
) -> Launch:
    """The command for a model.

    Args:
        model: Reference of the target.
        name: What requests call it.
        config: What `--speculative-config` says, JSON or the file that holds it; `None` translates the drafter.
        drafter: foredraft's.
        draft_tokens: Of a draft; `None` takes a usual number.
        program: What starts vLLM, such as `["vllm"]`.
        more: Further arguments for it.
        cache: Folder of converted models.
        notify: Told what takes time.

    Raises:
        InvalidInputError: The configuration is wrong.
        UnsupportedError: Its head or draft model is for another target.
        ModelError: The model cannot be found or read.
    """
    reference = _loadable(model, cache, notify)
    if config is not None:
        given = read_config(config)
        check_config(given, target=facts_of(reference), draft=draft_facts_of(given))
        found: dict[str, Any] | None = given
        named = method_of(given)
    else:
        plan = planned(reference, None, drafter, draft_tokens=draft_tokens)
        plan.check(facts_of(reference))
        found, named = plan.config, drafter
    port = _free_port()
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", name]
    arguments += ["--enable-per-request-metrics", "--enable-prompt-tokens-details"]
    if found is not None:
        arguments += ["--speculative-config", compact(found), "--per-request-spec-decode-metrics", "summary"]
    return Launch(
        (*program, "serve", reference, *arguments, *more), f"http://127.0.0.1:{port}", _drafting(named, found)
    )


def run(front: Front, listener: socket.socket, *, grace: float, announce: Callable[[], None]) -> None:
    """Start vLLM, serve until a signal comes, and end both.

    Raises:
        UnsupportedError: vLLM does not start; the message says how it ended.
    """
    app = create_proxy(front)
    waiting: list[asyncio.Task[None]] = []

    async def wait() -> None:
        if await front.process.ready():
            announce()
        await front.process.given_up()
        os.kill(os.getpid(), signal.SIGTERM)  # as whoever stops it would

    def begin() -> None:
        front.process.begin()
        waiting.append(asyncio.get_running_loop().create_task(wait()))

    serve(app, front, listener, grace=grace, ready=begin)
    if front.process.state == "failed":
        raise UnsupportedError(
            f"vLLM does not run ({front.process.last_end}); what it printed says why. The command was: "
            f"{' '.join(front.process.command)}"
        )


def supervised(found: Launch) -> Supervised:
    """The process, not started yet."""
    return Supervised(found.command, found.url, stop_after=_STARTS)


def _drafting(drafter: str, config: dict[str, Any] | None) -> Drafting:
    if config is None:
        return Drafting(drafter, "")
    rule = RULES[config.get("rejection_sample_method") or "standard"]
    return Drafting(drafter, method_of(config), config.get("num_speculative_tokens"), rule)


def _loadable(model: str, cache: Path, notify: Notify) -> str:
    """The model as vLLM loads it; of a GGUF file a converted folder."""
    files = files_here(model, cache, notify)
    return model if files is None else loadable(files, cache / "converted" / file_key(files.path), notify)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
