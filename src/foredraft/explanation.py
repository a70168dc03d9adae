"""Why `auto` drafted as it did: what was tried, what it cost and gained, and what could gain more."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from foredraft.costs import CostCurve
from foredraft.proposers.auto import Auto
from foredraft.proposers.heads import HeadDrafter
from foredraft.types import Stats

_LONGEST = 16  # tokens of the chains that advice is about
_WIDE = {"f32", "bf16", "f16"}  # formats of more than 8 bits
_WORTH_SAYING = 1.05  # times as fast as now


@dataclass(frozen=True)
class PartFigures:
    """One part. Nodes that several parts proposed count for each in part."""

    name: str
    asked: int
    """Rounds in which it was asked."""
    draft_ms: float
    """Of a draft, what it learns from a verification included."""
    verified: float
    accepted: float
    foreseen: int
    """Tokens of the text that its drafts had right, verified or not."""
    tokens_per_second: float
    """As it would have been with what this part gained and cost, and nothing else."""

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted of the verified nodes; `None` if none was."""
        return self.accepted / self.verified if self.verified else None


@dataclass(frozen=True)
class Explanation:
    """What `auto` did since it was loaded, at the costs that it measured."""

    rounds: int
    plain_rounds: int
    plain_tokens_per_second: float
    tokens_per_second: float
    """Of the last answer, after its first token."""
    plain_ms: float
    node_ms: float
    """What each drafted node added to a forward, for the usual number of nodes."""
    break_even: float
    """The chance of being right at which a single drafted token pays for its row, at plain decoding's rate."""
    parts: tuple[PartFigures, ...]
    advice: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain JSON values."""
        return asdict(self)


def explain(auto: Auto, stats: Stats, context: int) -> Explanation:
    """Explain the choices of a drafter, after an answer.

    Args:
        auto: The drafter.
        stats: Of the answer.
        context: Tokens that were cached at its end.
    """
    curve = auto.costs.curve
    plain = curve.seconds(1, context)
    drafting = max(1, auto.rounds - auto.plain_rounds)
    nodes = max(1, round(float(auto.arms["verified"].sum()) / drafting))
    node = (curve.seconds(1 + nodes, context) - plain) / nodes
    parts = []
    for part, arm in zip(auto.parts, auto.arms, strict=True):
        asked, spent, verified, accepted = (arm[f].item() for f in ("asked", "spent", "verified", "accepted"))
        seconds = auto.rounds * plain + verified * node + spent
        parts.append(
            PartFigures(
                name=part.name,
                asked=asked,
                draft_ms=1e3 * spent / asked if asked else 0.0,
                verified=verified,
                accepted=accepted,
                foreseen=arm["foreseen"].item(),
                tokens_per_second=(auto.rounds + accepted) / seconds if seconds else 0.0,
            )
        )
    now = 1e3 / stats.tpot_ms if stats.tpot_ms else stats.tokens_per_second
    return Explanation(
        rounds=auto.rounds,
        plain_rounds=auto.plain_rounds,
        plain_tokens_per_second=1 / plain,
        tokens_per_second=now,
        plain_ms=1e3 * plain,
        node_ms=1e3 * node,
        break_even=(curve.seconds(2, context) - plain) / plain,
        parts=tuple(parts),
        advice=tuple(_advice(auto, curve, context, max(now, 1 / plain), stats.backend)),
    )


def best_chain(curve: CostCurve, context: int, acceptance: float, step: float) -> tuple[float, int]:
    """Tokens per second of the best length of chain, and that length; 0 is plain decoding.

    Args:
        curve: Costs of the target.
        context: Tokens cached.
        acceptance: Chance of each token.
        step: Seconds of drafting one.
    """
    forwards = curve.all_seconds(_LONGEST + 1, context)
    expected = [sum(acceptance**depth for depth in range(k + 1)) for k in range(_LONGEST + 1)]
    rates = [tokens / (float(forwards[k]) + k * step) for k, tokens in enumerate(expected)]
    best = max(range(_LONGEST + 1), key=lambda k: rates[k])
    return rates[best], best


def _advice(auto: Auto, curve: CostCurve, context: int, now: float, backend: str) -> list[str]:
    found = []
    plain = curve.seconds(1, context)
    candidates = [("A draft model of about a tenth of the size (auto:suffix+recycling+draft:REF)", 0.7, 0.15)]
    if not any(isinstance(part, HeadDrafter) for part in auto.parts):
        candidates.append(("A drafting head trained for this model", 0.6, 0.05))
    for what, acceptance, share in candidates:
        rate, length = best_chain(curve, context, acceptance, share * plain)
        if length and rate > _WORTH_SAYING * now:
            found.append(
                f"{what}: if it took {1e3 * share * plain:.1f} ms a token and were right {acceptance:.0%} of the time, "
                f"about {rate:.0f} tokens/s ({rate / now:.2f} x of now) with {length} tokens a draft."
            )
    eight = curve.v(8, context)
    if eight > 1.5:
        other = "--backend native" if backend != "native" else "--weights as the file has them, or more threads"
        found.append(
            f"Cheaper rows: a forward over 8 rows takes {eight:.1f} plain steps here, so a draft must be right more "
            f"than {curve.v(2, context) - 1:.0%} of the time to begin with. Try {other}."
        )
    if backend == "native" and _WIDE & set(auto.costs.about.get("weights", "").split("+")):
        found.append(
            f"Smaller weights: a plain step takes {1e3 * plain:.1f} ms, most of it reading weights; --weights q8 "
            "makes them 8 bits each, and changes the model a little."
        )
    if any(part.learns for part in auto.parts):
        found.append("Text like earlier text: --memory FOLDER keeps what the parts learned for the next run.")
    return found
