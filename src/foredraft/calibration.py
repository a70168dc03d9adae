"""Costs measured in seconds, and kept: forwards over made-up tokens, one file for each model, backend and machine."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import psutil

from foredraft.backends.base import Backend, KVCache, Query
from foredraft.backends.native.vector import host
from foredraft.costs import CostCurve, Costs
from foredraft.errors import InvalidInputError
from foredraft.models import ModelFiles, Notify, file_key
from foredraft.pages import whole_file
from foredraft.types import Draft

logger = logging.getLogger(__name__)

ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24, 32)  # engines serve so many at once: what comes after eight costs more
CONTEXTS = (64, 512, 2048)
BATCHES = (1, 2, 4)
QUICK_ROWS, QUICK_CONTEXT, QUICK_SECONDS = (1, 2, 3, 4, 6, 8, 9, 12, 16), 128, 1.0
_MOST_ROWS = 64  # of a batch
_MOST_TOKENS = 2048  # cached in a batch: what the caches take for a while, and what must be read into them
_MOST_TURNS = 30
_STEADY = 1.5  # times the fastest that the usual turn may take; else something else ran meanwhile


class _Point(NamedTuple):
    """A forward to time: so many sequences, each with `context` tokens cached, a root and `rows - 1` nodes."""

    sequences: int
    context: int
    rows: int


def costs_for(
    backend: Backend,
    files: ModelFiles | None,
    cache: Path,
    *,
    notify: Notify = lambda _: None,
    clock: Callable[[], float] = perf_counter,
) -> Costs:
    """What was measured of this model here before, else a quick calibration of about a second, which is kept.

    It is not kept if the machine was busy meanwhile: rounds correct what they can, and the next process measures again.

    Args:
        backend: What runs the model.
        files: Where the model lies; `None` (a model that was passed in) keeps nothing, as nothing tells models apart.
        cache: Folder for everything that is kept.
        notify: Told if there is something to measure.
        clock: Seconds.
    """
    about = key_of(backend, files) if files is not None else {}
    costs = _kept(about, cache) if about else None
    if costs is not None:
        return costs
    notify("Measuring what forwards cost here, once")
    rows, contexts = QUICK_ROWS, (QUICK_CONTEXT,)
    costs, unrest = _timed(backend, rows, contexts, (1,), QUICK_SECONDS, lambda _: None, clock)
    costs = replace(costs, about=about)
    if unrest < _STEADY:
        keep(costs, cache)
    else:
        logger.info("The machine was busy while forwards were timed (x %.1f): this is not kept", unrest)
    return costs


def calibrate(
    backend: Backend,
    *,
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = CONTEXTS,
    batches: Sequence[int] = BATCHES,
    seconds: float = 20.0,
    notify: Notify = lambda _: None,
    clock: Callable[[], float] = perf_counter,
) -> Costs:
    """Time forwards over made-up tokens: all points in turn, again and again, and the median of each.

    Args:
        backend: What runs the model. Its caches are made anew; nothing else may run on it meanwhile.
        rows: How many rows to give each sequence.
        contexts: How many tokens to have cached; those that the model's context has no room for are left out.
        batches: How many sequences; 1 is always among them. Of several, points with more than 64 rows or 2048 cached
            tokens in all are left out.
        seconds: When to stop, after every point has been timed at least once.
        notify: Told what is measured.
        clock: Seconds.

    Returns:
        Costs with a curve for each batch size, and the date.
    """
    return _timed(backend, rows, contexts, batches, seconds, notify, clock)[0]


def _timed(
    backend: Backend,
    rows: Sequence[int],
    contexts: Sequence[int],
    batches: Sequence[int],
    seconds: float,
    notify: Notify,
    clock: Callable[[], float],
) -> tuple[Costs, float]:
    """See `calibrate`; and how many times as long as the fastest turn the usual one took, of the usual point."""
    points = _points(rows, _that_fit(contexts, rows, backend.context), batches, backend.context)
    with backend.running():
        caches: dict[int, list[KVCache]] = {}
        for context in sorted({point.context for point in points}):
            notify(f"Reading {context} tokens of context")
            most = max(point.sequences for point in points if point.context == context)
            caches[context] = [_filled(backend, context) for _ in range(most)]
        notify(f"Timing forwards of {min(rows)} to {max(rows)} rows for about {seconds:.0f} s")
        times = _take_turns(points, lambda point: _time(backend, caches[point.context], point, clock), seconds, clock)
    curves = {size: _curve(size, {p: median(times[p]) for p in points}) for size in sorted({1, *batches})}
    costs = Costs(curves, measured=datetime.now(timezone.utc).isoformat(timespec="seconds"))
    return costs, median(median(taken) / max(min(taken), 1e-9) for taken in times.values())


def key_of(backend: Backend, files: ModelFiles) -> dict[str, str]:
    """What costs depend on: the model's file, backend, weights, threads, and the machine."""
    machine = f"{host().name}, {psutil.cpu_count(logical=False)} cores, {psutil.cpu_count()} threads"
    return {"model": file_key(files.path), "backend": backend.name, **backend.conditions(), "cpu": machine}


def costs_file(about: dict[str, str], cache: Path) -> Path:
    """Where costs of this key lie."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    return cache / "costs" / f"{digest}.json"


def keep(costs: Costs, cache: Path) -> Path | None:
    """Write costs where `costs_for` finds them; `None` if that cannot be (a folder that is protected: it is logged)."""
    if not costs.about:
        return None
    file = costs_file(dict(costs.about), cache)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as write:
            write(json.dumps(costs.to_json()) + "\n")
    except (OSError, InvalidInputError) as error:
        logger.warning("What forwards cost here is not kept, and will be measured again: %s", error)
        return None
    return file


def _kept(about: dict[str, str], cache: Path) -> Costs | None:
    file = costs_file(about, cache)
    try:
        costs = Costs.from_json(json.loads(file.read_text(encoding="utf-8")))
        if costs.about != about:
            raise InvalidInputError("It was measured for something else.")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:  # InvalidInputError and broken JSON or Unicode among them
        logger.warning("The costs kept in %s are not used: %s", file, error)
        return None
    logger.info("Costs of forwards as measured on %s", costs.measured)
    return costs


def _that_fit(contexts: Sequence[int], rows: Sequence[int], limit: int | None) -> list[int]:
    """The contexts after which there is room for the most rows; of a model with little room, half of that."""
    if limit is None:
        return sorted(contexts)
    return sorted(c for c in contexts if c + max(rows) <= limit) or [min(*contexts, limit // 2)]


def _points(rows: Sequence[int], contexts: Sequence[int], batches: Sequence[int], limit: int | None) -> list[_Point]:
    points = []
    for size in sorted({1, *batches}):
        for context in contexts:
            if size > 1 and size * context > _MOST_TOKENS and context > contexts[0]:
                continue
            room = min(_MOST_ROWS // size if size > 1 else max(rows), (limit or max(rows) + context) - context)
            points += [_Point(size, context, n) for n in sorted({1, 2, *rows}) if n <= max(room, 2)]
    return points


def _filled(backend: Backend, context: int) -> KVCache:
    cache = backend.new_cache()
    backend.prefill(cache, _tokens(context, backend.vocab_size))
    return cache


def _tokens(count: int, vocabulary: int) -> list[int]:
    """Made-up tokens: what they are makes no difference to what they cost."""
    return [(1 + 7 * i) % vocabulary for i in range(count)]


def _time(backend: Backend, caches: Sequence[KVCache], point: _Point, clock: Callable[[], float]) -> float:
    root, *chain = _tokens(point.rows, backend.vocab_size)
    queries = [Query(cache, root, Draft.chain(chain)) for cache in caches[: point.sequences]]
    started = clock()
    backend.forward(queries)
    seconds = clock() - started
    for query in queries:
        backend.commit(query.cache, ())
        backend.truncate(query.cache, point.context)
    return seconds


def _take_turns(
    points: Sequence[_Point], time: Callable[[_Point], float], seconds: float, clock: Callable[[], float]
) -> dict[_Point, list[float]]:
    """Seconds of every point in every turn. The first turn counts only where there is no time for another one."""
    started = clock()
    times: dict[_Point, list[float]] = {}
    for turn in range(_MOST_TURNS + 1):
        if turn == 1:
            times = {}
        for point in points if turn % 2 == 0 else reversed(points):  # so that a machine that slows down favours none
            times.setdefault(point, []).append(time(point))
        if clock() - started >= seconds:
            break
    return times


def _curve(sequences: int, medians: dict[_Point, float]) -> CostCurve:
    contexts = sorted({point.context for point in medians if point.sequences == sequences})
    rows = sorted({point.rows for point in medians if point.sequences == sequences})
    seconds = [[medians[_Point(sequences, context, n)] for n in rows] for context in contexts]
    return CostCurve([sequences * n for n in rows], contexts, seconds, sequences=sequences)
