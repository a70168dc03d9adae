"""A draft model drafts what its own law says, with that law as q, and its KV cache keeps step with the answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.backends.transformers import TransformersBackend
from foredraft.engine import Engine
from foredraft.proposers.base import Proposer, Verification
from foredraft.proposers.draft_model import DraftModel
from foredraft.randomness import RandomSource, TorchSource
from foredraft.sampling import SamplingLaw, probabilities
from foredraft.types import Draft, SamplingParams, Verdict
from tiny import VOCABULARY, CountingBackend, RecordingSource, generate, plain_chain, tiny_llama

SAMPLED = SamplingParams(temperature=0.8, top_k=20, top_p=0.95)
GREEDY = SamplingParams()


def proposer(
    backend: Any, params: SamplingParams, source: RandomSource | None = None, stop_tokens: Sequence[int] = ()
) -> Proposer:
    drafter = DraftModel(backend, VOCABULARY, stop_tokens)
    return drafter.proposer(SamplingLaw(params), source or TorchSource(torch.Generator().manual_seed(0)))


def rows(draft: Draft) -> Tensor:
    """q of a drawn draft, `[K, V]`."""
    return torch.stack([row for row in draft.q if row is not None])


def expected_q(model: Any, tokens: Sequence[int], draft: Draft, params: SamplingParams) -> Tensor:
    """What q must be, by one plain forward over everything."""
    logits = plain_chain(model, [*tokens, *draft.tokens])
    return probabilities(logits[len(tokens) - 1 : -1], params)


def tell(proposer: Proposer, draft: Draft, accepted: int) -> None:
    """Let the proposer observe that the beginning of its draft was accepted."""
    verdict = Verdict(tuple(range(accepted)), (*draft.tokens[:accepted], 0), rejected=accepted < len(draft))
    nothing = torch.empty(len(draft) + 1, VOCABULARY)
    proposer.observe(Verification(draft, nothing, root=0), verdict)


def test_q_is_what_it_drew_from_and_tokens_are_what_it_drew(draft_backend: TransformersBackend) -> None:
    source = RecordingSource(3)
    draft = proposer(draft_backend, SAMPLED, source).propose([5, 6, 7], 6)
    assert draft.is_chain
    assert list(draft.tokens) == source.drawn
    assert torch.equal(rows(draft), torch.stack(source.weights))


def test_q_is_the_law_of_the_draft_model_under_the_requests_settings(draft_backend: TransformersBackend) -> None:
    draft = proposer(draft_backend, SAMPLED).propose([5, 6, 7], 6)
    assert rows(draft).shape == (6, VOCABULARY)
    assert torch.allclose(rows(draft), expected_q(draft_backend.model, [5, 6, 7], draft, SAMPLED), atol=1e-4)


def test_greedy_drafts_are_the_argmax_and_point_masses(draft_backend: TransformersBackend) -> None:
    source = RecordingSource(0)
    draft = proposer(draft_backend, GREEDY, source).propose([5, 6, 7], 6)
    assert draft.q == (None,) * 6 and source.drawn == []
    assert list(draft.tokens) == expected_q(draft_backend.model, [5, 6, 7], draft, GREEDY).argmax(-1).tolist()


@pytest.mark.parametrize("prompt_length", [1, 2, 16, 17, 40])
def test_prompts_of_any_length_are_read_whole(draft_backend: TransformersBackend, prompt_length: int) -> None:
    prompt = [(7 * i) % VOCABULARY for i in range(prompt_length)]
    draft = proposer(draft_backend, SAMPLED).propose(prompt, 3)
    assert torch.allclose(rows(draft), expected_q(draft_backend.model, prompt, draft, SAMPLED), atol=1e-4)


def test_cache_equals_a_fresh_prefill_after_any_acceptance(draft_backend: TransformersBackend) -> None:
    dice = random.Random(0)
    drafting = proposer(draft_backend, SAMPLED)
    tokens = [1, 2, 3]
    for _ in range(60):
        draft = drafting.propose(tokens, dice.randint(0, 5))
        if len(draft):  # else nothing was proposed: the cache falls behind and must catch up later
            assert torch.allclose(rows(draft), expected_q(draft_backend.model, tokens, draft, SAMPLED), atol=1e-4)
        accepted = dice.randint(0, len(draft))
        tell(drafting, draft, accepted)
        tokens += [*draft.tokens[:accepted], dice.randrange(VOCABULARY)]
    assert len(tokens) > 120


@pytest.mark.parametrize("accepted", range(5))
def test_it_reads_no_token_twice(draft_backend: TransformersBackend, accepted: int) -> None:
    counting = CountingBackend(draft_backend)
    drafting = proposer(counting, SAMPLED)
    draft = drafting.propose([1, 2, 3], 4)
    tell(drafting, draft, accepted)
    counting.drafts.clear()
    drafting.propose([1, 2, 3, *draft.tokens[:accepted], 9], 1)
    # All it has not read: the new token, and the draft's last if that was accepted. (A query is a root and a chain.)
    assert [1 + len(chain) for chain in counting.drafts] == [2 if accepted == 4 else 1]


def test_forwards_are_counted(draft_backend: TransformersBackend) -> None:
    counting = CountingBackend(draft_backend)
    drafting = proposer(counting, SAMPLED)
    drafted = len(drafting.propose([1, 2, 3], 5))
    assert drafting.forwards == counting.forwards == drafted == 5


def test_drafting_ends_after_a_stop_token(draft_backend: TransformersBackend) -> None:
    drafted = proposer(draft_backend, GREEDY).propose([5, 6, 7], 6).tokens
    first = drafted.index(drafted[2])
    assert (
        proposer(draft_backend, GREEDY, stop_tokens=[drafted[2]]).propose([5, 6, 7], 6).tokens == drafted[: first + 1]
    )


def test_context_limit_of_the_draft_model_shortens_drafts_to_nothing() -> None:
    backend = CountingBackend(TransformersBackend(tiny_llama(seed=2, layers=1, context=12)))
    lengths = {length: len(proposer(backend, SAMPLED).propose(list(range(length)), 4)) for length in range(1, 16)}
    assert lengths == {length: max(0, min(4, 12 - length)) for length in lengths}
    backend.forwards = 0
    assert proposer(backend, SAMPLED).propose(list(range(12)), 4) == Draft()
    assert backend.forwards == 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_answer_goes_on_past_the_context_of_the_draft_model(
    target: TransformersBackend, params: SamplingParams
) -> None:
    short = DraftModel(TransformersBackend(tiny_llama(seed=2, layers=1, context=12)), VOCABULARY)
    completion = generate(
        Engine(target, short), [1, 2, 3], SamplingParams(max_tokens=40, temperature=params.temperature)
    )
    assert len(completion.ids) == 40
    assert 0 < completion.stats.drafted < 40


# Vocabularies


def test_ids_that_only_the_draft_model_has_are_never_drawn() -> None:
    larger = TransformersBackend(tiny_llama(seed=4, layers=1, vocabulary=VOCABULARY + 30))
    for params in (SAMPLED, GREEDY):
        draft = proposer(larger, params).propose([5, 6, 7], 20)
        assert max(draft.tokens) < VOCABULARY
        if not params.greedy:
            logits = plain_chain(larger.model, [5, 6, 7, *draft.tokens])[2:-1, :VOCABULARY]
            assert torch.allclose(rows(draft), probabilities(logits, params), atol=1e-4)


def test_ids_that_the_draft_model_lacks_get_no_mass() -> None:
    smaller = TransformersBackend(tiny_llama(seed=4, layers=1), vocab_size=40)
    draft = proposer(smaller, SAMPLED).propose(
        [5, 60, 7], 20
    )  # it can read them all the same: padding of its embedding
    assert max(draft.tokens) < 40
    q = rows(draft)
    assert q.shape == (20, VOCABULARY)
    assert (q[:, 40:] == 0).all()
    assert torch.allclose(q.sum(-1), torch.ones(20, dtype=torch.float64))


def test_drafting_ends_where_the_settings_leave_only_ids_that_the_draft_model_lacks() -> None:
    mask = torch.zeros(VOCABULARY, dtype=torch.bool)
    mask[50:] = True
    smaller = TransformersBackend(tiny_llama(seed=4, layers=1), vocab_size=40)
    drafter = DraftModel(smaller, VOCABULARY)
    law = SamplingLaw(SAMPLED, allowed=lambda tokens: mask if len(tokens) > 4 else None)
    drafting = drafter.proposer(law, TorchSource(torch.Generator().manual_seed(0)))
    draft = drafting.propose([5, 6, 7], 6)
    assert len(draft) == 2
    tell(drafting, draft, 2)
    assert drafting.propose([5, 6, 7, *draft.tokens, 50], 6) == Draft()


def test_a_fed_token_that_comes_back_as_the_correction_is_scored_again(draft_backend: TransformersBackend) -> None:
    drafting = proposer(draft_backend, SAMPLED)
    draft = drafting.propose([5, 6, 7], 3)
    nothing = torch.empty(0)
    verdict = Verdict((), draft.tokens[:1], rejected=True)  # of another drafter's draft, say
    drafting.observe(Verification(draft, nothing, root=7), verdict)
    tokens = [5, 6, 7, draft.tokens[0]]
    found = drafting.propose(tokens, 3)
    assert torch.allclose(rows(found), expected_q(draft_backend.model, tokens, found, SAMPLED), atol=1e-4)
