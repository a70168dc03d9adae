"""How long accepted runs are on prompts that were not trained on, by the engine itself: it is what users get."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from foredraft.backends.base import Backend
from foredraft.engine import Engine
from foredraft.generation import Request
from foredraft.proposers.base import Drafter
from foredraft.types import FinishEvent, SamplingParams


class Setting(NamedTuple):
    """One way to use a drafter."""

    name: str
    draft_tokens: int
    rule: str | None = None


SETTINGS = (Setting("chain of 4", 4, "token"), Setting("tree of 16", 16))


def accepted_length(
    target: Backend,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    setting: Setting,
    *,
    max_tokens: int = 96,
    stop_tokens: Collection[int] = (),
) -> float:
    """Tokens emitted for each target forward of all greedy answers together: plain decoding has 1.00."""
    engine = Engine(target, drafter, stop_tokens=stop_tokens, draft_tokens=setting.draft_tokens, rule=setting.rule)
    tokens = forwards = 0
    for prompt in prompts:
        params = SamplingParams(max_tokens=max_tokens)
        for _, event in engine.run([Request(prompt, params)]):
            if isinstance(event, FinishEvent):
                tokens += event.completion.stats.tokens
                forwards += event.completion.stats.target_forwards
    return tokens / max(1, forwards)
