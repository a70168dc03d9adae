"""What a model's or head's own files say of it, as far as other engines ask: only `config.json` is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "n_predict")


@dataclass(frozen=True)
class Facts:
    """`None` is: the files do not say, or are not here."""

    reference: str
    hidden: int | None = None
    """Size of the states; of a head, of those that it reads."""
    vocabulary: int | None = None
    kind: str | None = None
    """Of a head in the `speculators` format: its method."""
    steps: int | None = None
    """MTP layers."""


def facts_of(reference: str) -> Facts | None:
    """Of a folder; `None` where there is none, as with a hub id: nothing is fetched for it."""
    file = Path(reference).expanduser() / "config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):
        return None
    return _of_config(reference, found) if isinstance(found, dict) else None


def draft_facts_of(config: Mapping[str, Any]) -> Facts | None:
    """Of the draft model or head that a speculative config names; `None` where it names none, or it is not here."""
    model = config.get("model")
    return facts_of(model) if isinstance(model, str) else None


def _of_config(reference: str, config: Mapping[str, Any]) -> Facts:
    layer = config.get("transformer_layer_config") or config.get("text_config") or config
    hidden = _count(config.get("target_hidden_size")) or _count(layer.get("hidden_size"))
    kind = config.get("speculators_model_type")
    return Facts(
        reference,
        hidden=hidden,
        vocabulary=_count(layer.get("vocab_size")),
        kind=kind if isinstance(kind, str) else None,
        steps=next((count for name in _MTP_LAYERS if (count := _count(layer.get(name)))), None),
    )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
