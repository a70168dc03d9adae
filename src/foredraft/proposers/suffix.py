"""Suffix decoding: what followed the same tokens before, in this text and in earlier answers, as a tree with counts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from foredraft.backends.base import Backend
from foredraft.checks import is_integer, is_number, require
from foredraft.errors import InvalidInputError
from foredraft.proposers.base import OFFER, Drafter, Proposer, drafted
from foredraft.proposers.files import damaged, read_arrays, write_arrays
from foredraft.proposers.forks import Fork, PeekFork, Plan
from foredraft.randomness import RandomSource
from foredraft.sampling import Law
from foredraft.types import Draft

if TYPE_CHECKING:  # else where they are used: numba takes 0.3 s to import, and few need it
    from foredraft.proposers.suffix_kernels import Limits
    from foredraft.proposers.suffix_tree import SuffixTree

_LEAST_BYTES = 2**20
_ROOM = 1024  # nodes


@dataclass(frozen=True, kw_only=True)
class SuffixSettings:
    """How far a suffix drafter looks and what it drafts. The defaults are the best found on answers of a small model.

    After a match of m tokens, a continuation seen c of n times counts as `c / (n + smoothing / m)` likely, with m that
    grows along the path. The default smoothing makes that about the rate at which drafted tokens are accepted.

    Args:
        max_depth: Tokens of the longest run that is counted, at least 2; one half may match, so that one is left to
            draft. A new token costs time in proportion.
        factor: Nodes of a draft for each token that matches.
        offset: Nodes on top of that. Never more than the caller's budget.
        floor: Least path probability of a node, in [0, 1].
        smoothing: Of the request's own tree, at least 0; 0 takes plain shares, as the paper does.
        global_smoothing: Of the global tree, that of earlier answers, whose text is less alike.
        global_bytes: Most memory for the global tree, at least 1 MiB, or 0 to have none. The oldest answers go first.
        chains_only: Draft the likeliest path alone.

    Raises:
        InvalidInputError: A value is outside its range; the message names it and the range.
    """

    max_depth: int = 64
    factor: float = 8.0
    offset: float = 8.0
    floor: float = 0.02
    smoothing: float = 2.0
    global_smoothing: float = 12.0
    global_bytes: int = 64 * 2**20
    chains_only: bool = False

    def __post_init__(self) -> None:
        self._require(
            "max_depth", is_integer(self.max_depth) and 2 <= self.max_depth <= 1024, "an integer in [2, 1024]"
        )
        for name in ("factor", "offset", "smoothing", "global_smoothing"):
            value = getattr(self, name)
            self._require(name, is_number(value) and value >= 0, "a number >= 0")
        self._require("floor", is_number(self.floor) and 0 <= self.floor <= 1, "a number in [0, 1]")
        good_bytes = is_integer(self.global_bytes) and (self.global_bytes == 0 or self.global_bytes >= _LEAST_BYTES)
        self._require("global_bytes", good_bytes, f"0 or an integer >= {_LEAST_BYTES}")
        self._require("chains_only", isinstance(self.chains_only, bool), "True or False")

    def _require(self, name: str, ok: bool, allowed: str) -> None:
        require(name, getattr(self, name), ok, allowed)

    @classmethod
    def parse(cls, text: str) -> SuffixSettings:
        """Settings as they stand behind `suffix:`, `NAME=VALUE` with slashes between; none is the defaults.

        Raises:
            InvalidInputError: A name is unknown, or a value is no JSON or outside its range.
        """
        known = tuple(field.name for field in fields(cls))
        given: dict[str, Any] = {}
        for part in filter(None, text.split("/")):
            name, _, value = part.partition("=")
            if name not in known:
                raise InvalidInputError(f"Drafter 'suffix:{text}' names '{name}', but knows {', '.join(known)}.")
            try:
                given[name] = json.loads(value)
            except ValueError:
                raise InvalidInputError(
                    f"Drafter 'suffix:{text}': {name} is '{value}', but must be a number, true or false."
                ) from None
        return cls(**given)

    def __str__(self) -> str:
        """What differs from the defaults, as `parse` takes it."""
        usual = SuffixSettings()
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return "/".join(f"{name}={json.dumps(value)}" for name, value in named if value != getattr(usual, name))

    @property
    def longest_match(self) -> int:
        """Most tokens that are looked up; as many of a prompt are kept before its answer."""
        return self.max_depth // 2

    def limits(self, smoothing: float) -> Limits:
        """For proposals of as many nodes as there is room for."""
        from foredraft.proposers.suffix_kernels import Limits

        return Limits(
            _ROOM, float(self.factor), float(self.offset), float(self.floor), float(smoothing), self.chains_only
        )


class Suffix(Drafter):
    """Drafts what followed the same tokens before (SuffixDecoding, Oliaro et al. 2024, arXiv 2411.04975).

    Every request has a tree of its own prompt and output; all share `global_tree`, the finished answers, each with
    the end of its prompt. A request's answer is added when it is complete.

    Args:
        vocab_size: The target's: answers kept by `save` fit only a target with as many tokens.
        settings: How far to look and what to draft.
    """

    name = "suffix"
    usage = "suffix[:SETTINGS]"
    trees = True
    forks = True
    learns = True
    draft_tokens = 8
    when_nothing_is_accepted = (
        "the answer does not repeat anything from its prompt, from itself or from earlier answers"
    )

    def __init__(self, vocab_size: int, settings: SuffixSettings | None = None) -> None:
        self.settings = settings or SuffixSettings()
        self.trees = not self.settings.chains_only
        self.global_tree = _new_tree(self.settings.max_depth, self.settings.global_bytes)
        self._vocab_size = vocab_size
        _compile()

    @classmethod
    def check_argument(cls, argument: str) -> None:
        """See `Drafter`."""
        SuffixSettings.parse(argument)

    @classmethod
    def for_target(cls, target: Backend, argument: str = "") -> Suffix:
        """No earlier answers; the settings that the argument names, `suffix:max_depth=24/floor=0.1`."""
        return cls(target.vocab_size, SuffixSettings.parse(argument))

    def proposer(self, law: Law, source: RandomSource) -> SuffixProposer:
        """A proposer that has read nothing yet; it needs neither the law nor randomness."""
        return SuffixProposer(self)

    def save(self, folder: Path) -> None:
        """Keep the earlier answers in `suffix.safetensors`."""
        sequences = self.global_tree.sequences
        lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int32)
        tokens = np.concatenate([np.zeros(0, dtype=np.int32), *sequences])
        arrays = {"lengths": torch.from_numpy(lengths), "tokens": torch.from_numpy(tokens)}
        write_arrays(folder / "suffix.safetensors", arrays, self._about())

    def load(self, folder: Path) -> None:
        """Read kept answers, as newer than those that are here already."""
        file = folder / "suffix.safetensors"
        arrays = read_arrays(file, self._about())
        if arrays is None:
            return
        lengths, tokens = (arrays.get(name, torch.zeros(0)) for name in ("lengths", "tokens"))
        kinds = {lengths.dtype, tokens.dtype} == {torch.int32} and lengths.dim() == tokens.dim() == 1
        if not kinds or (lengths < 0).any() or lengths.sum() != len(tokens) or not self._all_known(tokens):
            raise damaged(file)
        for start, stop in pairwise(accumulate(lengths.tolist(), initial=0)):
            self.global_tree.add(tokens[start:stop].tolist())

    def _all_known(self, tokens: torch.Tensor) -> bool:
        return bool(((tokens >= 0) & (tokens < self._vocab_size)).all())

    def _about(self) -> dict[str, str]:
        return {"foredraft": "suffix", "version": "1", "vocabulary": str(self._vocab_size)}


class SuffixProposer(Proposer):
    """One sequence's drafts, out of its own tree or the global one, whichever promises more."""

    def __init__(self, drafter: Suffix) -> None:
        self._settings = drafter.settings
        self._global = drafter.global_tree
        self._own = _new_tree(self._settings.max_depth)
        self._own_limits = self._settings.limits(self._settings.smoothing)
        self._global_limits = self._settings.limits(self._settings.global_smoothing)
        self._read = 0
        self._prompt_length: int | None = None

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The candidate tree with the highest sum of path probabilities, which are its scores."""
        nodes = np.zeros(budget, dtype=OFFER)
        return drafted(nodes[: self.offer(tokens, budget, nodes, np.zeros(1 + budget))])

    def offer(
        self, tokens: Sequence[int], budget: int, nodes: NDArray[Any], costs: NDArray[np.float64], least: float = 0.0
    ) -> int:
        """The candidate tree that is worth most at these costs."""
        if self._prompt_length is None:
            self._prompt_length = len(tokens)
        new, longest = tokens[self._read :], self._settings.longest_match
        self._read = len(tokens)
        if budget < 1:
            self._own.extend(new)
            return 0
        nodes = nodes[:budget]
        count, worth = self._own.follow(new, longest, self._own_limits, nodes, costs)
        if self._global.nodes > 1:  # its root is always there
            better, _ = self._global.propose(self._own.tail(longest), self._global_limits, nodes, costs, worth)
            count = better or count
        return count

    def peek(self, tokens: Sequence[int], budget: int) -> Draft:
        """The same for a text that goes on from its own, whose continuation is looked up and not counted."""
        nodes, costs = np.zeros(budget, dtype=OFFER), np.zeros(1 + budget)
        tail = np.array(tokens[-self._settings.longest_match :], dtype=np.int32)
        count, worth = self._own.propose(tail, self._own_limits, nodes, costs)
        if self._global.nodes > 1:
            better, _ = self._global.propose(tail, self._global_limits, nodes, costs, worth)
            count = better or count
        return drafted(nodes[:count])

    def fork(self, tokens: Sequence[int], draft: Draft, plan: Plan) -> Fork:
        """See `Proposer`."""
        return PeekFork(self, tokens, draft, plan)

    def finish(self, tokens: Sequence[int]) -> None:
        """Add the answer to the earlier ones, with as much of its prompt as a match may need."""
        if self._settings.global_bytes and self._prompt_length is not None and len(tokens) > self._prompt_length:
            self._global.add(tokens[max(0, self._prompt_length - self._settings.longest_match) :])


def _new_tree(max_depth: int, most_bytes: int | None = None) -> SuffixTree:
    from foredraft.proposers.suffix_tree import SuffixTree

    return SuffixTree(max_depth, most_bytes)


def _compile() -> None:
    """Run every kernel once, so that compiling them falls into loading and not into the first request."""
    tree = _new_tree(2)
    tree.add([1, 1])
    limits, nodes, costs = SuffixSettings().limits(1.0), np.zeros(1, dtype=OFFER), np.zeros(2)
    tree.propose(np.array([1], dtype=np.int32), limits, nodes, costs)
    tree.follow([1], 1, limits, nodes, costs)
    tree.close()
    tree.forget_oldest()
