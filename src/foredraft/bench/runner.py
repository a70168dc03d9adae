"""Runs a plan: items in turn, every cell asked each of them in another order, each answer written down at once."""

from __future__ import annotations

import random
import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from foredraft.bench.methods import Method, OnceLoader, Own, PeerMethod, Prompt
from foredraft.bench.peers import PeerError, PeerOptions, open_peer
from foredraft.bench.plan import Plan
from foredraft.bench.provenance import provenance_of
from foredraft.bench.records import OWN, Cell, Measurement, Turn
from foredraft.bench.results import SETTINGS, Results, append_answer
from foredraft.bench.workloads import Item, Workload
from foredraft.calibration import calibrate
from foredraft.costs import CostCurve
from foredraft.errors import InvalidInputError
from foredraft.loading import cache_folder, stop_tokens
from foredraft.models import Notify

if TYPE_CHECKING:
    from collections.abc import Callable

_WARM_UP = "Good morning."
_WARM_TOKENS = 8
_MEMORY = "memory"  # folder of what drafters learned in the repetition at hand
_CURVE_SECONDS = 4.0
_CURVE_ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 33)
_LEAST_CONTEXT = 16  # tokens


class Step(NamedTuple):
    """How far a run is."""

    done: int
    total: int
    cell: str
    item: str
    seconds_left: float | None
    """As the answers so far promise; `None` before there is one."""


def run(
    plan: Plan,
    folder: Path,
    *,
    cache: Path | None = None,
    notify: Notify = lambda _: None,
    progress: Callable[[Step], None] = lambda _: None,
) -> Results:
    """Measure what the plan says and `folder` does not have yet; every answer is kept as soon as it is there.

    Args:
        plan: What to measure.
        folder: Of the run; if it holds one with the same settings, that one is gone on with.
        cache: Of models; `None` takes foredraft's.
        notify: Told what takes time.
        progress: Told of every answer.

    Returns:
        The run with all answers; its settings and summary are written as well.

    Raises:
        InvalidInputError: The folder holds another run, or cannot be written.
        ForedraftError: The model cannot be loaded, or a drafter does not fit.
    """
    kept = Results.read(folder) if (folder / SETTINGS).exists() else None
    if kept is not None:
        _refuse_another(kept, plan, folder)
    elif folder.is_dir() and any(folder.iterdir()):
        raise InvalidInputError(f"{folder} has files, and none of a run: give a new folder, or an empty one.")
    own = Own(plan.model, OnceLoader(cache, plan.engine, notify))
    for cell in plan.cells:
        if cell.engine == OWN:
            own.method(cell)  # what does not fit is told before anything is measured
    notify("Noting versions, machine and the model's hash")
    provenance = {**provenance_of(own.target, own.files), "workload_sha256": plan.workload.sha256}
    if kept is not None and kept.provenance.get("model_sha256") != provenance["model_sha256"]:
        raise InvalidInputError(f"{folder} has a run over another {plan.model}, by its hash: give another folder.")
    begun = kept or Results(folder.resolve().name, plan.settings(), provenance, plan.cells)
    fitting, lengths = _fitting(own, plan, notify)
    runner = _Runner(replace(plan, workload=fitting), lengths, folder, own, begun, notify, progress)
    with ExitStack() as stack:
        return runner.run(runner.open_peers(stack, cache or cache_folder()))


def _fitting(own: Own, plan: Plan, notify: Notify) -> tuple[Workload, list[int]]:
    """The items whose first prompt, and an answer, the model's context has room for, and the tokens of each prompt."""
    fitting, lengths = [], []
    for item in plan.workload.items:
        length = len(own.encode([*item.beginning, {"role": "user", "content": item.turns[0]}], raw=item.raw))
        if own.has_room(length):
            fitting.append(item)
            lengths.append(length)
        else:
            notify(f"Item {item.id} is left out: its prompt of {length} tokens does not fit the model's context")
    if not fitting:
        raise InvalidInputError("No item of the workload fits the model's context: give shorter ones.")
    return replace(plan.workload, items=tuple(fitting)), lengths


def _refuse_another(kept: Results, plan: Plan, folder: Path) -> None:
    """The same settings, cells and texts, or none of it: figures of different runs cannot be put together."""
    wanted = {**plan.settings(), "workload_sha256": plan.workload.sha256, "cells": [c.name for c in plan.cells]}
    found = {
        **kept.settings,
        "workload_sha256": kept.provenance.get("workload_sha256"),
        "cells": [cell.name for cell in kept.cells],
    }
    other = [name for name in wanted if wanted[name] != found.get(name)]
    if other:
        raise InvalidInputError(
            f"{folder} has a run with other settings ({', '.join(other)}): give another folder, or repeat these."
        )


class _Task(NamedTuple):
    """What is still to be measured."""

    repetition: int
    item: Item
    cell: Cell


class _Runner:
    """One run from where it stands to its end."""

    def __init__(
        self,
        plan: Plan,
        lengths: Sequence[int],
        folder: Path,
        own: Own,
        begun: Results,
        notify: Notify,
        progress: Callable[[Step], None],
    ) -> None:
        self.plan, self.folder, self.own, self.results = plan, folder, own, begun
        self._lengths = lengths  # tokens of each item's first prompt
        self.notify, self.progress = notify, progress
        self._measured = list(begun.measurements)
        self._absent: dict[str, str] = {}  # who was absent when a run was broken off may be there now
        self._provenance = dict(begun.provenance)
        self._curves = [begun.curve] if begun.curve is not None else []
        self._items: Counter[str] = Counter()  # answered, by cell
        self._seconds: defaultdict[str, float] = defaultdict(float)  # of these
        for m in self._measured:
            self._note_time(m)

    def run(self, peers: Mapping[str, PeerMethod]) -> Results:
        """All that is not there yet, then the summary."""
        tasks = self._tasks()
        left = Counter(task.cell for task in tasks)
        for repetition, group in groupby(tasks, key=lambda task: task.repetition):
            self._measure_costs()
            methods: dict[str, Method] = {**peers, **self._own_methods(repetition)}
            for task in group:
                if task.cell.engine not in self._absent:
                    self._tell(task, left)
                    self._measure(task, methods[task.cell.name])
                left[task.cell] -= 1
            shutil.rmtree(self.folder / _MEMORY, ignore_errors=True)
        self.progress(Step(len(self._measured), len(self._measured), "", "", None))
        self._save()
        self.results.write_summary(self.folder)
        return self.results

    def open_peers(self, stack: ExitStack, cache: Path) -> dict[str, PeerMethod]:
        """Every peer that is still needed, started and warm; of those that cannot run it is noted why."""
        methods: dict[str, PeerMethod] = {}
        for engine in dict.fromkeys(task.cell.engine for task in self._tasks() if task.cell.engine != OWN):
            cells = [cell for cell in self.plan.cells if cell.engine == engine]
            self.notify(f"Starting {engine}")
            try:
                peer = open_peer(engine, self._peer_options(cache), self.own.tokenizer)
                stack.callback(peer.close)
                opened = {cell.name: PeerMethod(peer, cell) for cell in cells}
                for cell in cells:
                    opened[cell.name].answer(self._warm_up(cell))
            except PeerError as error:
                self.leave_out(engine, str(error))
                continue
            self._provenance[engine] = peer.conditions()
            methods.update(opened)
        return methods

    def _peer_options(self, cache: Path) -> PeerOptions:
        choice = self.plan.engine
        items = self.plan.workload.items
        prompts = zip(self._lengths, items, strict=True)
        longest = max(length + sum(map(len, item.turns[1:])) for length, item in prompts)
        turns = max(len(item.turns) for item in items)
        return PeerOptions(
            model=self.plan.model,
            cache=str(cache),
            gguf=self.plan.gguf,
            threads=choice.threads,
            device=choice.device,
            dtype=choice.dtype,
            context=longest + turns * self.plan.max_tokens,
            stop_tokens=tuple(sorted(stop_tokens(self.own.target, self.own.tokenizer))),
            api_key=self.plan.api_key,
        )

    def leave_out(self, engine: str, why: str) -> None:
        """Go on without a peer."""
        self.notify(f"{engine} is left out: {why}")
        self._absent[engine] = why

    def _tasks(self) -> list[_Task]:
        """What is to be measured: item by item, the cells in another order at each, the same whenever it is asked."""
        done = {m.key for m in self._measured}
        found = []
        for repetition in range(1, self.plan.repeat + 1):
            for item in self.plan.workload.items:
                order = random.Random(self.plan.seed_of(repetition, item.id, -1))
                for cell in order.sample(self.plan.cells, len(self.plan.cells)):
                    if (cell.name, repetition, item.id) not in done and cell.engine not in self._absent:
                        found.append(_Task(repetition, item, cell))
        return found

    def _measure_costs(self) -> None:
        """What forwards cost now, in contexts like those of the answers; of several times the middle is taken."""
        self.notify("Measuring what forwards cost here")
        reach = max(self._lengths) + self.plan.max_tokens
        contexts = sorted({max(round(median(self._lengths)), _LEAST_CONTEXT), max(reach, 2 * _LEAST_CONTEXT)})
        costs = calibrate(self.own.target, rows=_CURVE_ROWS, contexts=contexts, batches=(1,), seconds=_CURVE_SECONDS)
        self._curves.append(costs.curve)
        self._save()

    def _own_methods(self, repetition: int) -> dict[str, Method]:
        """Of all foredraft's cells: new, or as they were when this repetition was broken off.

        Others warm up in their place: what is compiled or loaded late is there then, and nothing was learned.
        """
        methods: dict[str, Method] = {}
        for number, cell in enumerate(self.plan.cells):
            if cell.engine == OWN:
                self.own.method(cell).answer(self._warm_up(cell))
                methods[cell.name] = self.own.method(cell, self.folder / _MEMORY / f"{repetition}-{number}")
        return methods

    def _warm_up(self, cell: Cell) -> Prompt:
        message = {"role": "user", "content": _WARM_UP}
        return Prompt(self.own.encode([message], raw=False), (message,), _WARM_TOKENS, cell.temperature, 0)

    def _measure(self, task: _Task, method: Method) -> None:
        try:
            turns = self._ask(task, method)
        except PeerError as error:
            self.leave_out(task.cell.engine, f"it failed at item {task.item.id}: {error}")
            return
        item = task.item
        measured = Measurement(task.cell.name, task.repetition, item.id, item.category, turns, method.peak_memory)
        append_answer(self.folder, measured)
        method.keep()  # after the answer: what was learned from one that is asked again would be no guess
        self._measured.append(measured)
        self._note_time(measured)

    def _ask(self, task: _Task, method: Method) -> tuple[Turn, ...]:
        """All turns of an item, each with the answers before it, as far as the model's context has room for them."""
        item, turns = task.item, list[Turn]()
        messages = item.beginning
        for number, text in enumerate(item.turns):
            messages = [*messages, {"role": "user", "content": text}]
            ids = self.own.encode(messages, raw=item.raw)
            if turns and not self.own.has_room(len(ids)):
                break
            prompt = Prompt(
                ids=ids,
                messages=() if item.raw else tuple(messages),
                max_tokens=min(item.max_tokens or self.plan.max_tokens, self.plan.max_tokens),
                temperature=task.cell.temperature,
                seed=self.plan.seed_of(task.repetition, item.id, number),
            )
            turns.append(method.answer(prompt))
            messages = [*messages, {"role": "assistant", "content": turns[-1].text}]
        return tuple(turns)

    def _tell(self, task: _Task, left: Mapping[Cell, int]) -> None:
        """How far the run is: time left by the mean of each cell so far, of all where one has none yet."""
        open_cells = {cell.name: count for cell, count in left.items() if cell.engine not in self._absent}
        seconds = None
        if self._items:
            mean = {name: self._seconds[name] / count for name, count in self._items.items()}
            usual = fmean(mean.values())
            seconds = sum(count * mean.get(name, usual) for name, count in open_cells.items())
        done = len(self._measured)
        self.progress(Step(done, done + sum(open_cells.values()), task.cell.name, task.item.id, seconds))

    def _note_time(self, measured: Measurement) -> None:
        self._items[measured.cell] += 1
        self._seconds[measured.cell] += sum(turn.seconds for turn in measured.turns)

    def _save(self) -> None:
        curve = _middle(self._curves)
        self.results = replace(
            self.results,
            measurements=tuple(self._measured),
            absent=self._absent,
            provenance=self._provenance,
            curve=curve,
        )
        self.results.write_settings(self.folder)


def _middle(curves: Sequence[CostCurve]) -> CostCurve | None:
    """The curve of the median at every point; those of other points, from before a run was gone on with, are left."""
    if not curves:
        return None
    alike = [c.to_json() for c in curves if (c.rows, c.contexts) == (curves[-1].rows, curves[-1].contexts)]
    middle: Any = np.median([found["seconds"] for found in alike], axis=0)
    return CostCurve.from_json({**alike[-1], "seconds": middle.tolist()})
