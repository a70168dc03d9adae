"""The public step on plain tensors does exactly what its issue says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import foredraft
from foredraft import speculative_decode_step
from foredraft.acceptance import step
from foredraft.proof.enumeration import outcome_law, total_variation
from foredraft.proof.statistics import g_test
from foredraft.randomness import RandomSource, TorchSource

Q = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.625, 0.25]])
P = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.0, 0.5], [0.125, 0.75, 0.125]])  # dyadic: exact in every dtype


def rows(*values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# What it returns


def test_is_public() -> None:
    assert foredraft.speculative_decode_step is speculative_decode_step


def test_has_exactly_the_four_keys_with_plain_values() -> None:
    result = speculative_decode_step(Q, P, [1, 0], seeded())
    assert list(result) == ["tokens", "accepted_count", "rejected", "target_positions_checked"]
    assert [type(value) for value in result.values()] == [list, int, bool, int]
    assert all(type(token) is int for token in result["tokens"])


def test_all_accepted_adds_the_bonus_from_the_last_row() -> None:
    q, p = rows([0.5, 0.5, 0], [0.5, 0.5, 0]), rows([0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1])
    assert speculative_decode_step(q, p, [1, 0], seeded()) == {
        "tokens": [1, 0, 2],
        "accepted_count": 2,
        "rejected": False,
        "target_positions_checked": 2,
    }


@pytest.mark.parametrize("position", [0, 1, 2])
def test_rejection_ends_the_step_with_a_correction(position: int) -> None:
    q = rows([1, 0, 0]).repeat(3, 1)
    p = rows([1, 0, 0]).repeat(4, 1)
    p[position] = torch.tensor([0, 0, 1])
    assert speculative_decode_step(q, p, [0, 0, 0], seeded()) == {
        "tokens": [0] * position + [2],
        "accepted_count": position,
        "rejected": True,
        "target_positions_checked": position + 1,
    }


def test_correction_comes_from_the_residual_alone() -> None:
    q, p = rows([0.75, 0.25, 0, 0]), rows([0, 0.25, 0.5, 0.25], [1, 0, 0, 0])
    corrections = {speculative_decode_step(q, p, [0], seeded(seed))["tokens"][0] for seed in range(50)}
    assert corrections == {2, 3}  # missing one of them by chance: (2/3)^50 + (1/3)^50 < 1e-8


def test_token_that_q_cannot_draw_is_accepted_if_p_has_it() -> None:
    q, p = rows([1, 0]), rows([0.999, 0.001], [0, 1])
    for seed in range(20):
        assert speculative_decode_step(q, p, [1], seeded(seed))["accepted_count"] == 1


def test_token_that_neither_can_draw_is_rejected() -> None:
    q, p = rows([1, 0, 0]), rows([0.5, 0.5, 0], [1, 0, 0])
    for seed in range(20):
        result = speculative_decode_step(q, p, [2], seeded(seed))
        assert result["rejected"] and result["tokens"] == [1]


def test_without_drafts_it_draws_from_row_0() -> None:
    result = speculative_decode_step(torch.empty(0, 3), rows([0, 1, 0]), [], seeded())
    assert result == {"tokens": [1], "accepted_count": 0, "rejected": False, "target_positions_checked": 0}
    empty: tuple[Any, ...] = (torch.empty(0, dtype=torch.long), np.array([], dtype=np.int64), ())
    for none in empty:
        assert speculative_decode_step(torch.empty(0, 3), rows([0, 1, 0]), none, seeded()) == result


# What it takes


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 0],
        (1, 0),
        torch.tensor([1, 0]),
        torch.tensor([1, 0], dtype=torch.int32),
        torch.tensor([1, 0], dtype=torch.uint8),
        np.array([1, 0]),
        [np.int64(1), np.int32(0)],
        [torch.tensor(1), torch.tensor(0)],
    ],
    ids=["list", "tuple", "int64", "int32", "uint8", "numpy", "numpy scalars", "0-d tensors"],
)
def test_takes_integer_ids_of_every_kind(tokens: Any) -> None:
    for seed in range(5):
        expected = speculative_decode_step(Q, P, [1, 0], seeded(seed))
        assert speculative_decode_step(Q, P, tokens, seeded(seed)) == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtype_does_not_change_the_result(dtype: torch.dtype) -> None:
    for seed in range(20):
        expected = speculative_decode_step(Q.double(), P.double(), [1, 0], seeded(seed))
        assert speculative_decode_step(Q.to(dtype), P.to(dtype), [1, 0], seeded(seed)) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_device_does_not_change_the_result() -> None:
    q, p, tokens = Q.to("cuda"), P.to("cuda"), torch.tensor([1, 0], device="cuda")
    for seed in range(20):
        expected = speculative_decode_step(Q, P, [1, 0], seeded(seed))
        assert speculative_decode_step(q, p, tokens, seeded(seed)) == expected
        assert speculative_decode_step(Q, p, [1, 0], seeded(seed)) == expected
    on_device = [torch.Generator("cuda").manual_seed(1) for _ in range(2)]
    first, again = (speculative_decode_step(q, p, tokens, generator) for generator in on_device)
    assert first == again


def test_draft_and_target_may_differ_in_dtype() -> None:
    assert speculative_decode_step(Q.half(), P.double(), [1, 0], seeded())["target_positions_checked"] in (1, 2)


def test_rows_may_be_off_by_the_tolerance() -> None:
    p = rows([0.5 + 9e-6, 0.5], [0.5, 0.5 - 9e-6])
    assert speculative_decode_step(rows([0.5, 0.5]), p, [0], seeded())["accepted_count"] == 1


def test_inputs_are_left_as_they_were_and_may_need_gradients() -> None:
    q, p, tokens = Q.clone().requires_grad_(), P.clone().requires_grad_(), torch.tensor([1, 1])
    speculative_decode_step(q, p, tokens, seeded())
    assert torch.equal(q, Q) and torch.equal(p, P) and tokens.tolist() == [1, 1]


# What it refuses


REFUSED: list[tuple[Any, Any, Any, str]] = [
    (rows([1, 0])[0], rows([1, 0], [1, 0]), [0], r"draft_probs has shape \[2\], but must be a 2-D"),
    (rows([1, 0]), rows([1, 0])[0], [0], r"target_probs has shape \[2\], but must be a 2-D"),
    (rows([1, 0])[None], rows([1, 0], [1, 0]), [0], r"draft_probs has shape \[1, 1, 2\]"),
    ([[1.0, 0.0]], rows([1, 0], [1, 0]), [0], "draft_probs has type list"),
    (torch.tensor([[1, 0]]), rows([1, 0], [1, 0]), [0], r"dtype torch.int64, but .* floating point"),
    (torch.empty(0, 0), torch.empty(1, 0), [], "V must not be empty"),
    (rows([1, 0]), rows([1, 0]), [0], r"needs \[K\+1, V\] = \[2, 2\]"),
    (rows([1, 0]), rows([1, 0], [1, 0], [1, 0]), [0], r"needs \[K\+1, V\] = \[2, 2\]"),
    (rows([1, 0]), rows([1, 0, 0], [1, 0, 0]), [0], r"needs \[K\+1, V\] = \[2, 2\]"),
    (rows([1, 0]), rows([1, 0], [1, 0]), [0, 0], "has 2 ids, but draft_probs has K = 1"),
    (rows([1, 0]), rows([1, 0], [1, 0]), [], "has 0 ids, but draft_probs has K = 1"),
    (rows([float("nan"), 1]), rows([1, 0], [1, 0]), [0], "draft_probs contains NaN or infinity"),
    (rows([1, 0]), rows([1, 0], [float("inf"), 0]), [0], "target_probs contains NaN or infinity"),
    (rows([1, 0]), rows([1, 0], [-float("inf"), 0]), [0], "target_probs contains NaN or infinity"),
    (rows([1.25, -0.25]), rows([1, 0], [1, 0]), [0], r"draft_probs contains -0.25"),
    (rows([1, 0]), rows([1, 0], [1.5, -0.5]), [0], r"target_probs contains -0.5"),
    (rows([1, 2e-5]), rows([1, 0], [1, 0]), [0], r"draft_probs\[0\] sums to 1.00002"),
    (rows([1, 0]), rows([1, 0], [0.5, 0.25]), [0], r"target_probs\[1\] sums to 0.75"),
    (rows([0, 0]), rows([1, 0], [1, 0]), [0], r"draft_probs\[0\] sums to 0"),
    (torch.tensor([[0.3, 0.3, 0.3]]).bfloat16(), P[:2].bfloat16(), [0], "must sum to 1"),
    (rows([1, 0]), rows([1, 0], [1, 0]), [2], r"draft_tokens\[0\] is 2, but ids must lie in \[0, 1\]"),
    (rows([1, 0]), rows([1, 0], [1, 0]), [-1], r"draft_tokens\[0\] is -1"),
    (rows([1, 0]), rows([1, 0], [1, 0]), [2**80], "but ids must lie in"),
    (rows([1, 0]), rows([1, 0], [1, 0]), [0.0], r"draft_tokens\[0\] is 0.0, but must be an integer"),
    (rows([1, 0]), rows([1, 0], [1, 0]), [True], r"draft_tokens\[0\] is True, but must be an integer"),
    (rows([1, 0]), rows([1, 0], [1, 0]), ["0"], r"draft_tokens\[0\] is '0'"),
    (rows([1, 0]), rows([1, 0], [1, 0]), [None], r"draft_tokens\[0\] is None"),
    (rows([1, 0]), rows([1, 0], [1, 0]), None, "draft_tokens is None"),
    (rows([1, 0]), rows([1, 0], [1, 0]), 0, "draft_tokens is 0"),
    (rows([1, 0]), rows([1, 0], [1, 0]), [[0]], "must be an integer"),
    (rows([1, 0]), rows([1, 0], [1, 0]), [torch.tensor(True)], r"draft_tokens\[0\] is True"),
    (rows([1, 0]), rows([1, 0], [1, 0]), torch.tensor([0.0]), "1-D tensor of integer ids"),
    (rows([1, 0]), rows([1, 0], [1, 0]), torch.tensor([True]), "1-D tensor of integer ids"),
    (rows([1, 0]), rows([1, 0], [1, 0]), torch.tensor([[0]]), "1-D tensor of integer ids"),
    (rows([1, 0]), rows([1, 0], [1, 0]), torch.tensor(0), "1-D tensor of integer ids"),
    (rows([1, 0]), rows([1, 0], [1, 0]), np.array([0.0]), r"draft_tokens\[0\]"),
    (rows([1, 0]), rows([1, 0], [1, 0]), np.array([[0]]), r"draft_tokens\[0\]"),
    (rows([1, 0]), rows([1, 0], [1, 0]), np.array([True]), r"draft_tokens\[0\]"),
    (rows([1, 0]), rows([1, 0], [1, 0]), [1], r"residual \(p - q\)\+ has no mass after drafted token 1 \(number 0\)"),
    (
        rows([1, 9e-6]),
        rows([1, 0], [1, 0]),
        [1],
        r"residual \(p - q\)\+ has no mass after drafted token 1 \(number 0\)",
    ),
]


@pytest.mark.parametrize(("q", "p", "tokens", "says"), REFUSED, ids=[says.replace("\\", "") for *_, says in REFUSED])
def test_refuses_with_a_value_error(q: Any, p: Any, tokens: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        speculative_decode_step(q, p, tokens)
    assert isinstance(refused.value, foredraft.ForedraftError)


# Randomness


def test_a_generator_reproduces_and_the_global_one_is_left_alone() -> None:
    before = torch.get_rng_state()
    first = [speculative_decode_step(Q, P, [0, 1], generator)["tokens"] for generator in [seeded(7)] * 10]
    again = [speculative_decode_step(Q, P, [0, 1], generator)["tokens"] for generator in [seeded(7)] * 10]
    assert first == again and len({tuple(tokens) for tokens in first}) > 1
    assert torch.equal(torch.get_rng_state(), before)


def test_all_randomness_comes_from_the_generator() -> None:
    torch.manual_seed(0)
    first = speculative_decode_step(Q, P, [0, 1], seeded(3))
    torch.manual_seed(1)
    assert speculative_decode_step(Q, P, [0, 1], seeded(3)) == first


def test_without_a_generator_the_global_one_is_used() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        first = [speculative_decode_step(Q, P, [0, 1]) for _ in range(10)]
        torch.manual_seed(5)
        assert [speculative_decode_step(Q, P, [0, 1]) for _ in range(10)] == first


# The law


def drawn_step(source: RandomSource, generator: torch.Generator | None = None) -> tuple[int, ...]:
    """First two tokens of: draw a draft from Q, take the step, continue from P (its rows ignore what came before)."""
    draft = [source.draw(row) for row in Q]
    tokens = speculative_decode_step(Q, P, draft, generator)["tokens"]
    if len(tokens) == 1:
        tokens.append(source.draw(P[1]))
    return (tokens[0], tokens[1])


LAW: dict[tuple[int, ...], float] = {(x, y): float(P[0, x] * P[1, y]) for x in range(3) for y in range(3)}


def test_enumerated_law_is_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(source: RandomSource) -> tuple[int, ...]:
        monkeypatch.setattr(step, "TorchSource", lambda generator: source)
        return drawn_step(source)

    assert total_variation(outcome_law(play), LAW) < 1e-9


def test_sampled_law_is_the_targets() -> None:
    # 5000 samples: a sampler whose KL divergence from the law is 0.012 fails with probability 0.999.
    generator = seeded(11)
    source = TorchSource(generator)
    assert g_test(Counter(drawn_step(source, generator) for _ in range(5000)), LAW).passed
