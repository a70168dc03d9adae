"""Folds the rounds of an answer into its figures: one definition for command line, API, benchmark and server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from foredraft.types import RoundStats, Stats

_MANY_ROUNDS = 16


def summarize(
    rounds: Sequence[RoundStats],
    *,
    ttft_seconds: float,
    seconds: float,
    drafter: str,
    rule: str,
    backend: str,
) -> Stats:
    """The figures of one answer; `Stats` defines each.

    Args:
        rounds: Every round of the answer; the counts are of tokens that are really in it.
        ttft_seconds: From the request to its first token, prefill included.
        seconds: From the request to its last token.
        drafter: The method in effect.
        rule: The acceptance rule in effect.
        backend: The backend in effect.
    """
    tokens = sum(r.emitted for r in rounds)
    drafted = sum(r.drafted for r in rounds)
    accepted = sum(r.accepted for r in rounds)
    return Stats(
        tokens=tokens,
        target_forwards=len(rounds),
        draft_forwards=sum(r.draft_forwards for r in rounds),
        drafted=drafted,
        accepted=accepted,
        acceptance_rate=accepted / drafted if drafted else None,
        mean_accepted_length=tokens / len(rounds),
        ttft_ms=1e3 * ttft_seconds,
        tpot_ms=1e3 * (seconds - ttft_seconds) / (tokens - 1) if tokens > 1 else None,
        tokens_per_second=tokens / seconds,
        seconds=seconds,
        draft_seconds=sum(r.draft_seconds for r in rounds),
        verify_seconds=sum(r.verify_seconds for r in rounds),
        accept_seconds=sum(r.accept_seconds for r in rounds),
        accepted_from=dict(sum((Counter(r.accepted_from) for r in rounds), Counter())),
        drafter=drafter,
        rule=rule,
        backend=backend,
    )


def zero_acceptance(rounds: Sequence[RoundStats], likely_causes: str) -> str | None:
    """A warning if many rounds drafted and not one drafted token was accepted."""
    drafting = [r for r in rounds if r.drafted]
    if len(drafting) < _MANY_ROUNDS or any(r.accepted for r in drafting):
        return None
    drafted = sum(r.drafted for r in drafting)
    return (
        f"None of {drafted} drafted tokens was accepted in {len(drafting)} rounds: drafting only cost time here. "
        f"Likely causes: {likely_causes}. The text is right all the same."
    )
