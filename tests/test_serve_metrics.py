"""The server's counters: what `Stats` says, names that the benchmark reads, and text that strict parsers take."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason='needs the extra "serve"')

from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families as classic

from foredraft.backends.transformers import TransformersBackend
from foredraft.bench.peers.prometheus import FOREDRAFT, acceptance, generated, parse_metrics
from foredraft.engine import Engine
from foredraft.generation import Request
from foredraft.proposers.ngram import NGram
from foredraft.serve.asks import Status, Watch
from foredraft.serve.metrics import DEPTHS, OUTCOMES, SECONDS, Metrics
from foredraft.types import FinishEvent, Foresight, RoundEvent, RoundStats, SamplingParams, Stats
from tiny import collect

strict: Any = openmetrics.text_string_to_metric_families  # it has no type hints
READY = Status("ready", 3, 2, 5000, 9000, 1, 4, None)
PROMPT = [1, 2, 3, 4, 1, 2, 3]


def metrics(status: Status = READY, plain: float | None = 140.0) -> Metrics:
    return Metrics(lambda: status, lambda: plain, model='a "model"\n', backend="native")


def values(of: Metrics) -> dict[str, float]:
    return parse_metrics(of.render()[0].decode())


def sample(of: Metrics, name: str, **labels: str) -> float | None:
    return of.registry.get_sample_value(name, labels)


def a_round(*, drafted: int = 0, accepted: int = 0, depth: int = 0, foresight: Foresight | None = None) -> RoundStats:
    return RoundStats(
        drafted=drafted,
        drafted_from={},
        accepted=accepted,
        accepted_from={},
        emitted=accepted + 1,
        draft_forwards=2 * bool(drafted),
        draft_seconds=0.25,
        verify_seconds=0.5,
        accept_seconds=0.125,
        depth=depth,
        foresight=foresight,
    )


def answered(watch: Watch, backend: TransformersBackend, **settings: Any) -> Stats:
    """What the engine says of one answer, told to the metrics as the worker tells it."""
    drafter = NGram()
    request = Request(PROMPT, SamplingParams(ignore_eos=True, **settings))
    watch.waited(0.01, len(PROMPT), 2)
    for event in collect(Engine(backend, drafter), request)[0]:
        if isinstance(event, RoundEvent):
            watch.round(drafter.name, event.stats)
        elif isinstance(event, FinishEvent):
            watch.finished(event.completion)
            return event.completion.stats
    raise AssertionError("no end")


def test_counts_are_those_of_the_answer_and_the_benchmark_reads_them(target: TransformersBackend) -> None:
    counted = metrics()
    answered(counted, target, max_tokens=5)
    before = values(counted)
    stats = answered(counted, target, max_tokens=40)
    after = values(counted)
    assert generated(before, after) == stats.tokens == 40
    found = acceptance(before, after, stats.tokens)
    assert (found.drafted, found.accepted) == (stats.drafted, stats.accepted)
    assert (found.target_forwards, found.draft_forwards) == (stats.target_forwards, stats.draft_forwards)
    assert stats.accepted > 0
    assert after["foredraft_rounds_total"] - before["foredraft_rounds_total"] == stats.target_forwards
    assert after["foredraft_plain_rounds_total"] - before["foredraft_plain_rounds_total"] == stats.plain_rounds
    assert after["foredraft_accepted_at_position_total"] >= stats.accepted
    assert after["foredraft_ttft_seconds_count"] == after["foredraft_request_seconds_count"] == 2


def test_another_answer_in_between_is_noticed(target: TransformersBackend) -> None:
    counted = metrics()
    before = values(counted)
    stats = answered(counted, target, max_tokens=5)
    answered(counted, target, max_tokens=5)
    assert acceptance(before, values(counted), stats.tokens).drafted is None


def test_plain_decoding_counts_as_drafting_nothing() -> None:
    counted = metrics()
    before = values(counted)
    for _ in range(3):
        counted.round("none", a_round())
    found = acceptance(before, values(counted), tokens=3)
    assert (found.drafted, found.accepted, found.target_forwards, found.draft_forwards) == (0, 0, 3, 0)
    assert sample(counted, "foredraft_plain_rounds_total", drafter="none") == 3


def test_positions_count_from_one_to_the_last() -> None:
    counted = metrics()
    counted.round("suffix", a_round(drafted=5, accepted=2, depth=3))
    counted.round("suffix", a_round(drafted=40, accepted=20, depth=20))
    reached = [
        sample(counted, "foredraft_drafted_at_position_total", drafter="suffix", position=str(i)) for i in (1, 3, 4)
    ]
    kept = [
        sample(counted, "foredraft_accepted_at_position_total", drafter="suffix", position=str(i)) for i in (1, 2, 3)
    ]
    assert reached == [2, 2, 1]
    assert kept == [2, 2, 1]
    last = f'position="{DEPTHS}"'
    assert last in counted.render()[0].decode()
    assert f'position="{DEPTHS + 1}"' not in counted.render()[0].decode()
    assert sample(counted, "foredraft_accepted_tokens_total", drafter="suffix") == 22


def test_what_was_foreseen_is_counted_by_what_came_of_it() -> None:
    counted = metrics()
    counted.round("ssd:draft", a_round(foresight=Foresight("hit", 6, 0.25)))
    counted.round("ssd:draft", a_round(foresight=Foresight("miss", 4, 0.25)))
    counted.round("ssd:draft", a_round(foresight=Foresight("hit", 5, 0.25)))
    counted.round("suffix", a_round())
    name = "foredraft_foreseen_rounds_total"
    found = [sample(counted, name, drafter="ssd:draft", found=way) for way in ("hit", "late", "miss")]
    assert found == [2, 0, 1]
    assert sample(counted, name, drafter="suffix", found="hit") == 0
    assert sample(counted, "foredraft_foreseen_branches_total", drafter="ssd:draft") == 15
    assert sample(counted, "foredraft_drafted_meanwhile_seconds_total", drafter="ssd:draft") == 0.75


def test_a_forward_is_counted_once_however_many_share_it() -> None:
    counted = metrics()
    counted.forward(sequences=3, rows=12, seconds=0.02)
    for drafter in ("ngram", "ngram", "none"):
        counted.round(drafter, a_round())
    found = values(counted)
    assert found["foredraft_batch_forwards_total"] == 1
    assert found["foredraft_target_forwards_total"] == 3
    assert found["foredraft_batch_sequences_sum"] == 3
    assert found["foredraft_batch_rows_sum"] == 12
    assert found["foredraft_draft_seconds_total"] == 0.75


def test_what_the_worker_is_doing_is_asked_each_time() -> None:
    status = READY
    plain: float | None = None
    counted = Metrics(lambda: status, lambda: plain)
    assert "foredraft_plain_tokens_per_second" not in values(counted)
    found = values(counted)
    assert (found["foredraft_requests_running"], found["foredraft_requests_waiting"]) == (3, 2)
    assert (found["foredraft_kv_bytes"], found["foredraft_kv_limit_bytes"]) == (5000, 9000)
    assert (found["foredraft_kept_prefixes"], found["foredraft_worker_restarts_total"]) == (1, 4)
    status, plain = status._replace(state="draining", running=0), 99.5
    assert values(counted)["foredraft_requests_running"] == 0
    assert values(counted)["foredraft_plain_tokens_per_second"] == 99.5
    assert sample(counted, "foredraft_worker_state", state="draining") == 1
    assert sample(counted, "foredraft_worker_state", state="ready") == 0


def test_outcomes_are_there_before_anything_happened() -> None:
    counted = metrics()
    assert {"length", "stop_token", "queue_full", "timeout", "worker_crashed", "cancelled", "invalid"} < set(OUTCOMES)
    assert all(sample(counted, "foredraft_requests_total", outcome=outcome) == 0 for outcome in OUTCOMES)
    counted.failed("queue_full")
    assert sample(counted, "foredraft_requests_total", outcome="queue_full") == 1


def test_the_text_is_what_parsers_take(target: TransformersBackend) -> None:
    counted = metrics()
    answered(counted, target, max_tokens=5)
    counted.forward(1, 4, 0.01)
    text, kind = counted.render()
    assert kind.startswith("text/plain")
    names = {family.name for family in classic(text.decode())}
    assert "foredraft_build_info" in names
    assert all(name in text.decode() for name in FOREDRAFT.values())
    text, kind = counted.render("application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    families = list(strict(text.decode()))
    assert len(families) == len({family.name for family in families})
    assert all(family.documentation.endswith(".") for family in families)
    build = next(family for family in families if family.name == "foredraft_build").samples[0]
    assert build.labels["model"] == 'a "model"\n'


def test_buckets_reach_from_a_millisecond_to_a_minute() -> None:
    assert (SECONDS[0], SECONDS[-1]) == (0.001, 60)
    assert list(SECONDS) == sorted(SECONDS)


def test_registries_are_apart() -> None:
    one, other = metrics(), metrics()
    one.round("ngram", a_round())
    assert "foredraft_rounds_total" not in values(other)
