"""The routes of the server, in OpenAI's shape where OpenAI has them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from foredraft import __version__
from foredraft.errors import ForedraftError
from foredraft.serve import document
from foredraft.serve.access import Keys
from foredraft.serve.answers import Answers, ChatAnswers, TextAnswers, fingerprint
from foredraft.serve.exchange import Exchange
from foredraft.serve.interfaces import Render, Worker
from foredraft.serve.logs import Recent, Record, logger
from foredraft.serve.middleware import Bounded, Guarded, Noted
from foredraft.serve.orders import Order, OrderDesk
from foredraft.serve.problems import ApiError, problem
from foredraft.serve.reading import read_body
from foredraft.serve.settings import ServerSettings
from foredraft.serve.token_texts import TokenTexts
from foredraft.serve.wire import ChatRequest, CompletionRequest, Sampling

_STUCK = 60.0  # seconds without a round while something runs: a forward takes far less
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"

B = TypeVar("B", bound=Sampling)


@dataclass(frozen=True)
class Page:
    """The page at `/`, and its Content-Security-Policy."""

    html: str
    policy: str = _POLICY


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

    @property
    def card(self) -> dict[str, Any]:
        """The model, as clients list it."""
        context = self.worker.model.backend.context
        name = self.settings.name
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "foredraft",
            "max_model_len": context,
        }

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
    app = FastAPI(
        title="foredraft",
        version=__version__,
        description="OpenAI-compatible serving with lossless speculative decoding.",
        docs_url=None,  # these load scripts from elsewhere
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    server = app.state.server = Server(worker, settings, metrics, page)
    app.include_router(router)
    app.openapi = partial(_document, app, bool(settings.api_keys))  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, _http_error)
    for kind in (ApiError, ForedraftError):  # all else is `Noted`'s
        app.add_exception_handler(kind, _failed)
    # The last one added is the first one passed.
    app.add_middleware(Bounded, limit=settings.max_body)
    app.add_middleware(Guarded, keys=Keys(settings.api_keys), open_metrics=settings.open_metrics)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(Noted, recent=server.recent)
    return app


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
    server, record = _server(request), _record(request)
    body = await read_body(request, model)
    made = await run_in_threadpool(order, body, request.headers, _user(request, body))
    answers = told(made, server.identity(prefix), server.texts, server.desk.stop_tokens)
    exchange = Exchange(answers, record, server.settings)
    await exchange.submit(server.worker)
    return await exchange.respond(request)


@router.get("/v1/models", responses=document.returned(document.ModelList, 401))
async def models(request: Request) -> Response:
    """List the one model that the server has."""
    return JSONResponse({"object": "list", "data": [_server(request).card]})


@router.get("/v1/models/{name:path}", responses=document.returned(document.ModelCard, 401, 404))
async def one_model(request: Request, name: str) -> Response:
    """Show the model."""
    card = _server(request).card
    if name != card["id"]:
        message = f"There is no model '{name[:80]}' here: this server has '{card['id']}'."
        raise ApiError(404, message, param="model", code="model_not_found")
    return JSONResponse(card)


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
    responses={
        200: {
            "description": "Counters as Prometheus reads them",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        },
        **document.errors(401, 404),
    },
)
async def metrics(request: Request) -> Response:
    """Tell what is counted."""
    render = _server(request).metrics
    if render is None:
        raise ApiError(404, "This server counts nothing.", code="not_found")
    body, content_type = render(request.headers.get("accept"))
    return Response(body, headers={"Content-Type": content_type})


@router.get("/version", responses=document.returned(document.Version, 401))
async def version(request: Request) -> Response:
    """Tell which foredraft this is."""
    return JSONResponse({"version": __version__})


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
            "context": worker.model.backend.context,
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


@router.get("/", responses={200: {"description": "The page", "content": {"text/html": {}}}, **document.errors(404)})
async def page(request: Request) -> Response:
    """Show the page."""
    found = _server(request).page
    if found is None:
        raise ApiError(404, "This server has no page.", code="not_found")
    headers = {
        "Content-Security-Policy": found.policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return HTMLResponse(found.html, headers=headers)


def _document(app: FastAPI, keys: bool) -> dict[str, Any]:
    if app.openapi_schema is None:
        app.openapi_schema = document.document(app, keys=keys)
    return app.openapi_schema


def _server(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


def _record(request: Request) -> Record:
    record: Record = request.scope["foredraft"]
    return record


def _user(request: Request, body: Sampling) -> str:
    """Who takes turns with others: a key, else who the client says it asks for, else where it asks from."""
    key = request.scope.get("foredraft_key")
    if key is not None:
        return f"key {key}"
    return body.user or (request.client.host if request.client is not None else "")


async def _failed(request: Request, error: Exception) -> Response:
    record = _record(request)
    found = problem(error, record.id)
    record.outcome = found.code
    if found.code == "internal":
        logger.error("request failed", exc_info=error, extra={"fields": {"id": record.id}})
    return JSONResponse(found.body, status_code=found.status, headers=found.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:80]
    told = {
        404: (f"There is nothing at {path}.", "not_found"),
        405: (f"{path} does not take {request.method}.", "method_not_allowed"),
    }
    message, code = told.get(error.status_code, (str(error.detail), "invalid_request"))
    return await _failed(request, ApiError(error.status_code, message, code=code, headers=error.headers))
