"""Folds the rounds of an answer into its figures: one definition for command line, API, benchmark and server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from foredraft.types import ForesightStats, RoundStats, Stats

_MANY_ROUNDS = 16
_LONG_WINDOW = 64  # rounds
_SETTLING = 4  # rounds


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
        plain_rounds=sum(not r.drafted for r in rounds),
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
        drafted_from=_joined(r.drafted_from for r in rounds),
        accepted_from=_joined(r.accepted_from for r in rounds),
        drafter=drafter,
        rule=rule,
        backend=backend,
        foresight=_foresight(rounds),
    )


def _foresight(rounds: Sequence[RoundStats]) -> ForesightStats | None:
    seen = [(r.foresight, r.accepted) for r in rounds if r.foresight is not None]
    if not seen:
        return None
    tried, hits = Counter(k for _, k in seen), Counter(k for found, k in seen if found.found == "hit")
    return ForesightStats(
        rounds=len(seen),
        hits=sum(hits.values()),
        late=sum(found.found == "late" for found, _ in seen),
        by_accepted={k: (hits[k], tried[k]) for k in sorted(tried)},
        branches=sum(found.branches for found, _ in seen),
        hidden_seconds=sum(found.seconds for found, _ in seen),
        waited_seconds=sum(found.waited for found, _ in seen),
    )


def joined_foresight(parts: Sequence[ForesightStats]) -> ForesightStats | None:
    """Of several answers together; `None` of none."""
    if not parts:
        return None
    by_accepted: dict[int, tuple[int, int]] = {}
    for part in parts:
        for k, (hits, rounds) in part.by_accepted.items():
            before = by_accepted.get(k, (0, 0))
            by_accepted[k] = before[0] + hits, before[1] + rounds
    return ForesightStats(
        rounds=sum(part.rounds for part in parts),
        hits=sum(part.hits for part in parts),
        late=sum(part.late for part in parts),
        by_accepted=dict(sorted(by_accepted.items())),
        branches=sum(part.branches for part in parts),
        hidden_seconds=sum(part.hidden_seconds for part in parts),
        waited_seconds=sum(part.waited_seconds for part in parts),
    )


def _joined(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    joined: Counter[str] = Counter()
    for each in counts:
        joined.update(each)
    return dict(joined)


def slower_than_plain(rounds: Sequence[RoundStats], plain_seconds: float | None) -> str | None:
    """A warning if speculation was slower than plain decoding would have been, over many rounds.

    Args:
        rounds: Those of one answer. In a batch they share forwards, and nothing is said about one of them.
        plain_seconds: A plain forward, as measured elsewhere; `None` takes the rounds that drafted nothing.
    """
    seen = rounds[_SETTLING:]  # the first rounds of a process may wait for something to be compiled
    if len(seen) < _LONG_WINDOW or any(r.batch > 1 for r in seen):
        return None
    drafting, plain = [r for r in seen if r.drafted], [r.verify_seconds for r in seen if not r.drafted]
    if plain_seconds is None and len(plain) >= _MANY_ROUNDS:
        plain_seconds = median(plain)
    if plain_seconds is None or not drafting:
        return None
    tokens = sum(r.emitted for r in seen)
    seconds = sum(r.draft_seconds + r.verify_seconds for r in seen)
    gain = tokens * plain_seconds / seconds
    if gain >= 1:
        return None
    accepted = sum(r.accepted for r in seen) / sum(r.drafted for r in seen)
    return (
        f"Speculation ran at {gain:.2f} x of plain decoding over the last {len(seen)} rounds: {tokens / seconds:.1f} "
        f"against {1 / plain_seconds:.1f} tokens/s, with {accepted:.0%} of drafted tokens accepted. "
        "Use drafter 'auto', which drafts only where it pays, or 'none'."
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
