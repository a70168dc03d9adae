"""The page of a hand-over: what was translated, what vLLM cannot do, and what to expect, as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator

from foredraft.handover.plan import Handover, quoted
from foredraft.handover.vllm import command

FILES = {
    "speculative-config.json": "what stands behind `--speculative-config`",
    "vllm-serve.sh": "the command",
    "kubernetes.yaml": "a Deployment and a Service",
    "ray_app.py": "a Ray Serve app: `serve run ray_app:app`",
}
"""What is written beside the page."""

CANNOT = (
    ("trees of drafted tokens", "chains: of each draft the likeliest path is verified, so a round keeps fewer tokens"),
    ("token recycling, lookahead", "suffix decoding, prompt lookup"),
    (
        "hybrids, and `auto`",
        "the one part that is likely to gain most; `num_speculative_tokens_per_batch_size` for load",
    ),
    ("Medusa heads (removed from vLLM in 0.33)", "an EAGLE-3 head: `foredraft train eagle3 MODEL`"),
    ("drafting while the target verifies (`ssd`)", "the drafter in it, in turn with the target"),
    ("drafting with a part of the target", "what needs no model, or a trained head"),
    (
        "rule `seed-exact` (the same text with a seed as without drafts)",
        "the same law, other draws; greedy text is the same",
    ),
)
"""What foredraft has and vLLM has not, and what takes its place."""


def markdown(plan: Handover) -> str:
    """The whole page."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: Handover) -> Iterator[str]:
    yield f"# {plan.name} with vLLM {plan.version}"
    yield ""
    yield from _translated(plan)
    yield from _commands(plan)
    yield from _expected(plan)
    yield "## What vLLM does not do, and what stands in"
    yield ""
    yield "| foredraft | vLLM |"
    yield "|---|---|"
    for ours, theirs in CANNOT:
        yield f"| {ours} | {theirs} |"
    yield ""
    yield "## Check it"
    yield ""
    yield "With the server running, compare its answers with plain decoding here, and its figures with foredraft's:"
    yield ""
    reference = plan.record.model if plan.record is not None and plan.record.model else plan.model
    drafter = plan.translation.drafter
    yield "```console"
    yield f"foredraft verify {reference} --url http://127.0.0.1:8000/v1 --drafter '{drafter}'"
    yield f"foredraft bench {reference} --url http://127.0.0.1:8000/v1 --drafters '{drafter}'"
    yield "```"


def _translated(plan: Handover) -> Iterator[str]:
    translation, measured = plan.translation, plan.measured
    yield "## What was translated"
    yield ""
    if plan.record is not None and measured is not None:
        speed = f", {measured.speedup:.2f}x of plain decoding there" if measured.speedup is not None else ""
        rate = (
            f", {measured.acceptance_rate:.0%} of drafted tokens accepted"
            if measured.acceptance_rate is not None
            else ""
        )
        yield (
            f"From {plan.record.origin}: drafter `{measured.name}`, {measured.mean_accepted_length:.2f} tokens for "
            f"each forward of the target{rate}{speed}."
        )
    else:
        yield f"Drafter `{translation.drafter}`, which nothing was measured of: the number of tokens is a usual one."
    yield ""
    if not translation.method:
        yield "Plain decoding: no speculative configuration."
        yield ""
        return
    what = f"`{translation.drafter}` is vLLM's method `{translation.method}`."
    yield (
        what if translation.stands_in is None else f"vLLM's `{translation.method}` stands in: {translation.stands_in}."
    )
    yield ""
    for note in translation.notes:
        yield f"- {note}."
    yield ""


def _commands(plan: Handover) -> Iterator[str]:
    yield "## Start it"
    yield ""
    if plan.config is not None:
        yield "```json"
        yield json.dumps(plan.config, indent=2)
        yield "```"
        yield ""
    yield "```console"
    yield quoted(command(plan))
    yield "```"
    yield ""
    for name, what in FILES.items():
        if name != "speculative-config.json" or plan.config is not None:
            yield f"- `{name}`: {what}"
    yield ""
    if plan.parallel.data > 1:
        yield (
            f"The command runs {plan.parallel.data} copies behind one port (`--data-parallel-size`); the manifest and "
            "the Ray app run them as replicas instead, so that one may fail alone."
        )
        yield ""
    if plan.parallel.pipeline > 1:
        yield (
            "Pipeline stages on several machines need Ray or a LeaderWorkerSet under the command and the manifest; "
            "the Ray app places them itself."
        )
        yield ""


def _expected(plan: Handover) -> Iterator[str]:
    if not plan.gains or plan.machine is None:
        return
    yield "## Expected gain"
    yield ""
    yield "| batch | draft tokens | tokens a forward and answer | gain |"
    yield "|---|---|---|---|"
    for gain in plan.gains:
        tokens = str(gain.draft_tokens) if gain.draft_tokens else "none pays"
        yield f"| {gain.batch} | {tokens} | {gain.tokens_per_forward:.2f} | {gain.gain:.2f}x |"
    yield ""
    yield f"Forwards cost: {plan.machine.source}."
    yield ""
    yield (
        "The acceptance is that of the record, the same at every batch size, and drafting costs as many plain steps "
        "as it did "
        "there. Reading keys and values, and what the engine does between forwards, are left out; both make the gain "
        "smaller."
    )
    if plan.measured is not None and plan.measured.trees:
        yield (
            "It was measured with trees, of which chains accept less: by how much is not known before it is measured, "
            "so these gains are at most."
        )
    yield ""
