"""The ways of drafting, by name. A new one is a file here and a row in `DRAFTERS`; `hybrid` joins several of them.

`auto` joins them as well, and decides which of them pay.
"""

from __future__ import annotations

from foredraft.proposers.auto import Auto
from foredraft.proposers.base import Drafter
from foredraft.proposers.draft_model import DraftModel
from foredraft.proposers.early_exit import EarlyExit
from foredraft.proposers.layer_skip import LayerSkip
from foredraft.proposers.lookahead import Lookahead
from foredraft.proposers.ngram import NGram
from foredraft.proposers.recycling import Recycling
from foredraft.proposers.self_quant import SelfQuantized
from foredraft.proposers.suffix import Suffix
from foredraft.proposers.trained import MTP, Eagle, Eagle3, Medusa

DRAFTERS: dict[str, type[Drafter]] = {
    "ngram": NGram,
    "suffix": Suffix,
    "recycling": Recycling,
    "lookahead": Lookahead,
    "draft": DraftModel,
    "early_exit": EarlyExit,
    "layer_skip": LayerSkip,
    "self_quant": SelfQuantized,
    "eagle3": Eagle3,
    "eagle": Eagle,
    "mtp": MTP,
    "medusa": Medusa,
    "auto": Auto,
}
