"""Negative controls: known mistakes, each of which the proof must catch. A control that passes is a broken test."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from foredraft.acceptance.chain import acceptance, drafted_masses, remainder
from foredraft.backends.base import Backend, KVCache, Query
from foredraft.proof.enumeration import Decide
from foredraft.proof.toys import Child, Children, Siblings
from foredraft.randomness import RandomSource
from foredraft.types import Draft, Verdict


@dataclass(frozen=True)
class Control:
    """One mistake. Rules and ways of drawing are enumerated with it; a stale cache shows in the equality audit."""

    name: str
    mistake: str
    rule: str | None = None  # the rule whose place `decide` takes, or that meets the wrong children
    decide: Decide | None = None
    children: Children | None = None
    siblings: Siblings = "single"
    widths: tuple[int, ...] = (1, 1)

    @property
    def breaks_the_cache(self) -> bool:
        """Whether the mistake is made by the backend and not by a rule or a drafter."""
        return self.rule is None


def token_without_residual(draft: Draft, p: Tensor, source: RandomSource) -> Verdict:
    """`token`, but the correction is drawn from p."""
    for i, masses in enumerate(zip(*drafted_masses(draft, p), strict=True)):
        if not source.coin(acceptance(*masses)):
            return Verdict(tuple(range(i)), (*draft.tokens[:i], source.draw(p[i])), rejected=True)
    return Verdict(tuple(range(len(draft))), (*draft.tokens, source.draw(p[len(draft)])), rejected=False)


def block_without_weight(draft: Draft, p: Tensor, source: RandomSource) -> Verdict:
    """`block`, but the correction is drawn from `(p - q)+` and not from `(P_tau p - q)+`."""
    count, longest, weight = len(draft), 0, 1.0
    for i, masses in enumerate(zip(*drafted_masses(draft, p), strict=True), start=1):
        weight = acceptance(*masses, weight)
        mass = float(remainder(draft, i, p[i], weight).sum()) if i < count else 0.0
        taken = weight if i == count else mass / (mass + 1 - weight) if weight < 1 else 1.0
        if source.coin(taken):
            longest = i
    law = p[longest] if longest == count else remainder(draft, longest, p[longest])
    if not law.sum() > 0:  # p = q: the mistake has nothing to draw from
        law = p[longest]
    return Verdict(tuple(range(longest)), (*draft.tokens[:longest], source.draw(law)), rejected=longest < count)


def _warmer_than_said(law: Tensor, width: int, source: RandomSource) -> list[Child]:
    """Draws at temperature 2 and says that it drew at 1."""
    return [(source.draw(law.sqrt()), law) for _ in range(width)]


def _replacement_forgotten(law: Tensor, width: int, source: RandomSource) -> list[Child]:
    """Draws without replacement and says that it drew with it."""
    left = law.clone()
    children: list[Child] = []
    for _ in range(width):
        children.append((source.draw(left), law))
        left[children[-1][0]] = 0.0
    return children


def _looked_up(law: Tensor, width: int, source: RandomSource) -> list[Child]:
    """Takes the likeliest token, as a look-up would, and says that it was drawn."""
    return [(int(law.argmax()), law)] * width


def stale_cache(backend: Backend) -> Backend:
    """The same backend, which keeps one rejected node in its cache at every rollback."""
    stale, drafted = copy.copy(backend), {}

    def forward(queries: Sequence[Query]) -> list[Tensor]:
        drafted.update({id(query.cache): len(query.draft) for query in queries})
        return backend.forward(queries)

    def commit(cache: KVCache, path: Sequence[int]) -> None:
        rejected = [node for node in range(drafted[id(cache)]) if node not in path]
        backend.commit(cache, [*path, *rejected[:1]])

    vars(stale).update(forward=forward, commit=commit)
    return stale


CONTROLS = {
    control.name: control
    for control in (
        Control("residual", "the residual is not subtracted: corrections follow p", "token", token_without_residual),
        Control("block-weight", "P_tau is left out of the residual of block", "block", block_without_weight),
        Control("draft-temperature", "drafts are warmer than their q says", "token", children=_warmer_than_said),
        Control(
            "replacement",
            "siblings drawn without replacement are verified as drawn with it",
            "recursive",
            children=_replacement_forgotten,
            siblings="with replacement",
            widths=(2,),
        ),
        Control(
            "ssd-miss", "where nothing was prepared, a look-up counts as drawn from q", "token", children=_looked_up
        ),
        Control("stale-cache", "a rejected node stays in the KV cache"),
    )
}
