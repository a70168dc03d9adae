"""Heads that go on from their own output: EAGLE-1, EAGLE-3, and the sequential MTP module of DeepSeek-V3.

All three are one step, `(g, token) -> g'`: a state of the target (or the head's own) and the token after it become the
state a token further, from which the law of the next token is read. They differ in what they make g of, how they join
it with the token, and whose matrix reads it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from foredraft.checks import require
from foredraft.errors import InvalidInputError
from foredraft.heads.block import Block, BlockShape, Norm


class Joined(NamedTuple):
    """What a block gets of a state and a token: what attention reads `[B, n, inputs]`, and the residual `[B, n, H]`."""

    inputs: Tensor
    residual: Tensor


class RecurrentHead(nn.Module):
    """What the loop, the proposer and training know of such a head.

    Attributes:
        kind: Its name.
        feature_layers: Layers of the target that it reads (`backends.base.Features`).
        draft_ids: `[V_draft]` the target's ids of what it can draft, ascending; `None` if it drafts all.
    """

    kind: str
    feature_layers: tuple[int, ...]
    block: Block
    draft_ids: Tensor | None
    lm_head: nn.Linear | None
    """Its own matrix `[V_draft, H]`; `None` if the target's reads its states."""
    norm: Norm
    """Before the output matrix, in heads that have one."""
    norm_output: bool = False
    """Whether the next step starts from what `norm` gives out, instead of what the block does."""

    @property
    def shape(self) -> BlockShape:
        """Sizes of its block."""
        return self.block.shape

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """The first state g `[B, n, H]` of the target's features `[B, n, layers, H]`."""

    @abstractmethod
    def join(self, state: Tensor, embedding: Tensor) -> Joined:
        """What the block gets of states g and the embeddings of the tokens after them, both `[B, n, H]`."""

    def leave(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """The state `[B, n, H]` that the next step starts from, of what the block's `finish` takes."""
        state = self.block.finish(residual, mixed)
        if self.norm_output:
            state = self.norm(state)
        return state

    @abstractmethod
    def readout(self, state: Tensor) -> Tensor:
        """What the output matrix reads of a state, `[B, n, H]`."""


@dataclass(frozen=True)
class Eagle3Norms:
    """Where public EAGLE-3 heads differ in their norms; the names are those of the `speculators` format.

    Args:
        norm_before_residual: The residual is the state after its norm.
        norm_before_fc: One norm over the features of all layers side by side.
        fc_norm: A norm for the features of each layer.
        norm_output: The next step starts from the normed state.

    Raises:
        InvalidInputError: Both norms of the features.
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        require(
            "fc_norm", self.fc_norm, not (self.fc_norm and self.norm_before_fc), "False where norm_before_fc is True"
        )


class Eagle3Head(RecurrentHead):
    """EAGLE-3 (Li et al. 2025, arXiv 2503.01840): a low, a middle and a high layer fused, its own reduced vocabulary.

    Args:
        shape: Of its block; `hidden` is the target's.
        feature_layers: Of the target, usually 2, the middle one and the third from the end.
        draft_ids: The target's ids that it can draft.
        norms: Where it has which.
    """

    kind = "eagle3"

    def __init__(
        self,
        shape: BlockShape,
        feature_layers: Sequence[int],
        draft_ids: Tensor,
        norms: Eagle3Norms = Eagle3Norms(),
    ) -> None:
        super().__init__()
        self.feature_layers = tuple(feature_layers)
        self.norms = norms
        self.norm_output = norms.norm_output
        layers = len(self.feature_layers)
        if norms.norm_before_fc:
            self.input_norm = Norm(layers * shape.hidden, shape.epsilon)
        if norms.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(shape.hidden, shape.epsilon) for _ in range(layers))
        self.fc = nn.Linear(layers * shape.hidden, shape.hidden, bias=False)
        self.block = Block(shape, inputs=2 * shape.hidden)
        self.input_layernorm = Norm(shape.hidden, shape.epsilon)
        self.hidden_norm = Norm(shape.hidden, shape.epsilon)
        self.norm = Norm(shape.hidden, shape.epsilon)
        self.lm_head: nn.Linear = nn.Linear(shape.hidden, len(draft_ids), bias=False)
        self.draft_ids: Tensor
        self.register_buffer("draft_ids", checked_ids(draft_ids), persistent=False)

    def fuse(self, features: Tensor) -> Tensor:
        """See `RecurrentHead`."""
        if self.norms.fc_norm:
            features = torch.stack([norm(f) for norm, f in zip(self.fc_norm, features.unbind(-2), strict=True)], dim=-2)
        x = features.flatten(-2)
        fused: Tensor = self.fc(self.input_norm(x) if self.norms.norm_before_fc else x)
        return fused

    def join(self, state: Tensor, embedding: Tensor) -> Joined:
        """See `RecurrentHead`."""
        normed = self.hidden_norm(state)
        inputs = torch.cat([self.input_layernorm(embedding), normed], dim=-1)
        return Joined(inputs, normed if self.norms.norm_before_residual else state)

    def readout(self, state: Tensor) -> Tensor:
        """See `RecurrentHead`."""
        return state if self.norm_output else self.norm(state)


class EagleHead(RecurrentHead):
    """EAGLE-1 (Li et al. 2024, arXiv 2401.15077): regression of the target's last states, read by the target's head.

    Args:
        shape: Of its block; `hidden` is the target's.
        layers: Of the target: it reads what its final norm gives out.
    """

    kind = "eagle"
    draft_ids = None
    lm_head = None

    def __init__(self, shape: BlockShape, layers: int) -> None:
        super().__init__()
        self.feature_layers = (layers,)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=True)
        self.block = Block(shape, inputs=shape.hidden)

    def fuse(self, features: Tensor) -> Tensor:
        """See `RecurrentHead`."""
        return features.flatten(-2)

    def join(self, state: Tensor, embedding: Tensor) -> Joined:
        """See `RecurrentHead`. The block has no norm before its attention."""
        x: Tensor = self.fc(torch.cat([embedding, state], dim=-1))
        return Joined(x, x)

    def readout(self, state: Tensor) -> Tensor:
        """See `RecurrentHead`."""
        return state


class SequentialMTPHead(RecurrentHead):
    """One multi-token prediction module of DeepSeek-V3 (arXiv 2412.19437): `h' = M[RMS(h); RMS(Emb(t))]`, then a block.

    Args:
        shape: Of its block; `hidden` is the target's.
        layers: Of the target: it reads what its final norm gives out.
        norm_output: Whether the next step starts from the normed state, as in Qwen3-Next and the `speculators` library;
            in DeepSeek-V3 it does not.
    """

    kind = "mtp"
    draft_ids = None
    lm_head = None

    def __init__(self, shape: BlockShape, layers: int, *, norm_output: bool = False) -> None:
        super().__init__()
        self.norm_output = norm_output
        self.feature_layers = (layers,)
        self.enorm = Norm(shape.hidden, shape.epsilon)
        self.hnorm = Norm(shape.hidden, shape.epsilon)
        self.eh_proj = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.input_layernorm = Norm(shape.hidden, shape.epsilon)
        self.block = Block(shape, inputs=shape.hidden)
        self.norm = Norm(shape.hidden, shape.epsilon)

    def fuse(self, features: Tensor) -> Tensor:
        """See `RecurrentHead`."""
        return features.flatten(-2)

    def join(self, state: Tensor, embedding: Tensor) -> Joined:
        """See `RecurrentHead`."""
        x: Tensor = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(state)], dim=-1))
        return Joined(self.input_layernorm(x), x)

    def readout(self, state: Tensor) -> Tensor:
        """See `RecurrentHead`."""
        return state if self.norm_output else self.norm(state)


def checked_ids(ids: Tensor) -> Tensor:
    """Draft ids as int64.

    Raises:
        InvalidInputError: They are not ascending, or there are none.
    """
    ids = ids.to(torch.int64)
    if not len(ids) or ids[0] < 0 or (len(ids) > 1 and bool((ids.diff() <= 0).any())):
        raise InvalidInputError(
            "A draft vocabulary must be a list of ids of the target, each once, in ascending order."
        )
    return ids
