"""Whether vLLM will take a speculative configuration, and mean by it what its writer does: told without vLLM."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from foredraft.checks import is_integer, require
from foredraft.errors import InvalidInputError, UnsupportedError
from foredraft.handover.facts import Facts
from foredraft.handover.keys import DRAFTING, HEADS, METHODS, NGRAM, OTHER_METHODS, REMOVED, VERSIONS, keys_of

Config = Mapping[str, Any]
_LIMIT = 2**20
_OLD_RUNNER = ("use_heterogeneous_vocab", "parallel_drafting")
"""Keys with which vLLM falls back to its model runner V1 (`vllm/config/vllm.py`)."""


@dataclass(frozen=True)
class Parallel:
    """Over how many devices a model is spread.

    Args:
        tensor: Devices that share each layer.
        pipeline: Groups of devices that have some of the layers each.
        data: Copies of all that.

    Raises:
        InvalidInputError: A number is below 1.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data"):
            value = getattr(self, name)
            good = is_integer(value) and 1 <= value <= _LIMIT
            require(f"{name}-parallel", value, good, f"an integer in [1, {_LIMIT}]")

    @property
    def devices(self) -> int:
        """Those of one copy."""
        return self.tensor * self.pipeline


def method_of(config: Config) -> str:
    """Its method; as in vLLM a model without a method is a draft model, and old names of MTP are `mtp`."""
    method, model = config.get("method"), config.get("model")
    if method in ("ngram", "[ngram]") or (method is None and model in ("ngram", "[ngram]")):
        return "ngram"
    if isinstance(method, str) and method.endswith("_mtp"):
        return "mtp"
    return "draft_model" if method is None and model is not None else str(method or "")


def check_config(
    config: Config,
    *,
    version: str = VERSIONS[-1],
    parallel: Parallel | None = None,
    target: Facts | None = None,
    draft: Facts | None = None,
) -> None:
    """Refuse what vLLM would refuse, or would take and not do.

    Args:
        config: The object behind `--speculative-config`.
        version: One of `VERSIONS`.
        parallel: How the target is spread.
        target: What is known of the target, if anything.
        draft: The same of the draft model or head.

    Raises:
        InvalidInputError: It is wrong by itself; the message says why, and what to do.
        UnsupportedError: Its draft model or head is for another target.
    """
    if version not in VERSIONS:
        raise InvalidInputError(f"vLLM {version} is not in the table of keys: it has {', '.join(VERSIONS)}.")
    _check_keys(config, version)
    method = method_of(config)
    gone = REMOVED.get(method)
    if gone is not None and VERSIONS.index(gone) <= VERSIONS.index(version):
        raise InvalidInputError(
            f"vLLM's speculative config: method '{method}' was removed in vLLM {gone}, and this is for {version}: use "
            "another, such as an EAGLE-3 head (foredraft train eagle3)."
        )
    for rule in _RULES:
        wrong = rule(config, method, parallel or Parallel())
        if wrong is not None:
            raise InvalidInputError(f"vLLM's speculative config: {wrong}")
    if target is not None and draft is not None:
        _check_pair(config, method, target, draft)


def _check_keys(config: Config, version: str) -> None:
    """Names and types."""
    keys = keys_of(version)
    for name, value in config.items():
        if name not in keys:
            newer = name in keys_of(VERSIONS[-1])
            near = difflib.get_close_matches(name, keys, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else f" Known: {', '.join(keys)}."
            why = f"is newer than vLLM {version}." if newer else f"is not known to vLLM {version}.{hint}"
            raise InvalidInputError(f"vLLM's speculative config: '{name}' {why}")
        if not keys[name].fits(value):
            raise InvalidInputError(
                f"vLLM's speculative config: {name} is {value!r}, but must be {keys[name].allowed}."
            )


# Each says what is wrong, or nothing.


def _tensor_parallel(config: Config, method: str, parallel: Parallel) -> str | None:
    if config.get("tensor_parallel_size") is None:
        return None
    return (
        "'tensor_parallel_size' is no key of it, though vLLM parses it in order to refuse it: the target's is the "
        "option --tensor-parallel-size, the draft model's is 'draft_tensor_parallel_size'."
    )


def _known_method(config: Config, method: str, parallel: Parallel) -> str | None:
    if method in METHODS:
        return None
    if not method:
        return f"it has neither 'method' nor 'model': give a method, one of {', '.join(METHODS)}."
    if method in OTHER_METHODS:
        return f"method '{method}' has no counterpart here: {OTHER_METHODS[method]}. Known: {', '.join(METHODS)}."
    near = difflib.get_close_matches(method, METHODS, n=1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return f"there is no method '{method}'.{hint} Known: {', '.join(METHODS)}."


def _model_given(config: Config, method: str, parallel: Parallel) -> str | None:
    if method in DRAFTING and method != "mtp" and not config.get("model"):
        return f"method '{method}' needs 'model': a folder or hub id of the {'head' if method in HEADS else 'model'}."
    return None


def _count_given(config: Config, method: str, parallel: Parallel) -> str | None:
    if config.get("num_speculative_tokens") is None and method not in ("suffix", "mtp"):
        return f"method '{method}' needs 'num_speculative_tokens', the tokens that each draft has at most."
    return None


def _own_keys(config: Config, method: str, parallel: Parallel) -> str | None:
    keys = keys_of(VERSIONS[-1])
    for name, value in config.items():
        wanted = keys[name].methods
        spelled = name == "model" and method in (*NGRAM, "suffix") and value in (method, f"[{method}]")
        if value is not None and wanted and method not in wanted and not spelled:
            return f"'{name}' belongs to method {' or '.join(wanted)}, and vLLM would ignore it under '{method}'."
    return None


def _ngram_bounds(config: Config, method: str, parallel: Parallel) -> str | None:
    least, most = config.get("prompt_lookup_min"), config.get("prompt_lookup_max")
    if least is not None and most is not None and least > most:
        return f"prompt_lookup_min is {least} and prompt_lookup_max {most}, but the first must not be the larger one."
    return None


def _block(config: Config, method: str, parallel: Parallel) -> str | None:
    if config.get("rejection_sample_method") != "block":
        return None
    if method in NGRAM:
        return (
            f"rejection_sample_method 'block' does nothing under '{method}', whose drafts have no probabilities: of "
            "point masses it accepts what 'standard' does. Leave it out, or use a draft model or head."
        )
    old = method in ("suffix", "medusa")
    reason = f"method '{method}'" if old else next((name for name in _OLD_RUNNER if config.get(name)), None)
    if reason is None:
        return None
    return (
        f"rejection_sample_method 'block' is ignored with {reason}, which vLLM runs on its model runner V1, and that "
        "verifies by 'standard' only: leave it out."
    )


def _block_greedy(config: Config, method: str, parallel: Parallel) -> str | None:
    if config.get("rejection_sample_method") == "block" and config.get("draft_sample_method") == "greedy":
        return (
            "rejection_sample_method 'block' with draft_sample_method 'greedy' gains nothing over 'standard': the "
            "drafts are point masses. Use 'probabilistic'."
        )
    return None


def _lossy(config: Config, method: str, parallel: Parallel) -> str | None:
    found = next(
        (name for name in config if name.startswith(("synthetic_", "fly_")) and config[name] is not None), None
    )
    rule = config.get("rejection_sample_method")
    if found is None and rule not in ("synthetic", "fly"):
        return None
    why = {
        "synthetic": "keeps drafted tokens by chance, whatever the target says: it is for measuring kernels",
        "fly": "keeps tokens that the target would not have written, where it is unsure",
    }
    name = str(rule) if rule in why else str(found).partition("_")[0]
    return f"'{name}' acceptance {why[name]}. The answers are not the target's: use 'standard' or 'block'."


def _draft_parallel(config: Config, method: str, parallel: Parallel) -> str | None:
    size = config.get("draft_tensor_parallel_size")
    if size is None or size in (1, parallel.tensor):
        return None
    allowed = "1" if parallel.tensor == 1 else f"1 or {parallel.tensor}, the target's"
    return f"draft_tensor_parallel_size is {size}, but must be {allowed}."


def _vocabularies(config: Config, method: str, parallel: Parallel) -> str | None:
    if not config.get("use_heterogeneous_vocab"):
        return None
    if config.get("draft_sample_method") == "probabilistic":
        return "use_heterogeneous_vocab takes draft_sample_method 'greedy' only."
    if config.get("use_local_argmax_reduction"):
        return (
            "use_heterogeneous_vocab and use_local_argmax_reduction exclude each other: the second skips the mapping."
        )
    return None


def _schedule(config: Config, method: str, parallel: Parallel) -> str | None:
    ranges = config.get("num_speculative_tokens_per_batch_size")
    if ranges is None:
        return None
    name, most = "num_speculative_tokens_per_batch_size", config.get("num_speculative_tokens")
    if not ranges:
        return f"{name} is empty: leave it out, or give [first, last, tokens] for batch sizes from 1 on."
    if parallel.data > 1:
        return f"{name} is switched off by vLLM under data parallelism: leave it out, or run copies as replicas."
    expected = 1
    for first, last, tokens in ranges:
        if first != expected or last < first:
            return (
                f"{name} has the range {first} to {last}, where one from {expected} on must stand: no gap, no overlap."
            )
        if tokens < 0 or (most is not None and tokens > most):
            return f"{name} has {tokens} tokens, but must have 0 to num_speculative_tokens = {most}."
        expected = last + 1
    return None


Rule = Callable[[Config, str, Parallel], "str | None"]
_RULES: tuple[Rule, ...] = (
    _tensor_parallel,
    _known_method,
    _own_keys,
    _model_given,
    _count_given,
    _ngram_bounds,
    _block,
    _block_greedy,
    _lossy,
    _draft_parallel,
    _vocabularies,
    _schedule,
)


def _check_pair(config: Config, method: str, target: Facts, draft: Facts) -> None:
    """Refuse a head that was made for another target, and a draft model of another vocabulary."""
    if method not in DRAFTING:
        return
    what = f"The {'head' if method in HEADS else 'draft model'} {draft.reference}"
    if method in HEADS:
        if draft.kind is not None and draft.kind != method:
            raise UnsupportedError(f"{what} is of kind {draft.kind}, and the method is '{method}': use its own method.")
        if draft.hidden is not None and target.hidden is not None and draft.hidden != target.hidden:
            raise UnsupportedError(
                f"{what} was made for a target with states of {draft.hidden}, and {target.reference} has "
                f"{target.hidden}: "
                "use it with its own model, or train one (foredraft train)."
            )
    differ = draft.vocabulary is not None and target.vocabulary is not None and draft.vocabulary != target.vocabulary
    if differ and not config.get("use_heterogeneous_vocab"):
        remedy = "train one for this model" if method in HEADS else "set use_heterogeneous_vocab"
        raise UnsupportedError(
            f"{what} has a vocabulary of {draft.vocabulary}, and {target.reference} has {target.vocabulary}: "
            f"{remedy}, or "
            "use another."
        )
    steps = config.get("num_speculative_tokens")
    if method == "mtp" and draft.steps and steps and steps > draft.steps and steps % draft.steps:
        raise InvalidInputError(
            f"vLLM's speculative config: num_speculative_tokens is {steps}, but the {draft.steps} MTP layers of "
            f"{draft.reference} are run in turn: it must be a multiple of {draft.steps}."
        )
