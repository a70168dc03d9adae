"""The application in front of vLLM: the routes of `foredraft serve`, answered by vLLM."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass, field

import httpx
from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from foredraft.bench.peers.prometheus import parse_metrics
from foredraft.handover.counts import Counts
from foredraft.handover.edge import Drafting, body_for
from foredraft.handover.process import Supervised
from foredraft.handover.relay import Relay
from foredraft.serve import document
from foredraft.serve.asks import DrainingError, Limits, QueueFullError, Refusal
from foredraft.serve.common import Page, application, record_of
from foredraft.serve.logs import Recent
from foredraft.serve.orders import steered
from foredraft.serve.problems import bad, problem
from foredraft.serve.reading import read_body
from foredraft.serve.settings import ServerSettings
from foredraft.serve.wire import ChatRequest, CompletionRequest

_PATIENCE = 5.0  # seconds for what vLLM answers at once
_LOOK = 0.1  # seconds between two looks at what still runs


@dataclass
class Front:
    """What the routes share.

    Args:
        process: vLLM.
        drafting: How it drafts.
        settings: Whom to let in, and what to take.
        limits: `sequences` and `waiting` together are the most requests at once, `timeout` the longest.
        page: For `/`.
    """

    process: Supervised
    drafting: Drafting
    settings: ServerSettings
    limits: Limits = field(default_factory=Limits)
    page: Page | None = None
    recent: Recent = field(default_factory=Recent)
    created: int = field(default_factory=lambda: int(time.time()))
    running: int = 0

    def __post_init__(self) -> None:
        self.counts = Counts(self.settings.name, self.drafting)
        self.client = httpx.AsyncClient(
            base_url=self.process.url,
            timeout=httpx.Timeout(None, connect=_PATIENCE),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=16),
        )

    async def drain(self, seconds: float) -> None:
        """Take no more; return when all have ended. What still runs after so many seconds is broken off with vLLM."""
        self.process.drain()
        until = time.monotonic() + seconds
        while self.running and time.monotonic() < until:
            await asyncio.sleep(_LOOK)
        await self.client.aclose()
        await self.process.close()

    def ended(self, outcome: str | None) -> None:
        """A request that was admitted has ended."""
        self.running -= 1
        self.counts.outcomes[outcome or "cancelled"] += 1

    async def told(self, path: str) -> str:
        """A page of vLLM's; empty if it does not answer."""
        try:
            response = await self.client.get(path, timeout=_PATIENCE)
            return response.text if response.status_code == 200 else ""
        except (httpx.HTTPError, RuntimeError):  # the latter of a closed client
            return ""

    async def context(self) -> int | None:
        """Most tokens of a prompt and its answer, as vLLM says; `None` while it does not answer."""
        try:
            response = await self.client.get("/v1/models", timeout=_PATIENCE)
            found = response.json()["data"][0].get("max_model_len")
            return int(found) if found is not None else None
        except (httpx.HTTPError, RuntimeError, ValueError, LookupError, TypeError, AttributeError):
            return None

    def admit(self) -> None:
        """Refuse a request that cannot be taken now.

        Raises:
            Refusal: vLLM is not there, or too many wait.
        """
        state = self.process.state
        if state == "draining":
            raise DrainingError("The server is shutting down: ask again when another one runs.")
        if state != "ready":
            refusal = Refusal(f"vLLM is {state}: ask again in a moment.")
            refusal.retry_after = 5
            raise refusal
        most = self.limits.sequences + self.limits.waiting
        if self.running >= most:
            raise QueueFullError(f"{most} requests run or wait, which is the most here: ask again in a moment.")


def create_proxy(front: Front) -> FastAPI:
    """The application."""
    return application(front, router, "OpenAI-compatible serving with lossless speculative decoding, by vLLM.")


router = APIRouter()


@router.post(
    "/v1/chat/completions",
    openapi_extra=document.asked(ChatRequest),
    responses=document.answered(document.ChatCompletion, document.ChatCompletionChunk),
)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    return await _answer(request, ChatRequest)


@router.post(
    "/v1/completions",
    openapi_extra=document.asked(CompletionRequest),
    responses=document.answered(document.TextCompletion, document.TextCompletion),
)
async def completions(request: Request) -> Response:
    """Continue texts."""
    return await _answer(request, CompletionRequest)


async def _answer(request: Request, model: type[ChatRequest] | type[CompletionRequest]) -> Response:
    front, record = _front(request), record_of(request)
    body = await read_body(request, model)
    steering = steered(body.foredraft, request.headers)
    asked, most = steering.timeout, front.limits.timeout
    if asked is not None and asked > most:
        raise bad("foredraft.timeout", f"foredraft.timeout is {asked:g} s, but the server allows at most {most:g} s.")
    sent = body_for(body, front.settings, front.drafting, steering)
    front.admit()
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    relay = Relay(
        front.client,
        request.url.path,
        sent,
        record,
        front.settings,
        front.drafting,
        include_usage=usage,
        timeout=asked if asked is not None else most,
        ended=front.ended,
    )
    front.running += 1
    try:
        return await relay.respond(request)
    except BaseException as error:
        front.ended(problem(error, record.id).code if isinstance(error, Exception) else "cancelled")
        raise


@router.get("/health", responses=document.returned(document.Health))
async def health(request: Request) -> Response:
    """Whether vLLM answers: 503 while it starts, restarts or drains."""
    state = _front(request).process.state
    return JSONResponse({"state": state}, status_code=200 if state == "ready" else 503)


@router.get("/metrics", responses=document.counted(401))
async def metrics(request: Request) -> Response:
    """Tell what is counted: by foredraft's names, then vLLM's own."""
    front = _front(request)
    text, process = await front.told("/metrics"), front.process
    body, kind = front.counts.render(text, process.state, process.restarts, request.headers.get("accept"))
    return Response(body, headers={"Content-Type": kind})


@router.get("/foredraft/status", responses=document.errors(401))
async def status(request: Request) -> Response:
    """Tell how the server is and what it did last. What vLLM does not tell is `null`."""
    front = _front(request)
    found, drafting = parse_metrics(await front.told("/metrics")), front.drafting

    def count(name: str) -> int | None:
        return int(found[name]) if name in found else None

    now = {
        "state": front.process.state,
        "running": count("vllm:num_requests_running"),
        "waiting": count("vllm:num_requests_waiting"),
        "kv_bytes": None,
        "kv_limit": None,
        "kv_share": found.get("vllm:kv_cache_usage_perc"),
        "kept_prefixes": None,
        "restarts": front.process.restarts,
        "seconds_since_round": None,
    }
    return JSONResponse(
        {
            "model": front.settings.name,
            "context": await front.context(),
            "backend": "vllm",
            "default_drafter": drafting.drafter,
            "drafters": [drafting.drafter],
            "rules": [drafting.rule] if drafting.rule is not None else [],
            "plain_tokens_per_second": None,
            "status": now,
            "traces": False,
            "limits": asdict(front.limits),
            "recent": front.recent.listed(),
            "engine": {
                "method": drafting.method or None,
                "draft_tokens": drafting.draft_tokens,
                "pid": front.process.pid,
                "last_end": front.process.last_end,
            },
        }
    )


def _front(request: Request) -> Front:
    front: Front = request.app.state.host
    return front
