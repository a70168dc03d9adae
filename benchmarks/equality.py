"""Output with every drafter against plain decoding, id for id; greedy also against transformers' own generate.

    python benchmarks/equality.py smollm2-135m --prompts questions.jsonl --limit 20 --max-tokens 64
    python benchmarks/equality.py smollm2-135m --temperature 0.7

Above temperature 0 the rule is seed-exact, with top-p 0.95, penalties of 1.1 and a logit bias. The draft model is a
truncated copy of the target. Prints a line for each pair, then one JSON line; the exit status is 1 if any ids differ.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

import foredraft
from common import arguments, load_prompts, truncated


def main() -> None:
    parser = arguments(__doc__, limit=20, max_tokens=64)
    parser.add_argument("--draft-layers", type=int, default=10, help="layers of the truncated draft model")
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()

    greedy = options.temperature == 0
    rule = None if greedy else "seed-exact"
    ngram = foredraft.load(options.model, "ngram", dtype="float32", rule=rule)
    network = ngram.backend.model  # type: ignore[attr-defined]
    draft = foredraft.load(network, truncated(network, options.draft_layers), tokenizer=ngram.tokenizer, rule=rule)
    plain = ngram.plain()
    params = foredraft.SamplingParams(max_tokens=options.max_tokens)
    if not greedy:
        penalties: dict[str, Any] = dict.fromkeys(("repetition_penalty", "frequency_penalty", "presence_penalty"), 1.1)
        params = dataclasses.replace(
            params, temperature=options.temperature, top_p=0.95, seed=11, logit_bias={28: -1.0, 30: 0.5}, **penalties
        )

    def generate_ids(ids: list[int]) -> tuple[int, ...]:
        inputs = torch.tensor([ids], device=network.device)
        output = network.generate(inputs, max_new_tokens=options.max_tokens, do_sample=False)
        return tuple(output[0, len(ids) :].tolist())

    others: dict[str, Callable[[list[int]], tuple[int, ...]]] = {
        "ngram": lambda ids: ngram.generate(ids, params).ids,
        "draft model": lambda ids: draft.generate(ids, params).ids,
    }
    if greedy:
        others["transformers generate"] = generate_ids
    equal = dict.fromkeys(others, 0)
    tokens = 0
    prompts = load_prompts(options.prompts, options.limit)
    for number, prompt in enumerate(prompts, 1):
        ids = plain.encode(prompt)
        expected = plain.generate(ids, params).ids
        tokens += len(expected)
        for name, run in others.items():
            same = run(ids) == expected
            equal[name] += same
            if not same:
                print(f"prompt {number}: {name} differs from plain decoding")
    for name, count in equal.items():
        print(f"{name}: {count} of {len(prompts)} prompts identical to plain decoding ({tokens} tokens)")
    print(
        json.dumps(
            {
                "model": options.model,
                "temperature": options.temperature,
                "prompts": len(prompts),
                "tokens": tokens,
                "identical": equal,
            }
        )
    )
    sys.exit(0 if all(count == len(prompts) for count in equal.values()) else 1)


if __name__ == "__main__":
    main()
