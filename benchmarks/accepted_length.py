"""Mean accepted length of drafters by node budget, greedy, cold start, with whose tokens were accepted.

    python benchmarks/accepted_length.py smollm2-135m --drafters suffix,hybrid:suffix+recycling --nodes 8,32 \
        --prompts questions.jsonl --limit 40 --max-tokens 160

Prints a line for each drafter and budget, then one JSON line.
"""

from __future__ import annotations

import json
from collections import Counter

import foredraft
from common import arguments, load_prompts
from foredraft.api import Loader, Model, parse_drafter


def main() -> None:
    parser = arguments(__doc__, limit=8, max_tokens=64)
    parser.add_argument("--drafters", default="ngram,suffix,recycling,hybrid:suffix+recycling")
    parser.add_argument("--nodes", default="8")
    options = parser.parse_args()

    target = foredraft.load(options.model, "none")
    prompts = load_prompts(options.prompts, options.limit)
    params = foredraft.SamplingParams(max_tokens=options.max_tokens)
    rows = []
    for name in options.drafters.split(","):
        for nodes in map(int, options.nodes.split(",")):
            drafter = Loader().drafter(parse_drafter(name), target.backend, target.tokenizer)
            model = Model(target.backend, target.tokenizer, drafter, draft_tokens=nodes)
            stats = [model.generate(prompt, params).stats for prompt in prompts]
            tokens, forwards = sum(s.tokens for s in stats), sum(s.target_forwards for s in stats)
            sources: Counter[str] = sum((Counter(s.accepted_from) for s in stats), Counter())
            print(f"{name:<28}{nodes:>4} nodes  {tokens / forwards:.3f} tokens a forward ({tokens}) {dict(sources)}")
            rows.append({"drafter": name, "nodes": nodes, "tokens": tokens, "target_forwards": forwards})
    print(json.dumps({"model": options.model, "prompts": len(prompts), "rows": rows}))


if __name__ == "__main__":
    main()
