"""Text to train on, written by the target itself: prompts answered in batch, shard by shard, into a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from foredraft.backends.base import Backend
from foredraft.checks import is_integer, require
from foredraft.engine import Engine
from foredraft.errors import InvalidInputError
from foredraft.generation import Request
from foredraft.loading import stop_tokens
from foredraft.models import ModelFiles, sha256_of
from foredraft.pages import make_folder, whole_file
from foredraft.train.dialogues import Dialogue, read_dialogues, write_dialogues
from foredraft.train.prompts import Elicit, Elicitor, Given, Prompt, Prompts, finished, seed_of
from foredraft.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHARD = 64  # items of a file
MANIFEST = "manifest.json"
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


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What answers follow from, besides prompts and target.

    Args:
        seed: Every item has seeds of its own that follow from it.
        max_tokens: Most tokens of an answer.
        temperatures: Of the answers, in turn; 0 is greedy.

    Raises:
        InvalidInputError: A value is outside its range.
    """

    seed: int = 0
    max_tokens: int = 384
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)

    def __post_init__(self) -> None:
        SamplingParams(max_tokens=self.max_tokens, seed=self.seed)
        require("temperatures", self.temperatures, len(self.temperatures) > 0, "one or more numbers >= 0")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)

    @property
    def about(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "temperatures": [float(temperature) for temperature in self.temperatures]}

    def temperature(self, index: int) -> float:
        """Of the answer to this item."""
        return float(self.temperatures[index % len(self.temperatures)])

    def request(self, index: int, prompt: Prompt) -> Request:
        """What the engine is asked for this item."""
        seed, temperature = seed_of(self.seed, "answer", index), self.temperature(index)
        return Request(prompt, SamplingParams(max_tokens=self.max_tokens, temperature=temperature, seed=seed))


def generate_dialogues(
    target: Backend,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Sequence[int]] | Elicit,
    folder: Path,
    *,
    model: str,
    settings: Settings | None = None,
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
        settings: Of the answers; `None` takes the defaults.
        at_once: Sequences of a forward.
        progress: Told how far the work is, before each shard and after every answer.

    Returns:
        The shards in the order of their items.

    Raises:
        InvalidInputError: An argument is out of range, a prompt does not fit, or the folder holds something else.
        UnsupportedError: Prompts are to be elicited, and the target's chat template does not allow it.
    """
    settings = settings or Settings()
    require("at_once", at_once, is_integer(at_once) and at_once >= 1, "an integer >= 1")
    source: Prompts
    if isinstance(prompts, Elicit):
        source = Elicitor(target, tokenizer, prompts, seed=settings.seed, at_once=at_once)
    else:
        source = Given(target, prompts)
    _open(folder, {"model": model, **source.about, **settings.about})
    engine = Engine(target, stop_tokens=stop_tokens(target, tokenizer))
    return _Writer(engine, source, settings, at_once, progress).write(folder)


class _Writer:
    """Writes the shards that are not there yet, one after the other."""

    def __init__(
        self, engine: Engine, source: Prompts, settings: Settings, at_once: int, progress: Callable[[Progress], None]
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
        for place, completion in finished(self._engine, requests, self._at_once):
            answers[place] = completion.ids
            self._made += 1
            self._tokens += len(completion.ids)
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
    other = [name for name in about if found.get(name) != about[name]]
    if other:
        kept = "; ".join(f"{name} is {found.get(name)} there and {about[name]} here" for name in other)
        raise InvalidInputError(
            f"{folder} has dialogues made otherwise: {kept}. Give another folder, or repeat what was given."
        )


def _manifest(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"Cannot read {file} ({error}): restore it, or give a new folder.") from error
    if not isinstance(found, dict) or found.get("foredraft") != "dialogues":
        raise InvalidInputError(f"{file} is not that of dialogues: give a new folder.")
    return found
