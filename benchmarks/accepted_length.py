"""Mean accepted length of drafters by node budget and category, greedy, with whose tokens were accepted.

    python benchmarks/accepted_length.py smollm2-135m --drafters suffix,hybrid:suffix+recycling --nodes 8,32 \
        --prompts questions.jsonl --limit 40 --max-tokens 160 --again

Every drafter and budget starts with nothing kept from before, and keeps what it learns from question to question, as
it would in one process. With --again the same questions are asked a second time, of the drafter that has answered them.

Prints a table for each drafter and budget, by the `category` of JSON lines, then one JSON line.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import foredraft
from common import Question, arguments, load_questions
from foredraft.api import Model
from foredraft.loading import Loader, parse_drafter
from foredraft.types import SamplingParams, Stats

ALL = "all"


class Figures(NamedTuple):
    """Sums over some answers."""

    answers: int
    tokens: int
    target_forwards: int

    @property
    def length(self) -> float:
        """The mean accepted length."""
        return self.tokens / self.target_forwards


def ask(model: Model, questions: Sequence[Question], params: SamplingParams) -> tuple[dict[str, Figures], Counter[str]]:
    """Figures by category and of all, and accepted tokens by who proposed them."""
    groups: defaultdict[str, list[Stats]] = defaultdict(list)
    for question in questions:
        stats = model.generate(question.prompt, params).stats
        for group in (question.category, ALL) if question.category else (ALL,):
            groups[group].append(stats)
    figures = {
        group: Figures(len(all_), sum(s.tokens for s in all_), sum(s.target_forwards for s in all_))
        for group, all_ in groups.items()
    }
    return figures, sum((Counter(s.accepted_from) for s in groups[ALL]), Counter())


def show(title: str, passes: dict[str, tuple[dict[str, Figures], Counter[str]]]) -> None:
    """A row for each category and one for all; a column for each pass."""
    print(f"\n{title:<34}{'answers':>8}{'tokens':>8}" + "".join(f"{name:>8}" for name in passes))
    first = next(iter(passes.values()))[0]
    for group in sorted(first, key=lambda group: (group == ALL, group)):
        lengths = "".join(f"{figures[group].length:>8.3f}" for figures, _ in passes.values())
        print(f"  {group:<32}{first[group].answers:>8}{first[group].tokens:>8}{lengths}")
    for name, (_, sources) in passes.items():
        print(f"  accepted from, {name}: {dict(sources)}", flush=True)


def main() -> None:
    parser = arguments(__doc__, limit=8, max_tokens=64)
    parser.add_argument("--drafters", default="ngram,suffix,recycling,hybrid:suffix+recycling")
    parser.add_argument("--nodes", default="8")
    parser.add_argument("--again", action="store_true", help="ask all questions once more of the same drafter")
    options = parser.parse_args()

    target = foredraft.load(options.model, "none")
    questions = load_questions(options.prompts, options.limit)
    params = foredraft.SamplingParams(max_tokens=options.max_tokens)
    rows: list[dict[str, Any]] = []
    for name in options.drafters.split(","):
        for nodes in map(int, options.nodes.split(",")):
            drafter = Loader().drafter(parse_drafter(name), target.backend, target.tokenizer)
            model = Model(target.backend, target.tokenizer, drafter, draft_tokens=nodes)
            passes = {when: ask(model, questions, params) for when in ("cold", "again")[: 1 + options.again]}
            show(f"{name}, {nodes} nodes", passes)
            for when, (figures, _) in passes.items():
                rows += [
                    {"drafter": name, "nodes": nodes, "pass": when, "category": group, **each._asdict()}
                    for group, each in figures.items()
                ]
    print(json.dumps({"model": options.model, "prompts": len(questions), "rows": rows}))


if __name__ == "__main__":
    main()
