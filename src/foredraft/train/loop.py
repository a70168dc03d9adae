"""The training loop: batches in a fixed order, AdamW on a cosine schedule, checkpoints that go on to the bit."""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from foredraft.checks import is_integer, is_number, require
from foredraft.errors import InvalidInputError, ModelError

logger = logging.getLogger(__name__)


_WHEN = ("save_every", "validate_every")  # settings of a schedule on which the weights do not depend


class Objective(Protocol):
    """What is trained and for what."""

    @property
    def head(self) -> nn.Module:
        """Whose parameters are trained."""

    def losses(self, batch: Any) -> dict[str, Tensor]:
        """Terms by name; `loss` is what is minimised."""


@dataclass(frozen=True)
class Schedule:
    """How the weights are moved.

    Args:
        learning_rate: The highest one, reached after `warmup` of all steps, from where it falls along a cosine to a
            hundredth.
        weight_decay: Of AdamW, for matrices.
        warmup: Share of all steps.
        clip: Longest gradient.
        accumulate: Batches whose gradients make one step.
        save_every: Seconds between checkpoints.
        validate_every: Steps between validations; 0 validates at the end alone.

    Raises:
        InvalidInputError: One of them is out of range.
    """

    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warmup: float = 0.03
    clip: float = 1.0
    accumulate: int = 1
    save_every: float = 120.0
    validate_every: int = 0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "clip", "save_every"):
            value = getattr(self, name)
            require(name, value, is_number(value) and value > 0, "a number > 0")
        good = is_number(self.weight_decay) and self.weight_decay >= 0
        require("weight_decay", self.weight_decay, good, "a number >= 0")
        require("warmup", self.warmup, is_number(self.warmup) and 0 <= self.warmup < 1, "a number in [0, 1)")
        good = is_integer(self.accumulate) and self.accumulate >= 1
        require("accumulate", self.accumulate, good, "an integer >= 1")
        good = is_integer(self.validate_every) and self.validate_every >= 0
        require("validate_every", self.validate_every, good, "an integer >= 0")

    @property
    def about(self) -> dict[str, Any]:
        """What the weights depend on, as plain JSON values."""
        return {name: value for name, value in asdict(self).items() if name not in _WHEN}

    def rate_at(self, step: int, steps: int) -> float:
        """The learning rate of a step, counted from 0."""
        rising = max(1, round(self.warmup * steps))
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        done = (step - rising) / max(1, steps - rising)
        return self.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


class Progress(NamedTuple):
    """Where training is: `losses` are those of the last step."""

    step: int
    steps: int
    seconds_left: float
    losses: Mapping[str, float]
    tokens_per_second: float


class Training:
    """A run in a folder, which can be killed at any point and started again with the same arguments.

    Args:
        objective: The head and what it is trained for.
        batches: What to learn from, in an order that never changes.
        load: Makes a batch of one of these.
        schedule: How.
        folder: For `checkpoint.pt` and `log.csv`.
        key: Names everything that the outcome depends on; a checkpoint of another key is refused.
        precision: In which matrices are multiplied; weights and sums are in float32.
        validate: Called now and then with the step; the figures that it returns are logged.
        watch: Called after every step.

    Raises:
        InvalidInputError: The folder has a checkpoint of something else.
        ModelError: The checkpoint is damaged, or the folder cannot be written.
    """

    def __init__(
        self,
        objective: Objective,
        batches: Sequence[Any],
        load: Callable[[Any], Any],
        schedule: Schedule,
        folder: Path,
        key: Mapping[str, Any],
        *,
        precision: torch.dtype = torch.float32,
        validate: Callable[[int], Mapping[str, float]] | None = None,
        watch: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self._objective, self._schedule = objective, schedule
        self._batches, self._load = batches, load
        self._folder, self._key = folder, {**key, "schedule": schedule.about, "batches": len(batches)}
        self._precision = precision
        self._validate, self._watch = validate, watch
        self._parameters = [p for p in objective.head.parameters() if p.requires_grad]
        matrices = [p for p in self._parameters if p.ndim > 1]
        vectors = [p for p in self._parameters if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": schedule.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=schedule.learning_rate, betas=(0.9, 0.95))
        self.steps = len(batches) // schedule.accumulate
        self.step = 0
        self.tokens = 0
        self.figures: dict[str, float] = {}
        """Of the last validation."""
        self._resume()

    def run(self) -> None:
        """Train to the end, from wherever the checkpoint was."""
        with closing(Log(self._folder, self.step)) as log:
            self._run(log)

    def _run(self, log: Log) -> None:
        started = saved = perf_counter()
        first, seen = self.step, self.tokens
        self._objective.head.train()
        while self.step < self.steps:
            losses = self._take_step()
            self.step += 1
            now = perf_counter()
            left = (now - started) / (self.step - first) * (self.steps - self.step)
            figures = {name: float(value.detach()) for name, value in losses.items()}
            log.write(self.step, {"tokens": self.tokens, "rate": self._rate, **figures})
            pace = (self.tokens - seen) / (now - started)
            self._watch(Progress(self.step, self.steps, left, figures, pace))
            if self._validation_is_due():
                self.figures = self._validated()
                log.write(self.step, self.figures)
            if now - saved >= self._schedule.save_every or self.step == self.steps:
                log.flush()
                self._save()
                saved = perf_counter()
        self._objective.head.eval()

    def _take_step(self) -> dict[str, Tensor]:
        self._rate = self._schedule.rate_at(self.step, self.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate
        count = self._schedule.accumulate
        losses: dict[str, Tensor] = {}
        for batch in self._batches[self.step * count : (self.step + 1) * count]:
            loaded = self._load(batch)
            with torch.autocast(self._device, dtype=self._precision, enabled=self._precision != torch.float32):
                losses = self._objective.losses(loaded)
            if not torch.isfinite(losses["loss"]):
                raise InvalidInputError(
                    f"The loss is {float(losses['loss'])} at step {self.step}: try a lower learning rate than "
                    f"{self._schedule.learning_rate}."
                )
            (losses["loss"] / count).backward()  # type: ignore[no-untyped-call]
            self.tokens += int(loaded.ids.numel())
        nn.utils.clip_grad_norm_(self._parameters, self._schedule.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return losses

    @property
    def _device(self) -> str:
        return self._parameters[0].device.type

    def _validation_is_due(self) -> bool:
        every = self._schedule.validate_every
        return self._validate is not None and (self.step == self.steps or (every > 0 and self.step % every == 0))

    def _validated(self) -> dict[str, float]:
        assert self._validate is not None
        self._objective.head.eval()
        figures = self._validate(self.step)
        self._objective.head.train()
        return dict(figures)

    def _save(self) -> None:
        state = {
            "key": self._key,
            "step": self.step,
            "tokens": self.tokens,
            "figures": self.figures,
            "head": self._objective.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        file = self._folder / "checkpoint.pt"
        try:
            fresh = file.with_suffix(".part")
            torch.save(state, fresh)
            fresh.replace(file)
        except (OSError, RuntimeError) as error:
            raise ModelError(f"Cannot write {file} ({error}): check the folder and the free space.") from error

    def _resume(self) -> None:
        file = self._folder / "checkpoint.pt"
        if not file.exists():
            return
        try:
            state = torch.load(file, weights_only=True, map_location="cpu")
            found = state["key"]
        except Exception as error:
            raise ModelError(f"Cannot read {file} ({error}). Remove it to train anew.") from error
        different = next((name for name in self._key if found.get(name) != self._key[name]), None)
        if different is not None:
            raise InvalidInputError(
                f"{self._folder} holds training of another kind: {different} was {found.get(different)}, now it is "
                f"{self._key[different]}. Give another folder, or the same arguments as before."
            )
        self._objective.head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.figures = state["step"], state["tokens"], state["figures"]
        logger.info("Going on from step %d of %d", self.step, self.steps)


class Log:
    """Figures by step, as CSV (`step,name,value`) and, where tensorboard is installed, for it too.

    Rows past the step that training goes on from were written by a process that was killed: they are cut off.
    """

    def __init__(self, folder: Path, step: int) -> None:
        file = folder / "log.csv"
        kept: list[list[str]] = []
        if step and file.exists():
            with file.open(newline="", encoding="utf-8") as stream:
                kept = [row for row in csv.reader(stream) if len(row) == 3 and row[0].isdigit() and int(row[0]) <= step]
        self._stream = file.open("w", newline="", encoding="utf-8")
        self._rows = csv.writer(self._stream)
        self._rows.writerows([["step", "name", "value"], *kept])
        self._board = _tensorboard(folder, step)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Figures of a step."""
        self._rows.writerows([step, name, f"{value:.6g}"] for name, value in figures.items())
        if self._board is not None:
            for name, value in figures.items():
                self._board.add_scalar(name, value, step)

    def flush(self) -> None:
        """Have all of it on disk."""
        self._stream.flush()

    def close(self) -> None:
        """No more will come."""
        self._stream.close()
        if self._board is not None:
            self._board.close()


def _tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
