"""The native engine against llama.cpp and transformers: what a forward over n tokens costs, and whole answers.

    python benchmarks/native.py smollm2-135m --prompts questions.jsonl --limit 8 --max-tokens 64

Engines take turns within each repetition, so that the machine's moods fall on all alike; figures are medians, ratios
the medians of the ratios within a repetition. llama.cpp is left out, and named, where llama-cpp-python is missing.
Prints tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM

import foredraft
from common import arguments, load_prompts
from foredraft.api import Model
from foredraft.backends.base import Query
from foredraft.backends.native.backend import NativeBackend
from foredraft.backends.native.decoder import first_row, linear
from foredraft.backends.native.reading import read_native
from foredraft.backends.native.team import compiled, physical_cores
from foredraft.backends.transformers import TransformersBackend
from foredraft.loading import Loader, cache_folder, parse_drafter
from foredraft.models import resolve
from foredraft.types import Draft
from llama import Llama
from variants import TYPES, variant

CONTEXT = 128  # tokens before those that are timed
PROMPT = 512  # tokens of a prefill
FILLER = [100 + 7 * i % 5000 for i in range(PROMPT)]


@compiled  # type: ignore[untyped-decorator]
def linears(thread: int, threads: int, arrivals: Any, tables: Any, work: Any, logits: Any) -> None:
    """The products of a forward and nothing else."""
    nodes = len(logits)
    for index in range(len(tables.layers)):
        layer = tables.layers[index]
        for part, x, y in (
            (layer.q, work.normed, work.q),
            (layer.k, work.normed, work.k),
            (layer.v, work.normed, work.v),
            (layer.o, work.mixed, work.added),
            (layer.gate, work.normed, work.gate),
            (layer.up, work.normed, work.up),
            (layer.down, work.gate, work.added),
        ):
            first, last = first_row(part.rows, thread, threads), first_row(part.rows, thread + 1, threads)
            linear(tables.kernels, part, x, y, nodes, first, last)
    head = tables.decoder[0].head
    first, last = first_row(head.rows, thread, threads), first_row(head.rows, thread + 1, threads)
    linear(tables.kernels, head, work.normed, logits, nodes, first, last)


def seconds_of(call: Callable[[], object]) -> float:
    started = perf_counter()
    call()
    return perf_counter() - started


class Ours:
    """One weight type on the native engine."""

    def __init__(self, file: Path, threads: int) -> None:
        read = read_native(file, cache=cache_folder())
        self.tokenizer = read.tokenizer
        self.backend = NativeBackend(read.weights, threads=threads, kernels=cache_folder() / "kernels")
        self._cache = self.backend.new_cache()
        self.backend.prefill(self._cache, FILLER[:CONTEXT])

    def step(self, nodes: int) -> float:
        query = Query(self._cache, FILLER[0], Draft.chain(FILLER[1:nodes]))
        return seconds_of(lambda: self.backend.forward([query]))

    def products(self, nodes: int) -> float:
        logits = np.empty((nodes, self.backend.weights.measures.vocabulary), dtype=np.float32)
        work = self.backend._workspace(nodes, 1)
        return seconds_of(lambda: self.backend.team.run(linears, self.backend._tables, work, logits))

    def prefill(self) -> float:
        return seconds_of(lambda: self.backend.prefill(self.backend.new_cache(), FILLER))


class Theirs:
    """One weight type on llama.cpp."""

    def __init__(self, file: Path, threads: int) -> None:
        self.llama = Llama(file, threads)
        self.llama.decode(FILLER[:CONTEXT], 0)

    def step(self, nodes: int) -> float:
        self.llama.forget(CONTEXT)
        return self.llama.decode(FILLER[:nodes], CONTEXT)

    def prefill(self) -> float:
        self.llama.forget(0)
        return self.llama.decode(FILLER, 0, scored=False)


class Transformers:
    """transformers with eager attention."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        self._backend = TransformersBackend(self.model)
        self._cache = self._backend.new_cache()
        self._backend.prefill(self._cache, FILLER[:CONTEXT])

    def step(self, nodes: int) -> float:
        query = Query(self._cache, FILLER[0], Draft.chain(FILLER[1:nodes]))
        seconds = seconds_of(lambda: self._backend.forward([query]))
        self._backend.commit(self._cache, ())
        self._backend.truncate(self._cache, CONTEXT)
        return seconds

    def prefill(self) -> float:
        return seconds_of(lambda: self._backend.prefill(self._backend.new_cache(), FILLER))


def read_bandwidth(threads: int) -> float:
    """Bytes a second of reading memory once, by the best of a few ways."""
    numbers = torch.ones(150_000_000)
    torch.set_num_threads(threads)
    ways: tuple[Callable[[], object], ...] = (numbers.sum, numbers.view(torch.int64).sum, numbers.max)
    return numbers.nbytes / min(seconds_of(way) for way in ways for _ in range(4))


def take_turns(calls: dict[Any, Callable[[], float]], repeat: int) -> dict[Any, list[float]]:
    """Seconds of every call in every repetition, one warm-up aside."""
    found: dict[Any, list[float]] = {name: [] for name in calls}
    for turn in range(repeat + 1):
        for name, call in calls.items():
            sleep(0.005)  # torch's threads look for work for a while before they rest
            call()  # whoever comes after another engine finds everything cold
            seconds = call()
            if turn:
                found[name].append(seconds)
    return found


def steps(engines: dict[str, Any], nodes: list[int], repeat: int) -> dict[str, dict[str, Any]]:
    """Milliseconds by engine and nodes, with v(n), and of the prefill."""
    calls: dict[Any, Callable[[], float]] = {}
    for name, engine in engines.items():
        for n in nodes:
            calls[name, n] = lambda engine=engine, n=n: engine.step(n)  # type: ignore[misc]
            if isinstance(engine, Ours):
                calls[f"{name} products", n] = lambda engine=engine, n=n: engine.products(n)  # type: ignore[misc]
    times = take_turns(calls, repeat)
    prefills = take_turns({name: engine.prefill for name, engine in engines.items()}, max(3, repeat // 4))
    report: dict[str, dict[str, Any]] = {}
    for name, n in calls:
        report.setdefault(name, {"ms": {}, "v": {}})
        ratios = [one / first for one, first in zip(times[name, n], times[name, nodes[0]], strict=True)]
        report[name]["ms"][n], report[name]["v"][n] = median(times[name, n]) * 1e3, median(ratios)
    for name, seconds in prefills.items():
        report[name]["prefill_ms"] = median(seconds) * 1e3
    return report


def show_steps(report: dict[str, dict[str, Any]], nodes: list[int]) -> None:
    print(f"{'milliseconds (v)':<22}" + "".join(f"{f'n={n}':>14}" for n in nodes) + f"{'prefill 512':>14}")
    for name, row in report.items():
        figures = [f"{row['ms'][n]:.2f} ({row['v'][n]:.2f})" for n in nodes]
        cells = "".join(f"{figure:>14}" for figure in figures)
        prefill = f"{row['prefill_ms']:.0f}" if "prefill_ms" in row else ""
        print(f"{name:<22}{cells}{prefill:>14}")


def answers(
    options: argparse.Namespace, engines: dict[str, Any], drafter: str, prompts: list[str]
) -> dict[str, dict[str, float]]:
    """Tokens a second of whole answers, with their prefill."""
    runs: dict[str, Callable[[list[int]], int]] = {}
    stop: frozenset[int] = frozenset()
    encoded: list[list[int]] = []
    for name, engine in engines.items():
        if isinstance(engine, Ours):
            drafts = Loader().drafter(parse_drafter(drafter), engine.backend, engine.tokenizer)
            loaded = Model(engine.backend, engine.tokenizer, drafts, draft_tokens=options.nodes)
            plain = loaded.plain()
            stop = engine.backend.stop_tokens
            encoded = encoded or [loaded.encode(prompt) for prompt in prompts]
            runs[f"{name} {drafter}"] = _ours(loaded, options.max_tokens)
            runs[f"{name} plain"] = _ours(plain, options.max_tokens)
    for name, engine in engines.items():
        if isinstance(engine, Theirs):
            runs[name] = lambda ids, e=engine: len(e.llama.generate(ids, options.max_tokens, stop))  # type: ignore[misc]
        elif isinstance(engine, Transformers):
            runs[name] = _generate(engine.model, options.max_tokens)
    for run in runs.values():
        run(encoded[0])
    seconds, tokens = dict.fromkeys(runs, 0.0), dict.fromkeys(runs, 0)
    for ids in encoded:
        for name, run in runs.items():
            started = perf_counter()
            tokens[name] += run(ids)
            seconds[name] += perf_counter() - started
    return {name: {"tokens": tokens[name], "tokens_per_second": tokens[name] / seconds[name]} for name in runs}


def _ours(model: Model, max_tokens: int) -> Callable[[list[int]], int]:
    params = foredraft.SamplingParams(max_tokens=max_tokens)
    return lambda ids: model.generate(ids, params).stats.tokens


def _generate(model: Any, max_tokens: int) -> Callable[[list[int]], int]:
    def run(ids: list[int]) -> int:
        inputs = torch.tensor([ids])
        mask = torch.ones_like(inputs)
        output = model.generate(inputs, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
        return int(output.shape[1]) - len(ids)

    return run


def memory(file: Path, threads: int) -> dict[str, float]:
    """MB that a process takes for one model beyond its imports, after an answer of 512 tokens; to be run alone."""
    process = psutil.Process()
    before = process.memory_info().rss
    engine = Ours(file, threads)
    engine.prefill()
    engine.step(8)
    taken = process.memory_info().rss - before
    weights = engine.backend.weights
    embedding = 0 if weights.head is weights.embedding else weights.embedding.data.nbytes
    cache = engine.backend.new_cache()
    engine.backend.prefill(cache, FILLER)
    kv = 2 * (cache.keys.nbytes + cache.values.nbytes)  # of the prefill's cache and of the steps'
    return {"taken": taken / 1e6, "weights": (weights.bytes_per_token + embedding) / 1e6, "kv": kv / 1e6}


def main() -> None:
    parser = arguments(__doc__, limit=8, max_tokens=64)
    parser.add_argument("--weights", default="f32,bf16,q8_0", help=f"of {', '.join(TYPES)}")
    parser.add_argument("--widths", default="1,2,4,8,16,32", help="tokens of a forward")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--drafter", default="hybrid:suffix+recycling")
    parser.add_argument("--nodes", type=int, default=8, help="most tokens of a draft")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    options = parser.parse_args()

    source = resolve(options.model, cache_folder()).path
    if options.memory:
        print(json.dumps(memory(variant(source, options.memory, cache_folder() / "variants"), options.threads)))
        return
    widths, names = [int(n) for n in options.widths.split(",")], options.weights.split(",")
    files = {name: variant(source, name, cache_folder() / "variants") for name in names}
    engines: dict[str, Any] = {f"native {name}": Ours(file, options.threads) for name, file in files.items()}
    if importlib.util.find_spec("llama_cpp") is None:
        print("llama.cpp is left out: llama-cpp-python is not installed")
    else:
        engines |= {f"llama.cpp {name}": Theirs(file, options.threads) for name, file in files.items()}
    network = foredraft.load(options.model, "none", backend="transformers").backend.model  # type: ignore[attr-defined]
    folder = cache_folder() / "variants" / "transformers"
    network.save_pretrained(folder)
    torch.set_num_threads(options.threads)
    engines |= {f"transformers {dtype}": Transformers(folder, dtype) for dtype in ("float32", "bfloat16")}

    report: dict[str, Any] = {"model": options.model, "threads": options.threads, "cpu": _cpu()}
    report["read_gb_per_second"] = read_bandwidth(options.threads) / 1e9
    report["steps"] = steps(engines, widths, options.repeat)
    show_steps(report["steps"], widths)
    print(f"\nmemory is read at {report['read_gb_per_second']:.1f} GB/s")
    for name, engine in engines.items():
        if isinstance(engine, Ours):
            row = report["steps"][f"{name} products"]
            row["gb_per_second"] = engine.backend.weights.bytes_per_token / row["ms"][widths[0]] / 1e6
            print(f"{name}: products at n={widths[0]} read {row['gb_per_second']:.1f} GB/s")
    report["memory_mb"] = {}
    for name in names:
        command = [sys.executable, __file__, options.model, "--memory", name, "--threads", str(options.threads)]
        taken = json.loads(subprocess.run(command, capture_output=True, check=True, env=os.environ).stdout)
        report["memory_mb"][name] = taken
        print(
            f"native {name}: {taken['taken']:.0f} MB, of which weights {taken['weights']:.0f} and KV {taken['kv']:.0f}"
        )
    report["answers"] = answers(options, engines, options.drafter, load_prompts(options.prompts, options.limit))
    print()
    for name, row in report["answers"].items():
        print(f"{name:<42}{row['tokens_per_second']:>9.1f} tokens/s  ({row['tokens']} tokens)")
    print(json.dumps(report))


def _cpu() -> str:
    from foredraft.backends.native.vector import host

    cpu = host()
    return f"{cpu.name}, {cpu.lanes} lanes"


if __name__ == "__main__":
    main()
