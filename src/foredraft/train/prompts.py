"""What a target is asked: prompts from files, or those that it writes itself out of its own chat template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from foredraft.api import Model
from foredraft.backends.base import Backend
from foredraft.bench.workloads import Item, load_workload, prompt_ids
from foredraft.checks import is_integer, is_number, require
from foredraft.engine import Engine
from foredraft.errors import InvalidInputError, UnsupportedError
from foredraft.generation import Request, checked_prompt
from foredraft.loading import stop_tokens
from foredraft.models import Notify
from foredraft.types import Completion, FinishEvent, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = tuple[int, ...]
"""Token ids, chat template included."""

_SENTINEL = "foredraft asks"  # any text that a template hands on as it is
_SHORTEST, _LONGEST = 3, 256  # tokens of an elicited message
_ATTEMPTS = 16  # at a message, before its item is given up


@dataclass(frozen=True)
class Elicit:
    """Prompts that the target writes itself: so many messages of a user, drawn after the template's beginning of one.

    That is Magpie (Xu et al. 2024, arXiv 2406.08464): an instruction-tuned model knows what users ask.

    Raises:
        InvalidInputError: A value is outside its range.
    """

    count: int
    temperature: float = 1.0
    top_p: float = 0.95

    def __post_init__(self) -> None:
        require("elicit", self.count, is_integer(self.count) and self.count >= 1, "an integer >= 1")
        warm = is_number(self.temperature) and self.temperature > 0
        require("temperature", self.temperature, warm, "a number > 0: at 0 all messages would be the same")
        require("top_p", self.top_p, is_number(self.top_p) and 0 < self.top_p <= 1, "a number in (0, 1]")


def read_prompts(
    references: Iterable[str],
    target: Backend,
    tokenizer: PreTrainedTokenizerBase,
    notify: Notify = lambda _: None,
) -> list[Prompt]:
    """The first prompt of every item of workload files, in the chat template unless the item is raw.

    Args:
        references: Files in any of the formats of docs/workloads.md, or `bundled`.
        target: Whose context has room for them; what does not fit is left out.
        tokenizer: The target's.
        notify: Told how many are left out.

    Raises:
        InvalidInputError: A file cannot be read, or no prompt fits.
    """
    items = [item for reference in references for item in load_workload(reference).items]
    return prompts_of(items, target, tokenizer, notify)


def prompts_of(
    items: Iterable[Item], target: Backend, tokenizer: PreTrainedTokenizerBase, notify: Notify = lambda _: None
) -> list[Prompt]:
    """The same of items that are loaded."""
    asked = Model(target, tokenizer, None)
    prompts = [_first_prompt(item, asked) for item in items]
    fitting = [prompt for prompt in prompts if _has_room(target, prompt)]
    if len(fitting) < len(prompts):
        notify(f"{len(prompts) - len(fitting)} prompts are left out: the model's context has no room for them")
    if not fitting:
        raise InvalidInputError("No prompt fits the model's context: give shorter ones.")
    return fitting


def _first_prompt(item: Item, asked: Model) -> Prompt:
    return prompt_ids(asked, [*item.beginning, {"role": "user", "content": item.turns[0]}], raw=item.raw)


def _has_room(target: Backend, prompt: Sequence[int]) -> bool:
    return target.context is None or len(prompt) < target.context


class Prompts(Protocol):
    """Where prompts come from, each with the index of its item."""

    total: int
    about: Mapping[str, Any]
    """What tells these from others, as plain JSON values."""

    def prompts(self, indices: Sequence[int], taken: Collection[Prompt]) -> dict[int, Prompt]:
        """Those of these items, in their order; the items before them have `taken`."""
        ...


class Given:
    """Prompts that a user brings. All are checked at once."""

    def __init__(self, target: Backend, prompts: Iterable[Sequence[int]]) -> None:
        self._prompts = [tuple(checked_prompt(prompt, target)) for prompt in prompts]
        self.total = len(self._prompts)
        require("prompts", self._prompts, self.total > 0, "one or more")
        digest = hashlib.sha256(json.dumps(self._prompts).encode()).hexdigest()
        self.about: Mapping[str, Any] = {"prompts": {"count": self.total, "sha256": digest}}

    def prompts(self, indices: Sequence[int], taken: Collection[Prompt]) -> dict[int, Prompt]:
        """See `Prompts`."""
        return {index: self._prompts[index] for index in indices}


class Elicitor:
    """Draws messages of a user from a target. Message `i` follows from the seed, `i`, and the messages before it."""

    def __init__(
        self, target: Backend, tokenizer: PreTrainedTokenizerBase, elicit: Elicit, *, seed: int, at_once: int
    ) -> None:
        self._elicit, self._seed, self._at_once = elicit, seed, at_once
        self.total = elicit.count
        self.about: Mapping[str, Any] = {"elicited": asdict(elicit)}
        self._asked = Model(target, tokenizer, None)
        before, after = _around_the_user(tokenizer)
        self._before = _ids(tokenizer, before)
        self._special = frozenset(tokenizer.all_special_ids)
        ends = [token for token in _ids(tokenizer, after) if token in self._special]
        self._engine = Engine(target, stop_tokens={*stop_tokens(target, tokenizer), *ends[:1]})

    def prompts(self, indices: Sequence[int], taken: Collection[Prompt]) -> dict[int, Prompt]:
        """See `Prompts`: none that is taken, none twice.

        An attempt that is empty, very short, very long or no text, or that was had before, is followed by another one.

        Raises:
            UnsupportedError: Every attempt failed: this model does not know what users ask.
        """
        had = set(taken)
        found: dict[int, Prompt] = {}
        for attempt in range(_ATTEMPTS):
            missing = [index for index in indices if index not in found]
            if not missing:
                break
            drawn = self._draw([seed_of(self._seed, "message", index, attempt) for index in missing])
            for index, completion in zip(missing, drawn, strict=True):
                prompt = self._prompt(completion)
                if prompt is not None and prompt not in had:
                    had.add(prompt)
                    found[index] = prompt
        if not found:
            raise UnsupportedError(
                f"In {_ATTEMPTS * len(indices)} attempts this model wrote no new message of {_SHORTEST} to {_LONGEST} "
                "tokens: give a file of prompts instead (--prompts FILE), or elicit fewer."
            )
        return dict(sorted(found.items()))

    def _draw(self, seeds: Sequence[int]) -> list[Completion]:
        law = self._elicit
        settings = [
            SamplingParams(max_tokens=_LONGEST + 1, temperature=law.temperature, top_p=law.top_p, seed=seed)
            for seed in seeds
        ]
        requests = [Request(self._before, params) for params in settings]
        found = dict(finished(self._engine, requests, self._at_once))
        return [found[place] for place in range(len(seeds))]

    def _prompt(self, drawn: Completion) -> Prompt | None:
        """The message in the template, as if a user had typed it: tokens are those of its text."""
        ids = drawn.ids[:-1]
        if drawn.finish_reason != "stop_token" or len(ids) < _SHORTEST or self._special & set(ids):
            return None
        text = str(self._asked.tokenizer.decode(list(ids))).strip()
        if not text or "\ufffd" in text:
            return None
        prompt = tuple(self._asked.encode(text))
        return prompt if _has_room(self._asked.backend, prompt) else None


def finished(engine: Engine, requests: Sequence[Request], at_once: int) -> Iterator[tuple[int, Completion]]:
    """Each completion with the place of its request, as they end."""
    for place, event in engine.run(requests, at_once):
        if isinstance(event, FinishEvent):
            yield place, event.completion


def seed_of(seed: int, purpose: str, index: int, attempt: int = 0) -> int:
    """The seed of one draw."""
    digest = hashlib.sha256(f"{seed}|{purpose}|{index}|{attempt}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _around_the_user(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The text of the chat template before and after the first message of a user."""
    if not tokenizer.chat_template:
        raise UnsupportedError(
            "This model has no chat template, so it cannot be asked to write prompts itself: give a file of prompts "
            "instead (--prompts FILE)."
        )
    message = {"role": "user", "content": _SENTINEL}
    text = str(tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False))
    before, found, after = text.partition(_SENTINEL)
    if not found or not before:
        raise UnsupportedError(
            "This model's chat template does not show where a user's message begins, so it cannot be asked to write "
            "prompts itself: give a file of prompts instead (--prompts FILE)."
        )
    return before, after


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
