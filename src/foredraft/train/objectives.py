"""What heads are trained for, named term by term."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.heads.recurrent import RecurrentHead
from foredraft.train.features import Window
from foredraft.train.rollout import rollout


class RecurrentObjective:
    """Soft cross entropy of what a recurrent head drafts, a term for each step, against the target's own law.

    The target's probabilities of the head's vocabulary count as they are: places where most of the mass is elsewhere
    weigh little.

    Args:
        head: To be trained.
        embedding: `[V, H]` the target's, which is not trained.
        target_rows: `[V_draft, H]` of the target's head, for the ids that the head drafts.
        steps: How far it goes on from its own states.
        decay: Each step's term weighs this times the one before.
        regression: Weight of the distance between the head's states and the target's (EAGLE-1), smooth L1.
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
    ) -> None:
        self.head = head
        self.embedding = embedding
        self.target_rows = target_rows
        self.steps = steps
        self.decay = decay
        self.regression = regression

    def losses(self, batch: Window) -> dict[str, Tensor]:
        """The terms by name, and their weighted sum as `loss`; `agree_j` is the share of steps j that name the target's."""
        p = self._target_law(batch)
        found: dict[str, Tensor] = {}
        total = p.new_zeros(())
        embeddings = self.embedding[batch.ids]
        features = batch.features.to(embeddings.dtype)
        right: Tensor | None = None
        for step, state in enumerate(rollout(self.head, features, embeddings, self.steps)):
            places = p.shape[1] - 1 - step
            wanted = p[:, 1 + step :]  # [B, places, V_draft]
            known = torch.isfinite(batch.log_total[:, 1 + step :])
            count = known.sum().clamp(min=1)
            read = self.head.readout(state[:, :places])
            logits = wide(self._logits(read))
            term = -(wanted * torch.log_softmax(logits, dim=-1)).sum() / count
            found[f"loss_{step}"] = term.detach()
            total = total + self.decay**step * term
            if self.regression:
                distance = self._distance(read, batch.states[:, 1 + step :], known)
                found[f"distance_{step}"] = distance.detach()
                total = total + self.decay**step * self.regression * distance
            with torch.no_grad():
                agrees = (logits.argmax(-1) == wanted.argmax(-1)) & known
                right = agrees if right is None else right[:, : agrees.shape[1]] & agrees
                found[f"agree_{step}"] = right.sum() / count
        return {"loss": total, **found}

    def _logits(self, read: Tensor) -> Tensor:
        if self.head.lm_head is not None:
            own: Tensor = self.head.lm_head(read)
            return own
        return torch.nn.functional.linear(read, self.target_rows.to(read.dtype))

    @torch.no_grad()
    def _target_law(self, batch: Window) -> Tensor:
        """`[B, n, V_draft]` the target's probabilities after each token; they sum to what the draft vocabulary has."""
        logits = torch.nn.functional.linear(batch.states, self.target_rows.to(batch.states.dtype))
        return torch.exp(wide(logits) - batch.log_total[..., None])

    def _distance(self, read: Tensor, wanted: Tensor, known: Tensor) -> Tensor:
        each = torch.nn.functional.smooth_l1_loss(wide(read), wide(wanted), reduction="none").mean(-1)
        return (each * known).sum() / known.sum().clamp(min=1)


def wide(x: Tensor) -> Tensor:
    """In float32 at least: sums of probabilities need it."""
    return x if x.dtype is torch.float64 else x.float()


def expected_length(agreements: Sequence[float]) -> float:
    """Mean accepted length of a chain whose first j tokens are all right with these probabilities."""
    return 1.0 + sum(agreements)
