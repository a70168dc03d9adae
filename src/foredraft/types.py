"""The values that travel through a round: settings in, drafts and verdicts between, events and a completion out.

All are frozen. Settings check themselves when they are built, so that nothing half-valid reaches the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from foredraft.checks import is_integer, is_number, require

if TYPE_CHECKING:
    from torch import Tensor

COLDEST = 1e-12
"""Least temperature above 0: below, a division by it may overflow. It is greedy for any logits but exact ties."""
STRONGEST = 1000.0
"""Largest repetition penalty, and its inverse the smallest, for the same reason."""

Origin = Literal["draft", "correction", "bonus"]
"""Where an emitted token came from. Plain decoding emits only bonus tokens: it drafts nothing, so rejects nothing."""

FinishReason = Literal["stop_token", "stop_string", "length", "halted"]
"""Why an answer ended. `length` is the token limit or the end of the context; `halted` a caller's own test."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    Args:
        max_tokens: Most tokens to emit, at least 1.
        temperature: 0 is greedy decoding (exactly, not a small temperature); otherwise logits are divided by it, which
            is at least `COLDEST`.
        top_k: Keep the k likeliest tokens; 0 keeps all.
        top_p: Keep the smallest set of likeliest tokens whose probabilities sum to at least this, in (0, 1].
        min_p: Drop tokens less likely than this share of the likeliest one, in [0, 1].
        repetition_penalty: Divides positive logits, and multiplies negative ones, of every token that prompt or answer
            has already; 1 is off, [0.001, 1000].
        frequency_penalty: Subtracted from a token's logit for each time the answer has it, in [-2, 2].
        presence_penalty: Subtracted once if the answer has the token, in [-2, 2].
        logit_bias: Added to the logits of these token ids, in [-100, 100].
        bad_words: Strings that the answer must not contain (as their usual tokens, with and without a leading space).
        min_tokens: No stop token before the answer has this many tokens.
        logprobs: Report each emitted token's log-probability and those of the n likeliest, n in [0, 20]; of tokens with
            no probability none.
        seed: Seed of the request's private random source; `None` takes a fresh one, which the completion reports.
        stop: Strings that end the answer; the text is cut before the first of them.
        ignore_eos: Go on past the model's stop tokens (for measurements of a fixed length).

    Raises:
        InvalidInputError: A value is outside its range; the message names it and the range.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[str] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            strings = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else None
            object.__setattr__(self, name, value if strings is None else strings)
            good = strings is not None and all(isinstance(s, str) and s for s in strings)
            self._require(name, good, "a string or a list of strings, none of them empty")
        self._require("max_tokens", is_integer(self.max_tokens) and self.max_tokens >= 1, "an integer >= 1")
        cold = is_number(self.temperature) and (self.temperature == 0 or self.temperature >= COLDEST)
        self._require("temperature", cold, f"0 (greedy), or a number >= {COLDEST:g}")
        self._require("top_k", is_integer(self.top_k) and self.top_k >= 0, "an integer >= 0 (0 keeps all)")
        self._require("top_p", is_number(self.top_p) and 0 < self.top_p <= 1, "a number in (0, 1]")
        self._require("min_p", is_number(self.min_p) and 0 <= self.min_p <= 1, "a number in [0, 1]")
        good_seed = self.seed is None or (is_integer(self.seed) and 0 <= self.seed < 2**63)
        self._require("seed", good_seed, "an integer in [0, 2**63), or None for a fresh one")
        weak = is_number(self.repetition_penalty) and 1 / STRONGEST <= self.repetition_penalty <= STRONGEST
        self._require("repetition_penalty", weak, f"a number in [{1 / STRONGEST:g}, {STRONGEST:g}] (1 is off)")
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            self._require(name, is_number(value) and -2 <= value <= 2, "a number in [-2, 2]")
        good_bias = isinstance(self.logit_bias, Mapping) and all(
            is_integer(i) and i >= 0 and is_number(bias) and -100 <= bias <= 100 for i, bias in self.logit_bias.items()
        )
        self._require("logit_bias", good_bias, "a mapping of token ids to numbers in [-100, 100]")
        good_minimum = is_integer(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens
        self._require("min_tokens", good_minimum, f"an integer in [0, max_tokens = {self.max_tokens}]")
        good_logprobs = self.logprobs is None or (is_integer(self.logprobs) and 0 <= self.logprobs <= 20)
        self._require("logprobs", good_logprobs, "an integer in [0, 20], or None for none")

    def _require(self, name: str, ok: bool, allowed: str) -> None:
        require(name, getattr(self, name), ok, allowed)

    @property
    def greedy(self) -> bool:
        """Whether the law is the one-hot of the argmax at every position."""
        return self.temperature == 0


@dataclass(frozen=True, init=False)
class Draft:
    """A tree of proposed tokens below the root, the last emitted token. A chain is a tree without branches.

    Args:
        tokens: `[N]` token ids in an order where every parent comes before its children.
        parents: `[N]` index of each node's parent, -1 for children of the root.
        q: For each node the distribution `[V]` it was drawn from, given everything drawn before it: siblings drawn
            with replacement have the same one, siblings drawn without have it renormalised off the earlier ones.
            `None` marks a node that is a deterministic function of the context (a point mass). Siblings stand in the
            order in which they were drawn.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    q: tuple[Tensor | None, ...]
    scores: tuple[float, ...]
    """For each node the proposer's estimate that its whole path will be accepted; empty if it makes none."""
    proposers: tuple[str, ...]
    """For each node who proposed it, where several did so together; else empty."""

    def __init__(  # by hand: it is built every round, and a dataclass takes twice as long
        self,
        tokens: tuple[int, ...] = (),
        parents: tuple[int, ...] = (),
        q: tuple[Tensor | None, ...] = (),
        scores: tuple[float, ...] = (),
        proposers: tuple[str, ...] = (),
    ) -> None:
        count = len(tokens)
        assert len(parents) == count and len(q) in (0, count) and len(scores) in (0, count)
        for node, parent in enumerate(parents):
            assert -1 <= parent < node
        self.__dict__.update(tokens=tokens, parents=parents, q=q or (None,) * count, scores=scores, proposers=proposers)

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(cls, tokens: Sequence[int], q: Iterable[Tensor] = ()) -> Draft:
        """A draft in which every token follows the one before; `q` is `[K, V]`, or left out for point masses."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)), tuple(q))

    @property
    def is_chain(self) -> bool:
        """Whether no node has a sibling."""
        return self.parents == tuple(range(-1, len(self) - 1))


class Verdict(NamedTuple):
    """What an acceptance rule decided about a draft.

    `path` holds the accepted nodes (indices into the draft, root to leaf); `tokens` their ids and then the one token
    drawn from the target: a correction if `rejected`, else the bonus.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    rejected: bool

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Origin of each of `tokens`."""
        last: Origin = "correction" if self.rejected else "bonus"
        origins: list[Origin] = ["draft"] * len(self.path)
        return (*origins, last)[: len(self.tokens)]


class Foresight(NamedTuple):
    """What a drafter that drafts while the target verifies made of that time, in one round."""

    found: Literal["hit", "late", "miss"]
    """Whether how the verification ended was foreseen and drafted for; `late` if only the first."""
    branches: int
    """Ends that were drafted for."""
    seconds: float
    """For which it drafted while the target verified."""
    waited: float = 0.0
    """Seconds that the target had verified before the step that was being drafted then was over."""


@dataclass(frozen=True)
class RoundStats:
    """Counts and seconds of one round of one sequence; `verify_seconds` are those of the batch's whole forward."""

    drafted: int
    drafted_from: Mapping[str, int]
    accepted: int
    accepted_from: Mapping[str, int]
    emitted: int
    draft_forwards: int
    draft_seconds: float
    verify_seconds: float
    accept_seconds: float
    batch: int = 1
    """Sequences in the forward."""
    depth: int = 0
    """Tokens of the draft's longest path."""
    foresight: Foresight | None = None
    """What was drafted meanwhile, for after this round; `None` if nothing was."""


class TokenEvent(NamedTuple):
    """One emitted token. `text` is what may now be shown: empty while a character or a stop string is open."""

    token: int
    origin: Origin
    text: str
    logprobs: Mapping[int, float] | None = None
    """If asked for: log-probabilities of this token and of the likeliest, by id (see `sampling.Law.logprobs`)."""


class RoundDetail(NamedTuple):
    """What one round looked at, for showing it: on the event only of requests that ask for it."""

    draft: Draft
    verdict: Verdict
    """The part that counts: it ends with the answer, then without a token drawn from the target."""
    root: int
    p: tuple[float, ...]
    """For each node the target's probability of its token after the node above; greedy: at temperature 1."""
    p_drawn: float | None
    """The same of the correction or bonus; `None` if the answer ended before it."""


class RoundEvent(NamedTuple):
    """One round is over; the tokens it emitted came just before."""

    stats: RoundStats
    detail: RoundDetail | None = None


@dataclass(frozen=True)
class ForesightStats:
    """Rounds of an answer during whose verification the next draft was made, and what came of it.

    `hits` is how often the way in which the verification ended was drafted for, `late` how often it was foreseen and
    nothing was drafted yet. `by_accepted` has hits and rounds by the number of accepted tokens. `branches` were drafted
    in all, `wasted` are those that did not come true. `hidden_seconds` were drafted while the target verified, and
    `waited_seconds` passed until what was being drafted at its end was over.
    """

    rounds: int
    hits: int
    late: int
    by_accepted: Mapping[int, tuple[int, int]]
    branches: int
    hidden_seconds: float
    waited_seconds: float

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> ForesightStats:
        """Of the dict that `asdict` makes, after JSON, which has texts for keys."""
        by_accepted = {int(k): (int(hits), int(rounds)) for k, (hits, rounds) in found["by_accepted"].items()}
        return cls(**{**found, "by_accepted": by_accepted})

    @property
    def hit_rate(self) -> float:
        """Of the rounds."""
        return self.hits / self.rounds

    @property
    def wasted(self) -> int:
        """Branches that did not come true."""
        return self.branches - self.hits


@dataclass(frozen=True)
class Stats:
    """The figures of one answer, the same everywhere (see `metrics.summarize`). Times are wall-clock.

    `target_forwards` counts the forwards that score tokens; the prompt's prefill is in `ttft_ms` instead.
    `mean_accepted_length` = tokens / target_forwards, so plain decoding has 1.00. `acceptance_rate` = accepted /
    drafted, `None` if nothing was drafted; `drafted_from` and `accepted_from` split these by proposer where there are
    several. `plain_rounds` counts the forwards in which nothing was drafted. `tpot_ms` = (end to end - TTFT) /
    (tokens - 1), `None` for one token.
    """

    tokens: int
    target_forwards: int
    plain_rounds: int
    draft_forwards: int
    drafted: int
    accepted: int
    acceptance_rate: float | None
    mean_accepted_length: float
    ttft_ms: float
    tpot_ms: float | None
    tokens_per_second: float
    seconds: float
    draft_seconds: float
    verify_seconds: float
    accept_seconds: float
    drafted_from: Mapping[str, int]
    accepted_from: Mapping[str, int]
    drafter: str
    rule: str
    backend: str
    foresight: ForesightStats | None = None
    """Of a drafter that drafts while the target verifies."""

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain JSON values."""
        found = asdict(self)
        if self.foresight is not None:
            found["foresight"] |= {"hit_rate": self.foresight.hit_rate, "wasted": self.foresight.wasted}
        return found


@dataclass(frozen=True)
class Completion:
    """One finished answer.

    `ids` are the emitted token ids, the one that ended the answer included; `text` is their text, without special
    tokens and cut before a stop string. `origins` tells for each id where it came from. `settings` are the sampling
    settings in effect, with the seed that was used. `logprobs`, if asked for, has an entry for each id.
    """

    text: str
    ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    finish_reason: FinishReason
    settings: SamplingParams
    stats: Stats
    warnings: tuple[str, ...] = ()
    logprobs: tuple[Mapping[int, float], ...] | None = None


class FinishEvent(NamedTuple):
    """The answer is complete. `text` was held back until now: pieces of all events joined are `completion.text`."""

    text: str
    completion: Completion


Event = TokenEvent | RoundEvent | FinishEvent
"""What the engine yields. The tokens of a round come first, then its figures, after the last round the end."""
