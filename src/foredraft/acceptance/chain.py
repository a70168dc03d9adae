"""Acceptance rules for a drafted chain. Pure functions: a draft, the target's rows, a random source, a verdict."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.errors import InvalidInputError
from foredraft.randomness import RandomSource
from foredraft.types import Draft, Verdict


def token(draft: Draft, p: Tensor, source: RandomSource) -> Verdict:
    """Token-by-token rejection sampling (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, 2302.01318).

    Accept `x_i` with probability `min(1, p_i(x_i) / q_i(x_i))`. The first rejection draws the correction from the
    residual `(p_i - q_i)+`, normalised; if all are accepted the bonus token is drawn from the last row.

    Args:
        draft: A chain of K tokens, each a point mass or drawn from its own q.
        p: `[K+1, V]` target distributions, row K after the whole chain.
        source: Coins and draws.

    Raises:
        InvalidInputError: A rejection left no residual mass: the rows were not distributions.
    """
    p_drafted, q_drafted = drafted_masses(draft, p)
    for i, (p_x, q_x) in enumerate(zip(p_drafted, q_drafted, strict=True)):
        if source.coin(acceptance(p_x, q_x)):
            continue
        correction = source.draw(residual(draft, i, p[i]))
        return Verdict(tuple(range(i)), (*draft.tokens[:i], correction), rejected=True)
    bonus = source.draw(p[len(draft)])
    return Verdict(tuple(range(len(draft))), (*draft.tokens, bonus), rejected=False)


def typical(draft: Draft, p: Tensor, source: RandomSource, epsilon: float = 0.09, delta: float = 0.3) -> Verdict:
    """Typical acceptance (Cai et al. 2024, Medusa, arXiv 2401.10774). **Lossy**: the output does not follow p.

    Accept while `p_i(x_i) >= min(epsilon, delta exp(-H(p_i)))`, whatever the token was drawn from; then draw from p.
    """
    entropy = torch.special.entr(p[: len(draft)]).sum(-1)
    thresholds = (delta * torch.exp(-entropy)).clamp(max=epsilon).tolist()
    p_drafted, _ = drafted_masses(draft, p)
    accepted = 0
    while accepted < len(draft) and p_drafted[accepted] >= thresholds[accepted]:
        accepted += 1
    last = source.draw(p[accepted])
    return Verdict(tuple(range(accepted)), (*draft.tokens[:accepted], last), rejected=accepted < len(draft))


def acceptance(p_x: float, q_x: float, weight: float = 1.0) -> float:
    """min(1, weight p/q) with its limits: what q could not draw is accepted if p has it, and rejected if not."""
    if q_x > 0:
        return min(1.0, weight * p_x / q_x)
    return 1.0 if weight * p_x > 0 else 0.0


def drafted_masses(draft: Draft, p: Tensor) -> tuple[list[float], list[float]]:
    """p(x) at its parent's row and q(x) of every drafted token, fetched from the device in one go each."""
    if not len(draft):
        return [], []
    rows = torch.tensor(draft.parents, device=p.device) + 1
    p_drafted = p[rows, torch.tensor(draft.tokens, device=p.device)].tolist()
    one = p.new_ones(())
    masses = [one if q is None else q[x] for q, x in zip(draft.q, draft.tokens, strict=True)]
    return p_drafted, torch.stack(masses).tolist()


def remainder(draft: Draft, node: int, p: Tensor, weight: float = 1.0) -> Tensor:
    """`(weight p - q)+`, `[V]`, for the q that `node` was drawn from; not normalised."""
    q = draft.q[node]
    if q is not None:
        return (weight * p - q).clamp(min=0.0)
    left = weight * p
    left[draft.tokens[node]] = 0.0  # weight p(x) <= 1
    return left


def residual(draft: Draft, node: int, p: Tensor, weight: float = 1.0) -> Tensor:
    """The `remainder` that a correction is drawn from after `node` was rejected.

    Raises:
        InvalidInputError: It has no mass.
    """
    left = remainder(draft, node, p, weight)
    if not left.sum() > 0:
        raise InvalidInputError(
            f"The residual (p - q)+ has no mass after drafted token {draft.tokens[node]} (number {node}) was rejected: "
            "p and q must each sum to 1 there."
        )
    return left
