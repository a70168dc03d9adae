"""Hybrids: several drafts become one tree, the likeliest nodes stay, and it is known whose were accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count

import pytest

from foredraft.backends.transformers import TransformersBackend
from foredraft.engine import Engine
from foredraft.errors import InvalidInputError
from foredraft.loading import parse_drafter
from foredraft.proposers.base import Proposer
from foredraft.proposers.hybrid import Hybrid
from foredraft.proposers.ngram import NGram
from foredraft.proposers.recycling import Recycling
from foredraft.randomness import RandomSource
from foredraft.sampling import Law
from foredraft.types import Draft, SamplingParams
from tiny import DRAFTER_MAKERS, VOCABULARY, CountingBackend, Oracle, generate

PROMPT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]


class EveryThirdRound(Oracle):
    """Drafts like an oracle in the first round of three, and nothing in the others."""

    def proposer(self, law: Law, source: RandomSource) -> Proposer:
        inner, rounds = super().proposer(law, source), count()

        class Sometimes(Proposer):
            def propose(self, tokens: Sequence[int], budget: int) -> Draft:
                return Draft() if next(rounds) % 3 else inner.propose(tokens, budget)

        return Sometimes()


def test_rounds_in_which_a_part_drafts_nothing_do_not_count_for_it(target: TransformersBackend) -> None:
    """Not even as a repetition of the round before: the tries of each are the nodes of its own that were verified."""
    params = SamplingParams(max_tokens=40)
    known = generate(Engine(target), PROMPT, params).ids
    often, backend = EveryThirdRound(PROMPT, [*known[:12], *PROMPT * 4]), CountingBackend(target)
    hybrid = Hybrid([often, NGram()])
    generate(Engine(backend, hybrid, draft_tokens=3), PROMPT, params)
    verified = Counter(who for draft in backend.drafts for who in draft.proposers)
    tries = {who: float(counts[1].sum()) for who, counts in hybrid.calibration.arrays().items()}
    assert tries == verified and "oracle" in verified
    assert [] in [list(draft.proposers) for draft in backend.drafts]  # there were rounds without any node
    assert {"ngram"} in [set(draft.proposers) for draft in backend.drafts]  # and rounds with the other part's alone


@pytest.mark.parametrize("budget", [1, 2, 5, 16])
def test_the_budget_is_kept_and_parents_come_first(target: TransformersBackend, budget: int) -> None:
    engine = Engine(target, Hybrid([NGram(), Recycling.for_target(target)]), draft_tokens=budget)
    completion = generate(engine, PROMPT, SamplingParams(max_tokens=60))
    assert completion.stats.drafted <= budget * completion.stats.target_forwards
    assert completion.stats.drafted > 0


def test_whose_tokens_were_accepted_is_recorded(target: TransformersBackend) -> None:
    known = generate(Engine(target), PROMPT, SamplingParams(max_tokens=40)).ids
    engine = Engine(target, Hybrid([Oracle(PROMPT, known), NGram()]), draft_tokens=4)
    stats = generate(engine, PROMPT, SamplingParams(max_tokens=40)).stats
    assert sum(stats.accepted_from.values()) == stats.accepted > 20
    assert any("oracle" in who for who in stats.accepted_from)


@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=60), SamplingParams(max_tokens=60, temperature=0.9, seed=4)]
)
@pytest.mark.parametrize(
    "parts",
    [
        ("ngram", "recycling"),
        ("draft", "ngram"),
        ("recycling", "lookahead", "draft"),
        ("suffix", "early_exit"),
        ("suffix", "eagle3"),
        ("medusa", "suffix", "recycling"),
        ("eagle", "mtp-cascaded"),
    ],
)
def test_output_equals_plain_decoding(
    target: TransformersBackend, parts: tuple[str, ...], params: SamplingParams
) -> None:
    hybrid = Hybrid([DRAFTER_MAKERS[part](target, 0.1) for part in parts])
    assert generate(Engine(target, hybrid), PROMPT, params).ids == generate(Engine(target), PROMPT, params).ids


def test_a_draft_model_in_a_hybrid_keeps_its_cache_right(target: TransformersBackend) -> None:
    alone = generate(Engine(target, DRAFTER_MAKERS["draft"](target, 0.0)), PROMPT, SamplingParams(max_tokens=60)).stats
    hybrid = Hybrid([NGram(), DRAFTER_MAKERS["draft"](target, 0.0)])
    joined = generate(Engine(target, hybrid, draft_tokens=8), PROMPT, SamplingParams(max_tokens=60)).stats
    assert alone.acceptance_rate == 1.0
    assert joined.mean_accepted_length >= alone.mean_accepted_length


def test_a_hybrid_is_written_with_plus() -> None:
    assert parse_drafter("hybrid:ngram+recycling") == ("hybrid", [("ngram", ""), ("recycling", "")])


@pytest.mark.parametrize("text", ["hybrid", "hybrid:", "hybrid:ngram", "hybrid:ngram+ngram", "hybrid:ngram+none"])
def test_a_hybrid_of_fewer_than_two_different_drafters_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError):
        parse_drafter(text)


def test_vocabulary_is_what_the_tests_think() -> None:
    assert max(PROMPT) < VOCABULARY
