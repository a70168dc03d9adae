"""What every application of ours has, whoever answers: routes, document, errors, bounds, keys, origins, and the log."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from foredraft import __version__
from foredraft.errors import ForedraftError
from foredraft.serve import document
from foredraft.serve.access import Keys
from foredraft.serve.logs import Recent, Record, logger
from foredraft.serve.middleware import Bounded, Guarded, Noted
from foredraft.serve.problems import ApiError, no_such_model, problem
from foredraft.serve.settings import ServerSettings


@dataclass(frozen=True)
class Page:
    """The page at `/`, and its Content-Security-Policy."""

    html: str
    policy: str


class Host(Protocol):
    """What the routes below ask; `app.state.host`."""

    settings: ServerSettings
    page: Page | None
    recent: Recent
    created: int

    async def context(self) -> int | None:
        """Most tokens of a prompt and its answer; `None` if it is not known."""
        ...


def application(host: Host, routes: APIRouter, description: str) -> FastAPI:
    """The application with these routes and the common ones."""
    app = FastAPI(
        title="foredraft",
        version=__version__,
        description=description,
        docs_url=None,  # these load scripts from elsewhere
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    app.state.host = host
    app.include_router(routes)
    app.include_router(router)
    settings = host.settings
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
    app.add_middleware(Noted, recent=host.recent)
    return app


def record_of(request: Request) -> Record:
    """Where a request is noted."""
    record: Record = request.scope["foredraft"]
    return record


router = APIRouter()


@router.get("/v1/models", responses=document.returned(document.ModelList, 401))
async def models(request: Request) -> Response:
    """List the one model that the server has."""
    return JSONResponse({"object": "list", "data": [await _card(_host(request))]})


@router.get("/v1/models/{name:path}", responses=document.returned(document.ModelCard, 401, 404))
async def one_model(request: Request, name: str) -> Response:
    """Show the model."""
    host = _host(request)
    if name != host.settings.name:
        raise no_such_model(name, host.settings.name)
    return JSONResponse(await _card(host))


async def _card(host: Host) -> dict[str, Any]:
    """The model, as clients list it."""
    return {
        "id": host.settings.name,
        "object": "model",
        "created": host.created,
        "owned_by": "foredraft",
        "max_model_len": await host.context(),
    }


@router.get("/version", responses=document.returned(document.Version, 401))
async def version(request: Request) -> Response:
    """Tell which foredraft this is."""
    return JSONResponse({"version": __version__})


@router.get("/", responses={200: {"description": "The page", "content": {"text/html": {}}}, **document.errors(404)})
async def page(request: Request) -> Response:
    """Show the page."""
    found = _host(request).page
    if found is None:
        raise ApiError(404, "This server has no page.", code="not_found")
    headers = {
        "Content-Security-Policy": found.policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return HTMLResponse(found.html, headers=headers)


def _host(request: Request) -> Host:
    host: Host = request.app.state.host
    return host


def _document(app: FastAPI, keys: bool) -> dict[str, Any]:
    if app.openapi_schema is None:
        app.openapi_schema = document.document(app, keys=keys)
    return app.openapi_schema


async def _failed(request: Request, error: Exception) -> Response:
    record = record_of(request)
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
