"""Calibration with planted times, and what is kept of it where."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft import calibration
from foredraft.backends.base import Backend, Capabilities, KVCache, Query
from foredraft.backends.native.backend import NativeBackend
from foredraft.backends.native.reading import weights_of_model
from foredraft.backends.transformers import TransformersBackend
from foredraft.calibration import calibrate, costs_file, costs_for, keep, key_of
from foredraft.models import ModelFiles

Seconds = Callable[[int, int, int], float]
"""Of a forward: by all its rows, context and sequences."""


def planted(rows: int, context: int, sequences: int) -> float:
    return 0.01 + 0.001 * rows + 0.000004 * context * sequences


class PlantedCache(KVCache):
    def __init__(self) -> None:
        self.tokens = self.pending = 0

    @property
    def length(self) -> int:
        return self.tokens


class PlantedBackend(Backend):
    """Its forwards take the time that is planted, by a clock of its own."""

    name = "planted"
    vocab_size = embedding_rows = 50
    stop_tokens: frozenset[int] = frozenset()
    capabilities = Capabilities()

    def __init__(self, seconds: Seconds = planted, context: int | None = None, stalls: float = 0.0) -> None:
        self.context, self.now, self.forwards = context, 0.0, 0
        self._seconds, self._stalls, self._source = seconds, stalls, random.Random(0)

    def clock(self) -> float:
        return self.now

    def new_cache(self, room: int = 0) -> PlantedCache:
        return PlantedCache()

    def prefill(self, cache: KVCache, tokens: Sequence[int]) -> None:
        assert isinstance(cache, PlantedCache)
        assert all(0 <= token < self.vocab_size for token in tokens)
        cache.tokens += len(tokens)

    def forward(self, queries: Sequence[Query]) -> list[Tensor]:
        rows = [1 + len(query.draft) for query in queries]
        for query, more in zip(queries, rows, strict=True):
            assert isinstance(query.cache, PlantedCache) and query.cache.pending == 0
            assert self.context is None or query.cache.length + more <= self.context
            query.cache.pending = more
        stalled = 50 if self._source.random() < self._stalls else 1
        warm = 1 if self.forwards > 50 else 3  # the first ones are slow
        self.now += self._seconds(sum(rows), queries[0].cache.length, len(queries)) * stalled * warm
        self.forwards += 1
        return [torch.zeros(more, self.vocab_size) for more in rows]

    def commit(self, cache: KVCache, path: Sequence[int]) -> None:
        assert isinstance(cache, PlantedCache) and cache.pending
        cache.tokens, cache.pending = cache.tokens + 1 + len(path), 0

    def truncate(self, cache: KVCache, length: int) -> None:
        assert isinstance(cache, PlantedCache)
        cache.tokens = min(cache.tokens, length)


def test_planted_times_are_found_for_every_batch_and_context() -> None:
    backend = PlantedBackend(stalls=0.05)
    costs = calibrate(backend, clock=backend.clock, seconds=300)
    assert sorted(costs.curves) == [1, 2, 4]
    assert costs.curve.rows == calibration.ROWS and costs.curve.contexts == calibration.CONTEXTS
    for sequences, curve in costs.curves.items():
        for context in curve.contexts:
            assert context * sequences <= 2048
            for rows in (sequences, 2 * sequences, 10 * sequences):
                assert curve.seconds(rows, context) == pytest.approx(planted(rows, context, sequences))
    datetime.fromisoformat(costs.measured)


def test_it_ends_in_time_once_every_point_was_timed() -> None:
    slow = PlantedBackend(lambda *_: 10.0)
    calibrate(slow, rows=(1, 2, 4), contexts=(8,), batches=(1,), seconds=1, clock=slow.clock)
    assert slow.forwards == 3
    quick = PlantedBackend(lambda *_: 1e-6)
    calibrate(quick, rows=(1, 2, 4), contexts=(8,), batches=(1,), seconds=1, clock=quick.clock)
    assert quick.forwards < 100


@pytest.mark.parametrize("context", [8, 20, 70, 600, None])
def test_contexts_and_rows_stay_within_what_the_model_takes(context: int | None) -> None:
    backend = PlantedBackend(context=context)
    costs = calibrate(backend, clock=backend.clock, seconds=5)  # the backend refuses what is too long
    assert costs.curve.contexts == {8: (4,), 20: (10,), 70: (35,), 600: (64, 512), None: (64, 512, 2048)}[context]


def test_the_machine_is_held_and_what_is_measured_is_told() -> None:
    held: list[int] = []
    told: list[str] = []

    class Held(PlantedBackend):
        @contextmanager
        def running(self) -> Iterator[None]:
            held.append(self.forwards)
            yield
            held.append(self.forwards)

    backend = Held()
    calibrate(backend, clock=backend.clock, seconds=1, notify=told.append)
    assert held == [0, backend.forwards]
    assert any("512 tokens" in message for message in told) and any("1 to 32 rows" in message for message in told)


# What is kept


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    return ModelFiles("model.gguf", file)


def quickly(backend: PlantedBackend, files: ModelFiles | None, cache: Path) -> Any:
    return costs_for(backend, files, cache, clock=backend.clock)


def test_what_was_measured_once_is_taken_up_later(files: ModelFiles, tmp_path: Path) -> None:
    first, second, told = PlantedBackend(), PlantedBackend(), list[str]()
    costs = costs_for(first, files, tmp_path, notify=told.append, clock=first.clock)
    assert len(told) == 1 and first.forwards
    again = costs_for(second, files, tmp_path, notify=told.append, clock=second.clock)
    assert len(told) == 1 and not second.forwards
    assert again.to_json() == costs.to_json()
    assert again.measured and again.about["backend"] == "planted"


def test_what_was_measured_while_the_machine_was_busy_is_not_kept(files: ModelFiles, tmp_path: Path) -> None:
    busy, quiet = (PlantedBackend(lambda rows, *_: 0.00002 * rows, stalls=stalls) for stalls in (0.6, 0.05))
    assert quickly(busy, files, tmp_path).curve.seconds(1) > 0.00002
    assert not (tmp_path / "costs").exists()
    assert quickly(quiet, files, tmp_path).curve.seconds(1) == pytest.approx(0.00002)
    assert (tmp_path / "costs").exists()


def test_a_full_calibration_is_found_in_place_of_a_quick_one(files: ModelFiles, tmp_path: Path) -> None:
    backend = PlantedBackend()
    full = calibrate(backend, clock=backend.clock, seconds=20)
    file = keep(replace(full, about=key_of(backend, files)), tmp_path)
    assert file is not None and file.parent == tmp_path / "costs"
    assert quickly(PlantedBackend(), files, tmp_path).curve.contexts == calibration.CONTEXTS


def test_another_model_backend_or_machine_is_measured_anew(files: ModelFiles, tmp_path: Path, monkeypatch: Any) -> None:
    class Other(PlantedBackend):
        def conditions(self) -> dict[str, str]:
            return {"threads": "2"}

    other_files = ModelFiles("other.gguf", tmp_path / "other.gguf")
    other_files.path.write_bytes(b"GGUF")
    keys = [key_of(PlantedBackend(), files), key_of(Other(), files), key_of(PlantedBackend(), other_files)]
    with monkeypatch.context() as patch:
        patch.setattr("psutil.cpu_count", lambda logical=True: 77)
        keys.append(key_of(PlantedBackend(), files))
    files.path.write_bytes(b"GGUF, replaced")
    keys.append(key_of(PlantedBackend(), files))
    assert len({costs_file(key, tmp_path) for key in keys}) == len(keys)


def test_the_key_names_weights_and_threads_of_each_backend(tiny_target: Any, tiny_folder: Path) -> None:
    files = ModelFiles("tiny", tiny_folder)
    native = [NativeBackend(weights_of_model(tiny_target, kind), threads=n) for kind, n in (("f32", 1), ("q8", 2))]
    keys = [key_of(backend, files) for backend in (*native, TransformersBackend(tiny_target))]
    assert [key["weights"] for key in keys] == ["f32", "q8_0", "float32"]
    assert [key["threads"] for key in keys[:2]] == ["1", "2"]
    assert keys[2]["device"] == "cpu" and all("cores" in key["cpu"] for key in keys)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"foredraft": "costs"}', b"[" * 100_000])
def test_a_damaged_file_is_measured_anew(
    content: bytes, files: ModelFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    costs = quickly(PlantedBackend(), files, tmp_path)
    file = costs_file(dict(costs.about), tmp_path)
    file.write_bytes(content)
    backend = PlantedBackend()
    assert quickly(backend, files, tmp_path).curve.seconds(1, 128) == pytest.approx(planted(1, 128, 1), rel=2.1)
    assert backend.forwards
    assert "are not used" in caplog.text
    assert json.loads(file.read_text(encoding="utf-8"))["about"] == costs.about, "it is put right"


def test_a_file_of_something_else_is_measured_anew(files: ModelFiles, tmp_path: Path) -> None:
    costs = quickly(PlantedBackend(), files, tmp_path)
    file = costs_file(dict(costs.about), tmp_path)
    file.write_text(json.dumps({**costs.to_json(), "about": {"model": "another"}}), encoding="utf-8")
    backend = PlantedBackend()
    quickly(backend, files, tmp_path)
    assert backend.forwards


def test_a_folder_that_cannot_be_written_is_only_logged(
    files: ModelFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "cache"
    blocked.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        costs = quickly(PlantedBackend(), files, blocked)
    assert costs.curve.seconds(1) > 0
    assert "is not kept" in caplog.text


def test_a_model_without_files_is_measured_and_not_kept(tmp_path: Path) -> None:
    costs = quickly(PlantedBackend(), None, tmp_path)
    assert costs.curve.seconds(8) > costs.curve.seconds(1)
    assert not (tmp_path / "costs").exists()


def test_a_real_backend_is_as_it_was_afterwards(target: TransformersBackend) -> None:
    costs = calibrate(target, rows=(1, 2, 4), contexts=(8, 16), batches=(1, 2), seconds=0.01)
    assert costs.curve.contexts == (8, 16) and sorted(costs.curves) == [1, 2]
    cache = target.new_cache()
    target.prefill(cache, [1, 2, 3])
    assert len(target.forward([Query(cache, 4)])[0]) == 1
