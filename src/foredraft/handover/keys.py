"""What vLLM takes in `--speculative-config`, as a table: keys, their values, and the methods that use them.

Read off `vllm/config/speculative.py` and `vllm/config/vllm.py` of the released 0.32.0 and 0.33.0. A key that a method
does not use is ignored by vLLM without a word; here it is refused, for whoever wrote it expected something of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.checks import is_integer, is_number

VERSIONS = ("0.32", "0.33")
"""Those of the table, the last one being what is written for unless another is asked for."""

NGRAM = ("ngram", "ngram_gpu")
HEADS = ("eagle", "eagle3", "mtp", "medusa")
DRAFTING = ("draft_model", *HEADS)
"""Methods that run a network of their own."""
METHODS = (*NGRAM, "suffix", *DRAFTING)
"""Those that are known here. `medusa` and `ngram_gpu` are read, not written."""
RULES = {"standard": "token", "block": "block"}
"""Values of `rejection_sample_method`, and foredraft's rules of the same law."""
REMOVED = {"medusa": "0.33", "mlp_speculator": "0.33"}
"""Methods by the version from which on vLLM has them no more."""
OTHER_METHODS = {
    "mlp_speculator": "foredraft has no such drafter",
    "dflash": "foredraft has no such drafter",
    "dspark": "foredraft has no such drafter",
    "extract_hidden_states": "it drafts nothing: it writes hidden states down",
    "custom_class": "it names code of your own",
}
"""Those that vLLM has besides, and why they are not."""


@dataclass(frozen=True)
class Key:
    """One key.

    Args:
        name: As in the JSON.
        kind: `integer`, `number`, `switch`, `text`, `choice`, `schedule` or `other`, which is passed over.
        methods: Those that use it; empty is all.
        least: Smallest number.
        most: Largest number.
        choices: Of a `choice`.
        since: The first version here that has it.
    """

    name: str
    kind: str
    methods: tuple[str, ...] = ()
    least: float = 0
    most: float = float("inf")
    choices: tuple[str, ...] = ()
    since: str = VERSIONS[0]

    def fits(self, value: object) -> bool:
        """Whether a value is one that vLLM takes; `null` is the same as leaving the key out."""
        if value is None or self.kind == "other":
            return True
        if self.kind in ("integer", "number"):
            good = is_integer(value) if self.kind == "integer" else is_number(value)
            return good and self.least <= value <= self.most  # type: ignore[operator]
        if self.kind == "choice":
            return value in self.choices
        if self.kind == "schedule":
            return isinstance(value, list) and all(_is_range(each) for each in value)
        return isinstance(value, bool if self.kind == "switch" else str)

    @property
    def allowed(self) -> str:
        """What `fits`, for people."""
        if self.kind == "choice":
            return f"one of {', '.join(self.choices)}"
        if self.kind == "schedule":
            return "a list of [first batch size, last batch size, tokens]"
        if self.kind in ("integer", "number"):
            bounds = f"in [{self.least:g}, {self.most:g}]" if self.most != float("inf") else f">= {self.least:g}"
            return f"{'an integer' if self.kind == 'integer' else 'a number'} {bounds}"
        return {"switch": "true or false", "text": "a string", "other": "what vLLM takes"}[self.kind]


def _is_range(entry: object) -> bool:
    return isinstance(entry, (list, tuple)) and len(entry) == 3 and all(is_integer(each) for each in entry)


_TABLE = (
    Key("method", "text"),
    Key("model", "text", DRAFTING),
    Key("num_speculative_tokens", "integer", least=1),
    Key("num_speculative_tokens_per_batch_size", "schedule"),
    Key("draft_tensor_parallel_size", "integer", DRAFTING, least=1),
    Key("tensor_parallel_size", "integer", least=1),
    Key("prompt_lookup_min", "integer", NGRAM, least=1),
    Key("prompt_lookup_max", "integer", NGRAM, least=1),
    Key("suffix_decoding_max_tree_depth", "integer", ("suffix",), least=1),
    Key("suffix_decoding_max_cached_requests", "integer", ("suffix",)),
    Key("suffix_decoding_max_spec_factor", "number", ("suffix",)),
    Key("suffix_decoding_min_token_prob", "number", ("suffix",), most=1),
    Key("draft_sample_method", "choice", DRAFTING, choices=("greedy", "probabilistic")),
    Key("rejection_sample_method", "choice", choices=("standard", "block", "synthetic", "fly")),
    Key("synthetic_acceptance_rates", "other"),
    Key("synthetic_acceptance_length", "number", least=1),
    Key("parallel_drafting", "switch", DRAFTING),
    Key("use_heterogeneous_vocab", "switch", ("draft_model",)),
    Key("use_local_argmax_reduction", "switch", DRAFTING),
    Key("disable_padded_drafter_batch", "switch", HEADS[:3]),
    Key("disable_eagle_block_drop", "switch", HEADS[:3]),
    Key("index_share_for_mtp_iteration", "switch", ("mtp",)),
    Key("enable_adaptive_verification", "switch", ("dspark",)),
    Key("dspark_draft_topk", "integer", ("dspark",), least=1),
    Key("disable_lookahead_block_hashes", "switch", HEADS[:3], since="0.33"),
    Key("draft_lm_head_quantization", "choice", HEADS[:3], choices=("fp8", "nvfp4"), since="0.33"),
    Key("xpress_topc", "integer", ("dflash",), since="0.33"),
    Key("fly_window_size", "integer", least=1, since="0.33"),
    Key("fly_entropy_threshold", "number", since="0.33"),
    Key("fly_entropy_top_k", "integer", least=1, since="0.33"),
    Key("quantization", "text", DRAFTING),
    Key("max_model_len", "integer", DRAFTING, least=1),
    Key("revision", "text", DRAFTING),
    Key("code_revision", "text", DRAFTING),
    Key("moe_backend", "text", DRAFTING),
    Key("attention_backend", "text", DRAFTING),
    Key("kv_cache_dtype", "text", DRAFTING),
    Key("draft_load_config", "other", DRAFTING),
    Key("enforce_eager", "switch"),
)


def keys_of(version: str) -> dict[str, Key]:
    """The keys of a version, by name."""
    return {key.name: key for key in _TABLE if VERSIONS.index(key.since) <= VERSIONS.index(version)}
