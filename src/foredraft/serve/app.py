"""The routes of the server, in OpenAI's shape where OpenAI has them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from foredraft.serve import document
from foredraft.serve.answers import Answers, ChatAnswers, TextAnswers, fingerprint
from foredraft.serve.common import Page, application, record_of
from foredraft.serve.exchange import Exchange
from foredraft.serve.interfaces import Render, Worker
from foredraft.serve.logs import Recent
from foredraft.serve.orders import Order, OrderDesk
from foredraft.serve.problems import ApiError
from foredraft.serve.reading import read_body
from foredraft.serve.settings import ServerSettings
from foredraft.serve.token_texts import TokenTexts
from foredraft.serve.wire import ChatRequest, CompletionRequest, Sampling

_STUCK = 60.0  # seconds without a round while something runs: a forward takes far less

B = TypeVar("B", bound=Sampling)


@dataclass
class Server:
    """What the routes share."""

    worker: Worker
    settings: ServerSettings
    metrics: Render | None = None
    page: Page | None = None
    recent: Recent = field(default_factory=Recent)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.desk = OrderDesk(self.worker, self.settings)
        self.texts = TokenTexts(self.worker.model.tokenizer)
        self.fingerprint = fingerprint(self.settings.name, self.worker.model.backend.name)

    async def context(self) -> int | None:
        """Most tokens of a prompt and its answer."""
        return self.worker.model.backend.context

    def identity(self, prefix: str) -> dict[str, Any]:
        """What all objects of one answer have in common."""
        return {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": self.settings.name,
            "system_fingerprint": self.fingerprint,
        }


def create_app(
    worker: Worker, settings: ServerSettings, *, metrics: Render | None = None, page: Page | None = None
) -> FastAPI:
    """The application.

    Args:
        worker: Who answers; it must have been started.
        settings: Whom to let in, and what to take.
        metrics: Renders what is counted, for `/metrics`.
        page: For `/`.
    """
    server = Server(worker, settings, metrics, page)
    return application(server, router, "OpenAI-compatible serving with lossless speculative decoding.")


router = APIRouter()


@router.post(
    "/v1/chat/completions",
    openapi_extra=document.asked(ChatRequest),
    responses=document.answered(document.ChatCompletion, document.ChatCompletionChunk),
)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    return await _answer(request, ChatRequest, _server(request).desk.chat, ChatAnswers, "chatcmpl")


@router.post(
    "/v1/completions",
    openapi_extra=document.asked(CompletionRequest),
    responses=document.answered(document.TextCompletion, document.TextCompletion),
)
async def completions(request: Request) -> Response:
    """Continue texts."""
    return await _answer(request, CompletionRequest, _server(request).desk.completion, TextAnswers, "cmpl")


async def _answer(
    request: Request, model: type[B], order: Callable[..., Order], told: type[Answers], prefix: str
) -> Response:
    server, record = _server(request), record_of(request)
    body = await read_body(request, model)
    made = await run_in_threadpool(order, body, request.headers, _user(request, body))
    answers = told(made, server.identity(prefix), server.texts, server.desk.stop_tokens)
    exchange = Exchange(answers, record, server.settings)
    await exchange.submit(server.worker)
    return await exchange.respond(request)


@router.get(
    "/health",
    responses={
        **document.returned(document.Health),
        503: {"description": "Draining, restarting or stuck", "content": {"application/json": {}}},
    },
)
async def health(request: Request) -> Response:
    """Whether the server answers: 503 while it drains or restarts, and if its worker does not come back."""
    status = _server(request).worker.status()
    since = status.seconds_since_round
    state = "stuck" if status.state == "ready" and since is not None and since > _STUCK else status.state
    return JSONResponse({"state": state}, status_code=200 if state == "ready" else 503)


@router.get(
    "/metrics",
    responses=document.counted(401, 404),
)
async def metrics(request: Request) -> Response:
    """Tell what is counted."""
    render = _server(request).metrics
    if render is None:
        raise ApiError(404, "This server counts nothing.", code="not_found")
    body, content_type = render(request.headers.get("accept"))
    return Response(body, headers={"Content-Type": content_type})


@router.get(
    "/foredraft/status",
    responses={
        200: {"description": "For the page", "content": {"application/json": {"schema": {"type": "object"}}}},
        **document.errors(401),
    },
)
async def status(request: Request) -> Response:
    """Tell how the server is and what it did last, without any text of prompts or answers."""
    server = _server(request)
    worker = server.worker
    return JSONResponse(
        {
            "model": server.settings.name,
            "context": await server.context(),
            "backend": worker.model.backend.name,
            "default_drafter": worker.methods.default,
            "drafters": list(worker.methods.drafters),
            "rules": list(worker.methods.rules),
            "plain_tokens_per_second": worker.plain_tokens_per_second(),
            "status": worker.status()._asdict(),
            "limits": asdict(worker.limits),
            "recent": server.recent.listed(),
        }
    )


def _server(request: Request) -> Server:
    server: Server = request.app.state.host
    return server


def _user(request: Request, body: Sampling) -> str:
    """Who takes turns with others: a key, else who the client says it asks for, else where it asks from."""
    key = request.scope.get("foredraft_key")
    if key is not None:
        return f"key {key}"
    return body.user or (request.client.host if request.client is not None else "")
