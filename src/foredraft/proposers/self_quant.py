"""A copy of the target in 8 bits, made at load, drafts a chain."""

from __future__ import annotations

from collections.abc import Collection

from foredraft.backends.base import Backend
from foredraft.proposers.draft_model import DraftModel


class SelfQuantized(DraftModel):
    """Drafts with the target's own weights in 8 bits; embeddings, norms and biases are shared with it.

    A draft step reads a quarter of the target's bytes in float32, half of them in bfloat16, and agrees with it nearly
    always; it has a KV cache of its own.

    Args:
        target: The backend of the target, on a CPU.
        stop_tokens: Drafting ends after one of these.

    Raises:
        UnsupportedError: The backend cannot make such a copy, or not of this model; the message says why.
    """

    name = usage = "self_quant"
    draft_tokens = 4
    when_nothing_is_accepted = "a few weights are so large that 8 bits do not hold the others"

    def __init__(self, target: Backend, stop_tokens: Collection[int] = ()) -> None:
        super().__init__(target.quantized(), target.vocab_size, stop_tokens)

    @classmethod
    def for_target(cls, target: Backend, argument: str = "") -> SelfQuantized:
        """A copy of this target."""
        return cls(target, target.stop_tokens)
