"""Text to train on, written by the target itself: prompts answered in batch, shard by shard, into a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from foredraft.backends.base import Backend
from foredraft.checks import is_integer, is_number, require
from foredraft.engine import Engine
from foredraft.errors import InvalidInputError
from foredraft.generation import Request
from foredraft.loading import stop_tokens
from foredraft.models import ModelFiles, sha256_of
from foredraft.pages import make_folder, whole_file
from foredraft.train.dialogues import Dialogue, read_dialogues, write_dialogues
from foredraft.train.prompts import Elicit, Elicitor, Given, Prompt, Prompts, seed_of
from foredraft.types import FinishEvent, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHARD = 64  # items of a file
MANIFEST = "manifest.json"
TEMPERATURES = (0.0, 0.7, 1.0)
_VERSION = 1


class Progress(NamedTuple):
    """How far the work is."""

    items: int
    """That are done, those of earlier runs among them."""
    total: int
    made: int = 0
    """Items of this run."""
    tokens: int = 0
    """Of the answers of this run."""
    seconds: float = 0.0
    """Of this run."""

    @property
    def tokens_per_second(self) -> float:
        """Answer tokens a second so far; eliciting prompts takes its part of the time."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """As the items so far promise; `None` before there is one."""
        return (self.total - self.items) * self.seconds / self.made if self.made else None


@dataclass(frozen=True)
class _Settings:
    """What an answer follows from, besides its prompt."""

    seed: int
    max_tokens: int
    temperatures: tuple[float, ...]

    def __post_init__(self) -> None:
        require("seed", self.seed, is_integer(self.seed) and 0 <= self.seed < 2**63, "an integer in [0, 2**63)")
        good = is_integer(self.max_tokens) and self.max_tokens >= 1
        require("max_tokens", self.max_tokens, good, "an integer >= 1")
        some = len(self.temperatures) > 0 and all(is_number(t) and t >= 0 for t in self.temperatures)
        require("temperatures", self.temperatures, some, "one or more numbers >= 0")

    def temperature(self, index: int) -> float:
        """Of the answer of this item."""
        return float(self.temperatures[index % len(self.temperatures)])

    def request(self, index: int, prompt: Prompt) -> Request:
        """What is asked for this item."""
        drawn = seed_of(self.seed, "answer", index)
        return Request(
            prompt, SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature(index), seed=drawn)
        )


def generate_dialogues(
    target: Backend,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Sequence[int]] | Elicit,
    folder: Path,
    *,
    model: str,
    seed: int = 0,
    max_tokens: int = 384,
    temperatures: Sequence[float] = TEMPERATURES,
    at_once: int = 16,
    progress: Callable[[Progress], None] = lambda _: None,
) -> list[Path]:
    """Answer prompts by the target, and keep each shard of 64 dialogues as soon as it is there.

    An item follows from the seed, its index, and (lest a prompt be elicited twice) the items before it: a run that was
    killed goes on when it is called again, and ends with the same files.

    Args:
        target: Who answers, by plain decoding in batch.
        tokenizer: The target's.
        prompts: Token ids of each prompt, template included; or how many the target is to write itself.
        folder: Of the shards; one that holds some of the same settings is gone on with.
        model: What names the target, as `target_key` does: shards of different targets must not mix.
        seed: Every item has seeds of its own that follow from it.
        max_tokens: Most tokens of an answer.
        temperatures: Of the answers, in turn.
        at_once: Sequences of a forward.
        progress: Told how far the work is, before each shard and after every answer.

    Returns:
        The shards in the order of their items.

    Raises:
        InvalidInputError: An argument is out of range, a prompt does not fit, or the folder holds something else.
        UnsupportedError: Prompts are to be elicited, and the target's chat template does not allow it.
    """
    settings = _Settings(seed, max_tokens, tuple(float(t) if is_number(t) else t for t in temperatures))
    require("at_once", at_once, is_integer(at_once) and at_once >= 1, "an integer >= 1")
    source: Prompts = (
        Elicitor(target, tokenizer, prompts, seed=seed, at_once=at_once)
        if isinstance(prompts, Elicit)
        else Given(prompts)
    )
    _open(folder, {"model": model, **source.about, **asdict(settings), "temperatures": [*settings.temperatures]})
    engine = Engine(target, stop_tokens=stop_tokens(target, tokenizer))
    return _Writer(engine, source, settings, at_once, progress).write(folder)


class _Writer:
    """Writes the shards that are not there yet, one after the other."""

    def __init__(
        self, engine: Engine, source: Prompts, settings: _Settings, at_once: int, progress: Callable[[Progress], None]
    ) -> None:
        self._engine, self._source, self._settings = engine, source, settings
        self._at_once, self._progress = at_once, progress
        self._there = self._made = self._tokens = 0
        self._started = perf_counter()

    def write(self, folder: Path) -> list[Path]:
        """All shards, in order."""
        shards: list[Path] = []
        taken: set[Prompt] = set()
        for first in range(0, self._source.total, SHARD):
            indices = range(first, min(first + SHARD, self._source.total))
            shard = folder / f"shard-{first // SHARD:05}.jsonl"
            if shard.exists():
                dialogues = read_dialogues([shard], self._engine.setup.backend.vocab_size)
                self._there += len(indices)
            else:
                self._tell()
                prompts = self._source.prompts(indices, taken)
                self._made += len(indices) - len(prompts)
                dialogues = self._answer(prompts)
                write_dialogues(shard, dialogues)
            taken.update(dialogue.prompt for dialogue in dialogues)
            shards.append(shard)
        self._tell()
        return shards

    def _answer(self, prompts: Mapping[int, Prompt]) -> list[Dialogue]:
        """A dialogue for every prompt, in the order of their indices."""
        requests = [self._settings.request(index, prompt) for index, prompt in prompts.items()]
        answers: dict[int, tuple[int, ...]] = {}
        for place, event in self._engine.run(requests, self._at_once):
            if isinstance(event, FinishEvent):
                answers[place] = event.completion.ids
                self._made += 1
                self._tokens += len(event.completion.ids)
                self._tell()
        return [
            Dialogue((*prompt, *answers[place]), len(prompt), self._settings.temperature(index))
            for place, (index, prompt) in enumerate(prompts.items())
        ]

    def _tell(self) -> None:
        seconds = perf_counter() - self._started
        done = self._there + self._made
        self._progress(Progress(done, self._source.total, self._made, self._tokens, seconds))


def target_key(target: Backend, files: ModelFiles) -> str:
    """What names a target for `generate_dialogues`: the hash of its weights, and how the backend keeps them."""
    conditions = target.conditions()
    kept = (conditions[name] for name in ("weights", "kv") if name in conditions)
    return " ".join((sha256_of(files.weights), target.name, *kept))


def _open(folder: Path, settings: Mapping[str, Any]) -> None:
    """Begin a folder, or see that it is of the same settings."""
    file = folder / MANIFEST
    about = {"foredraft": "dialogues", "version": _VERSION, **settings}
    if not file.exists():
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise InvalidInputError(f"{folder} has files, and no {MANIFEST} of dialogues: give a new or empty folder.")
        make_folder(folder)
        with whole_file(file) as write:
            write(f"{json.dumps(about, indent=2)}\n")
        return
    found = _manifest(file)
    other = [
        f"{name} is {found.get(name)} there and {about[name]} here" for name in about if found.get(name) != about[name]
    ]
    if other:
        raise InvalidInputError(
            f"{folder} has dialogues of other settings: {'; '.join(other)}. Give another folder, or repeat these."
        )


def _manifest(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"Cannot read {file} ({error}): restore it, or give a new folder.") from error
    if not isinstance(found, dict) or found.get("foredraft") != "dialogues":
        raise InvalidInputError(f"{file} is not that of dialogues: give a new folder.")
    return found
