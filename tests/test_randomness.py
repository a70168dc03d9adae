"""Draws follow their weights, from a generator and from noise keyed by position, and depend on nothing else.

The seeds are fixed: a test that passed once passes always. Of all other seeds each test of a law fails one in 1e9.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from foredraft import randomness
from foredraft.proof.statistics import g_test
from foredraft.randomness import KeyedSource, TorchSource, gumbel

LARGEST_SEED = 2**63 - 1


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Fresh numbers


weights_with_zeros = st.lists(
    st.one_of(st.just(0.0), st.floats(min_value=0.0, max_value=1e6, allow_subnormal=True)), min_size=1, max_size=40
).filter(lambda weights: sum(weights) > 0)


class FixedSource(TorchSource):
    """Takes a given number for the uniform one."""

    def __init__(self, uniform: float) -> None:
        super().__init__()
        self.fixed = uniform

    def _uniform(self) -> float:
        return self.fixed


@example(weights=[5e-324, 0.0], uniform=0.9)  # 0.9 of the least number rounds up to it
@given(weights=weights_with_zeros, uniform=st.floats(min_value=0.0, max_value=1.0, exclude_max=True))
def test_what_has_no_weight_is_never_drawn(weights: list[float], uniform: float) -> None:
    for edge in (uniform, 0.0, 1.0 - 2.0**-53):  # the least and the largest that a generator gives
        assert weights[FixedSource(edge).draw(torch.tensor(weights, dtype=torch.float64))] > 0


@given(weights=weights_with_zeros, seed=st.integers(0, 2**32))
def test_what_has_no_weight_is_never_drawn_from_a_generator(weights: list[float], seed: int) -> None:
    source, tensor = TorchSource(seeded(seed)), torch.tensor(weights, dtype=torch.float64)
    assert all(weights[source.draw(tensor)] > 0 for _ in range(5))


def test_a_coin_of_0_never_and_of_1_always_falls() -> None:
    source = TorchSource(seeded())
    assert not any(source.coin(0.0) for _ in range(1000))
    assert all(source.coin(1.0) for _ in range(1000))
    assert not FixedSource(0.0).coin(0.0) and FixedSource(1.0 - 2.0**-53).coin(1.0)


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6], ids=["normalised", "small", "large"])
def test_draws_follow_the_weights(scale: float) -> None:
    # 20000 draws: a sampler whose KL divergence from the law is 0.003 fails with probability 0.999.
    law = {0: 0.5, 1: 0.0, 2: 0.3, 3: 0.15, 4: 0.049, 5: 0.001}
    source, weights = TorchSource(seeded(4)), torch.tensor(list(law.values()), dtype=torch.float64) * scale
    assert g_test(Counter(source.draw(weights) for _ in range(20_000)), law).passed


def test_coins_fall_with_their_probability() -> None:
    source = TorchSource(seeded(5))
    assert g_test(Counter(source.coin(0.3) for _ in range(20_000)), {True: 0.3, False: 0.7}).passed


def test_the_test_of_draws_rejects_a_wrong_law() -> None:
    source, weights = TorchSource(seeded(6)), torch.tensor([0.5, 0.5])
    assert not g_test(Counter(source.draw(weights) for _ in range(20_000)), {0: 0.45, 1: 0.55}).passed


def test_a_source_is_private_and_reproduces() -> None:
    before = torch.get_rng_state()
    weights = torch.ones(100)
    first, second = TorchSource(seeded(8)), TorchSource(seeded(8))
    assert [first.draw(weights) for _ in range(20)] == [second.draw(weights) for _ in range(20)]
    assert torch.equal(torch.get_rng_state(), before)


def test_fresh_numbers_do_not_depend_on_the_position() -> None:
    source, weights = TorchSource(seeded(8)), torch.ones(100)
    same = TorchSource(seeded(8))
    assert [source.at(t).draw(weights, depth=t) for t in range(20)] == [same.draw(weights) for _ in range(20)]


# Noise keyed by position


WEIGHTS = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.049, 0.001], dtype=torch.float64)
LAW = dict(enumerate(WEIGHTS.tolist()))
MANY = 20_000

_WORD, _GOLDEN = 2**64, 0x9E3779B97F4A7C15


def splitmix64(state: int, n: int) -> int:
    """The n-th output of SplitMix64 (Steele, Lea and Flood 2014) from a state, written from the paper."""
    z = (state + n * _GOLDEN) % _WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % _WORD
    return z ^ (z >> 31)


def noise(seed: int, position: int, token: int) -> float:
    """What `gumbel` must be, one number at a time in plain Python."""
    key = splitmix64((splitmix64(seed, 1) + position) % _WORD, 1)
    uniform = ((splitmix64(key, token) >> 11) + 0.5) / 2**53
    return -math.log(-math.log(uniform))


def test_the_reference_is_splitmix64() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [splitmix64(1234567, n) for n in (1, 2, 3, 4)] == published


GOLDEN = {
    (0, 0, 0): 1.0530590592834106,
    (0, 0, 1): -0.6807578025137784,
    (1, 0, 0): 0.8635963628317398,
    (0, 1, 0): 1.506833584422617,
    (12345, 678, 90123): 1.037916356002576,
    (LARGEST_SEED, 2**20, 151935): -0.05688597519638385,
}
"""Changing any of these changes every seeded answer there ever was."""


@pytest.mark.parametrize(("where", "value"), GOLDEN.items(), ids=str)
def test_noise_has_its_documented_values(where: tuple[int, int, int], value: float) -> None:
    seed, position, token = where
    assert gumbel(seed, position, torch.tensor([token])).item() == pytest.approx(value, rel=1e-14)
    assert noise(*where) == pytest.approx(value, rel=1e-14)


@given(seed=st.integers(0, LARGEST_SEED), position=st.integers(0, 2**24), token=st.integers(0, 2**20))
def test_noise_is_the_reference_everywhere(seed: int, position: int, token: int) -> None:
    assert gumbel(seed, position, torch.tensor([token])).item() == pytest.approx(noise(seed, position, token), rel=1e-9)


def quarters(values: Tensor) -> list[int]:
    """In which quarter of the standard Gumbel law each value lies."""
    return (torch.exp(-torch.exp(-values)) * 4).long().clamp(max=3).tolist()


UNIFORM_PAIRS = {(i, j): 1 / 16 for i in range(4) for j in range(4)}


def at_positions(positions: Iterable[int], token: int = 5, seed: int = 7) -> list[int]:
    return quarters(torch.cat([gumbel(seed, t, torch.tensor([token])) for t in positions]))


# Each pair test has 20000 pairs in 16 cells: dependence of 0.003 nats (mutual information) fails it with odds of 0.999.


def test_noise_of_tokens_is_gumbel_and_independent_of_the_neighbours() -> None:
    even, odd = gumbel(3, 11, torch.arange(2 * MANY)).reshape(MANY, 2).unbind(1)
    assert g_test(Counter(zip(quarters(even), quarters(odd), strict=True)), UNIFORM_PAIRS).passed


def test_noise_of_positions_is_gumbel_and_independent_of_the_neighbours() -> None:
    found = at_positions(range(2 * MANY))
    assert g_test(Counter(zip(found[::2], found[1::2], strict=True)), UNIFORM_PAIRS).passed


@pytest.mark.parametrize("first", [0, 1234, LARGEST_SEED - 1])
def test_noise_of_neighbouring_seeds_is_independent(first: int) -> None:
    tokens = torch.arange(MANY)
    pairs = zip(quarters(gumbel(first, 9, tokens)), quarters(gumbel(first + 1, 9, tokens)), strict=True)
    assert g_test(Counter(pairs), UNIFORM_PAIRS).passed


def test_seed_and_position_are_no_sum() -> None:
    tokens = torch.arange(1000)
    pairs = [(seed, position) for seed in range(4) for position in range(4)]
    assert len({tuple(gumbel(seed, position, tokens).tolist()) for seed, position in pairs}) == len(pairs)


def test_keyed_draws_follow_the_weights() -> None:
    # 20000 draws: a sampler whose KL divergence from the law is 0.003 fails with probability 0.999.
    source = KeyedSource(1)
    assert g_test(Counter(source.at(t).draw(WEIGHTS) for t in range(MANY)), LAW).passed


def test_keyed_draws_follow_the_weights_over_seeds() -> None:
    assert g_test(Counter(KeyedSource(seed).at(3).draw(WEIGHTS) for seed in range(MANY)), LAW).passed


def test_keyed_draws_of_neighbouring_positions_are_independent() -> None:
    drawn = [KeyedSource(2).at(t).draw(WEIGHTS) for t in range(MANY)]
    law = {(x, y): LAW[x] * LAW[y] for x in LAW for y in LAW}
    assert g_test(Counter(zip(drawn[::2], drawn[1::2], strict=True)), law).passed


def test_keyed_draws_of_neighbouring_seeds_are_independent() -> None:
    drawn = [KeyedSource(seed).at(3).draw(WEIGHTS) for seed in range(MANY)]
    law = {(x, y): LAW[x] * LAW[y] for x in LAW for y in LAW}
    assert g_test(Counter(zip(drawn[::2], drawn[1::2], strict=True)), law).passed


def test_a_keyed_draw_does_not_depend_on_what_was_drawn_before() -> None:
    weights = torch.rand(1000, generator=seeded(1), dtype=torch.float64)
    alone = [KeyedSource(5).at(t).draw(weights) for t in range(20)]
    source = KeyedSource(5)
    backwards = [source.at(t).draw(weights) for t in reversed(range(20))]
    assert backwards[::-1] == alone
    source.at(3).draw(torch.ones(7), depth=2)
    assert [source.at(0).draw(weights, depth=t) for t in range(20)] == alone
    assert [source.at(t - 4).draw(weights, depth=4) for t in range(4, 20)] == alone[4:]
    assert len(set(alone)) > 15  # all alike would pass the above


def test_noise_of_a_token_does_not_depend_on_which_others_are_asked_for() -> None:
    every = gumbel(6, 40, torch.arange(500))
    some = torch.randperm(500, generator=seeded(2))[:60]
    assert torch.equal(gumbel(6, 40, some), every[some])


@given(weights=weights_with_zeros, seed=st.integers(0, LARGEST_SEED), position=st.integers(0, 2**20))
def test_a_keyed_draw_has_weight_and_wins_among_any_others(weights: list[float], seed: int, position: int) -> None:
    tensor = torch.tensor(weights, dtype=torch.float64)
    source = KeyedSource(seed, position)
    winner = source.draw(tensor)
    assert weights[winner] > 0
    fewer = tensor.clone()
    fewer[torch.arange(len(fewer)) % 2 != winner % 2] = 0.0
    assert source.draw(fewer / fewer.sum()) == winner  # top-k and top-p may drop what they like but the winner


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("seed", [0, 1, LARGEST_SEED])
def test_every_seed_gives_finite_noise_and_draws(seed: int, dtype: torch.dtype) -> None:
    values = gumbel(seed, 2**40, torch.arange(10_000))
    assert values.dtype == torch.float64 and torch.isfinite(values).all()
    assert KeyedSource(seed, 2**40).draw(WEIGHTS.to(dtype)) in {x for x, mass in LAW.items() if mass}


def test_seeds_differ() -> None:
    seeds = [0, 1, 2, 2**32, 2**62, LARGEST_SEED - 1, LARGEST_SEED]
    drawn = [tuple(KeyedSource(seed).at(t).draw(torch.ones(64)) for t in range(30)) for seed in seeds]
    assert all(a != b for a, b in pairwise(sorted(drawn)))  # alike by chance: less than 1e-50


def test_keyed_noise_has_no_coins() -> None:
    with pytest.raises(NotImplementedError, match="no coins"):
        KeyedSource(0).coin(0.5)


def test_keyed_noise_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    KeyedSource(3).at(4).draw(torch.ones(10))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("zeros", [0.0, 0.5, 0.999])
def test_a_draw_is_the_largest_weight_over_noise(zeros: float) -> None:
    generator = seeded(4)
    for position in range(200):
        weights = torch.rand(1500, dtype=torch.float64, generator=generator) ** 8
        weights[torch.rand(1500, generator=generator) < zeros] = 0
        weights[position] = 1e-6
        noise = randomness.exponential(7, position, torch.arange(1500))
        assert KeyedSource(7, position).draw(weights) == int((weights / noise).argmax())


# The same on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_noise_has_the_same_bits_on_a_gpu() -> None:
    tokens = torch.arange(150_000)
    assert torch.equal(randomness._mix(tokens.to("cuda")).cpu(), randomness._mix(tokens))
    for seed in (0, 1, LARGEST_SEED):
        here, there = gumbel(seed, 77, tokens), gumbel(seed, 77, tokens.to("cuda"))
        assert there.is_cuda and torch.allclose(here, there.cpu(), rtol=1e-12, atol=1e-14)  # logarithms may round


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_keyed_draws_are_the_same_on_a_gpu() -> None:
    # They differ where two scores lie within a rounding of the logarithm: less than 1e-10 a draw.
    weights = (3 * torch.randn(150_000, generator=seeded(12), dtype=torch.float64)).softmax(-1)
    weights[torch.rand(150_000, generator=seeded(13)) < 0.3] = 0.0
    on_device, source = weights.to("cuda"), KeyedSource(LARGEST_SEED)
    drawn = [source.at(t).draw(weights) for t in range(200)]
    assert [source.at(t).draw(on_device) for t in range(200)] == drawn
    assert len(set(drawn)) > 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_what_has_no_weight_is_never_drawn_on_a_gpu() -> None:
    generator = seeded(11)
    weights = torch.rand(50_000, generator=generator, dtype=torch.float64)
    weights[torch.rand(50_000, generator=generator) < 0.5] = 0.0
    on_device = weights.to("cuda")
    sums = on_device.cumsum(0).cpu()
    steps = ((weights[1:] == 0) & (sums.diff() > 0)).nonzero()[:100, 0]  # parallel sums: uneven by a rounding
    for below in sums[steps].tolist():
        assert weights[FixedSource(below / sums[-1].item()).draw(on_device)] > 0
