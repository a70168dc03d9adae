"""One speculative decoding step on plain tensors: the whole idea in a function that can be read and called alone."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import TypedDict

import torch
from torch import Tensor

from foredraft.acceptance.chain import token
from foredraft.errors import InvalidInputError
from foredraft.randomness import TorchSource
from foredraft.types import Draft

_SUM_TOLERANCE = 1e-5


class StepResult(TypedDict):
    """What `speculative_decode_step` returns."""

    tokens: list[int]
    accepted_count: int
    rejected: bool
    target_positions_checked: int


def speculative_decode_step(
    draft_probs: Tensor,
    target_probs: Tensor,
    draft_tokens: Sequence[int] | Tensor,
    generator: torch.Generator | None = None,
) -> StepResult:
    """Verify K drafted tokens by rejection sampling, so that the output follows the target's law exactly.

    Each drafted token x is accepted with probability `min(1, p(x) / q(x))`. The first rejection is replaced by a
    correction drawn from the normalised residual `(p - q)+`, which ends the step. If all K are accepted, one bonus
    token is drawn from the target's last row. (Leviathan et al. 2023, arXiv 2211.17192.)

    Args:
        draft_probs: `[K, V]`, row i the distribution that token i was drawn from.
        target_probs: `[K+1, V]`, row i the target's distribution at position i; row K is the bonus position.
        draft_tokens: K integer ids, a sequence or a 1-D integer tensor.
        generator: Source of all randomness; `None` takes torch's global one.

    Returns:
        `tokens`: the accepted tokens and then the correction or bonus. `accepted_count`: how many were accepted.
        `rejected`: whether one was rejected. `target_positions_checked`: i + 1 when position i rejected, else K.

    Raises:
        ValueError: Inputs are not distributions of matching shapes, ids are not integers within the vocabulary, or a
            rejection leaves no residual mass.
    """
    _check_distributions("draft_probs", draft_probs)
    _check_distributions("target_probs", target_probs)
    tokens = _integer_ids(draft_tokens)
    k, vocabulary = draft_probs.shape
    if target_probs.shape != (k + 1, vocabulary):
        raise InvalidInputError(
            f"target_probs has shape {list(target_probs.shape)}, but draft_probs {list(draft_probs.shape)} needs "
            f"[K+1, V] = [{k + 1}, {vocabulary}]."
        )
    if len(tokens) != k:
        raise InvalidInputError(f"draft_tokens has {len(tokens)} ids, but draft_probs has K = {k} rows.")
    for i, x in enumerate(tokens):
        if not 0 <= x < vocabulary:
            raise InvalidInputError(f"draft_tokens[{i}] is {x}, but ids must lie in [0, {vocabulary - 1}].")

    p = target_probs.double()
    draft = Draft.chain(tokens, draft_probs.to(device=p.device, dtype=torch.float64))
    verdict = token(draft, p, TorchSource(generator))
    accepted = len(verdict.path)
    return {
        "tokens": list(verdict.tokens),
        "accepted_count": accepted,
        "rejected": verdict.rejected,
        "target_positions_checked": accepted + 1 if verdict.rejected else k,
    }


def _check_distributions(name: str, rows: Tensor) -> None:
    if not isinstance(rows, Tensor) or rows.dim() != 2:
        shape = f"shape {list(rows.shape)}" if isinstance(rows, Tensor) else f"type {type(rows).__name__}"
        raise InvalidInputError(f"{name} has {shape}, but must be a 2-D tensor of probabilities, one row a position.")
    if not rows.is_floating_point():
        raise InvalidInputError(f"{name} has dtype {rows.dtype}, but probabilities must be floating point.")
    if rows.shape[1] == 0:
        raise InvalidInputError(f"{name} has shape {list(rows.shape)}, but the vocabulary V must not be empty.")
    if not torch.isfinite(rows).all():
        raise InvalidInputError(f"{name} contains NaN or infinity.")
    if (rows < 0).any():
        raise InvalidInputError(f"{name} contains {rows.min().item():g}, but probabilities must not be negative.")
    sums = rows.double().sum(-1)
    off = (sums - 1).abs() > _SUM_TOLERANCE
    if off.any():
        row = int(off.nonzero()[0])
        raise InvalidInputError(
            f"{name}[{row}] sums to {sums[row].item():.8g}, but every row must sum to 1 within {_SUM_TOLERANCE:g}."
        )


def _integer_ids(draft_tokens: Sequence[int] | Tensor) -> list[int]:
    if isinstance(draft_tokens, Tensor):
        kind = draft_tokens.dtype
        integral = not (kind.is_floating_point or kind.is_complex or kind == torch.bool)
        if draft_tokens.dim() != 1 or not integral:
            raise InvalidInputError(
                f"draft_tokens has shape {list(draft_tokens.shape)} and dtype {kind}, but must be a 1-D "
                "tensor of integer ids."
            )
        return [int(x) for x in draft_tokens.tolist()]
    try:
        given = list(draft_tokens)
    except TypeError:
        raise InvalidInputError(f"draft_tokens is {draft_tokens!r}, but must be a sequence of integer ids.") from None
    return [_integer_id(i, x.item() if isinstance(x, Tensor) and x.numel() == 1 else x) for i, x in enumerate(given)]


def _integer_id(i: int, x: object) -> int:
    try:
        if not isinstance(x, bool):
            return index(x)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise InvalidInputError(f"draft_tokens[{i}] is {x!r}, but must be an integer id.")
