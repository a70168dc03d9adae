"""What heads are trained for, named term by term."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foredraft.heads.recurrent import RecurrentHead
from foredraft.train.features import Window
from foredraft.train.rollout import Rollout

_ROWS = 32  # of logits that are worked on together, so that they stay in a core's cache


class RecurrentObjective:
    """Soft cross entropy of what a recurrent head drafts, a term for each step, against the target's own law.

    The target's probabilities of the head's vocabulary count as they are: places where most of the mass is elsewhere
    weigh little. A step further is taken only from places whose own token the head would have drafted: what it says
    after a token that it leaves out is never asked for.

    Args:
        head: To be trained.
        embedding: `[V, H]` the target's, which is not trained.
        target_rows: `[V_draft, H]` of the target's head, for the ids that the head drafts.
        steps: How far it goes on from its own states.
        decay: Each step's term weighs this times the one before.
        regression: Weight of the distance between the head's states and the target's (EAGLE-1), smooth L1.
        likely: The head would have drafted a token of at least this probability.
    """

    def __init__(
        self,
        head: RecurrentHead,
        embedding: Tensor,
        target_rows: Tensor,
        *,
        steps: int = 4,
        decay: float = 0.8,
        regression: float = 0.0,
        likely: float = 0.05,
    ) -> None:
        self.head = head
        self.embedding = embedding
        self.target_rows = target_rows
        self.steps = steps
        self.decay = decay
        self.regression = regression
        self.likely = likely
        device = embedding.device
        head.to(device)
        self._index = torch.full((len(embedding),), -1, device=device)  # of a token in the draft vocabulary
        every = torch.arange(len(target_rows), device=device)
        self._index[head.draft_ids if head.draft_ids is not None else every] = every

    def losses(self, batch: Window) -> dict[str, Tensor]:
        """Terms by name, means over the places of their step, and their weighted sum as `loss`.

        While the head is not training also `agree_j`: the share of all places at which steps 0 to j all name what the
        target does.
        """
        p = self._target_law(batch)
        known = torch.isfinite(batch.log_total)
        embeddings = self.embedding[batch.ids]
        roll = Rollout(self.head, batch.features.to(embeddings.dtype), embeddings)
        found: dict[str, Tensor] = {}
        total = p.new_zeros(())
        everywhere = known[:, 1:].sum().clamp(min=1)
        right: Tensor | None = None
        for step in range(self.steps):
            after = roll.places + 1 + step  # the target's row that says what should have been drafted
            real = (after < p.shape[1]) & known.gather(1, after.clamp(max=p.shape[1] - 1))
            read = self.head.readout(roll.state)[real]  # [places, H]
            rows = (after + torch.arange(len(p), device=p.device)[:, None] * p.shape[1])[real]
            logits = self._logits(read)
            term, log_total = soft_cross_entropy(logits, p.flatten(0, 1), rows)
            found[f"loss_{step}"] = (term / len(rows)).detach()
            total = total + self.decay**step * term / everywhere
            if self.regression:
                wanted = batch.states.flatten(0, 1)[rows]
                distance = torch.nn.functional.smooth_l1_loss(wide(read), wide(wanted), reduction="none").mean(-1).sum()
                found[f"distance_{step}"] = (distance / len(rows)).detach()
                total = total + self.decay**step * self.regression * distance / everywhere
            if not self.head.training:
                agrees = torch.zeros_like(real)
                agrees[real] = logits.argmax(-1) == p.flatten(0, 1)[rows].argmax(-1)
                right = agrees if right is None else agrees & right
                found[f"agree_{step}"] = right.sum() / everywhere
            if step + 1 < self.steps:
                kept = self._worth(batch, roll.places + 2 + step, real, logits, log_total, right)
                if not kept.shape[1]:
                    break
                roll.go_on(kept)
                right = None if right is None else right.gather(1, kept)
        return {"loss": total, **found}

    @torch.no_grad()
    def _worth(
        self, batch: Window, after: Tensor, real: Tensor, logits: Tensor, log_total: Tensor, right: Tensor | None
    ) -> Tensor:
        """Indices `[B, S]` of places to go on from; rows with fewer than the most are filled up with others."""
        token = self._index[batch.ids.gather(1, after.clamp(max=batch.ids.shape[1] - 1))]
        chance = log_total.new_zeros(real.shape)
        picked = logits.gather(1, token[real].clamp(min=0)[:, None])[:, 0]
        chance[real] = torch.exp(wide(picked) - log_total)
        good = real & (after < batch.ids.shape[1]) & (token >= 0) & (chance >= self.likely)
        if right is not None:
            good |= right & real
        most = int(good.sum(1).max()) if good.numel() else 0
        order = torch.argsort((~good).to(torch.int8), dim=1, stable=True)
        return order[:, :most]

    def _logits(self, read: Tensor) -> Tensor:
        if self.head.lm_head is not None:
            own: Tensor = self.head.lm_head(read)
            return own
        return torch.nn.functional.linear(read, self.target_rows.to(read.dtype))

    @torch.no_grad()
    def _target_law(self, batch: Window) -> Tensor:
        """`[B, n, V_draft]` the target's probabilities after each token; they sum to what the draft vocabulary has."""
        p = torch.nn.functional.linear(batch.states, self.target_rows.to(batch.states.dtype))
        for part, totals in zip(p.flatten(0, 1).split(_ROWS), batch.log_total.flatten().split(_ROWS), strict=True):
            part.copy_(torch.exp(wide(part) - totals[:, None]))
        return p


class _SoftCrossEntropy(torch.autograd.Function):
    """`-sum p log softmax(logits)` with its gradient made in the same pass, a few rows at a time."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, p: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        gradient = torch.empty_like(logits)
        loss = torch.zeros((), dtype=wide(logits[:0]).dtype, device=logits.device)
        totals = torch.empty(len(logits), dtype=loss.dtype, device=logits.device)
        for first in range(0, len(logits), _ROWS):
            part = slice(first, first + _ROWS)
            x, wanted = wide(logits[part]), wide(p[rows[part]])
            totals[part] = total = x.logsumexp(-1)
            mass = wanted.sum(-1)
            loss += (total * mass).sum() - torch.dot(wanted.flatten(), x.flatten())
            gradient[part] = torch.exp(x - total[:, None]).mul_(mass[:, None]).sub_(wanted)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(totals)
        return loss, totals

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return gradient * slope.to(gradient.dtype), None, None


def soft_cross_entropy(logits: Tensor, p: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over i of `-sum_x p[rows[i], x] log softmax(logits[i])[x]`, and the log totals `[n]` of the logits.

    Args:
        logits: `[n, V]`.
        p: `[N, V]`; rows may sum to less than 1.
        rows: `[n]` of p.
    """
    found: tuple[Tensor, Tensor] = _SoftCrossEntropy.apply(logits, p, rows)  # type: ignore[no-untyped-call]
    return found


def wide(x: Tensor) -> Tensor:
    """In float32 at least: sums of probabilities need it."""
    return x if x.dtype is torch.float64 else x.float()


def expected_length(agreements: Sequence[float]) -> float:
    """Mean accepted length of a chain whose first j tokens are all right with these probabilities."""
    return 1.0 + sum(agreements)
