"""From foredraft's drafters to vLLM's methods: what is the same, what stands in for what vLLM does not have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from foredraft.proposers.auto import DEFAULT_PARTS
from foredraft.proposers.ngram import NGram
from foredraft.proposers.suffix import SuffixSettings

LEAST_PROBABILITY = 0.1
"""Of a token that a suffix tree drafts, where chains are verified: vLLM's default."""
_CACHED_REQUESTS = 10_000
_PLAIN = "none"


@dataclass(frozen=True)
class Translation:
    """What a drafter becomes."""

    drafter: str
    """As it was asked for, or measured."""
    method: str
    """vLLM's; empty is plain decoding."""
    settings: dict[str, Any]
    """Keys of the method but for the number of tokens."""
    model: str | None = None
    """Of a draft model or head; of a head that comes with the target, nothing."""
    stands_in: str | None = None
    """Why it is not the same, if it is another method."""
    notes: tuple[str, ...] = ()
    """What is not carried over."""

    def config(self, draft_tokens: int, *, model: str | None = None) -> dict[str, Any] | None:
        """The object for `--speculative-config`; `None` for plain decoding.

        Args:
            draft_tokens: `num_speculative_tokens`.
            model: Where the draft model or head lies for vLLM, if that is elsewhere.
        """
        if not self.method:
            return None
        reference = model or self.model
        named = {"model": reference} if reference is not None else {}
        return {"method": self.method, **named, "num_speculative_tokens": draft_tokens, **self.settings}


_CHAINS = "vLLM drafts chains: of a tree only its likeliest path is verified, so less is accepted at equal tokens"
_DRAWN = "Drafts are drawn from the draft's own law and verified with it, as here"


def translate(drafter: str) -> Translation:
    """What vLLM can do in a drafter's place.

    Args:
        drafter: As `--drafter` takes it, and as a benchmark names it.

    Raises:
        InvalidInputError: There is no such drafter, or nothing that could stand in for it.
    """
    from foredraft.loading import parse_drafter

    if parse_drafter(drafter) is None:
        return Translation(_PLAIN, "", {})
    alone = one_of("vLLM", drafter, _RANKS)
    if alone is not None:
        found = translate(alone.drafter)
        return replace(found, drafter=drafter, stands_in=found.stands_in or alone.why)
    name, _, argument = drafter.partition(":")
    return _TABLE[name](drafter, argument)


class Alone(NamedTuple):
    """The drafter that another engine gets of a compound one, and why."""

    drafter: str
    why: str


def one_of(engine: str, drafter: str, ranks: Sequence[str]) -> Alone | None:
    """What an engine gets of a drafter that joins others or drafts ahead; `None` of any other drafter.

    Args:
        engine: Its name, for the reason.
        drafter: As `--drafter` takes it.
        ranks: Names of drafters, of which the first is taken; those that are not among them come last.
    """
    from foredraft.loading import AHEAD

    name, _, argument = drafter.partition(":")
    if name in AHEAD:
        why = f"{engine} drafts and verifies in turn: of {drafter} it gets {argument}, which then costs its time"
        return Alone(argument, why)
    if name not in ("hybrid", "auto"):
        return None
    places = {each: place for place, each in enumerate(ranks)}
    parts = argument.split("+") if argument else [part.name for part in DEFAULT_PARTS]
    best = min(parts, key=lambda part: places.get(part.partition(":")[0], len(places)))
    return Alone(best, f"{engine} joins no drafters: of {' and '.join(parts)} it gets {best} alone")


def _ngram(drafter: str, argument: str) -> Translation:
    own = NGram.parse(argument)
    settings = {"prompt_lookup_min": own.shortest, "prompt_lookup_max": own.longest}
    return Translation(
        drafter,
        "ngram",
        settings,
        notes=(
            "vLLM copies what followed the earliest of the longest matches, foredraft what followed the newest: "
            "acceptance may differ a little",
        ),
    )


def _suffix(drafter: str, argument: str) -> Translation:
    own = SuffixSettings.parse(argument)
    settings = {
        "suffix_decoding_max_tree_depth": own.max_depth,
        "suffix_decoding_max_cached_requests": _CACHED_REQUESTS if own.global_bytes else 0,
        "suffix_decoding_max_spec_factor": float(own.factor),
        "suffix_decoding_min_token_prob": max(own.floor, LEAST_PROBABILITY),
    }
    notes = (
        _CHAINS,
        "Smoothing of the counts and the offset of the draft's length have no keys there",
        (
            f"vLLM bounds earlier answers by their number ({settings['suffix_decoding_max_cached_requests']}), "
            "foredraft by bytes"
        ),
        "vLLM needs the package arctic-inference for it: pip install arctic-inference==0.1.1",
    )
    return Translation(drafter, "suffix", settings, notes=notes)


def _draft_model(drafter: str, argument: str) -> Translation:
    return Translation(
        drafter,
        "draft_model",
        {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"},
        argument,
        notes=(
            _DRAWN,
            (
                "vLLM verifies blocks on its model runner V2 only: where it takes V1, as on a CPU, 'standard' draws "
                "better drafts"
            ),
            "The draft model needs the target's vocabulary, or use_heterogeneous_vocab",
        ),
    )


def _head(method: str) -> Callable[[str, str], Translation]:
    def make(drafter: str, argument: str) -> Translation:
        notes = (
            _CHAINS,
            "Where more is accepted matters more than memory, draft_sample_method 'probabilistic' draws the drafts",
        )
        return Translation(drafter, method, {}, argument or None, notes=notes)

    return make


def _in_place(other: str, why: str) -> Callable[[str, str], Translation]:
    """Another drafter's translation, with the reason."""

    def make(drafter: str, argument: str) -> Translation:
        return replace(translate(other), drafter=drafter, stands_in=why)

    return make


_RANKS = ("eagle3", "eagle", "mtp", "draft", "suffix", "ngram", "lookahead", "recycling")
"""Networks of their own before what needs none."""
_NO_SELF = "vLLM does not draft with a part of the target: what needs no model stands in, or a trained head would"
_TABLE: dict[str, Callable[[str, str], Translation]] = {
    "ngram": _ngram,
    "suffix": _suffix,
    "draft": _draft_model,
    "eagle": _head("eagle"),
    "eagle3": _head("eagle3"),
    "mtp": _head("mtp"),
    "recycling": _in_place("suffix", "vLLM has no token recycling: suffix decoding learns from earlier text as well"),
    "lookahead": _in_place(
        "ngram", "vLLM has no lookahead decoding: prompt lookup copies what its n-grams would find again"
    ),
    "early_exit": _in_place("suffix", _NO_SELF),
    "layer_skip": _in_place("suffix", _NO_SELF),
    "self_quant": _in_place("suffix", _NO_SELF),
    "medusa": _in_place(
        "suffix",
        "vLLM has no Medusa heads from 0.33 on, and verified chains of their likeliest tokens before, where foredraft "
        "verifies trees; an EAGLE-3 head (foredraft train eagle3) would do better than either",
    ),
}
