"""What the server counts, for Prometheus: `foredraft_*` at `/metrics`.

Tokens and forwards are counted round by round and for each answer, as `Stats` does: the sum over an answer's rounds is
what its `usage` says, and the rounds of a cancelled answer count too. A forward that serves sixteen answers is sixteen
target forwards of answers and one batch forward.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from foredraft import __version__
from foredraft.serve.asks import (
    AskTimeoutError,
    DrainingError,
    QueueFullError,
    Refusal,
    Status,
    WorkerCrashedError,
)
from foredraft.types import Completion, FinishReason, RoundStats

DEPTHS = 16
"""Positions of a draft that are counted apart: 1 to this. What is accepted beyond is in the totals only."""

STATES = ("ready", "restarting", "draining")

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SEQUENCES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)

_REFUSALS = (Refusal, QueueFullError, DrainingError, AskTimeoutError, WorkerCrashedError)
OUTCOMES = (*get_args(FinishReason), *(refusal.code for refusal in _REFUSALS), "cancelled", "invalid")
"""Label values of `foredraft_requests_total` that are there from the beginning, at 0: rates need a first value."""


class Metrics:
    """Counts what the worker tells it (a `Watch`), and renders it.

    Args:
        status: How the worker is now; asked once for each rendering.
        plain: Plain decoding's measured tokens/s on this machine, or `None` while it is not known.
        model: Name under which the model is served.
        backend: What runs it.
    """

    def __init__(
        self, status: Callable[[], Status], plain: Callable[[], float | None], *, model: str = "", backend: str = ""
    ) -> None:
        self.registry = CollectorRegistry()
        self._batches = _Batches(self.registry)
        self._prompts = _Prompts(self.registry)
        self._answers = _Answers(self.registry)
        self._of_drafters: dict[str, _OfDrafter] = {}
        self.registry.register(_Now(status, plain))
        Info("foredraft_build", "What serves.", registry=self.registry).info(
            {"version": __version__, "python": platform.python_version(), "model": model, "backend": backend}
        )

    def render(self, accept: str | None = None) -> tuple[bytes, str]:
        """The text and its content type: Prometheus' format, or OpenMetrics if the `Accept` header asks for that."""
        encode, content_type = choose_encoder(accept or "")
        return encode(self.registry), content_type

    def waited(self, seconds: float, prompt: int, reused: int) -> None:
        """An ask was taken up."""
        self._prompts.queued.observe(seconds)
        self._prompts.tokens.inc(prompt)
        self._prompts.reused.inc(reused)

    def forward(self, sequences: int, rows: int, seconds: float) -> None:
        """The target scored so many rows for so many answers."""
        self._batches.forwards.inc()
        self._batches.sequences.observe(sequences)
        self._batches.rows.observe(rows)
        self._batches.seconds.observe(seconds)

    def round(self, drafter: str, stats: RoundStats) -> None:
        """One answer's part of that forward."""
        if drafter not in self._of_drafters:
            self._of_drafters[drafter] = self._answers.of(drafter)
        self._of_drafters[drafter].note(stats)

    def finished(self, completion: Completion) -> None:
        """An answer is complete."""
        stats = completion.stats
        self._answers.outcomes.labels(completion.finish_reason).inc()
        self._answers.ttft.labels(stats.drafter).observe(stats.ttft_ms / 1e3)
        self._answers.seconds.labels(stats.drafter).observe(stats.seconds)
        if stats.tpot_ms is not None:
            self._answers.tpot.labels(stats.drafter).observe(stats.tpot_ms / 1e3)

    def failed(self, code: str) -> None:
        """An ask failed, was refused or cancelled."""
        self._answers.outcomes.labels(code).inc()


class _Batches:
    """Forwards of the target, whoever is in them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.forwards = Counter(
            "foredraft_batch_forwards", "Forwards of the target over a batch of answers.", registry=registry
        )
        self.sequences = Histogram(
            "foredraft_batch_sequences", "Answers in a forward.", buckets=SEQUENCES, registry=registry
        )
        self.rows = Histogram(
            "foredraft_batch_rows",
            "Rows that a forward scored: roots and drafted tokens.",
            buckets=ROWS,
            registry=registry,
        )
        self.seconds = Histogram(
            "foredraft_batch_forward_seconds", "Seconds of a forward.", buckets=SECONDS, registry=registry
        )


class _Prompts:
    """What comes in."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.queued = Histogram(
            "foredraft_queue_seconds", "Seconds a request waited to be taken up.", buckets=SECONDS, registry=registry
        )
        self.tokens = Counter("foredraft_prompt_tokens", "Tokens of prompts taken up.", registry=registry)
        self.reused = Counter(
            "foredraft_prompt_reused_tokens", "Of these, tokens whose keys and values were kept.", registry=registry
        )


class _OfDrafter(NamedTuple):
    """The counters of one drafter, looked up once: rounds are many."""

    rounds: Counter
    plain_rounds: Counter
    generated: Counter
    target_forwards: Counter
    draft_forwards: Counter
    drafted: Counter
    accepted: Counter
    draft_seconds: Counter
    accept_seconds: Counter
    branches: Counter
    meanwhile: Counter
    drafted_at: tuple[Counter, ...]
    accepted_at: tuple[Counter, ...]
    foreseen: Mapping[str, Counter]

    def note(self, stats: RoundStats) -> None:
        """One round of one answer."""
        self.rounds.inc()
        self.target_forwards.inc()
        self.plain_rounds.inc(not stats.drafted)
        self.generated.inc(stats.emitted)
        self.draft_forwards.inc(stats.draft_forwards)
        self.drafted.inc(stats.drafted)
        self.accepted.inc(stats.accepted)
        self.draft_seconds.inc(stats.draft_seconds)
        self.accept_seconds.inc(stats.accept_seconds)
        for counter in self.drafted_at[: stats.depth]:
            counter.inc()
        for counter in self.accepted_at[: stats.accepted]:
            counter.inc()
        if stats.foresight is not None:
            self.foreseen[stats.foresight.found].inc()
            self.branches.inc(stats.foresight.branches)
            self.meanwhile.inc(stats.foresight.seconds)


class _Answers:
    """What goes out, by drafter, and how it ended."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, says: str, *labels: str) -> Counter:
            return Counter(f"foredraft_{name}", says, ("drafter", *labels), registry=registry)

        def seconds(name: str, says: str) -> Histogram:
            return Histogram(f"foredraft_{name}_seconds", says, ("drafter",), buckets=SECONDS, registry=registry)

        self._counters = {
            "rounds": counter("rounds", "Rounds of answers."),
            "plain_rounds": counter("plain_rounds", "Rounds in which nothing was drafted."),
            "generated": counter("generated_tokens", "Tokens of answers."),
            "target_forwards": counter(
                "target_forwards", "Forwards of the target, counted once for each answer in them."
            ),
            "draft_forwards": counter("draft_forwards", "Forwards of draft models and heads."),
            "drafted": counter("drafted_tokens", "Tokens that were proposed."),
            "accepted": counter("accepted_tokens", "Proposed tokens that were accepted."),
            "draft_seconds": counter("draft_seconds", "Seconds of proposing."),
            "accept_seconds": counter("accept_seconds", "Seconds of deciding what stays."),
            "branches": counter("foreseen_branches", "Ends of verifications that were drafted for meanwhile."),
            "meanwhile": counter("drafted_meanwhile_seconds", "Seconds of drafting while the target verified."),
        }
        self._foreseen = counter("foreseen_rounds", "Rounds by whether their end was drafted for.", "found")
        self._drafted_at = counter(
            "drafted_at_position", "Rounds whose draft reached this depth; the first is 1.", "position"
        )
        self._accepted_at = counter(
            "accepted_at_position", "Rounds in which the token at this depth was accepted.", "position"
        )
        self.ttft = seconds("ttft", "Seconds to an answer's first token.")
        self.tpot = seconds("tpot", "Seconds for each token after the first: (end to end - TTFT) / (tokens - 1).")
        self.seconds = seconds("request", "Seconds of a whole answer.")
        self.outcomes = Counter(
            "foredraft_requests",
            "Answers by how they ended, each of the n of a request; requests that failed by why.",
            ("outcome",),
            registry=registry,
        )
        for outcome in OUTCOMES:
            self.outcomes.labels(outcome)

    def of(self, drafter: str) -> _OfDrafter:
        """The counters of a drafter."""
        positions = range(1, DEPTHS + 1)
        return _OfDrafter(
            **{name: counter.labels(drafter) for name, counter in self._counters.items()},
            drafted_at=tuple(self._drafted_at.labels(drafter, str(at)) for at in positions),
            accepted_at=tuple(self._accepted_at.labels(drafter, str(at)) for at in positions),
            foreseen={found: self._foreseen.labels(drafter, found) for found in ("hit", "late", "miss")},
        )


class _Now(Collector):
    """What is not counted but looked up: all from one status, so that the figures fit each other."""

    def __init__(self, status: Callable[[], Status], plain: Callable[[], float | None]) -> None:
        self._status = status
        self._plain = plain

    def describe(self) -> Iterator[Metric]:
        """No names in advance: the worker may not be there yet when this is registered."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The families of the moment."""
        now, plain = self._status(), self._plain()
        yield _gauge("requests_running", "Answers in the batch.", now.running)
        yield _gauge("requests_waiting", "Requests in the queue.", now.waiting)
        yield _gauge("kv_bytes", "Memory of keys and values, kept prefixes included.", now.kv_bytes)
        yield _gauge("kv_limit_bytes", "Most memory that keys and values may take.", now.kv_limit)
        yield _gauge("kept_prefixes", "Conversations whose keys and values are kept.", now.kept_prefixes)
        yield _gauge(
            "seconds_since_round", "Seconds since the last round; 0 while idle.", now.seconds_since_round or 0.0
        )
        states = GaugeMetricFamily("foredraft_worker_state", "1 for the state the worker is in.", labels=("state",))
        for state in STATES:
            states.add_metric((state,), float(state == now.state))
        yield states
        yield CounterMetricFamily("foredraft_worker_restarts", "Restarts after a crash.", now.restarts)
        if plain is not None:
            yield _gauge("plain_tokens_per_second", "Plain decoding's measured rate, one answer at a time.", plain)


def _gauge(name: str, says: str, value: float) -> Metric:
    return GaugeMetricFamily(f"foredraft_{name}", says, value)
