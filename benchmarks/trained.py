"""Trained drafters beside those that need no training: accepted length, draft cost, and speed against plain decoding.

    python benchmarks/trained.py smollm2-135m --trained eagle3,medusa:runs/medusa/drafter,draft:runs/draft/drafter \
        --untrained suffix,hybrid:suffix+recycling --prompts questions.jsonl --limit 20 --max-tokens 160

For each trained drafter: a chain of --chain tokens, a tree of --nodes nodes (if it drafts trees), and its tree merged
with suffix and recycling. Questions are asked of all methods in turn, each in another order. Times are with prompts.
`c` is what a forward of the drafter takes, in plain steps of the target. At temperature 1 chains are drawn, verified
by rule `token`; trees are verified seed-exactly. `M weights` are those of the drafter itself.

Prints a table for each temperature, then one JSON line.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from common import arguments, load_prompts
from foredraft.api import Model
from foredraft.backends.base import Backend
from foredraft.loading import EngineChoice, Loader, parse_drafter
from foredraft.proposers.base import Drafter
from foredraft.types import SamplingParams, Stats

PLAIN = "plain"


class Method(NamedTuple):
    """One way to draft."""

    name: str
    model: Model
    drafter: Drafter | None
    trained: bool


def parameters(drafter: Drafter | None) -> int:
    """Weights of a trained drafter, 0 of others."""
    network = getattr(drafter, "head", None)
    if network is None:
        model = getattr(getattr(drafter, "backend", None), "model", None)
        network = model
    return sum(weight.numel() for weight in network.parameters()) if network is not None else 0


def methods(loader: Loader, target: Backend, tokenizer: Any, files: Any, options: Any) -> list[Method]:
    """All that take part."""

    def made(spec: str, nodes: int | None, rule: str | None = None) -> tuple[Model, Drafter | None]:
        drafter = loader.drafter(parse_drafter(spec), target, tokenizer, files)
        return Model(target, tokenizer, drafter, draft_tokens=nodes, rule=rule), drafter

    found = [Method(PLAIN, *made("none", None), trained=False)]
    for spec in filter(None, options.untrained.split(",")):
        for nodes in map(int, options.untrained_nodes.split(",")):
            found.append(Method(f"{spec} {nodes}", *made(spec, nodes), trained=False))
    for spec in filter(None, options.trained.split(",")):
        short = spec.partition(":")[0] + (f" ({spec.rstrip('/').split('/')[-2]})" if "/" in spec else "")
        model, drafter = made(spec, options.chain, "token")
        found.append(Method(f"{short} chain {options.chain}", model, drafter, trained=True))
        if not spec.startswith("draft:"):
            found.append(Method(f"{short} tree {options.nodes}", *made(spec, options.nodes), trained=True))
            merged = f"hybrid:suffix+recycling+{spec}"
            for nodes in map(int, options.merged_nodes.split(",")):
                found.append(Method(f"suffix+recycling+{short} {nodes}", *made(merged, nodes), trained=True))
    return found


def ask(found: Sequence[Method], prompts: Sequence[str], options: Any, temperature: float) -> dict[str, list[Stats]]:
    """The figures of every answer, by method."""
    dice, stats = random.Random(0), defaultdict(list)
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=options.max_tokens, temperature=temperature, seed=index)
        answers = {}
        for method in dice.sample(list(found), len(found)):
            answers[method.name] = method.model.generate(prompt, params)
            stats[method.name].append(answers[method.name].stats)
        if temperature == 0:
            for name, answer in answers.items():
                assert answer.ids == answers[PLAIN].ids, name
    return dict(stats)


def row(method: Method, stats: Sequence[Stats], plain: Sequence[Stats]) -> dict[str, Any]:
    """Figures of a method over all its answers."""
    tokens, forwards = sum(s.tokens for s in stats), sum(s.target_forwards for s in stats)
    drafts, step = (
        sum(s.draft_forwards for s in stats),
        sum(s.verify_seconds for s in plain) / sum(s.tokens for s in plain),
    )
    seconds = sum(s.seconds for s in stats)
    speed, plain_speed = tokens / seconds, sum(s.tokens for s in plain) / sum(s.seconds for s in plain)
    return {
        "method": method.name,
        "parameters": parameters(method.drafter),
        "length": tokens / forwards,
        "c": sum(s.draft_seconds for s in stats) / drafts / step if drafts else None,
        "draft_share": sum(s.draft_seconds for s in stats) / seconds,
        "tokens_per_second": speed,
        "speedup": speed / plain_speed,
        "trained": method.trained,
    }


def show(temperature: float, rows: Sequence[dict[str, Any]]) -> None:
    print(f"\ntemperature {temperature:g}")
    print(f"{'method':<52}{'M weights':>10}{'length':>8}{'c':>7}{'tokens/s':>10}{'speedup':>9}")
    for each in rows:
        weights = f"{each['parameters'] / 1e6:.1f}" if each["parameters"] else ""
        c = "" if each["c"] is None else f"{each['c']:.2f}"
        figures = f"{each['length']:>8.3f}{c:>7}{each['tokens_per_second']:>10.1f}{each['speedup']:>9.2f}"
        print(f"{each['method']:<52}{weights:>10}{figures}", flush=True)


def main() -> None:
    parser = arguments(__doc__, limit=8, max_tokens=64)
    parser.add_argument("--trained", default="eagle3")
    parser.add_argument("--untrained", default="suffix,hybrid:suffix+recycling")
    parser.add_argument("--untrained-nodes", default="2,8,16")
    parser.add_argument("--chain", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--merged-nodes", default="16")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--weights", default="auto")
    options = parser.parse_args()

    loader = Loader(engine=EngineChoice(backend=options.backend, weights=options.weights))
    target, tokenizer, files = loader.model(options.model)
    prompts = load_prompts(options.prompts, options.limit)
    found = methods(loader, target, tokenizer, files, options)
    ask(found, prompts[:1], options, 0.0)  # warm
    tables = {}
    for temperature in map(float, options.temperatures.split(",")):
        stats = ask(found, prompts, options, temperature)
        tables[temperature] = [row(method, stats[method.name], stats[PLAIN]) for method in found]
        show(temperature, tables[temperature])
    about = {"model": options.model, "backend": target.name, "conditions": target.conditions(), "prompts": len(prompts)}
    print(json.dumps({**about, "max_tokens": options.max_tokens, "tables": tables}))


if __name__ == "__main__":
    main()
