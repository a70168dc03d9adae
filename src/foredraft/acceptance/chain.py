"""Acceptance rules for a drafted chain. Pure functions: a draft, the target's rows, a random source, a verdict."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.errors import InvalidInputError
from foredraft.sampling import RandomSource
from foredraft.types import Draft, Verdict


def greedy(draft: Draft, p: Tensor, source: RandomSource) -> Verdict:
    """The token rule where every row is one-hot: accept while the draft names the target's own token.

    `p` is `[K+1, V]`; no randomness is used.
    """
    best = p.argmax(-1).tolist()
    accepted = 0
    while accepted < len(draft) and draft.tokens[accepted] == best[accepted]:
        accepted += 1
    return Verdict(tuple(range(accepted)), tuple(best[: accepted + 1]), rejected=accepted < len(draft))


def token(draft: Draft, p: Tensor, source: RandomSource) -> Verdict:
    """Token-by-token rejection sampling (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, 2302.01318).

    Accept `x_i` with probability `min(1, p_i(x_i) / q_i(x_i))`. The first rejection draws the correction from the
    residual `(p_i - q_i)+`, normalised; if all are accepted the bonus token is drawn from the last row.

    Args:
        draft: A chain of K tokens; point mass or drawn from `draft.q`, `[K, V]`.
        p: `[K+1, V]` target distributions, row K after the whole chain.
        source: Coins and draws.

    Raises:
        InvalidInputError: A rejection left no residual mass: the rows were not distributions.
    """
    p_drafted, q_drafted = _mass_of_drafted(draft, p)
    for i, (p_x, q_x) in enumerate(zip(p_drafted, q_drafted, strict=True)):
        if source.coin(_acceptance(p_x, q_x)):
            continue
        correction = source.draw(residual(draft, p, i))
        return Verdict(tuple(range(i)), (*draft.tokens[:i], correction), rejected=True)
    bonus = source.draw(p[len(draft)])
    return Verdict(tuple(range(len(draft))), (*draft.tokens, bonus), rejected=False)


def _acceptance(p_x: float, q_x: float) -> float:
    """min(1, p/q) with its limits: a token that q could not draw is accepted if p has it, and rejected if not."""
    if p_x >= q_x:
        return 1.0 if p_x > 0 else 0.0
    return p_x / q_x


def _mass_of_drafted(draft: Draft, p: Tensor) -> tuple[list[float], list[float]]:
    """p_i(x_i) and q_i(x_i) of every drafted token, fetched from the device in one go."""
    tokens = torch.tensor(draft.tokens, dtype=torch.long, device=p.device)[:, None]
    p_drafted = p[: len(draft)].gather(1, tokens)[:, 0].tolist()
    q_drafted = [1.0] * len(draft) if draft.q is None else draft.q.gather(1, tokens)[:, 0].tolist()
    return p_drafted, q_drafted


def residual(draft: Draft, p: Tensor, i: int) -> Tensor:
    """`(p_i - q_i)+`, not normalised, `[V]`: what a correction at position i is drawn from.

    Raises:
        InvalidInputError: It has no mass.
    """
    if draft.q is None:
        left = p[i].clone()
        left[draft.tokens[i]] = 0.0
    else:
        left = (p[i] - draft.q[i]).clamp(min=0.0)
    if not left.sum() > 0:
        raise InvalidInputError(
            f"The residual (p - q)+ at position {i} has no mass after token {draft.tokens[i]} was rejected: "
            f"p[{i}] and q[{i}] must each sum to 1."
        )
    return left
