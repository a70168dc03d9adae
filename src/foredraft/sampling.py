"""From logits to the law that speculation sees, and the randomness that draws from it.

The settings apply in this order, which is that of transformers' processors where both have a setting:

    logit bias, repetition penalty, frequency and presence penalties, bad words, min tokens, allowed tokens,
    temperature, top-k, top-p, min-p

at every node of a draft with that node's own history: the committed tokens and its ancestors, nothing else. Everything
after this module is about `p` and `q`, distributions that went through all of it; no rule ever sees raw logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from foredraft.errors import InvalidInputError, ModelError
from foredraft.tree import paths, reachable
from foredraft.types import Draft, SamplingParams

AllowedTokens = Callable[[Sequence[int]], "Tensor | None"]
"""Which tokens may follow all tokens so far: a bool mask `[V]`, or `None` for all of them. The hook for grammars."""


class Law(Protocol):
    """The sampling law of one request, for the target and for whatever drafts for it."""

    @property
    def greedy(self) -> bool:
        """Whether every row is the one-hot of an argmax."""
        ...

    def __call__(self, history: Sequence[int], draft: Draft, logits: Tensor) -> Tensor:
        """Distributions `[N+1, V]`, float64, from `logits` `[N+1, V]`; of a greedy law any rows with their argmax.

        Rows of a greedy law only say by their largest entry, the first of several, which token has all mass: a one-hot
        written out would take more time than all else of a round. Row 0 follows `history` (all tokens so far, the root
        last); row i + 1 follows `history`, the ancestors of node i of `draft`, and node i.
        """
        ...

    def logprobs(self, history: Sequence[int], draft: Draft, logits: Tensor) -> Tensor:
        """Log-probabilities to report, `[N+1, V]`: log p, and for a greedy law what p would be at temperature 1."""
        ...


class SamplingLaw:
    """The `Law` of `SamplingParams`.

    Args:
        params: The settings.
        prompt_length: Tokens of the history that are the prompt: frequency, presence and minimum do not count them.
        stop_tokens: What `min_tokens` holds back.
        bad_words: Token ids of each forbidden word.
        allowed: A further mask; see `AllowedTokens`.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_length: int = 0,
        stop_tokens: Collection[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
        allowed: AllowedTokens | None = None,
    ) -> None:
        self._params = params
        self._prompt_length = prompt_length
        self._stop_tokens = sorted(stop_tokens)
        self._bad_words = [list(word) for word in bad_words]
        self._allowed = allowed
        self._penalised = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1, 0, 0)
        self._masked = bool(self._bad_words) or params.min_tokens > 0 or allowed is not None

    @property
    def greedy(self) -> bool:
        """Whether the temperature is 0."""
        return self._params.greedy

    @property
    def temperature(self) -> float:
        """Of the settings."""
        return self._params.temperature

    def __call__(self, history: Sequence[int], draft: Draft, logits: Tensor) -> Tensor:
        """See `Law`."""
        scores = self._scores(history, draft, logits)
        return scores if self.greedy else probabilities(scores, self._params)

    def logprobs(self, history: Sequence[int], draft: Draft, logits: Tensor) -> Tensor:
        """See `Law`."""
        scores = self._scores(history, draft, logits)
        return scores.double().log_softmax(-1) if self.greedy else probabilities(scores, self._params).log()

    def _scores(self, history: Sequence[int], draft: Draft, logits: Tensor) -> Tensor:
        """Logits after everything that looks at single tokens or at the history."""
        params = self._params
        if not (params.logit_bias or self._penalised or self._masked):
            return logits
        scores = logits.to(torch.float64, copy=True)  # masks are set in place
        if params.logit_bias:
            refuse_bias_beyond(scores.shape[-1], params.logit_bias)
            scores = _add_bias(scores, params.logit_bias)
        histories = [[*history, *path] for path in [(), *paths(draft)]]
        if self._penalised:
            scores = self._penalise(scores, histories)
        if self._masked:
            for row in reachable(draft, lambda row, token: bool(scores[row, token] > -torch.inf)):
                self._mask(scores[row], histories[row])
        return scores

    def _penalise(self, scores: Tensor, histories: Sequence[Sequence[int]]) -> Tensor:
        params = self._params
        prompt = _counts(histories[0][: self._prompt_length], scores)
        answer = torch.stack([_counts(tokens[self._prompt_length :], scores) for tokens in histories])
        if params.repetition_penalty != 1:
            penalty = params.repetition_penalty
            penalised = torch.where(scores > 0, scores / penalty, scores * penalty)
            scores = torch.where(answer + prompt > 0, penalised, scores)
        return scores - params.frequency_penalty * answer - params.presence_penalty * (answer > 0)

    def _mask(self, row: Tensor, tokens: Sequence[int]) -> None:
        forbidden = [
            last
            for *beginning, last in self._bad_words
            if not beginning or list(tokens[-len(beginning) :]) == beginning
        ]
        if len(tokens) - self._prompt_length < self._params.min_tokens:
            forbidden += self._stop_tokens
        row[[i for i in forbidden if i < len(row)]] = -torch.inf  # a tokenizer may have more ids than the model
        if self._allowed is not None and (mask := self._allowed(tokens)) is not None:
            row[~mask.to(row.device)] = -torch.inf
        if row.isneginf().all():
            raise InvalidInputError("Bad words, min_tokens and the allowed tokens leave no token to continue with.")


def refuse_bias_beyond(vocabulary: int, bias: Mapping[int, float]) -> None:
    """Raise `InvalidInputError` if `bias` names an id that does not exist."""
    if max(bias, default=-1) >= vocabulary:
        last = vocabulary - 1
        raise InvalidInputError(
            f"logit_bias names token id {max(bias)}, but the last id is {last}.", field="logit_bias"
        )


def _add_bias(scores: Tensor, bias: Mapping[int, float]) -> Tensor:
    offsets = scores.new_zeros(scores.shape[-1])
    offsets[list(bias)] = scores.new_tensor(list(bias.values()))
    return scores + offsets


def _counts(tokens: Sequence[int], like: Tensor) -> Tensor:
    ids = torch.tensor(tokens, dtype=torch.long, device=like.device)
    return torch.bincount(ids, minlength=like.shape[-1]).to(like.dtype)


def one_hot_argmax(logits: Tensor) -> Tensor:
    """The greedy law: `[n, V]` float64 rows with all mass on the largest logit (the first, where several tie)."""
    return torch.zeros_like(logits, dtype=torch.float64).scatter_(-1, argmax(logits)[..., None], 1.0)


def finite_argmax(row: Tensor) -> int:
    """The token of a greedy law's row `[V]`.

    Raises:
        ModelError: A logit is NaN or plus infinity, or all are minus infinity.
    """
    token = int(argmax(row))
    if not math.isfinite(row[token]):  # to both, numpy and torch, NaN is the largest
        raise _infinite()
    return token


def _infinite() -> ModelError:
    return ModelError("The model returned NaN or infinite logits. Half precision may overflow: try dtype float32.")


def argmax(rows: Tensor) -> Tensor:
    """`[n]` of `[n, V]`, or a scalar of `[V]`: where the largest number stands, the first where several tie."""
    if rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.asarray(rows.numpy().argmax(-1)))  # ten times as fast as torch's on a CPU
    return rows.argmax(-1)


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Distributions of `logits` under temperature, top-k, top-p and min-p, in that order.

    Args:
        logits: `[n, V]`, any floating dtype and device.
        params: The settings.

    Returns:
        `[n, V]` float64. In this precision rows of p and q sum to one closely enough that a rejection always leaves
        residual mass, even where p and q are almost equal.

    Raises:
        ModelError: A logit is NaN or plus infinity, or a whole row is minus infinity.
    """
    if not torch.isfinite(logits.amax(-1)).all():  # NaN spreads to the maximum
        raise _infinite()
    if logits.device.type == "mps":  # no float64 there
        logits = logits.cpu()
    if params.greedy:
        return one_hot_argmax(logits)
    scores = logits.double() / params.temperature
    vocabulary = scores.shape[-1]
    if 0 < params.top_k < vocabulary:
        kth = scores.topk(params.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if params.top_p < 1.0:
        scores = _keep_top_p(scores, params.top_p)
    p = scores.softmax(-1)
    if params.min_p > 0.0:
        p = p.masked_fill(p < params.min_p * p.amax(-1, keepdim=True), 0.0)
        p = p / p.sum(-1, keepdim=True)
    return p


def _keep_top_p(scores: Tensor, top_p: float) -> Tensor:
    """Mask the unlikely tail whose mass, added up from the least likely, stays within 1 - top_p."""
    if scores.device.type == "cpu":
        # Sorting the numbers alone is twenty times as fast as torch's sort, which also tells where each came from.
        ascending = torch.from_numpy(np.sort(scores.detach().numpy()))
        length = _tail(ascending, top_p).sum(-1, keepdim=True)
        masked = scores < ascending.gather(-1, length)
        if torch.equal(masked.sum(-1, keepdim=True), length):  # else some of the tail are as likely as what stays
            return scores.masked_fill(masked, -torch.inf)
    ascending, order = scores.sort(-1)
    tail = _tail(ascending, top_p)
    return scores.masked_fill(torch.zeros_like(tail).scatter(-1, order, tail), -torch.inf)


def _tail(ascending: Tensor, top_p: float) -> Tensor:
    """Which of the scores in ascending order, `[n, V]`, are the tail."""
    tail = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    tail[:, -1] = False  # the likeliest token always stays
    return tail
