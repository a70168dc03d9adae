"""`auto` against plain decoding and against fixed drafters with fixed numbers of draft tokens, by kind of text.

    python benchmarks/controller.py smollm2-135m --prompts questions.jsonl --limit 26 --max-tokens 128 --repeat 5

Questions of a file keep their category (Spec-Bench's have one); "nothing to copy" is text drawn at temperature 1.2,
which hardly repeats anything. Settings take turns question by question, in another order each time, so that what the
machine does besides falls on all alike. In every repetition every drafter begins anew and learns over the questions:
with an answer it has seen before it would have it easy. Figures are medians over repetitions of ratios within one;
times are after the first token. Prints tables, then one JSON line.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any

from common import Question, arguments, load_questions
from foredraft.api import Model
from foredraft.costs import Costs
from foredraft.loading import EngineChoice, Loader, parse_drafter
from foredraft.proposers.auto import Auto
from foredraft.proposers.base import Proposer, Verification
from foredraft.proposers.joint import AutoProposer
from foredraft.randomness import RandomSource
from foredraft.sampling import Law
from foredraft.types import Draft, SamplingParams, Verdict

NOTHING_TO_COPY = "nothing to copy"
DREAMS = (
    "Write the strangest dream you can think of.",
    "Make up ten names for planets and say what each smells like.",
    "Write a poem in which no word occurs twice.",
    "Invent a language and tell me about its sounds.",
)


class Clocked(Auto):
    """Counts the seconds of deciding: all of `auto` but what its parts take."""

    decided_seconds = 0.0

    def proposer(self, law: Law, source: RandomSource) -> AutoProposer:
        return _Clocked(self, [part.proposer(law, source) for part in self.parts])

    def select(
        self, drafts: Sequence[Draft], context: int, others: Sequence[Draft] = (), most: int | None = None
    ) -> list[Draft]:
        started = perf_counter()
        selected = Auto.select(self, drafts, context, others, most)
        self.decided_seconds += perf_counter() - started
        return selected


class _Clocked(AutoProposer):
    def __init__(self, auto: Clocked, parts: Sequence[Proposer]) -> None:
        super().__init__(auto, parts)
        self._clocked = auto

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        started = perf_counter()
        draft = AutoProposer.propose(self, tokens, budget)
        self._clocked.decided_seconds += perf_counter() - started - self._asking
        return draft

    def observe(self, verification: Verification, verdict: Verdict) -> None:
        started, before = perf_counter(), self._clocked.draft_seconds
        AutoProposer.observe(self, verification, verdict)
        self._clocked.decided_seconds += perf_counter() - started - (self._clocked.draft_seconds - before)


class Bench:
    """One backend, and every setting anew for each repetition."""

    def __init__(self, model: str, backend: str, threads: int | None) -> None:
        engine = EngineChoice(backend=backend, threads=threads if backend == "native" else None)
        self.loader = Loader(engine=engine)
        self.target, self.tokenizer, self.files = self.loader.model(model)
        self.costs = self.loader.costs(self.target, self.files)

    def model(self, setting: str) -> Model:
        """`none`, `auto`, or `DRAFTER K`."""
        name, _, tokens = setting.partition(" ")
        drafter = self.loader.drafter(parse_drafter(name), self.target, self.tokenizer, self.files)
        if isinstance(drafter, Auto):
            drafter = Clocked(drafter.parts, Costs.from_json(self.costs.to_json()), usual=True)  # as they were measured
        return Model(self.target, self.tokenizer, drafter, draft_tokens=int(tokens) if tokens else None)


def seconds_per_token(model: Model, question: Question, max_tokens: int) -> float:
    """Of one answer, after its first token."""
    hot = question.category == NOTHING_TO_COPY
    params = SamplingParams(max_tokens=max_tokens, temperature=1.2 if hot else 0.0, seed=1 if hot else None)
    stats = model.generate(question.prompt, params).stats
    return (stats.tpot_ms or 0.0) / 1e3


def measure(bench: Bench, questions: Sequence[Question], settings: Sequence[str], options: Any) -> dict[str, Any]:
    """Seconds per token by repetition, category and setting, and what deciding took of a plain step."""
    order = random.Random(0)
    times: list[dict[tuple[str, str], list[float]]] = []
    deciding = []
    for repetition in range(options.repeat + 1):  # the first one warms up
        models = {setting: bench.model(setting) for setting in settings}
        found: dict[tuple[str, str], list[float]] = defaultdict(list)
        for question in questions[: 1 if repetition == 0 else None]:
            for setting in order.sample(settings, len(settings)):
                seconds = seconds_per_token(models[setting], question, options.max_tokens)
                found[question.category, setting].append(seconds)
        auto = models["auto"].drafter
        assert isinstance(auto, Clocked)
        if repetition > 0:
            times.append(found)
            deciding.append(auto.decided_seconds / auto.rounds / bench.costs.seconds(1))
    return {"times": times, "deciding": median(deciding)}


def ratios(times: list[dict[tuple[str, str], list[float]]], categories: Sequence[str], a: str, b: str) -> float:
    """How many times as fast `a` is as `b` on these categories: the median over repetitions."""

    def total(found: dict[tuple[str, str], list[float]], setting: str) -> float:
        return sum(sum(found[category, setting]) for category in categories)

    return median(total(found, b) / total(found, a) for found in times)


def report(measured: dict[str, Any], categories: Sequence[str], settings: Sequence[str]) -> dict[str, Any]:
    """By category and over all: every setting against plain, and `auto` against the best fixed one."""
    fixed = [setting for setting in settings if setting not in ("auto", "none")]
    rows: dict[str, Any] = {}
    for name in (*categories, "all"):
        wanted = categories if name == "all" else [name]
        speedups = {s: ratios(measured["times"], wanted, s, "none") for s in settings if s != "none"}
        best = max(fixed, key=lambda s: speedups[s])
        against = ratios(measured["times"], wanted, "auto", best)
        rows[name] = {"speedups": speedups, "best_fixed": best, "auto_against_best": against}
    return rows


def show(rows: dict[str, Any], deciding: float) -> None:
    """A line for each category."""
    print(f"{'category':<24}{'auto / plain':>14}{'best fixed':>32}{'its speedup':>14}{'auto / best':>14}")
    for name, row in rows.items():
        best = row["best_fixed"]
        auto, fixed = row["speedups"]["auto"], row["speedups"][best]
        print(f"{name or '(none)':<24}{auto:>14.3f}{best:>32}{fixed:>14.3f}{row['auto_against_best']:>14.3f}")
    print(f"deciding takes {deciding:.2%} of a plain step")


def main() -> None:
    parser = arguments(__doc__, limit=26, max_tokens=128)
    parser.add_argument("--backends", default="native,transformers")
    parser.add_argument("--drafters", default="ngram,suffix,recycling,hybrid:suffix+recycling")
    parser.add_argument("--draft-tokens", default="2,4,8,16")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    questions = load_questions(options.prompts, options.limit)
    questions += [Question(prompt, NOTHING_TO_COPY) for prompt in DREAMS[: max(1, options.limit // 4)]]
    categories = list(dict.fromkeys(question.category for question in questions))
    fixed = [f"{drafter} {k}" for drafter in options.drafters.split(",") for k in options.draft_tokens.split(",")]
    settings = ["none", "auto", *fixed]
    result: dict[str, Any] = {"model": options.model, "max_tokens": options.max_tokens, "repeat": options.repeat}
    for backend in options.backends.split(","):
        bench = Bench(options.model, backend, options.threads)
        measured = measure(bench, questions, settings, options)
        rows = report(measured, categories, settings)
        print(f"\n{backend}, a plain step {1e3 * bench.costs.seconds(1):.1f} ms")
        show(rows, measured["deciding"])
        result[backend] = {"categories": rows, "deciding": measured["deciding"]}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
