"""The physical limit: what is measured of a machine, and what that allows a model. All clocks are made up."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foredraft.bench.limits import Limits, Machine, measure_machine, reads_of
from foredraft.bench.theory import expected_tokens
from foredraft.errors import InvalidInputError, UnsupportedError
from foredraft.loading import EngineChoice
from foredraft.models import ModelFiles

LIMITS = Limits(bandwidth=2e9, arithmetic=16e9, bytes_per_token=2e8, parameters=1e8)
"""0.1 s to read, 0.0125 s to multiply with for each row: a free width of 8."""
FIGURES = st.floats(1.0, 1e12)


def ticking(*steps: float) -> Callable[[], float]:
    """A clock that moves on by these steps, again and again."""
    now, turn = 0.0, 0

    def clock() -> float:
        nonlocal now, turn
        now, turn = now + steps[turn % len(steps)], turn + 1
        return now

    return clock


# What a machine allows a model


def test_a_forward_takes_as_long_as_the_slower_of_reading_and_multiplying() -> None:
    assert LIMITS.seconds(1) == LIMITS.seconds(8) == pytest.approx(0.1)
    assert LIMITS.seconds(16) == pytest.approx(0.2)
    assert LIMITS.free_width == pytest.approx(8)
    assert LIMITS.plain == pytest.approx(10)


@given(FIGURES, FIGURES, FIGURES, FIGURES)
def test_at_the_free_width_both_take_as_long(bandwidth: float, arithmetic: float, size: float, weights: float) -> None:
    limits = Limits(bandwidth, arithmetic, size, weights)
    assert 2 * weights * limits.free_width / arithmetic == pytest.approx(size / bandwidth)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("arithmetic", [1e9, 5e9, 16e9, 15.9e9, 17e9])
def test_no_chain_of_any_length_is_faster_than_the_best(alpha: float, arithmetic: float) -> None:
    limits = Limits(2e9, arithmetic, 2e8, 1e8)
    best = limits.speculative(alpha)
    every = [expected_tokens(alpha, n - 1) / limits.seconds(n) for n in range(1, 200)]
    assert best.tokens_per_second == pytest.approx(max(every))
    assert best.tokens_per_second == every[best.k] >= limits.plain


def test_a_wide_limit_is_not_searched_for_ever() -> None:
    assert Limits(1.0, 1e12, 1e9, 1.0).speculative(0.9).k <= 1023


def test_a_share_is_of_plain_decoding_or_of_the_best_chain() -> None:
    assert LIMITS.share(5) == pytest.approx(0.5)
    assert LIMITS.share(5, alpha=1.0) == pytest.approx(5 / 80)


@pytest.mark.parametrize("name", ["bandwidth", "arithmetic", "bytes_per_token", "parameters"])
@pytest.mark.parametrize("junk", [0, -1.0, math.nan, math.inf, None])
def test_figures_must_be_positive(name: str, junk: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"{name} is .*, but must be a number > 0"):
        Limits(**{**vars(LIMITS), name: junk})


@pytest.mark.parametrize("junk", [0, -3.0, math.nan])
def test_a_measured_speed_must_be_positive(junk: float) -> None:
    with pytest.raises(InvalidInputError, match="tokens_per_second is"):
        LIMITS.share(junk)


# What is measured


def measured(clock: Callable[[], float], **other: Any) -> Machine:
    return measure_machine(
        "cpu", **{"threads": 1, "buffer": 4096, "sizes": (8,), "seconds": 10.0, "clock": clock, **other}
    )


def test_rates_are_bytes_and_operations_over_seconds() -> None:
    found = measured(ticking(1.0))
    assert found.bandwidth == 4096 and found.arithmetic == 2 * 8**3
    assert (found.device, found.threads, found.dtype) == ("cpu", 1, "float32")


def test_the_quickest_turn_counts() -> None:
    turns = [step for seconds in (3.0, 0.5, 3.0) for step in (0.0, seconds, 0.0)]  # begun, done, looked at the time
    assert measured(ticking(0.0, *turns), seconds=5.0).bandwidth == 4096 / 0.5


def test_the_largest_product_of_several_sizes_counts() -> None:
    assert measured(ticking(1.0), sizes=(4, 16, 8)).arithmetic == 2 * 16**3


def test_a_clock_that_stands_still_for_a_turn_is_no_matter() -> None:
    assert measured(ticking(0.0, 0.0, 20.0)).bandwidth > 0


def test_the_threads_of_torch_are_those_asked_for_and_then_as_before() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    found = measured(ticking(1.0), threads=before + 1, notify=lambda _: seen.append(torch.get_num_threads()))
    assert seen == [before + 1] * 2 and found.threads == before + 1
    assert torch.get_num_threads() == before


def test_products_are_in_the_type_asked_for() -> None:
    assert measured(ticking(1.0), dtype=torch.bfloat16).dtype == "bfloat16"


def test_it_says_what_it_does() -> None:
    said: list[str] = []
    measured(ticking(1.0), buffer=3 * 2**20, notify=said.append)
    assert said == ["Reading 3 MiB of memory", "Multiplying matrices"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_a_gpu_is_measured_too() -> None:
    found = measure_machine("cuda", buffer=2**20, sizes=(64,), seconds=0.01)
    assert found.device.startswith("cuda") and found.threads is None
    assert found.bandwidth > 0 and found.arithmetic > 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"threads": 0}, "threads is 0, but must be an integer >= 1"),
        ({"threads": 1.5}, "threads is 1.5"),
        ({"seconds": 0}, "seconds is 0, but must be a number > 0"),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        measured(ticking(1.0), **wrong)
    with pytest.raises(InvalidInputError, match="Device 'nonsense' cannot be used here"):
        measure_machine("nonsense")


# What a model reads


@pytest.fixture(scope="module")
def count(text_target: Any) -> int:
    """Weights that a row of the tiny model is multiplied with."""
    matrices = [p for name, p in text_target.model.named_parameters() if p.dim() == 2 and "embed_tokens" not in name]
    return sum(p.numel() for p in matrices)


@pytest.mark.parametrize(("weights", "size"), [("auto", 4), ("f32", 4), ("bf16", 2), ("q8", 34 / 32)])
def test_the_native_engine_reads_its_weights(tiny_folder: Path, count: int, weights: str, size: float) -> None:
    reads = reads_of(ModelFiles("tiny", tiny_folder), EngineChoice(backend="native", weights=weights))
    assert reads == (size * count, count, torch.float32)


@pytest.mark.parametrize(("dtype", "size"), [("auto", 4), ("float32", 4), ("bfloat16", 2)])
def test_transformers_reads_them_in_its_own_type(tiny_folder: Path, count: int, dtype: str, size: int) -> None:
    engine = EngineChoice(backend="transformers", device="cpu", dtype=dtype)
    reads = reads_of(ModelFiles("tiny", tiny_folder), engine)
    assert reads == (size * count, count, torch.float32 if dtype == "auto" else getattr(torch, dtype))


def test_on_a_gpu_it_is_the_checkpoints_own_type(tiny_folder: Path, count: int, monkeypatch: Any) -> None:
    monkeypatch.setattr("foredraft.bench.limits.pick_device", lambda _: torch.device("cuda"))
    reads = reads_of(ModelFiles("tiny", tiny_folder), EngineChoice(backend="transformers"))
    assert reads == (4 * count, count, torch.float32)


def test_a_model_of_unknown_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UnsupportedError, match=r"What a model reads for a token is not known: .*gpt2"):
        reads_of(ModelFiles("a model", tmp_path), EngineChoice())
