"""Hybrids: several drafts become one tree, the likeliest nodes stay, and it is known whose were accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.backends.transformers import TransformersBackend
from foredraft.engine import Engine
from foredraft.errors import InvalidInputError
from foredraft.estimates import Calibration
from foredraft.loading import parse_drafter
from foredraft.proposers.base import Proposer
from foredraft.proposers.hybrid import Hybrid, merge
from foredraft.proposers.ngram import NGram
from foredraft.proposers.recycling import Recycling
from foredraft.randomness import RandomSource
from foredraft.sampling import Law
from foredraft.tree import paths
from foredraft.types import Draft, SamplingParams
from tiny import DRAFTER_MAKERS, VOCABULARY, CountingBackend, Oracle, generate

PROMPT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    count = draw(st.integers(0, 8))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(count))
    return Draft(tuple(draw(st.integers(0, 3)) for _ in range(count)), parents)


@given(drafts(), drafts())
def test_a_merged_tree_has_every_path_once(a: Draft, b: Draft) -> None:
    merged = merge({"a": a, "b": b})
    whole = Draft(tuple(n.token for n in merged), tuple(n.parent for n in merged))
    assert sorted(paths(whole)) == sorted({*paths(a), *paths(b)})


def test_a_node_of_both_has_two_proposers() -> None:
    merged = merge({"a": Draft.chain([1, 2]), "b": Draft.chain([1, 3])})
    assert [node.who for node in merged] == ["a+b", "a", "b"]


def test_calibration_moves_from_the_raw_score_to_what_happened() -> None:
    calibration = Calibration()
    assert calibration("a", 0.5) == pytest.approx(0.5)
    for _ in range(200):
        calibration.note("a", 0.5, accepted=False)
    assert calibration("a", 0.5) < 0.05
    assert calibration("b", 0.5) == pytest.approx(0.5)


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
