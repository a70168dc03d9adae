"""What a cell stands for, ready to answer: foredraft itself with a drafter, or a peer."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.api import Model
from foredraft.backends.base import Backend
from foredraft.bench.peers import Peer, PeerRequest
from foredraft.bench.peers.memory import peak, reset_peak
from foredraft.bench.records import Cell, Turn
from foredraft.bench.workloads import prompt_ids
from foredraft.errors import ModelError
from foredraft.loading import EngineChoice, Loader, parse_drafter
from foredraft.models import ModelFiles, Notify
from foredraft.proposers.base import Drafter
from foredraft.types import FinishEvent, RoundEvent, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompt:
    """One turn of an item, as every method is asked it."""

    ids: tuple[int, ...]
    messages: tuple[Mapping[str, str], ...]
    """Empty where the text is to be continued as it is."""
    max_tokens: int
    temperature: float
    seed: int


class Method(ABC):
    """Answers prompts as its cell says."""

    peak_memory: int | None = None
    """Bytes: the most that the process which answered last held meanwhile."""

    @abstractmethod
    def answer(self, prompt: Prompt) -> Turn:
        """The answer, with its figures."""

    def keep(self) -> None:  # noqa: B027  (only what learns has something to keep)
        """Write down what was learned so far, so that a run that is stopped can go on as if it had not been."""


class OwnMethod(Method):
    """foredraft with a drafter; with `memory`, what it learns is read from that folder and kept there."""

    def __init__(self, model: Model, memory: Path | None = None) -> None:
        self._model = model
        self._memory = memory if model.drafter is not None and model.drafter.learns else None
        if self._memory is not None and self._memory.is_dir():
            assert model.drafter is not None
            try:
                model.drafter.load(self._memory)
            except ModelError:  # torn by a kill: the drafter begins anew
                shutil.rmtree(self._memory, ignore_errors=True)

    def answer(self, prompt: Prompt) -> Turn:
        """See `Method`."""
        sampled = prompt.temperature > 0
        params = SamplingParams(
            max_tokens=prompt.max_tokens, temperature=prompt.temperature, seed=prompt.seed if sampled else None
        )
        rounds = []
        reset_peak()
        for event in self._model.stream(prompt.ids, params):
            if isinstance(event, RoundEvent):
                rounds.append(event.stats)
            elif isinstance(event, FinishEvent):
                completion = event.completion
        self.peak_memory = peak()
        return Turn.of(len(prompt.ids), completion, rounds)

    def keep(self) -> None:
        """See `Method`."""
        if self._memory is not None:
            assert self._model.drafter is not None
            self._model.drafter.save(self._memory)


class PeerMethod(Method):
    """Another engine."""

    def __init__(self, peer: Peer, cell: Cell) -> None:
        self._peer, self._cell = peer, cell

    def answer(self, prompt: Prompt) -> Turn:
        """See `Method`."""
        turn = self._peer.answer(
            PeerRequest(
                ids=prompt.ids,
                messages=prompt.messages,
                drafter=self._cell.drafter,
                draft_tokens=self._cell.draft_tokens,
                max_tokens=prompt.max_tokens,
                temperature=prompt.temperature,
                seed=prompt.seed,
            )
        )
        self.peak_memory = self._peer.peak_memory
        return turn


class OnceLoader(Loader):
    """Loads each model once, however many cells draft with it."""

    def __init__(self, cache: Path | None, engine: EngineChoice, notify: Notify) -> None:
        super().__init__(cache, engine, notify)
        self._loaded: dict[tuple[str, EngineChoice], tuple[Backend, PreTrainedTokenizerBase, ModelFiles]] = {}

    def model(
        self, reference: str, engine: EngineChoice | None = None
    ) -> tuple[Backend, PreTrainedTokenizerBase, ModelFiles]:
        """See `Loader`."""
        key = reference, engine or self._engine
        if key not in self._loaded:
            self._loaded[key] = super().model(*key)
        return self._loaded[key]


class Own:
    """foredraft's methods over one target. Draft models are loaded once, drafters that learn are made anew."""

    def __init__(self, model: str, loader: Loader) -> None:
        self._loader = loader
        self.target, self.tokenizer, self.files = loader.model(model)
        self._plain = Model(self.target, self.tokenizer, None, files=self.files)
        self._drafters: dict[str, Drafter | None] = {}  # that keep nothing from one answer to the next

    def encode(self, messages: Sequence[Mapping[str, str]], *, raw: bool) -> tuple[int, ...]:
        """See `prompt_ids`."""
        return prompt_ids(self._plain, messages, raw=raw)

    def has_room(self, prompt: int) -> bool:
        """Whether a token can follow a prompt of so many."""
        return self.target.context is None or prompt < self.target.context

    def method(self, cell: Cell, memory: Path | None = None) -> OwnMethod:
        """The method of a cell, as it is before any answer, or as `memory` has it.

        Raises:
            ForedraftError: The drafter does not fit the target, the rule or the backend.
        """
        drafter = self._drafter(cell.drafter)
        options: dict[str, Any] = {"draft_tokens": cell.draft_tokens, "rule": cell.rule or None}
        return OwnMethod(Model(self.target, self.tokenizer, drafter, **options, files=self.files), memory)

    def _drafter(self, name: str) -> Drafter | None:
        if name not in self._drafters:
            drafter = self._loader.drafter(parse_drafter(name), self.target, self.tokenizer, self.files)
            if drafter is not None and (drafter.learns or drafter.costs is not None):
                return drafter
            self._drafters[name] = drafter
        return self._drafters[name]
