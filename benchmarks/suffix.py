"""Memory and time of the suffix drafter over a long history; and, given dialogues, how much of them it foresees.

    python benchmarks/suffix.py --tokens 100000 --proposals 2000
    python benchmarks/suffix.py --dialogues answers.jsonl.gz --limit 150

The history is made up: words as frequent as in natural text (Zipf and Mandelbrot), broken by repetitions of earlier
passages. It is read once as a prompt (the request's own tree) and once as earlier answers (the global tree); proposals
then follow its further course.

Dialogues are JSON lines with `ids`, a prompt and the greedy answer to it, and `n_prompt`. Answers are replayed without
a model: a draft's path is accepted as far as it agrees. Every fourth dialogue is replayed, the others make the warm
global tree. Prints tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from foredraft.proposers.base import Proposer
from foredraft.proposers.ngram import NGramProposer
from foredraft.proposers.suffix import Suffix, SuffixProposer, SuffixSettings
from foredraft.types import Draft

VOCABULARY = 50_000
ANSWER = 250  # tokens of one earlier answer
BUDGETS = (1, 2, 4, 8, 16, 32)

Dialogue = tuple[list[int], int]
"""All ids, and how many of them are the prompt."""


def made_up(length: int, seed: int = 0) -> list[int]:
    """Text in which passages of 5 to 60 tokens come again, among others of independent words."""
    random = np.random.default_rng(seed)
    shares = 1 / (np.arange(VOCABULARY) + 2.7)
    words = iter(random.choice(VOCABULARY, length + 60, p=shares / shares.sum()).tolist())
    text: list[int] = []
    while len(text) < length:
        count = int(random.integers(5, 60))
        if len(text) > 100 and random.random() < 0.4:
            start = int(random.integers(0, len(text) - count))
            text += text[start : start + count]
        else:
            text += islice(words, count)
    return text[:length]


def timed(tokens: int, proposals: int) -> dict[str, float]:
    """Bytes and times with so many tokens in the request's own tree and as many in the global one."""
    started = perf_counter()
    drafter = Suffix(VOCABULARY)
    compile_seconds = perf_counter() - started
    text = made_up(tokens + 2 * proposals)
    history, course = text[:tokens], text[tokens:]

    started = perf_counter()
    for start in range(0, tokens, ANSWER):
        drafter.global_tree.add(history[start : start + ANSWER])
    global_seconds = perf_counter() - started
    proposer = SuffixProposer(drafter)
    started = perf_counter()
    proposer.propose(history, 0)
    own_seconds = perf_counter() - started

    seconds: dict[int, list[float]] = {8: [], 32: []}
    extending: list[float] = []
    read = list(history)
    for at in range(proposals):
        read += course[2 * at : 2 * at + 2]  # two tokens a round
        started = perf_counter()
        proposer.propose(read, 0)
        extending.append(perf_counter() - started)
        for budget, times in seconds.items():
            started = perf_counter()
            proposer.propose(read, budget)
            times.append(perf_counter() - started)
    return {
        "tokens": tokens,
        "compile_or_load_seconds": compile_seconds,
        "own_megabytes": proposer._own.nbytes / 1e6,
        "global_megabytes": drafter.global_tree.nbytes / 1e6,
        "own_microseconds_a_token": own_seconds / tokens * 1e6,
        "global_microseconds_a_token": global_seconds / tokens * 1e6,
        "round_extension_milliseconds": median(extending) * 1e3,
        "proposal_8_milliseconds": median(seconds[8]) * 1e3,
        "proposal_32_milliseconds": median(seconds[32]) * 1e3,
        "proposal_32_milliseconds_worst_hundredth": float(np.quantile(seconds[32], 0.99)) * 1e3,
    }


def accepted(draft: Draft, truth: Sequence[int]) -> int:
    """Length of the draft's path that agrees."""
    below = {
        (parent, token): node for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True))
    }
    node = -1
    for length, token in enumerate(truth):
        if (node, token) not in below:
            return length
        node = below[node, token]
    return len(truth)


def replay(dialogues: Sequence[Dialogue], make: Callable[[], Proposer], budget: int) -> tuple[float, float]:
    """Mean accepted length and mean nodes a round."""
    emitted = rounds = nodes = 0
    for ids, length in dialogues:
        proposer = make()
        emitted -= length
        while length < len(ids):
            draft = proposer.propose(ids[:length], min(budget, len(ids) - length - 1))
            nodes += len(draft)
            length += accepted(draft, ids[length:-1]) + 1
            rounds += 1
        emitted += length
        proposer.finish(ids)
    return emitted / rounds, nodes / rounds


def foreseen(dialogues: list[Dialogue], limit: int) -> dict[str, list[float]]:
    """Mean accepted length by way of drafting, for each of `BUDGETS`."""
    replayed, others = dialogues[::4][:limit], [d for at, d in enumerate(dialogues) if at % 4]
    found: dict[str, list[float]] = {}

    def warm(answers: Sequence[Dialogue]) -> Suffix:
        drafter = Suffix(VOCABULARY)
        replay(answers, lambda: SuffixProposer(drafter), 1)
        return drafter

    def kept(drafter: Suffix) -> Callable[[], Proposer]:
        def make() -> Proposer:
            proposer = SuffixProposer(drafter)
            proposer.finish = lambda tokens: None  # type: ignore[method-assign]  # what is warm stays as it is
            return proposer

        return make

    own = Suffix(VOCABULARY, SuffixSettings(global_bytes=0))
    chains = Suffix(VOCABULARY, SuffixSettings(global_bytes=0, chains_only=True))
    ways: dict[str, Callable[[], Proposer]] = {
        "ngram": NGramProposer,
        "suffix, chains": lambda: SuffixProposer(chains),
        "suffix": lambda: SuffixProposer(own),
        "suffix, warm by other questions": kept(warm(others)),
        "suffix, warm by the same questions": kept(warm(replayed)),
    }
    for way, make in ways.items():
        figures = [replay(replayed, make, budget) for budget in BUDGETS]
        found[way] = [round(length, 3) for length, _ in figures]
        found[f"{way}: nodes"] = [round(nodes, 1) for _, nodes in figures]
    return found


def read_dialogues(path: Path) -> list[Dialogue]:
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as lines:
        records = [json.loads(line) for line in lines]
    return [(r["ids"], r["n_prompt"]) for r in records if r.get("temperature", 0) == 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--proposals", type=int, default=2_000)
    parser.add_argument("--dialogues", type=Path)
    parser.add_argument("--limit", type=int, default=150)
    options = parser.parse_args()

    report: dict[str, Any] = timed(options.tokens, options.proposals)
    for name, value in report.items():
        print(f"{name.replace('_', ' '):<44}{value:>12,.4g}")
    if options.dialogues is not None:
        report["mean_accepted_length"] = foreseen(read_dialogues(options.dialogues), options.limit)
        print(f"\n{'mean accepted length by budget':<44}" + "".join(f"{budget:>8}" for budget in BUDGETS))
        for name, figures in report["mean_accepted_length"].items():
            print(f"{name:<44}" + "".join(f"{figure:>8}" for figure in figures))
    print(json.dumps({name: round(v, 4) if isinstance(v, float) else v for name, v in report.items()}))


if __name__ == "__main__":
    main()
