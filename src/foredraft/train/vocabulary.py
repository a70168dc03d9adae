"""Which tokens a head with a reduced vocabulary should be able to draft."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.checks import is_integer, require

PRIOR, _SHIFT = 0.1, 20
"""Weight of what the tokenizer's own training says, beside 1 for the counts; and the shift of its Zipf law."""


def choose_draft_ids(counts: Tensor, size: int) -> Tensor:
    """The likeliest tokens of the target's text in general, `[size]` ids in ascending order.

    Training text of a few hundred thousand tokens shows what is frequent in it, but not what else is frequent. The
    tokenizer knows: byte-pair merges are numbered in the order of their frequency in the wide text that it was trained
    on. So a token's probability is taken as its share of the counts, and a tenth of a Zipf law over the ids.

    Args:
        counts: `[V]` how often each token occurs in the training text.
        size: How many to choose; of all or more than there are, all.

    Raises:
        InvalidInputError: `size` is no integer >= 1.
    """
    require("draft_vocab", size, is_integer(size) and size >= 1, "an integer >= 1")
    share = counts.double() / counts.sum().clamp(min=1)
    zipf = 1 / (torch.arange(len(counts), dtype=torch.float64) + _SHIFT)
    likely = share + PRIOR * zipf / zipf.sum()
    return likely.topk(min(size, len(counts))).indices.sort().values


def coverage(counts: Tensor, ids: Tensor) -> float:
    """Share of a text, given as counts `[V]`, that is of these tokens."""
    return float(counts[ids].sum() / counts.sum().clamp(min=1))
