"""Plain decoding, ngram, and transformers' own generate with and without prompt lookup, on the same prompts.

    python benchmarks/first.py smollm2-135m --limit 8 --max-tokens 64 --repeat 3

Prompts run one after the other through all methods in turn, so that the machine's moods fall on all alike; each
method's rate is the median over the repetitions, and each ratio the median of the ratios within a repetition.
Prints a table, then one JSON line.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import torch

import foredraft
from common import arguments, counted_forwards, load_prompts
from foredraft.api import Model

LOOKUP = 10  # prompt_lookup_num_tokens, the value of transformers' documentation

Method = Callable[[list[int]], tuple[int, int]]
"""Generates from a prompt; returns how many tokens were emitted and how many target forwards that took."""


@dataclass
class Row:
    """What one method did, summed over the prompts of each repetition."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)

    def open_repetition(self) -> None:
        for column in (self.seconds, self.tokens, self.forwards):
            column.append(0)

    def add(self, seconds: float, tokens: int, forwards: int) -> None:
        self.seconds[-1] += seconds
        self.tokens[-1] += tokens
        self.forwards[-1] += forwards

    @property
    def rates(self) -> list[float]:
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]


def ours(model: Model, max_tokens: int) -> Method:
    params = foredraft.SamplingParams(max_tokens=max_tokens)

    def run(ids: list[int]) -> tuple[int, int]:
        stats = model.generate(ids, params).stats
        return stats.tokens, stats.target_forwards

    return run


def theirs(model: Model, max_tokens: int, **options: int) -> Method:
    network = model.backend.model  # type: ignore[attr-defined]

    def run(ids: list[int]) -> tuple[int, int]:
        inputs = torch.tensor([ids], device=network.device)
        with counted_forwards(network) as count:
            output = network.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=model.tokenizer.eos_token_id,
                **options,
            )
        return output.shape[1] - len(ids), count[0]

    return run


def main() -> None:
    parser = arguments(__doc__, limit=8, max_tokens=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--draft-tokens", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()

    model = foredraft.load(
        options.model,
        "ngram",
        draft_tokens=options.draft_tokens,
        backend="transformers",  # all methods on the same forwards; benchmarks/native.py has the other backend
        device=options.device,
        dtype=options.dtype,
    )
    prompts = [model.encode(prompt) for prompt in load_prompts(options.prompts, options.limit)]
    methods: dict[str, Method] = {
        "plain": ours(model.plain(), options.max_tokens),
        "ngram": ours(model, options.max_tokens),
        "transformers": theirs(model, options.max_tokens),
        "transformers prompt lookup": theirs(model, options.max_tokens, prompt_lookup_num_tokens=LOOKUP),
    }
    for method in methods.values():
        method(prompts[0])  # warm up
    rows = {name: Row() for name in methods}
    for _ in range(options.repeat):
        for row in rows.values():
            row.open_repetition()
        for ids in prompts:
            for name, method in methods.items():
                started = perf_counter()
                tokens, forwards = method(ids)
                rows[name].add(perf_counter() - started, tokens, forwards)

    print(f"{'method':<28}{'tokens/s':>9}{'x plain':>9}{'target forwards':>17}{'mean accepted length':>22}")
    report = {}
    for name, row in rows.items():
        ratio = median(own / plain for own, plain in zip(row.rates, rows["plain"].rates, strict=True))
        length = sum(row.tokens) / sum(row.forwards)
        print(f"{name:<28}{median(row.rates):>9.1f}{ratio:>9.2f}{row.forwards[0]:>17}{length:>22.2f}")
        report[name] = {
            "tokens_per_second": round(median(row.rates), 2),
            "speedup": round(ratio, 3),
            "tokens": row.tokens[0],
            "target_forwards": row.forwards[0],
            "mean_accepted_length": round(length, 3),
        }
    print(json.dumps({"model": options.model, "prompts": len(prompts), "repeat": options.repeat, "methods": report}))


if __name__ == "__main__":
    main()
