"""The way in: the JSON that people have for vLLM, as a drafter of foredraft with its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from foredraft.engine import MOST_DRAFT_TOKENS
from foredraft.errors import InvalidInputError, UnsupportedError
from foredraft.handover.check import check_config, method_of
from foredraft.handover.keys import DRAFTING, REMOVED, RULES, VERSIONS
from foredraft.handover.reading import read_config
from foredraft.proposers.ngram import MOST
from foredraft.proposers.suffix import SuffixSettings

_NGRAM_LENGTH = 5  # of a match where neither bound is given, as in vLLM
_SUFFIX = {"depth": 24, "factor": 1.0, "floor": 0.1}  # vLLM's defaults
_COMMON = frozenset(("method", "model", "num_speculative_tokens", "rejection_sample_method", "draft_sample_method"))
_NO_EFFECT = {
    "draft_tensor_parallel_size": (1,),
    "enforce_eager": (True, False),
    "use_heterogeneous_vocab": (True, False),
}
"""Values that ask for what foredraft does anyway: drafts on one device, no compiled graphs, other vocabularies."""
_WHY = {
    "num_speculative_tokens_per_batch_size": "drafter 'auto' decides by the measured cost, whatever the batch",
    "draft_tensor_parallel_size": "a draft model runs on one device here",
    "parallel_drafting": "no drafter here is trained for it",
    "quantization": "a draft model runs as its files are; --weights chooses otherwise",
    "max_model_len": "a draft model has its own context",
    "revision": "give the folder of that revision",
    "code_revision": "no code of a hub is run here",
}


@dataclass(frozen=True)
class Incoming:
    """What the JSON asks for, by foredraft's names."""

    drafter: str
    draft_tokens: int | None
    rule: str | None
    """Of temperatures above 0; `None` is what fits. With a head, `token` and `block` draft chains, as vLLM does."""


def incoming(text: str) -> Incoming:
    """Read `--speculative-config`, JSON or the name of its file.

    Raises:
        InvalidInputError: It is wrong in vLLM too, or a value is out of foredraft's range.
        UnsupportedError: A key has no counterpart here; the message names it.
    """
    config = {name: value for name, value in read_config(text).items() if value is not None}
    method = method_of(config)
    check_config(config, version=VERSIONS[0] if method in REMOVED else VERSIONS[-1])
    drafter, known = _METHODS[method](config)
    for name, value in config.items():
        if name in _COMMON or name in known or value in _NO_EFFECT.get(name, ()) or value is False:
            continue
        why = f": {_WHY[name]}" if name in _WHY else ""
        raise UnsupportedError(f"The speculative config's '{name}' has no counterpart in foredraft{why}. Leave it out.")
    tokens = config.get("num_speculative_tokens")
    if tokens is not None and tokens > MOST_DRAFT_TOKENS:
        raise InvalidInputError(
            f"The speculative config's num_speculative_tokens is {tokens}, but foredraft drafts {MOST_DRAFT_TOKENS} "
            "at most."
        )
    return Incoming(drafter, tokens, _rule(config, method))


def _rule(config: Mapping[str, Any], method: str) -> str | None:
    """The acceptance rule; a draft of vLLM's is a chain, which heads draft under these rules."""
    asked = config.get("rejection_sample_method")
    if config.get("draft_sample_method") == "greedy" and method == "draft_model":
        raise UnsupportedError(
            "The speculative config's draft_sample_method 'greedy' has no counterpart in foredraft: draft models draw "
            "from their "
            "own law ('probabilistic'), which is accepted more often. Leave it out; at temperature 0 they are the same."
        )
    if asked is None:
        return "token" if method in DRAFTING else None
    return RULES[asked]


def _ngram(config: Mapping[str, Any]) -> tuple[str, frozenset[str]]:
    least, most = config.get("prompt_lookup_min"), config.get("prompt_lookup_max")
    least = least or most or _NGRAM_LENGTH
    most = most or least
    if most > MOST:
        raise InvalidInputError(
            f"The speculative config's prompt_lookup_max is {most}, but foredraft looks up {MOST} at most."
        )
    return f"ngram:{least}-{most}", frozenset(("prompt_lookup_min", "prompt_lookup_max"))


def _suffix(config: Mapping[str, Any]) -> tuple[str, frozenset[str]]:
    """vLLM's trees of counts, without foredraft's smoothing and offset, and as chains."""
    name = "suffix_decoding_"
    cached = config.get(f"{name}max_cached_requests")
    if cached:
        raise UnsupportedError(
            f"The speculative config's '{name}max_cached_requests' has no counterpart in foredraft, which bounds "
            "earlier answers by bytes: leave it out, or set it to 0 for none."
        )
    settings = SuffixSettings(
        max_depth=config.get(f"{name}max_tree_depth", _SUFFIX["depth"]),
        factor=float(config.get(f"{name}max_spec_factor", _SUFFIX["factor"])),
        floor=float(config.get(f"{name}min_token_prob", _SUFFIX["floor"])),
        offset=0.0,
        smoothing=0.0,
        global_smoothing=0.0,
        chains_only=True,
        **({"global_bytes": 0} if cached == 0 else {}),
    )
    known = ("max_tree_depth", "max_spec_factor", "min_token_prob", "max_cached_requests")
    return f"suffix:{settings}", frozenset(f"{name}{each}" for each in known)


def _drafting(name: str) -> Callable[[Mapping[str, Any]], tuple[str, frozenset[str]]]:
    """A draft model or head; one without a reference is the target's own."""

    def make(config: Mapping[str, Any]) -> tuple[str, frozenset[str]]:
        model = config.get("model")
        return (f"{name}:{model}" if model else name), frozenset()

    return make


_METHODS: dict[str, Callable[[Mapping[str, Any]], tuple[str, frozenset[str]]]] = {
    "ngram": _ngram,
    "ngram_gpu": _ngram,
    "suffix": _suffix,
    "draft_model": _drafting("draft"),
    "eagle": _drafting("eagle"),
    "eagle3": _drafting("eagle3"),
    "mtp": _drafting("mtp"),
    "medusa": _drafting("medusa"),
}
