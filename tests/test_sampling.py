"""Temperature, top-k, top-p and min-p are transformers' own. (What needs a history: test_law.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from foredraft.errors import ModelError
from foredraft.randomness import TorchSource
from foredraft.sampling import SamplingLaw, one_hot_argmax, probabilities
from foredraft.types import Draft, SamplingParams


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def by_transformers(logits: Tensor, params: SamplingParams) -> Tensor:
    """The same settings through the library's warpers, in its order."""
    scores: Any = logits
    ids = torch.zeros(len(logits), 1, dtype=torch.long)
    warpers: list[tuple[bool, Callable[[], Any]]] = [
        (True, lambda: TemperatureLogitsWarper(params.temperature)),
        (params.top_k > 0, lambda: TopKLogitsWarper(params.top_k)),
        (params.top_p < 1, lambda: TopPLogitsWarper(params.top_p)),
        (params.min_p > 0, lambda: MinPLogitsWarper(params.min_p)),
    ]
    for wanted, make in warpers:
        if wanted:
            scores = make()(ids, scores)
    result: Tensor = scores.softmax(-1)
    return result


SETTINGS = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature in (0.3, 1.0, 1.7)
    for top_k in (0, 1, 5, 100)
    for top_p in (1.0, 0.9, 0.3, 1e-6)
    for min_p in (0.0, 0.05, 0.5, 1.0)
]


@pytest.mark.parametrize("ties", [False, True], ids=["random", "ties"])
def test_equals_the_warpers_of_transformers(ties: bool) -> None:
    logits = torch.randn(16, 50, generator=seeded(), dtype=torch.float64) * 3
    if ties:
        logits = logits.round()
    for params in SETTINGS:
        expected = by_transformers(logits, params)
        assert torch.allclose(probabilities(logits, params), expected, atol=1e-12), params
        assert torch.equal(probabilities(logits, params) > 0, expected > 0), params


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.5, 2), (0.75, 3), (0.76, 4)])
def test_top_p_keeps_no_more_than_it_must(top_p: float, kept: int) -> None:
    logits = torch.zeros(1, 4, dtype=torch.float64)
    params = SamplingParams(temperature=1.0, top_p=top_p)
    assert torch.equal(probabilities(logits, params), by_transformers(logits, params))
    assert int((probabilities(logits, params) > 0).sum()) == kept


def test_each_row_is_a_distribution_whatever_the_settings() -> None:
    logits = torch.randn(8, 30, generator=seeded(1)) * 20
    for params in [*SETTINGS, SamplingParams()]:
        p = probabilities(logits, params)
        assert p.dtype == torch.float64 and (p >= 0).all()
        assert torch.allclose(p.sum(-1), torch.ones(8, dtype=torch.float64), atol=1e-12)


def test_each_row_depends_on_its_own_logits_alone() -> None:
    logits = torch.randn(8, 30, generator=seeded(2)) * 5
    for params in [*SETTINGS[::7], SamplingParams()]:
        together = probabilities(logits, params)
        alone = torch.cat([probabilities(row[None], params) for row in logits])
        assert torch.equal(together, alone)


def test_greedy_is_the_one_hot_of_the_argmax() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, 1.0]])
    p = probabilities(logits, SamplingParams(temperature=0, top_k=2, top_p=0.5, min_p=0.1))
    assert p.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]  # of equals the first, as argmax has it
    assert torch.equal(p, one_hot_argmax(logits))


def test_impossible_tokens_stay_impossible() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0]])
    for params in (SamplingParams(), SamplingParams(temperature=2.0), SamplingParams(temperature=1e9, top_p=0.999)):
        assert probabilities(logits, params)[0, 1] == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_overflowed_are_refused(bad: float, temperature: float) -> None:
    logits = torch.zeros(2, 5)
    logits[1, 3] = bad
    with pytest.raises(ModelError, match=r"NaN or infinite logits.*float32"):
        probabilities(logits, SamplingParams(temperature=temperature))


def test_a_row_without_any_possible_token_is_refused() -> None:
    with pytest.raises(ModelError, match="NaN or infinite logits"):
        probabilities(torch.full((1, 5), -torch.inf), SamplingParams(temperature=1.0))


def test_law_of_settings_is_their_pipeline() -> None:
    params = SamplingParams(temperature=0.7, top_k=3)
    logits = torch.randn(3, 9, generator=seeded(3))
    law = SamplingLaw(params)
    assert torch.equal(law([1, 2], Draft.chain([4, 5]), logits), probabilities(logits, params))
    assert not law.greedy and SamplingLaw(SamplingParams()).greedy


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_the_device_changes_neither_law_nor_draws() -> None:
    logits = torch.randn(4, 50_000, generator=seeded(9), dtype=torch.float64)
    for params in [*SETTINGS[::7], SamplingParams()]:
        p = probabilities(logits, params)
        on_device = probabilities(logits.to("cuda"), params)
        assert torch.allclose(p, on_device.cpu(), atol=1e-12)
        here, there = TorchSource(seeded(10)), TorchSource(seeded(10))
        # A draw differs if its number falls between two roundings of a sum: less than 1e-10 a draw.
        assert [here.draw(p[0]) for _ in range(50)] == [there.draw(on_device[0]) for _ in range(50)]
