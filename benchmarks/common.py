"""What the benchmark scripts share: prompts, the model, a draft model made from it, and a count of forwards."""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils.logging import disable_progress_bar, set_verbosity_error

PROMPTS = (
    "Repeat this list with every price doubled: apples 3, pears 4, plums 6, cherries 8, grapes 5, figs 7.",
    "Rewrite in the past tense: The cat walks to the river, drinks, and walks home. The dog watches the cat walk to "
    "the river and waits at the gate until the cat walks back.",
    "Write a Python class Stack with push, pop, peek and is_empty, each with a docstring.",
    "Explain in a few sentences why the sky is blue.",
    "Summarise: The council met on Monday to discuss the new bridge. The bridge will cost four million and take two "
    "years. Some members asked whether a ferry would do. The council will vote on the bridge next Monday.",
    "Turn into JSON with keys name, age, city: Anna is 31 and lives in Oslo. Ben is 27 and lives in Rome. Carla is 45 "
    "and lives in Lima.",
    "A train leaves at 9:40 and arrives at 12:05. How long is the journey? Think step by step.",
    "Fix the spelling and return the whole text: I recieved the pakage yesterday and the pakage was allready open. "
    "Please tell me how I can return the pakage.",
)


def arguments(doc: str | None, *, limit: int, max_tokens: int) -> argparse.ArgumentParser:
    """What all of them take; transformers' own progress bars and warnings are turned off."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    set_verbosity_error()  # type: ignore[no-untyped-call]
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--prompts", type=Path, help="JSON lines or plain lines; default: prompts of these scripts")
    parser.add_argument("--limit", type=int, default=limit, help="prompts, spread over the file")
    parser.add_argument("--max-tokens", type=int, default=max_tokens)
    return parser


class Question(NamedTuple):
    """A prompt and what kind of text it asks for, where its file says so."""

    prompt: str
    category: str = ""


def load_questions(path: Path | None, limit: int) -> list[Question]:
    """`limit` questions spread evenly over a file: JSON lines with `turns`, `prompt` or `question`, or plain lines.

    JSON lines may have a `category`. Without a file, prompts written for this script.
    """
    if path is None:
        return [Question(prompt) for prompt in PROMPTS[:limit]]
    questions = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("{"):
            record = json.loads(line)
            prompt = record["turns"][0] if "turns" in record else record.get("prompt") or record["question"]
            questions.append(Question(prompt, record.get("category", "")))
        elif line.strip():
            questions.append(Question(line))
    step = max(1, len(questions) // limit)
    return questions[::step][:limit]


def load_prompts(path: Path | None, limit: int) -> list[str]:
    """The prompts of `load_questions`."""
    return [question.prompt for question in load_questions(path, limit)]


def truncated(model: Any, layers: int) -> Any:
    """A draft model out of the target's first layers, its final norm and its head, sharing the weights."""
    draft = copy.copy(model)
    draft._modules = dict(model._modules)
    body = copy.copy(model.model)
    body._modules = dict(model.model._modules)
    body.layers = model.model.layers[:layers]
    draft.model = body
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    for module in (draft, body):
        module.config = config
    return draft


@contextmanager
def counted_forwards(model: Any) -> Iterator[list[int]]:
    """Counts the model's forwards from outside, in the one element of the list it yields."""
    count = [0]

    def add(*_: Any) -> None:
        count[0] += 1

    handle = model.register_forward_pre_hook(add)
    try:
        yield count
    finally:
        handle.remove()
