"""vLLM's counters by foredraft's names, so that dashboards and alerts stay as they are. vLLM's own follow them."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families

from foredraft import __version__
from foredraft.bench.peers.prometheus import parse_metrics
from foredraft.handover.edge import Drafting
from foredraft.serve.metrics import STATES

Found = Mapping[str, float]

_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("ttft", "Seconds to an answer's first token."),
    "vllm:request_time_per_output_token_seconds": ("tpot", "Seconds for each token after the first."),
    "vllm:e2e_request_latency_seconds": ("request", "Seconds of a whole answer."),
    "vllm:request_queue_time_seconds": ("queue", "Seconds from a request's arrival to the first work on it."),
}
_GAUGES = {
    "vllm:num_requests_running": ("requests_running", "Answers in the batch."),
    "vllm:num_requests_waiting": ("requests_waiting", "Requests in the queue."),
}
_PROMPTS = {
    "vllm:prompt_tokens_total": ("prompt_tokens", "Tokens of prompts."),
    "vllm:prefix_cache_hits_total": ("prompt_reused_tokens", "Of these, tokens that were not read again."),
}
_ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_POSITIONS = 64


class Counts:
    """What the server tells at `/metrics`.

    Args:
        model: Name under which it is served.
        drafting: What drafts there.
    """

    def __init__(self, model: str, drafting: Drafting) -> None:
        self._model, self._drafting = model, drafting
        self.outcomes: Counter[str] = Counter()
        """Requests by how they ended."""

    def render(self, text: str, state: str, restarts: int, accept: str | None) -> tuple[bytes, str]:
        """Body and content type.

        Args:
            text: vLLM's own metrics; empty while it does not answer.
            state: Of the process.
            restarts: Starts after the first.
            accept: The header of that name.
        """
        theirs = [family for family in text_string_to_metric_families(text) if family.name.startswith("vllm:")]
        ours = [*self._own(state, restarts), *self._told(parse_metrics(text), theirs)]
        registry = CollectorRegistry()
        registry.register(_Given([*ours, *theirs]))
        encode, content_type = choose_encoder(accept or "")
        return encode(registry), content_type

    def _own(self, state: str, restarts: int) -> Iterator[Metric]:
        """What this side of it knows."""
        states = GaugeMetricFamily("foredraft_worker_state", "1 for the state vLLM is in.", labels=("state",))
        for each in dict.fromkeys((*STATES, state)):
            states.add_metric((each,), float(each == state))
        yield states
        yield CounterMetricFamily("foredraft_worker_restarts", "Restarts after a crash.", restarts)
        ended = CounterMetricFamily("foredraft_requests", "Requests by how they ended.", labels=("outcome",))
        for outcome, count in self.outcomes.items():
            ended.add_metric((outcome,), count)
        yield ended
        about = {"version": __version__, "python": platform.python_version(), "model": self._model, "backend": "vllm"}
        yield InfoMetricFamily("foredraft_build", "What serves.", about)

    def _told(self, found: Found, families: Sequence[Metric]) -> Iterator[Metric]:
        """What vLLM knows."""
        for theirs, (name, says) in _GAUGES.items():
            if theirs in found:
                yield GaugeMetricFamily(f"foredraft_{name}", says, found[theirs])
        for theirs, (name, says) in _PROMPTS.items():
            if theirs in found:
                yield CounterMetricFamily(f"foredraft_{name}", says, found[theirs])
        yield from self._speculation(found)
        for family in families:
            if family.name in _HISTOGRAMS:
                yield self._histogram(family)

    def _speculation(self, found: Found) -> Iterator[Metric]:
        """Counters of speculation; without it vLLM has none, and nothing was drafted."""
        generated = found.get("vllm:generation_tokens_total")
        if generated is None:
            return
        plain = self._drafting.plain
        drafted = found.get("vllm:spec_decode_num_draft_tokens_total", 0.0 if plain else None)
        accepted = found.get("vllm:spec_decode_num_accepted_tokens_total", 0.0 if plain else None)
        forwards = generated - accepted if accepted is not None else None
        for name, says, value in (
            ("generated_tokens", "Tokens of answers.", generated),
            ("drafted_tokens", "Tokens that were proposed.", drafted),
            ("accepted_tokens", "Proposed tokens that were accepted.", accepted),
            ("target_forwards", "Forwards of the target, counted once for each answer in them.", forwards),
        ):
            if value is not None:
                family = CounterMetricFamily(f"foredraft_{name}", says, labels=("drafter",))
                family.add_metric((self._drafting.drafter,), value)
                yield family
        at = CounterMetricFamily(
            "foredraft_accepted_at_position",
            "Rounds in which the token at this depth was accepted.",
            None,
            ("drafter", "position"),
        )
        for position in range(_POSITIONS):  # vLLM counts from 0
            value = found.get(f"{_ACCEPTED_AT}[{position}]")
            if value is not None:
                at.add_metric((self._drafting.drafter, str(position + 1)), value)
        if at.samples:
            yield at

    def _histogram(self, family: Metric) -> Metric:
        """The same under foredraft's name, summed over engines."""
        name, says = _HISTOGRAMS[family.name]
        ours = f"foredraft_{name}_seconds"
        label = {} if name == "queue" else {"drafter": self._drafting.drafter}
        sums: dict[tuple[str, str | None], float] = {}
        for sample in family.samples:
            key = sample.name.removeprefix(family.name), sample.labels.get("le")
            if key[0] != "_created":
                sums[key] = sums.get(key, 0.0) + sample.value
        renamed = Metric(ours, says, "histogram")
        for (suffix, bound), value in sums.items():
            renamed.add_sample(f"{ours}{suffix}", label | ({"le": bound} if bound is not None else {}), value)
        return renamed


class _Given:
    """A collector of families that are there already."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)
