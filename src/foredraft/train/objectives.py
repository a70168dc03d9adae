"""What heads are trained for, named term by term."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foredraft.checks import is_number, require
from foredraft.heads.parallel import ParallelHead
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
        p = target_law(batch, self.target_rows)
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


class ParallelObjective:
    """Soft cross entropy of what a parallel head drafts, a term for each depth, against the target's own law there.

    That law knows the tokens between, which the head does not: what it learns is its average over them.

    Args:
        head: To be trained.
        target_rows: `[V_draft, H]` of the target's head, for the ids that the head drafts.
        weights: Of the terms, by depth; `None` takes `depth_weights`.

    Raises:
        InvalidInputError: There is not one weight for each depth.
    """

    def __init__(self, head: ParallelHead, target_rows: Tensor, weights: Sequence[float] | None = None) -> None:
        self.head = head.to(target_rows.device)
        self.target_rows = target_rows
        self.weights = tuple(depth_weights(head) if weights is None else weights)
        good = len(self.weights) == head.depth and all(is_number(w) and w >= 0 for w in self.weights)
        require("weights", self.weights, good, f"{head.depth} numbers >= 0, one for each depth")

    def losses(self, batch: Window) -> dict[str, Tensor]:
        """Terms by name, means over the places of their depth, and their weighted sum as `loss`.

        Depths are counted from 0; `weight_j` is that of depth j. While the head is not training also `agree_j`: the
        share of the places of depth j at which depths 0 to j all name what the target does.
        """
        p = target_law(batch, self.target_rows)
        places = torch.arange(p.shape[0] * p.shape[1], device=p.device).view(p.shape[:2])
        states = self.head.states(batch.features.to(next(self.head.parameters()).dtype))
        found: dict[str, Tensor] = {}
        total = wide(p[:0]).new_zeros(())
        right = torch.ones_like(places, dtype=torch.bool)
        for depth, weight in enumerate(self.weights):
            known = torch.isfinite(batch.log_total[:, 1 + depth :])
            rows = places[:, 1 + depth :][known]  # of the target's law, for each row of logits
            read = states[depth][:, : known.shape[1]][known]
            logits = self.head.logits_at(depth, read, self._shared)
            term = soft_cross_entropy(logits, p.flatten(0, 1), rows)[0] / max(1, len(rows))
            found[f"loss_{depth}"] = term.detach()
            found[f"weight_{depth}"] = term.new_tensor(weight)
            total = total + weight * term
            if not self.head.training:
                agrees = torch.zeros_like(known)
                agrees[known] = logits.argmax(-1) == p.flatten(0, 1)[rows].argmax(-1)
                right = agrees & right[:, : known.shape[1]]
                found[f"agree_{depth}"] = right.sum() / max(1, len(rows))
        return {"loss": total, **found}

    def _shared(self, states: Tensor) -> Tensor:
        return torch.nn.functional.linear(states, self.target_rows.to(states.dtype))


def depth_weights(head: ParallelHead) -> tuple[float, ...]:
    """What depths count: Medusa's k-th, from 1 on, 0.8^k (arXiv 2401.10774), MTP's all the same (arXiv 2404.19737)."""
    return tuple(0.8**k if head.kind == "medusa" else 1.0 for k in range(1, head.depth + 1))


@torch.no_grad()
def target_law(batch: Window, rows: Tensor) -> Tensor:
    """Probabilities `[B, n, V_draft]` of the tokens with these `rows` `[V_draft, H]` of the head, after each token.

    They sum to what these tokens have.
    """
    p = torch.nn.functional.linear(batch.states, rows.to(batch.states.dtype))
    rows_of_p, all_totals = p.flatten(0, 1), batch.log_total.flatten()
    for part, totals in zip(torch.split(rows_of_p, _ROWS), torch.split(all_totals, _ROWS), strict=True):
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
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
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
