"""The ways of drafting, by name. A new one is a file here and a row in `DRAFTERS`."""

from __future__ import annotations

from foredraft.proposers.base import Drafter
from foredraft.proposers.draft_model import DraftModel
from foredraft.proposers.ngram import NGram

DRAFTERS: dict[str, type[Drafter]] = {drafter.name: drafter for drafter in (NGram, DraftModel)}
