"""Heads that say the laws of several tokens at once: Medusa, and MTP with independent or cascaded heads.

All read one state of the target, what its final norm gives out at the last committed token i. The target's own head
reads token i + 1 off it, which is the root of the next draft; head k, counted from 1, says the law of token i + 1 + k
without seeing the tokens between. They differ in what they make of that one state, and in whose matrix reads it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from foredraft.checks import is_integer, require
from foredraft.errors import InvalidInputError
from foredraft.heads.block import GatedMLP, Norm
from foredraft.heads.recurrent import checked_ids

FORMS = ("independent", "cascaded")
"""Of `MTPHead`."""


class ParallelHead(nn.Module):
    """What the proposer and training know of such a head.

    Attributes:
        kind: Its name.
        feature_layers: Layers of the target that it reads (`backends.base.Features`): the final norm's output alone.
        depth: How many tokens after the root it drafts, K.
        draft_ids: `[V_draft]` the target's ids of what it can draft, ascending; `None` if it drafts all.
        lm_heads: Matrices `[V_draft, H]` of its own, one for each depth; `None` if the target's reads its states.

    Args:
        layers: Of the target.
        depth: K, at least 1.
        draft_ids: Which of the target's ids it drafts, if not all.
    """

    kind: str
    draft_ids: Tensor | None
    lm_heads: nn.ModuleList | None

    def __init__(self, layers: int, depth: int, draft_ids: Tensor | None) -> None:
        super().__init__()
        require("depth", depth, is_integer(depth) and depth >= 1, "an integer >= 1")
        self.feature_layers = (layers,)
        self.depth = depth
        ids = checked_ids(draft_ids) if draft_ids is not None else None
        self.register_buffer("draft_ids", ids, persistent=False)
        self.lm_heads = None

    @abstractmethod
    def states(self, features: Tensor) -> Tensor:
        """`[K, …, H]` what the output matrices read, of the target's features `[…, 1, H]`."""

    def logits(self, states: Tensor, shared: Callable[[Tensor], Tensor]) -> Tensor:
        """`[K, …, V_draft]` of `states` `[K, …, H]`: by its own matrices, or by `shared` `[…, H] -> […, V_draft]`."""
        if self.lm_heads is None:
            return shared(states)
        return torch.stack([self.logits_at(depth, state, shared) for depth, state in enumerate(states)])

    def logits_at(self, depth: int, states: Tensor, shared: Callable[[Tensor], Tensor]) -> Tensor:
        """The same of one depth, counted from 0: `[…, V_draft]` of `[…, H]`."""
        logits: Tensor = shared(states) if self.lm_heads is None else self.lm_heads[depth](states)
        return logits


class ResBlock(nn.Module):
    """`x + silu(W x + b)`, which begins as the identity."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[…, size]` to the same."""
        return x + nn.functional.silu(self.linear(x))


class MedusaHead(ParallelHead):
    """Medusa (Cai et al. 2024, arXiv 2401.10774): for each depth residual blocks, then a matrix.

    Args:
        hidden: The target's H.
        layers: Of the target.
        depth: Tokens after the root.
        blocks: Residual blocks of each depth; Medusa has 1.
        own_matrices: Rows V_draft of a matrix for each depth, which `begin_as` can make the target's own; `None` leaves
            reading to the target's head, for files that are a fraction of the size.
        draft_ids: Which of the target's ids it drafts, if not all; then `own_matrices` has as many rows, if any.

    Raises:
        InvalidInputError: A size is out of range, or sizes do not fit each other.
    """

    kind = "medusa"

    def __init__(
        self,
        hidden: int,
        layers: int,
        depth: int = 4,
        *,
        blocks: int = 1,
        own_matrices: int | None = None,
        draft_ids: Tensor | None = None,
    ) -> None:
        super().__init__(layers, depth, draft_ids)
        require("blocks", blocks, is_integer(blocks) and blocks >= 1, "an integer >= 1")
        self.hidden, self.blocks_of_each = hidden, blocks
        self.blocks = nn.ModuleList(nn.Sequential(*(ResBlock(hidden) for _ in range(blocks))) for _ in range(depth))
        if own_matrices is not None:
            good = draft_ids is None or len(draft_ids) == own_matrices
            require("own_matrices", own_matrices, good, "the number of draft_ids, if these are given")
            self.lm_heads = nn.ModuleList(nn.Linear(hidden, own_matrices, bias=False) for _ in range(depth))

    @torch.no_grad()
    def begin_as(self, rows: Tensor) -> None:
        """Have its own matrices begin as the target's head `[V_draft, H]`: all then say what that says of i + 1."""
        for lm_head in self.lm_heads or ():
            assert isinstance(lm_head, nn.Linear)
            lm_head.weight.copy_(rows)

    def states(self, features: Tensor) -> Tensor:
        """See `ParallelHead`."""
        trunk = features.squeeze(-2)
        return torch.stack([block(trunk) for block in self.blocks])


class TrunkBlock(nn.Module):
    """`x + MLP(RMSNorm(x))`, which begins as the identity."""

    def __init__(self, hidden: int, mlp: int, epsilon: float) -> None:
        super().__init__()
        self.norm = Norm(hidden, epsilon)
        self.mlp = GatedMLP(hidden, mlp)
        nn.init.zeros_(self.mlp.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        """`[…, hidden]` to the same."""
        out: Tensor = x + self.mlp(self.norm(x))
        return out


class MTPHead(ParallelHead):
    """Multi-token prediction (Gloeckle et al. 2024, arXiv 2404.19737) with the target as the trunk and its head shared.

    Each depth is a residual MLP, so that drafting needs no cache of its own. Independent, all of them read the target's
    state; cascaded, each reads the state of the one before and thereby builds on what that made of it.

    Args:
        hidden: The target's H.
        layers: Of the target.
        depth: Tokens after the root.
        form: `independent` or `cascaded`.
        mlp: Inner width of each MLP; `None` is 2 H.
        epsilon: Of the norms.
        draft_ids: Which of the target's ids it drafts, if not all.

    Raises:
        InvalidInputError: A size is out of range, or there is no such form.
    """

    kind = "mtp"

    def __init__(
        self,
        hidden: int,
        layers: int,
        depth: int = 4,
        *,
        form: str = "independent",
        mlp: int | None = None,
        epsilon: float = 1e-5,
        draft_ids: Tensor | None = None,
    ) -> None:
        super().__init__(layers, depth, draft_ids)
        if form not in FORMS:
            raise InvalidInputError(
                f"form is {form!r}, but must be one of {', '.join(FORMS)}; the sequential form of DeepSeek-V3 is "
                "heads.recurrent.SequentialMTPHead."
            )
        mlp = 2 * hidden if mlp is None else mlp
        require("mlp", mlp, is_integer(mlp) and mlp >= 1, "an integer >= 1")
        self.form, self.hidden, self.mlp, self.epsilon = form, hidden, mlp, epsilon
        self.blocks = nn.ModuleList(TrunkBlock(hidden, mlp, epsilon) for _ in range(depth))

    def states(self, features: Tensor) -> Tensor:
        """See `ParallelHead`."""
        trunk = features.squeeze(-2)
        found: list[Tensor] = []
        for block in self.blocks:
            found.append(block(found[-1] if found and self.form == "cascaded" else trunk))
        return torch.stack(found)
