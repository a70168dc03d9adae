"""What seed-exact noise costs beside a target step, for a vocabulary of 150,000.

    python benchmarks/noise.py

The target is a seeded Qwen2-shaped model of about 0.5 B weights (24 layers, hidden 896), one row a forward. Medians of
interleaved runs; prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from foredraft.backends.base import Query
from foredraft.backends.transformers import TransformersBackend
from foredraft.randomness import KeyedSource
from foredraft.sampling import probabilities
from foredraft.types import SamplingParams

VOCABULARY = 150_000


def seconds(run: Callable[[], object]) -> float:
    started = perf_counter()
    run()
    return perf_counter() - started


def target() -> Callable[[], object]:
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    backend = TransformersBackend(Qwen2ForCausalLM(config))
    cache = backend.new_cache()
    backend.prefill(cache, list(range(127)))

    def step() -> None:
        backend.forward([Query(cache, 5)])
        backend.commit(cache, ())
        backend.truncate(cache, 127)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=15)
    options = parser.parse_args()

    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3
    laws = {
        "top-k 50": SamplingParams(temperature=1.0, top_k=50),
        "top-p 0.95": SamplingParams(temperature=0.7, top_p=0.95),
        "no truncation": SamplingParams(temperature=1.0),
    }
    source = KeyedSource(1)
    runs: dict[str, Callable[[], object]] = {"target step": target()}
    for name, params in laws.items():
        p = probabilities(logits, params)[0]
        runs[name] = lambda p=p: source.draw(p)  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.repeat + 1):
        for name, run in runs.items():
            times[name].append(seconds(run))
    medians = {name: median(values[1:]) for name, values in times.items()}  # the first round warms up
    for name, value in medians.items():
        print(f"{name:<16}{1e3 * value:>10.3f} ms{value / medians['target step']:>10.2%}")
    print(json.dumps({"vocabulary": VOCABULARY, "ms": {name: round(1e3 * v, 4) for name, v in medians.items()}}))


if __name__ == "__main__":
    main()
