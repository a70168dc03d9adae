"""What a server counted during one answer, from its `/metrics` before and after (Prometheus text).

Names are those of the servers' sources: vLLM `v1/spec_decode/metrics.py`, llama.cpp `tools/server`, SGLang
`srt/observability/metrics_collector.py`. foredraft's own server has the `FOREDRAFT` ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FOREDRAFT = {
    "generated": "foredraft_generated_tokens_total",
    "drafted": "foredraft_drafted_tokens_total",
    "accepted": "foredraft_accepted_tokens_total",
    "target_forwards": "foredraft_target_forwards_total",
    "draft_forwards": "foredraft_draft_forwards_total",
}
"""Counters of foredraft's server. `generated` are the tokens of answers; the others are the fields of a `Turn`."""

_GENERATED = (
    FOREDRAFT["generated"],
    "vllm:generation_tokens_total",
    "llamacpp:tokens_predicted_total",
    "sglang:generation_tokens_total",
)
_LINE = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{((?:[^"}]|"(?:\\.|[^"\\])*")*)\})?\s+(\S+)')
_POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')

Metrics = Mapping[str, float]
"""Values by name, summed over label sets; of those with a `position` also by `name[position]`."""


@dataclass(frozen=True)
class Acceptance:
    """Counts of one answer, `None` where the server does not tell.

    `accepted_at[i]` counts the rounds whose drafted token i was accepted; empty where unknown.
    """

    drafted: int | None = None
    accepted: int | None = None
    target_forwards: int | None = None
    draft_forwards: int | None = None
    accepted_at: tuple[int, ...] = ()


def parse_metrics(text: str) -> dict[str, float]:
    """`Metrics` of the text. Lines that are none are passed over."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        name, labels, written = match.groups()
        try:
            value = float(written)
        except ValueError:
            continue
        position = _POSITION.search(labels or "")
        for key in (name, f"{name}[{position[1]}]") if position else (name,):
            found[key] = found.get(key, 0.0) + value
    return found


def generated(before: Metrics, after: Metrics) -> int | None:
    """Tokens of all answers in between; `None` where the server does not count them."""
    return next((grown for name in _GENERATED if (grown := _grown(before, after, name)) is not None), None)


def acceptance(before: Metrics, after: Metrics, tokens: int) -> Acceptance:
    """Counts of an answer of so many tokens, during which the server must have had no other.

    If it generated more than these, the counts are of others too, and nothing is told. Servers count a last round that
    was cut by the end of the answer as a whole; it is kept from being more than the answer.
    """
    others = generated(before, after)
    if others is not None and others > tokens:
        return Acceptance()
    if FOREDRAFT["drafted"] in after:
        own = {field: _grown(before, after, name) for field, name in FOREDRAFT.items()}
        return Acceptance(own["drafted"], own["accepted"], own["target_forwards"], own["draft_forwards"])
    for server in ("vllm", "llamacpp"):
        name = f"{server}:spec_decode_num_accepted_tokens"
        drafted = _grown(before, after, f"{server}:spec_decode_num_draft_tokens_total")
        accepted = _grown(before, after, f"{name}_total")
        if drafted is not None and accepted is not None:
            return _counted(drafted, accepted, tokens, _by_position(before, after, f"{name}_per_pos_total"))
    if "vllm:generation_tokens_total" in after:  # it has these counters only with speculation
        return _counted(0, 0, tokens)
    return _sglang(before, after, tokens)


def from_timings(timings: Mapping[str, Any], tokens: int) -> Acceptance:
    """The same from the `timings` that llama.cpp's server puts into an answer; without drafts they do not name them."""
    return _counted(int(timings.get("draft_n", 0)), int(timings.get("draft_n_accepted", 0)), tokens)


def _counted(drafted: int, accepted: int, tokens: int, accepted_at: tuple[int, ...] = ()) -> Acceptance:
    """Each forward of the target emits what was accepted and one token more."""
    accepted = min(accepted, tokens - 1)
    return Acceptance(drafted, accepted, target_forwards=tokens - accepted, accepted_at=accepted_at)


def _sglang(before: Metrics, after: Metrics, tokens: int) -> Acceptance:
    """SGLang counts verifying forwards, of which the prompt's, which gives the first token, is none.

    It drafts as many tokens in each, less the root, which it counts with them. Older versions have but a gauge: the
    mean accepted length of the last interval that they logged, which is about the answer's.
    """
    calls = _grown(before, after, "sglang:spec_verify_calls_total")
    if calls is not None:
        if calls == 0:
            return _counted(0, 0, tokens)
        each = after.get("sglang:spec_num_draft_tokens", 0.0)
        forwards = min(tokens, calls + 1)
        return Acceptance(round(calls * (each - 1)) if each > 1 else None, tokens - forwards, forwards)
    length = after.get("sglang:spec_accept_length", 0.0)
    if length < 1:
        return Acceptance()
    forwards = max(1, round(tokens / length))
    return Acceptance(accepted=tokens - forwards, target_forwards=forwards)


def _by_position(before: Metrics, after: Metrics, name: str) -> tuple[int, ...]:
    counts: list[int] = []
    while (grown := _grown(before, after, f"{name}[{len(counts)}]")) is not None:
        counts.append(grown)
    return tuple(counts)


def _grown(before: Metrics, after: Metrics, name: str) -> int | None:
    grown = round(after[name] - before.get(name, 0.0)) if name in after else -1
    return grown if grown >= 0 else None  # less than before: the server was started anew
