"""The OpenAPI document: bodies and answers of all routes, error answers included."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import models_json_schema

from foredraft.serve.wire import ChatRequest, CompletionRequest

_REFERENCE = "#/components/schemas/{model}"
_ERRORS = {
    400: "Something in the request is not right; `param` names it",
    401: "No API key that the server knows",
    404: "There is no such model or path",
    408: "The body does not come",
    413: "The body is too large",
    500: "Something went wrong here",
    503: "Too many are waiting, or the server is shutting down",
    504: "It took longer than it may",
}
_STEERING = {
    "X-Foredraft-Drafter": {"type": "string"},
    "X-Foredraft-Budget": {"type": "string", "pattern": "^(off|[0-9]|[1-5][0-9]|6[0-4])$"},
    "X-Foredraft-Rule": {"type": "string"},
}
"""Headers that say what `foredraft` in the body says, which comes first."""


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """An error in OpenAI's shape."""

    error: ErrorDetail


class Speculation(BaseModel):
    """What speculation did for this request: counts of all its answers, times of the whole request."""

    drafter: str | None
    rule: str | None
    backend: str | None
    target_forwards: int
    draft_forwards: int
    drafted: int
    accepted: int
    acceptance_rate: float | None
    mean_accepted_length: float | None
    queue_ms: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    seconds: float
    tokens_per_second: float | None


class PromptDetails(BaseModel):
    """Of the prompt."""

    cached_tokens: int = Field(description="Read for an earlier request already.")


class Usage(BaseModel):
    """Tokens and figures."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    foredraft: Speculation


class _Answer(BaseModel):
    model_config = ConfigDict(extra="allow")

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[dict[str, Any]]


class ChatCompletion(_Answer):
    """An answer to a chat request."""

    object: Literal["chat.completion"]
    usage: Usage


class ChatCompletionChunk(_Answer):
    """An event of a streamed answer; the last event is `[DONE]`."""

    object: Literal["chat.completion.chunk"]
    usage: Usage | None = None
    foredraft: dict[str, Any] | None = None


class TextCompletion(_Answer):
    """An answer to a completion request, and an event of its stream."""

    object: Literal["text_completion"]
    usage: Usage | None = None
    foredraft: dict[str, Any] | None = None


class ModelCard(BaseModel):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None = Field(description="Tokens of prompt and answer together.")


class ModelList(BaseModel):
    """All models of the server."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(BaseModel):
    """Whether the server answers."""

    state: str


class Version(BaseModel):
    """Of foredraft."""

    version: str


_MODELS: tuple[type[BaseModel], ...] = (
    ChatRequest,
    CompletionRequest,
    ErrorBody,
    ChatCompletion,
    ChatCompletionChunk,
    TextCompletion,
    ModelList,
    ModelCard,
    Health,
    Version,
)


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route."""
    return {status: {"description": _ERRORS[status], "content": _json(ErrorBody)} for status in statuses}


def answered(whole: type[BaseModel], chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The answers of a route that can stream."""
    content = {**_json(whole), "text/event-stream": {"schema": _reference(chunk)}}
    return {200: {"description": "The answer, or its stream", "content": content}, **errors(*_ERRORS)}


def returned(model: type[BaseModel], *statuses: int) -> dict[int | str, dict[str, Any]]:
    """The answers of a route that returns one object."""
    return {200: {"description": model.__doc__ or "", "content": _json(model)}, **errors(*statuses)}


def counted(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The answers of `/metrics`."""
    content = {"text/plain": {"schema": {"type": "string"}}}
    return {200: {"description": "Counters as Prometheus reads them", "content": content}, **errors(*statuses)}


def asked(model: type[BaseModel]) -> dict[str, Any]:
    """The body and the headers of a route."""
    headers = [
        {"name": name, "in": "header", "required": False, "schema": schema} for name, schema in _STEERING.items()
    ]
    return {"requestBody": {"required": True, "content": _json(model)}, "parameters": headers}


def document(app: FastAPI, *, keys: bool) -> dict[str, Any]:
    """The whole document, with the models that routes only refer to."""
    made: dict[str, Any] = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    _, schemas = models_json_schema([(model, "validation") for model in _MODELS], ref_template=_REFERENCE)
    components = made.setdefault("components", {})
    components["schemas"] = {**components.get("schemas", {}), **schemas["$defs"]}
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{"key": []}]
    return made


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=model.__name__)}


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": _reference(model)}}
