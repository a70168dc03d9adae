"""One request in flight: its tokens, KV caches, randomness, text and figures. The engine drives many of them."""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch
from torch import Tensor

from foredraft.acceptance import RULES, Draws, Rule, default_rule
from foredraft.backends.base import Backend, KVCache
from foredraft.costs import Costs
from foredraft.errors import InvalidInputError
from foredraft.metrics import slower_than_plain, summarize, zero_acceptance
from foredraft.proposers.base import Drafter, Verification
from foredraft.randomness import KeyedSource, RandomSource, TorchSource
from foredraft.sampling import AllowedTokens, Law, SamplingLaw, refuse_bias_beyond
from foredraft.text import TextStream, TextTokenizer, word_ids
from foredraft.tree import depths
from foredraft.types import (
    Completion,
    Draft,
    Event,
    FinishEvent,
    FinishReason,
    Origin,
    RoundDetail,
    RoundEvent,
    RoundStats,
    SamplingParams,
    TokenEvent,
    Verdict,
)


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    `allowed` masks tokens by what came before (grammars). The other fields serve callers who bring their own sampling
    law, test for the end (it is given all tokens so far), or a KV cache that holds the beginning of the prompt already;
    else all follow from `params`. `detail` asks for what each round looked at (`RoundDetail`), at some cost. `progress`
    is told how many tokens of the prompt have been read, and of how many, now and then.
    """

    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    allowed: AllowedTokens | None = None
    law: Law | None = None
    halt: Callable[[Sequence[int]], bool] | None = None
    cache: KVCache | None = None
    detail: bool = False
    progress: Callable[[int, int], None] | None = None


_PIECE = 1024  # tokens of a prompt between two reports


@dataclass(frozen=True)
class Setup:
    """What all requests of an engine share; `Engine` documents the fields."""

    backend: Backend
    drafter: Drafter | None
    tokenizer: TextTokenizer | None
    stop_tokens: Collection[int]
    draft_tokens: int
    rule: Rule | None
    costs: Costs | None = None

    def rule_for(self, greedy: bool) -> Rule:
        """The acceptance rule of a request.

        Raises:
            InvalidInputError: The rule that was asked for is right at temperature 0 only, and this is not.
        """
        if greedy:  # what every rule comes to where all rows are one-hot
            return RULES["greedy"]
        if self.rule is None:
            drafter = self.drafter
            if drafter is not None and drafter.races:
                return RULES["seed-exact"]
            return (
                default_rule(drafter.draws, drafter.trees) if drafter is not None else default_rule(Draws.POINT, False)
            )
        if self.rule.greedy:
            raise InvalidInputError(f"Rule '{self.rule.name}' fits temperature 0 only: leave the rule open.")
        return self.rule


class Generation:
    """The state of one request between rounds.

    Raises:
        InvalidInputError: The prompt is empty, too long or not of this vocabulary, or a setting does not fit.
    """

    def __init__(self, request: Request, setup: Setup) -> None:
        params = request.params
        self.tokens = check_request(request, setup)
        self._prompt_length = len(self.tokens)
        self._limit = len(self.tokens) + params.max_tokens
        if setup.backend.context is not None:
            self._limit = min(self._limit, setup.backend.context)
        seed = params.seed if params.seed is not None else secrets.randbelow(2**63)
        self._settings = replace(params, seed=seed)
        self._halt = request.halt
        self._detail = request.detail
        self._progress = request.progress
        self._stop_tokens = frozenset() if params.ignore_eos else frozenset(setup.stop_tokens)
        self.law = request.law or SamplingLaw(
            params,
            prompt_length=len(self.tokens),
            stop_tokens=setup.stop_tokens,
            bad_words=word_ids(setup.tokenizer, params.bad_words) if setup.tokenizer is not None else (),
            allowed=request.allowed,
        )
        self.rule = setup.rule_for(self.law.greedy)
        self.source: RandomSource = (
            KeyedSource(seed) if self.rule.keyed else TorchSource(torch.Generator().manual_seed(seed))
        )
        self._text = TextStream(setup.tokenizer, params.stop) if setup.tokenizer is not None else None
        self.setup = setup
        self.cache = request.cache or setup.backend.new_cache()
        self._proposer = setup.drafter.proposer(self.law, self.source) if setup.drafter is not None else None
        if self._proposer is not None:
            self._proposer.attach(self.cache)

        self.finish_reason: FinishReason | None = None
        self._pieces: list[str] = []
        self._origins: list[Origin] = []
        self._logprobs: list[Mapping[int, float]] = []
        self._logprob_rows: Tensor | None = None
        self._rounds: list[RoundStats] = []
        self._draft_cost = (0, 0.0)  # forwards and seconds of the draft now in flight
        self._forwards = 0  # of the proposer, up to that draft
        self._started = self._first_token = 0.0

    def start(self) -> None:
        """Cache the prompt but for its last token: that is the root of the first round, which drafts already."""
        while not self.read(_PIECE):
            pass

    def read(self, most: int) -> bool:
        """Cache up to so many more tokens of the prompt; returns whether that was all that `start` has to do."""
        if not self._started:
            self._started = perf_counter()
        count, start = len(self.tokens) - 1, self.cache.length
        if start < count:
            self.setup.backend.prefill(self.cache, self.tokens[start : min(start + most, count)])
            if self._progress is not None:
                self._progress(self.cache.length, count)
        return self.cache.length >= count

    def propose(self, most: int | None = None, sequences: int = 1) -> Draft:
        """A draft that leaves room for the token that every round adds.

        Args:
            most: Nodes of the forward, if there is a limit: drafters that decide share them out in `select`, the others
                get each an equal part.
            sequences: Of the forward.
        """
        self._draft_cost = (0, 0.0)
        drafter = self.setup.drafter
        if drafter is None or self._proposer is None:
            return Draft()
        drafter.sequences = sequences
        budget = min(self.setup.draft_tokens, self._limit - len(self.tokens) - 1)
        if most is not None:
            budget = min(budget, most if drafter.costs is not None else most // sequences)
        started, before = perf_counter(), self._forwards
        draft = self._proposer.propose(self.tokens, budget)
        self._forwards = self._proposer.forwards  # some may have run since the last draft, beside the target
        self._draft_cost = (self._forwards - before, perf_counter() - started)
        return draft

    def verifying(self, draft: Draft) -> None:
        """The target is about to score this draft: what can be done meanwhile may begin."""
        if self._proposer is not None:
            self._proposer.verifying(self.tokens, draft)

    def score(self, draft: Draft, logits: Tensor) -> Tensor:
        """The target's law at the root and at every node, `[N+1, V]`."""
        if self._settings.logprobs is not None or self._detail:
            self._logprob_rows = self.law.logprobs(self.tokens, draft, logits)
        return self.law(self.tokens, draft, logits)

    def emit(self, verdict: Verdict) -> tuple[Verdict, list[Event]]:
        """Append the verdict's tokens in order; what follows one that ends the answer never happened.

        Returns the part of the verdict that counts and the events of its tokens.
        """
        events: list[Event] = []
        rows = (0, *(node + 1 for node in verdict.path))  # the row of p that each token was judged by
        for row, token, origin in zip(rows, verdict.tokens, verdict.origins, strict=True):
            self.tokens.append(token)
            self._origins.append(origin)
            events.append(TokenEvent(token, origin, self._read(token), self._note_logprobs(row, token)))
            if self.finish_reason is not None:
                break
        kept = len(events)
        rejected = verdict.rejected and kept == len(verdict.tokens)
        return Verdict(verdict.path[:kept], verdict.tokens[:kept], rejected), events

    def _note_logprobs(self, row: int, token: int) -> Mapping[int, float] | None:
        count = self._settings.logprobs
        if count is None or self._logprob_rows is None:
            return None
        values = self._logprob_rows[row]
        best = values.topk(min(count, len(values)))
        likeliest = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        noted = {token: float(values[token])} | {i: value for i, value in likeliest if value > -math.inf}
        self._logprobs.append(noted)
        return noted

    def _read(self, token: int) -> str:
        """Look for the end of the answer in this token; return the text it sets free."""
        text = ""
        if token in self._stop_tokens:
            self.finish_reason = "stop_token"
        elif self._text is not None:
            text, stopped = self._text.push(token)
            self._pieces.append(text)
            if stopped:
                self.finish_reason = "stop_string"
        if self.finish_reason is None and self._halt is not None and self._halt(self.tokens):
            self.finish_reason = "halted"
        if self.finish_reason is None and len(self.tokens) >= self._limit:
            self.finish_reason = "length"
        return text

    def close_round(self, verification: Verification, verdict: Verdict, verify: float, batch: int) -> list[Event]:
        """Let the proposer learn, count the round, and build the completion if it was the last one."""
        if self._proposer is not None:
            self._proposer.observe(verification, verdict)
        forwards, seconds = self._draft_cost
        proposers = verification.draft.proposers
        stats = RoundStats(
            drafted=len(verification.draft),
            drafted_from=Counter(proposers),
            accepted=len(verdict.path),
            accepted_from=Counter(proposers[node] for node in verdict.path if proposers),
            emitted=len(verdict.tokens),
            draft_forwards=forwards,
            draft_seconds=seconds,
            verify_seconds=verify,
            accept_seconds=verification.accept_seconds,
            batch=batch,
            depth=max(depths(verification.draft)),
            foresight=self._proposer.foresight if self._proposer is not None else None,
        )
        self._rounds.append(stats)
        now = perf_counter()
        if len(self._rounds) == 1:
            self._first_token = now
        event = RoundEvent(stats, self._look_at(verification, verdict) if self._detail else None)
        if self.finish_reason is None:
            return [event]
        if self._proposer is not None:
            self._proposer.finish(self.tokens)
        return [event, self._finish(self.finish_reason, now)]

    def close(self) -> None:
        """It will not go on, finished or not: what works for it beside the target need not."""
        if self._proposer is not None:
            self._proposer.close()

    def _look_at(self, verification: Verification, verdict: Verdict) -> RoundDetail:
        """The draft and the verdict with the target's probability of every token in them."""
        assert self._logprob_rows is not None
        draft, path = verification.draft, verdict.path
        rows = [parent + 1 for parent in draft.parents]
        drawn = verdict.tokens[len(path) :]  # none if the answer ended within the draft
        rows += [path[-1] + 1 if path else 0] * len(drawn)
        p = self._logprob_rows[rows, [*draft.tokens, *drawn]].exp().tolist()
        p_drawn = p.pop() if drawn else None
        return RoundDetail(draft, verdict, verification.root, tuple(p), p_drawn)

    def _finish(self, reason: FinishReason, now: float) -> FinishEvent:
        drafter = self.setup.drafter
        self.cache.features.clear()  # who goes on with this cache may draft with another head
        held = "" if self._text is None or reason == "stop_string" else self._text.flush()
        completion = Completion(
            text="".join([*self._pieces, held]),
            ids=tuple(self.tokens[self._prompt_length :]),
            origins=tuple(self._origins),
            finish_reason=reason,
            settings=self._settings,
            stats=summarize(
                self._rounds,
                ttft_seconds=self._first_token - self._started,
                seconds=now - self._started,
                drafter=drafter.name if drafter is not None else "none",
                rule=self.rule.name,
                backend=self.setup.backend.name,
            ),
            warnings=self._warnings(),
            logprobs=tuple(self._logprobs) if self._settings.logprobs is not None else None,
        )
        return FinishEvent(held, completion)

    def _warnings(self) -> tuple[str, ...]:
        drafter, costs = self.setup.drafter, self.setup.costs
        found: list[str | None] = []
        if drafter is not None:
            plain = costs.seconds(1, self.cache.length) if costs is not None else None
            idle = zero_acceptance(self._rounds, drafter.when_nothing_is_accepted)
            found = [idle, slower_than_plain(self._rounds, plain) if not drafter.costs else None, drafter.remark]
        if self.rule.lossy:
            found.append(f"Rule '{self.rule.name}' is lossy: the model by itself would write another text.")
        return tuple(warning for warning in found if warning is not None)


def check_request(request: Request, setup: Setup) -> list[int]:
    """The tokens of a request's prompt, if it can run: what `Generation` refuses is refused here, at no cost.

    Raises:
        InvalidInputError: See `Generation`.
    """
    params = request.params
    tokens = checked_prompt(request.prompt, setup.backend)
    if (params.stop or params.bad_words) and setup.tokenizer is None:
        raise InvalidInputError("Stop strings and bad words need a tokenizer, and there is none here.")
    refuse_bias_beyond(setup.backend.vocab_size, params.logit_bias)
    setup.rule_for(request.law.greedy if request.law is not None else params.greedy)
    return tokens


def checked_prompt(prompt: Sequence[int], backend: Backend) -> list[int]:
    """The tokens of a prompt.

    Raises:
        InvalidInputError: It is empty, too long for this model or not of its vocabulary.
    """
    tokens = list(prompt)
    if not tokens:
        raise InvalidInputError("The prompt is empty: give at least one token to continue from.")
    if backend.context is not None and len(tokens) >= backend.context:
        raise InvalidInputError(
            f"The prompt has {len(tokens)} tokens, but the model's context is {backend.context} and one more must fit: "
            "shorten the prompt."
        )
    strange = next((t for t in tokens if not 0 <= t < backend.vocab_size), None)
    if strange is not None:
        raise InvalidInputError(
            f"Token id {strange} in the prompt is outside the vocabulary, whose ids are 0 to {backend.vocab_size - 1}."
        )
    return tokens
