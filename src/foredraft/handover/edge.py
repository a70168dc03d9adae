"""foredraft's API in front of a vLLM: bodies checked here, answered there, and told with foredraft's figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foredraft.serve.orders import SEEDS, check_model, check_stream
from foredraft.serve.problems import bad
from foredraft.serve.settings import ServerSettings
from foredraft.serve.wire import ChatRequest, CompletionRequest, Sampling, Steering

_OURS = frozenset(
    (
        "foredraft",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "verbosity",
        "modalities",
        "best_of",
    )
)
"""What vLLM is not told."""
_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Said in every request: where one says nothing, vLLM would take the model's own defaults, foredraft these."""


@dataclass(frozen=True)
class Drafting:
    """How the server drafts, for all requests alike: vLLM fixes it when it starts."""

    drafter: str
    method: str
    draft_tokens: int | None = None
    rule: str | None = None

    @property
    def plain(self) -> bool:
        """Whether it does not draft at all."""
        return not self.method


def body_for(request: Sampling, settings: ServerSettings, drafting: Drafting, steering: Steering) -> dict[str, Any]:
    """What vLLM is sent for a checked body, where `steering` is what it or its headers say of drafting.

    Raises:
        ApiError: It asks for another model, or for what vLLM does not do for a single request.
    """
    check_model(request, settings)
    _check_steering(steering, drafting)
    check_stream(request)
    found = request.model_dump(exclude_none=True, by_alias=True)
    found = {name: value for name, value in found.items() if name not in _OURS}
    found = {**_NEUTRAL, **found}
    found["top_k"] = max(int(found["top_k"]), 0)
    if request.seed is not None:
        found["seed"] = request.seed % SEEDS
    if isinstance(request, CompletionRequest):
        found.setdefault("max_tokens", settings.max_tokens)
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise bad(
                "best_of", f"best_of is {request.best_of}, but must be the same as n: no answer is thrown away here."
            )
    elif isinstance(request, ChatRequest) and request.max_completion_tokens is None:
        found.setdefault("max_tokens", settings.max_tokens)
    if request.stream:
        found["stream_options"] = {"include_usage": True}  # its figures come with the last chunk
    return found


def _check_steering(asked: Steering, drafting: Drafting) -> None:
    """Refuse what one request cannot choose: nothing is left out in silence."""
    if asked.drafter not in (None, drafting.drafter):
        raise bad(
            "foredraft.drafter",
            f"foredraft.drafter is '{asked.drafter}', but vLLM drafts for all requests as it was started: with "
            f"'{drafting.drafter}'. Leave it out.",
        )
    for name in ("budget", "rule", "trace"):
        value = getattr(asked, name)
        if value is not None and value is not False:
            raise bad(
                f"foredraft.{name}",
                f"foredraft.{name} cannot be chosen by a request where vLLM answers: leave it out.",
                "unsupported_parameter",
            )


def usage_of(
    usage: Mapping[str, Any],
    metrics: Mapping[str, Any] | None,
    drafting: Drafting,
    *,
    choices: int,
    first_seconds: float | None,
    seconds: float,
) -> dict[str, Any]:
    """OpenAI's counts as vLLM has them, and foredraft's figures from its per-request metrics.

    Args:
        usage: vLLM's.
        metrics: vLLM's `metrics` of the same answer, which it has of single answers only.
        drafting: What drafted.
        choices: Answers to the request.
        first_seconds: To the first token, as seen here; `None` of an answer that came whole.
        seconds: Of the whole request.
    """
    counts = {name: int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    details = usage.get("prompt_tokens_details") or {}
    return {
        **counts,
        "prompt_tokens_details": {"cached_tokens": details.get("cached_tokens")},
        "foredraft": _speculation(
            counts["completion_tokens"], metrics or {}, drafting, choices, first_seconds, seconds
        ),
    }


def _speculation(
    tokens: int,
    metrics: Mapping[str, Any],
    drafting: Drafting,
    choices: int,
    first_seconds: float | None,
    seconds: float,
) -> dict[str, Any]:
    """`usage.foredraft`; what vLLM does not tell is `None`.

    Each forward of the target emits what it accepted and one token more, so their number follows from the two.
    """
    told = metrics.get("speculative_decoding") or {}
    drafted, accepted = told.get("num_draft_tokens"), told.get("num_accepted_draft_tokens")
    if drafting.plain:
        drafted = accepted = 0
    forwards = tokens - accepted if accepted is not None and choices == 1 and accepted < tokens else None
    first = 1e3 * first_seconds if first_seconds is not None else metrics.get("time_to_first_token_ms")
    return {
        "drafter": drafting.drafter,
        "rule": drafting.rule,
        "backend": "vllm",
        "target_forwards": forwards,
        "draft_forwards": None,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": accepted / drafted if drafted and accepted is not None else None,
        "mean_accepted_length": tokens / forwards if forwards else None,
        "queue_ms": metrics.get("queue_time_ms"),
        "ttft_ms": first,
        "tpot_ms": (1e3 * seconds - first) / (tokens - 1)
        if first is not None and choices == 1 and tokens > 1
        else None,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds > 0 else None,
    }
