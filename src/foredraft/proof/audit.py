"""Plain and speculative decoding side by side on a real model, and an explanation of every difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from foredraft.backends.base import Backend, Query
from foredraft.engine import Engine
from foredraft.generation import Request
from foredraft.proof.enumeration import JointLaw, Tokens
from foredraft.proof.statistics import GTest, g_test
from foredraft.randomness import gumbel
from foredraft.sampling import SamplingLaw
from foredraft.types import Draft, FinishEvent, SamplingParams

_WIDTHS = (2, 4, 8)  # rows a forward, for the drift of logits with the batch shape
_CANDIDATES = 3


Verdict = Literal["near-tie", "defect"]


@dataclass(frozen=True)
class Difference:
    """The first position at which two runs of one prompt part, and why."""

    prompt: int
    position: int
    plain_token: int
    other_token: int
    plain_candidates: dict[int, float]
    """The likeliest tokens and their scores, scored one token a forward."""
    other_candidates: dict[int, float]
    """The same, scored several tokens a forward."""
    gap: float
    """By how much the plain token leads over the other."""
    drift: float
    """By how much the two scores move with the number of rows a forward."""
    verdict: Verdict


@dataclass(frozen=True)
class Equality:
    """One setting, all prompts."""

    setting: str
    prompts: int
    tokens: int
    differences: tuple[Difference, ...]

    @property
    def defects(self) -> int:
        """Differences that the backend's drift does not explain."""
        return sum(difference.verdict == "defect" for difference in self.differences)


def audit(
    plain: Engine, other: Engine, backend: Backend, prompts: Sequence[Sequence[int]], params: SamplingParams, name: str
) -> Equality:
    """Compare the ids of two engines over the same model on every prompt.

    Args:
        plain: Plain decoding.
        other: What is to equal it.
        backend: The model, known good, on which differences are replayed.
        prompts: Token ids.
        params: A greedy or seeded setting whose output is to be the same.
        name: What the setting is called.
    """
    tokens = 0
    differences = []
    for number, prompt in enumerate(prompts):
        expected, found = _ids(plain, prompt, params), _ids(other, prompt, params)
        tokens += len(expected)
        if found != expected:
            differences.append(explain(backend, number, prompt, expected, found, params))
    return Equality(name, len(prompts), tokens, tuple(differences))


def _ids(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> Tokens:
    *_, (_, last) = engine.run([Request(prompt, params)])
    assert isinstance(last, FinishEvent)
    return last.completion.ids


def explain(
    backend: Backend, number: int, prompt: Sequence[int], plain: Tokens, other: Tokens, params: SamplingParams
) -> Difference:
    """Replay the way to the first difference one token and several tokens a forward, in fresh caches.

    Args:
        backend: The model, known good.
        number: Of the prompt.
        prompt: Token ids.
        plain: What plain decoding says.
        other: What was said instead.
        params: The setting.
    """
    position = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), None)
    if position is None:  # one is the beginning of the other: no numerics end an answer early
        return Difference(number, min(len(plain), len(other)), -1, -1, {}, {}, float("inf"), 0.0, "defect")
    a, b = plain[position], other[position]
    tokens = [*prompt, *plain[:position]]
    law = SamplingLaw(params, prompt_length=len(prompt))
    single, *several = [_scores(law, params, tokens, _replay(backend, prompt, tokens, w)) for w in (1, *_WIDTHS)]
    gap = float(single[a] - single[b])
    drift = max(float((single[[a, b]] - row[[a, b]]).abs().max()) for row in several)
    explained = gap <= 2 * drift or any(int(row.argmax()) == b for row in several)
    verdict: Verdict = "near-tie" if explained else "defect"
    return Difference(number, position, a, b, _top(single), _top(several[-1]), gap, drift, verdict)


def _replay(backend: Backend, prompt: Sequence[int], tokens: Sequence[int], width: int) -> Tensor:
    """Logits `[V]` after `tokens`, with everything past the prompt scored `width` tokens a forward.

    The last forward is filled up as by a draft, so that the first token after the prompt has company as well.
    """
    cache = backend.new_cache()
    backend.prefill(cache, prompt[:-1])
    rest = list(tokens[len(prompt) - 1 :])
    logits: Tensor | None = None
    for start in range(0, len(rest), width):
        root, *chain = rest[start : start + width]
        missing = width - 1 - len(chain)
        if backend.context is not None:
            missing = min(missing, backend.context - len(tokens))
        logits = backend.forward([Query(cache, root, Draft.chain([*chain, *[root] * missing]))])[0][len(chain)]
        backend.commit(cache, range(len(chain)))
    assert logits is not None
    return logits


def _scores(law: SamplingLaw, params: SamplingParams, tokens: Sequence[int], logits: Tensor) -> Tensor:
    """What the token is the argmax of: log p, plus the position's noise where the setting samples."""
    scores = law.logprobs(tokens, Draft(), logits[None])[0].cpu()
    if params.greedy:
        return scores
    assert params.seed is not None
    return scores + gumbel(params.seed, len(tokens), torch.arange(len(scores)))


def _top(scores: Tensor) -> dict[int, float]:
    best = scores.topk(_CANDIDATES)
    return dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def sampled(
    engine: Engine, backend: Backend, prompt: Sequence[int], samples: int, *, vocabulary: int = 4, length: int = 3
) -> GTest:
    """Draw short answers from the real engine and test them against their exact law.

    The answers are held to the few likeliest tokens, which the prompt repeats so that drafters have something to copy;
    their law is then computed in full with one forward a prefix.

    Args:
        engine: The engine under test.
        backend: The model, to compute the law with.
        prompt: Token ids.
        samples: Answers to draw; seeds are 0, 1, 2, …
        vocabulary: Tokens allowed.
        length: Tokens an answer.
    """
    cache = backend.new_cache()
    backend.prefill(cache, prompt[:-1])
    likeliest = backend.forward([Query(cache, prompt[-1])])[0][0].topk(vocabulary).indices.tolist()
    mask = torch.zeros(backend.vocab_size, dtype=torch.bool)
    mask[likeliest] = True
    seeded = [*prompt, *likeliest, *likeliest]

    def allowed(tokens: Sequence[int]) -> Tensor:
        return mask

    counts: Counter[Tokens] = Counter()
    for seed in range(samples):
        params = SamplingParams(max_tokens=length, temperature=1.0, seed=seed, ignore_eos=True)
        *_, (_, last) = engine.run([Request(seeded, params, allowed=allowed)])
        assert isinstance(last, FinishEvent)
        counts[last.completion.ids] += 1
    return g_test(counts, _exact_law(backend, seeded, likeliest, mask, length))


def _exact_law(backend: Backend, prompt: Sequence[int], tokens: Sequence[int], mask: Tensor, length: int) -> JointLaw:
    law = SamplingLaw(SamplingParams(temperature=1.0), allowed=lambda _: mask)
    cache = backend.new_cache()
    backend.prefill(cache, prompt[:-1])
    joint: JointLaw = {(): 1.0}
    for depth in range(length):
        rows: dict[Tokens, Tensor] = {}
        for prefix in product(tokens, repeat=depth):
            logits = backend.forward([Query(cache, prompt[-1], Draft.chain(prefix))])[0][-1:]
            rows[prefix] = law([*prompt, *prefix], Draft(), logits)[0]
            backend.commit(cache, ())
            backend.truncate(cache, len(prompt) - 1)
        joint = {(*prefix, x): mass * float(rows[prefix][x]) for prefix, mass in joint.items() for x in tokens}
    return joint
