"""The figures of a request, and what its rounds looked at, as plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from foredraft.serve.token_texts import TokenTexts
from foredraft.types import Completion, RoundDetail, RoundEvent, TokenEvent


class Figures(NamedTuple):
    """Times and counts of a request that no completion tells. `None` is not known, or never was."""

    queue_seconds: float | None
    reused_tokens: int
    first_token_seconds: float | None
    seconds: float


def usage(prompt_tokens: int, completions: Sequence[Completion], figures: Figures) -> dict[str, Any]:
    """Counts of all answers together, times of the whole request."""
    tokens = sum(len(completion.ids) for completion in completions)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
        "prompt_tokens_details": {"cached_tokens": figures.reused_tokens},
        "foredraft": speculation(completions, figures),
    }


def speculation(completions: Sequence[Completion], figures: Figures) -> dict[str, Any]:
    """What speculation did: figures as `Stats` has them, of all answers together."""
    stats = [completion.stats for completion in completions]
    forwards = sum(each.target_forwards for each in stats)
    drafted, accepted = sum(each.drafted for each in stats), sum(each.accepted for each in stats)
    tokens, longest = sum(each.tokens for each in stats), max((each.tokens for each in stats), default=0)
    first = figures.first_token_seconds
    per_token = (figures.seconds - first) / (longest - 1) if first is not None and longest > 1 else None
    return {
        "drafter": stats[0].drafter if stats else None,
        "rule": stats[0].rule if stats else None,
        "backend": stats[0].backend if stats else None,
        "target_forwards": forwards,
        "draft_forwards": sum(each.draft_forwards for each in stats),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "mean_accepted_length": tokens / forwards if forwards else None,
        "queue_ms": _milliseconds(figures.queue_seconds),
        "ttft_ms": _milliseconds(first),
        "tpot_ms": _milliseconds(per_token),
        "seconds": figures.seconds,
        "tokens_per_second": tokens / figures.seconds if figures.seconds > 0 else None,
    }


def trace(tokens: Iterable[TokenEvent], round_event: RoundEvent, texts: TokenTexts) -> dict[str, Any]:
    """What one round looked at and emitted, for the page."""
    stats = round_event.stats
    told: dict[str, Any] = {
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "emitted": stats.emitted,
        "batch": stats.batch,
        "verify_ms": 1e3 * stats.verify_seconds,
        "draft_ms": 1e3 * stats.draft_seconds,
    }
    if round_event.detail is not None:
        told |= _tree(round_event.detail, texts)
    emitted = [{"id": token.token, "text": token.text, "origin": token.origin} for token in tokens]
    return {"tokens": emitted, "round": told}


def _tree(detail: RoundDetail, texts: TokenTexts) -> dict[str, Any]:
    draft, verdict, label = detail.draft, detail.verdict, texts.labels.of
    added = None
    if detail.p_drawn is not None:
        added = {"text": label(verdict.tokens[-1]), "origin": verdict.origins[-1], "p": detail.p_drawn}
    return {
        "root": label(detail.root),
        "tree": {
            "tokens": [label(token) for token in draft.tokens],
            "ids": list(draft.tokens),
            "parents": list(draft.parents),
            "path": list(verdict.path),
            "p": list(detail.p),
        },
        "added": added,
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
