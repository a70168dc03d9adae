"""Does drafting while the target verifies pay here? Against the same drafters without it, and against plain decoding.

Two parts. The first one times every drafter alone and with `ssd`, target and drafter on a core each, and both on two.
The second one records where verifications ended, and by which token, and counts how many of these ends would have been
among those prepared for: by the fan-out rule, and with as many branches spread evenly.

    python benchmarks/ssd.py --limit 3 --max-tokens 48
    python benchmarks/ssd.py --drafters eagle3,layer_skip,draft:REF --temperatures 0,1

Needs the native backend and two cores. Prints tables, then one JSON line.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common import arguments, load_prompts
from foredraft.api import Model
from foredraft.generation import Request
from foredraft.loading import EngineChoice, Loader, parse_drafter
from foredraft.metrics import joined_foresight
from foredraft.proof.ahead import ScriptedRace
from foredraft.proposers.base import Drafter
from foredraft.proposers.beside import Work
from foredraft.proposers.foresight import Planner
from foredraft.proposers.forks import Fork, Plan, fan_out
from foredraft.proposers.growing import ModelFork
from foredraft.proposers.ssd import Ssd
from foredraft.types import RoundEvent, SamplingParams, Stats

PLAIN = "plain, 2 threads"
BUDGETS = (5, 10, 20, 40)
EXPONENTS = (0.5, 1.0, 2.0)


class Method(NamedTuple):
    name: str
    model: Model
    drafter: Drafter | None


class Machine:
    """The target with one thread and with two, and drafters for each."""

    def __init__(self, reference: str, weights: str) -> None:
        self.loaders = {
            threads: Loader(
                engine=EngineChoice(backend="native", weights=weights, threads=threads, draft_threads=threads)
            )
            for threads in (1, 2)
        }
        self.targets = {threads: loader.model(reference) for threads, loader in self.loaders.items()}

    def method(self, name: str, spec: str | None, threads: int, tokens: int | None = None, **ssd: Any) -> Method:
        """A drafter, drafting ahead if there is anything to say about how."""
        target, tokenizer, files = self.targets[threads]
        drafter = self.loaders[threads].drafter(parse_drafter(spec), target, tokenizer, files) if spec else None
        if ssd and drafter is not None:
            drafter = Ssd(drafter, threads=threads, **ssd)
        rule = "block" if spec else None
        return Method(name, Model(target, tokenizer, drafter, draft_tokens=tokens, rule=rule, files=files), drafter)


def timed(machine: Machine, specs: Sequence[str], tokens: int) -> list[Method]:
    found = [machine.method(PLAIN, None, 2), machine.method("plain, 1 thread", None, 1)]
    for spec in specs:
        found.append(machine.method(f"{spec}, 2 threads", spec, 2, tokens))
        found.append(machine.method(f"{spec}, 1 thread", spec, 1, tokens))
        bare: dict[str, Any] = {"always": True, "lookup": False}  # what is gained by drafting ahead, and nothing else
        found.append(machine.method(f"ssd:{spec}, a core each", spec, 1, tokens, **bare))
        found.append(machine.method(f"ssd:{spec}, 2 threads each", spec, 2, tokens, **bare))
        found.append(machine.method(f"ssd:{spec}, and look-ups", spec, 1, tokens, always=True))
        found.append(machine.method(f"ssd:{spec}, as it decides", spec, 1, tokens, always=False))
    return found


def ask(found: Sequence[Method], prompts: Sequence[str], params: SamplingParams) -> dict[str, list[Stats]]:
    """The figures of every answer, by method, each prompt asked of all methods in another order."""
    dice, stats = random.Random(0), defaultdict(list)
    for prompt in prompts:
        answers = {}
        for method in dice.sample(list(found), len(found)):
            answers[method.name] = method.model.generate(prompt, params)
            stats[method.name].append(answers[method.name].stats)
        if params.greedy:
            assert len({answer.ids for answer in answers.values()}) == 1
    return dict(stats)


def row(name: str, stats: Sequence[Stats], plain: Sequence[Stats]) -> dict[str, Any]:
    tokens, forwards = sum(s.tokens for s in stats), sum(s.target_forwards for s in stats)
    speed, base = (sum(s.tokens for s in each) / sum(s.seconds for s in each) for each in (stats, plain))
    seen = joined_foresight([s.foresight for s in stats if s.foresight is not None])
    return {
        "method": name,
        "length": tokens / forwards,
        "draft_ms": 1e3 * sum(s.draft_seconds for s in stats) / forwards,
        "verify_ms": 1e3 * sum(s.verify_seconds for s in stats) / forwards,
        "hit_rate": seen.hit_rate if seen is not None else None,
        "hidden_ms": 1e3 * seen.hidden_seconds / seen.rounds if seen is not None else None,
        "branches": seen.branches / seen.rounds if seen is not None else None,
        "tokens_per_second": speed,
        "speedup": speed / base,
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    print(
        f"{'method':<36}{'length':>8}{'draft':>9}{'verify':>9}{'foreseen':>10}{'branches':>10}{'tokens/s':>10}{'speedup':>9}"
    )
    for each in rows:
        seen = "" if each["hit_rate"] is None else f"{each['hit_rate']:.0%}"
        branches = "" if each["branches"] is None else f"{each['branches']:.1f}"
        times = f"{each['draft_ms']:>6.1f} ms{each['verify_ms']:>6.1f} ms"
        print(
            f"{each['method']:<36}{each['length']:>8.2f}{times}{seen:>10}{branches:>10}"
            f"{each['tokens_per_second']:>10.1f}{each['speedup']:>9.2f}",
            flush=True,
        )


class End(NamedTuple):
    """Where a verification ended: after how many accepted tokens of how many, and the rank of the token it added.

    The rank is among the tokens that the draft itself does not have there, by the draft's law, 0 for the likeliest.
    """

    accepted: int
    drafted: int
    rank: int


class Noting(ScriptedRace):
    """Has each fork read the whole draft, and keeps it."""

    def __init__(self) -> None:
        super().__init__(1)
        self.fork: Fork | None = None

    def begin(self, fork: Fork, seconds: float | None = None) -> Work:
        self.fork = fork
        return super().begin(fork)


class _One(Planner):
    """Has the model read all that may be a place to prepare for."""

    def plan(self, ends: Any, deepest: int, budget: int, model: bool) -> Plan:
        return Plan(lambda known: [1.0] * (deepest + 1), deepest + 1, budget, 1, 1.0)


def recorded(
    machine: Machine, spec: str, prompts: Sequence[str], params: SamplingParams, tokens: int, share: float = 1.0
) -> list[End]:
    """Every end of the rounds of these answers that was not that of the answer; `share` is that of Saguaro draws."""
    race, ends = Noting(), list[End]()
    method = machine.method("", spec, 2, tokens, always=True, lookup=False, share=share, race=lambda: race)
    assert isinstance(method.drafter, Ssd)
    method.drafter.planner = _One()
    for prompt in prompts:
        request = Request(method.model.encode(prompt), params, detail=True)
        for _, event in method.model.engine.run([request]):
            if isinstance(event, RoundEvent) and event.detail is not None and isinstance(race.fork, ModelFork):
                draft, verdict, fork, race.fork = event.detail.draft, event.detail.verdict, race.fork, None
                law = fork._known[len(verdict.path)]
                if len(verdict.tokens) > len(verdict.path) and isinstance(law, Tensor):
                    ends.append(_end(law, verdict.tokens[-1], draft.tokens, len(verdict.path)))
    return ends


def _end(law: Tensor, token: int, drafted: Sequence[int], accepted: int) -> End:
    others = law.clone()
    if accepted < len(drafted):
        others[drafted[accepted]] = -torch.inf
    return End(accepted, len(drafted), int((others > others[token]).sum()))


def hits(ends: Sequence[End], branches: int, exponent: float | None) -> float:
    """The share of these ends that was prepared for: by the rule, or with `None` spread evenly."""
    rate = sum(e.accepted for e in ends) / max(1, sum(min(e.accepted + 1, e.drafted) for e in ends))
    found = 0
    for end in ends:
        chances = [rate**k * (1 - rate) for k in range(end.drafted)] + [rate**end.drafted]
        fan = fan_out(chances if exponent is not None else [1.0] * len(chances), branches, exponent or 0.0)
        found += end.rank < fan[end.accepted]
    return found / len(ends)


def main() -> None:
    parser = arguments(__doc__, limit=3, max_tokens=48)
    parser.add_argument("--drafters", default="eagle3,layer_skip")
    parser.add_argument("--tokens", type=int, default=4, help="of a draft")
    parser.add_argument("--temperatures", default="0")
    parser.add_argument("--trace-temperatures", default="0,1")
    parser.add_argument("--weights", default="bf16")
    parser.add_argument("--no-times", action="store_true", help="the second part alone")
    options = parser.parse_args()
    specs = [spec for spec in options.drafters.split(",") if spec]
    prompts, machine = load_prompts(options.prompts, options.limit), Machine(options.model, options.weights)
    tables: dict[str, Any] = {}
    if not options.no_times:
        found = timed(machine, specs, options.tokens)
        ask(found, prompts[:1], SamplingParams(max_tokens=12))  # warm
        for temperature in options.temperatures.split(","):
            params = SamplingParams(max_tokens=options.max_tokens, temperature=float(temperature), seed=0)
            stats = ask(found, prompts, params)
            tables[temperature] = [row(m.name, stats[m.name], stats[PLAIN]) for m in found]
            print(f"\ntemperature {temperature}, drafts of {options.tokens}")
            show(tables[temperature])
        for method in found:
            if isinstance(method.drafter, Ssd) and method.drafter.trial is not None:
                print(method.drafter.explanation())
    rates: dict[str, dict[str, list[float]]] = {}
    print(f"\n{'ends that were prepared for':<30}" + "".join(f"{f'{b} branches':>14}" for b in BUDGETS))
    for spec in specs:
        for temperature in options.trace_temperatures.split(","):
            params = SamplingParams(max_tokens=options.max_tokens, temperature=float(temperature), seed=0)
            shares = (1.0,) if params.greedy else (1.0, 0.5)
            for share in shares:
                ends = recorded(machine, spec, prompts, params, options.tokens, share)
                draws = "" if share == 1 else f", Saguaro draws {share:g}"
                name = f"{spec}, temperature {temperature}{draws}"
                rule = {f"fan-out, r = {r:g}": [hits(ends, b, r) for b in BUDGETS] for r in EXPONENTS}
                rates[name] = {**rule, "even": [hits(ends, b, None) for b in BUDGETS]}
                accepted = sum(end.accepted for end in ends) / len(ends)
                print(f"{name}: {len(ends)} ends, {accepted:.2f} tokens accepted a round")
                for way, values in rates[name].items():
                    print(f"  {way:<28}" + "".join(f"{value:>14.1%}" for value in values), flush=True)
                rates[name] |= {"ends": [len(ends)], "accepted": [accepted]}
    about = {"model": options.model, "weights": options.weights, "prompts": len(prompts), "tokens": options.tokens}
    print(json.dumps({**about, "max_tokens": options.max_tokens, "times": tables, "prepared": rates}))


if __name__ == "__main__":
    main()
