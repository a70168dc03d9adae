"""The shape of a draft: what each node has above it."""

from __future__ import annotations

from foredraft.types import Draft


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """For each node its tokens from the first below the root down to itself."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        above = found[parent] if parent >= 0 else ()
        found.append((*above, token))
    return found
