"""The shape of a draft: what each node has above and below it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from foredraft.types import Draft


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """For each node its tokens from the first below the root down to itself."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        above = found[parent] if parent >= 0 else ()
        found.append((*above, token))
    return found


def children(draft: Draft) -> list[list[int]]:
    """`[N+1]` the child nodes of the root (entry 0) and of each node i (entry i + 1), in the order they were drawn."""
    below: list[list[int]] = [[] for _ in range(len(draft) + 1)]
    for node, parent in enumerate(draft.parents):
        below[parent + 1].append(node)
    return below


def depths(draft: Draft) -> list[int]:
    """Of the root (entry 0, depth 0) and of each node i (entry i + 1): its distance from the root."""
    found = [0]
    for parent in draft.parents:
        found.append(found[parent + 1] + 1)
    return found


def is_straight(path: Sequence[int]) -> bool:
    """Whether an accepted path is the first nodes one after the other: then nothing lies between what is kept."""
    return list(path) == list(range(len(path)))


def ancestor_mask(draft: Draft) -> Tensor:
    """`[N+1, N+1]` bool: row r sees column c if c is r itself or above it. Row 0 is the root, row i + 1 node i."""
    seen = torch.eye(len(draft) + 1, dtype=torch.bool)
    for node, parent in enumerate(draft.parents):
        seen[node + 1] |= seen[parent + 1]
    return seen


def reachable(draft: Draft, possible: Callable[[int, int], bool]) -> Iterator[int]:
    """Rows of the root and of the nodes that a rule can get to, one by one.

    `possible` says whether a row's law has a token; it is asked of rows that were yielded before. Below an impossible
    token no rule gets, and a grammar may have nothing to say there.
    """
    reached = [True]
    yield 0
    for node, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True)):
        reached.append(reached[parent + 1] and possible(parent + 1, token))
        if reached[-1]:
            yield node + 1


def first(draft: Draft, count: int) -> Draft:
    """The draft of so many of its first nodes."""
    if count == len(draft):
        return draft
    return Draft(
        draft.tokens[:count], draft.parents[:count], draft.q[:count], draft.scores[:count], draft.proposers[:count]
    )
