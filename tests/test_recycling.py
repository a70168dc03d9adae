"""Token recycling: the table holds what the target found likely, and drafts are its likeliest paths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from foredraft.backends.transformers import TransformersBackend
from foredraft.engine import Engine
from foredraft.errors import ModelError
from foredraft.proposers.base import Verification
from foredraft.proposers.recycling import WIDTH, Recycling, likeliest
from foredraft.randomness import TorchSource
from foredraft.sampling import SamplingLaw
from foredraft.types import Draft, SamplingParams, Verdict
from tiny import VOCABULARY, generate


def logits_that_rank(*rows: Sequence[int]) -> torch.Tensor:
    """Logits `[n, V]` whose largest entries are the given ids, in order."""
    logits = torch.zeros(len(rows), VOCABULARY)
    for row, ids in zip(logits, rows, strict=True):
        for rank, i in enumerate(ids):
            row[i] = 20.0 - rank
    return logits


def verified(table: Recycling, root: int, draft: Draft, logits: torch.Tensor, path: Sequence[int], last: int) -> None:
    proposer = table.proposer(SamplingLaw(SamplingParams()), TorchSource())
    tokens = (*(draft.tokens[node] for node in path), last)
    proposer.observe(Verification(draft, logits, root), Verdict(tuple(path), tokens, rejected=True))


def drafted(table: Recycling, root: int, budget: int) -> Draft:
    return table.proposer(SamplingLaw(SamplingParams()), TorchSource()).propose([1, root], budget)


def test_an_empty_table_drafts_nothing() -> None:
    assert len(drafted(Recycling(VOCABULARY), 5, 8)) == 0


def test_the_table_holds_the_targets_likeliest_tokens_of_rejected_nodes_too() -> None:
    table = Recycling(VOCABULARY)
    draft = Draft((7, 8), (-1, -1))
    verified(table, 5, draft, logits_that_rank([7, 9], [10, 11], [12, 13]), path=[0], last=10)
    assert table.candidates[5, :2].tolist() == [7, 9]
    assert table.candidates[7, :2].tolist() == [10, 11]
    assert table.candidates[8, :2].tolist() == [12, 13]
    assert table.candidates.shape == (VOCABULARY, WIDTH)


def test_where_a_token_stands_twice_the_accepted_row_is_kept() -> None:
    table = Recycling(VOCABULARY)
    draft = Draft((7, 8, 7), (-1, -1, 1))
    verified(table, 5, draft, logits_that_rank([7], [20], [7], [30]), path=[0], last=20)
    assert table.candidates[7, 0] == 20


def test_a_draft_is_the_likeliest_tree_that_the_table_spans() -> None:
    table = Recycling(VOCABULARY)
    verified(table, 5, Draft(), logits_that_rank([7, 8]), [], 7)
    verified(table, 7, Draft(), logits_that_rank([9]), [], 9)
    draft = drafted(table, 5, 3)
    assert draft.tokens[0] == 7 and draft.parents[0] == -1
    assert 9 in draft.tokens and draft.parents[draft.tokens.index(9)] == 0


def test_scores_are_probabilities_that_fall_along_a_path_and_the_budget_is_kept() -> None:
    table = Recycling(VOCABULARY)
    generator = torch.Generator().manual_seed(0)
    for token in range(VOCABULARY):
        verified(table, token, Draft(), torch.randn(1, VOCABULARY, generator=generator) * 3, [], token)
    for budget in (1, 5, 20, 64):
        draft = drafted(table, 3, budget)
        assert len(draft) == budget
        for score, parent in zip(draft.scores, draft.parents, strict=True):
            assert 0 <= score <= (draft.scores[parent] if parent >= 0 else 1.0)


def test_acceptance_rates_are_learned() -> None:
    table = Recycling(VOCABULARY)
    logits = logits_that_rank([7, 8])
    for _ in range(50):
        verified(table, 5, Draft(), logits, [], 8)  # the second candidate comes true, always
    draft = drafted(table, 5, 2)
    rates = dict(zip(draft.tokens, draft.scores, strict=True))
    assert rates[8] > 0.9 > 0.1 > rates[7]


def test_a_kept_table_is_taken_up_again(tmp_path: Path) -> None:
    table = Recycling(VOCABULARY)
    verified(table, 5, Draft(), logits_that_rank([7, 8]), [], 7)
    table.save(tmp_path)
    fresh = Recycling(VOCABULARY)
    fresh.load(tmp_path)
    assert torch.equal(fresh.candidates, table.candidates)
    assert drafted(fresh, 5, 4) == drafted(table, 5, 4)


def test_a_table_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    Recycling(VOCABULARY).save(tmp_path)
    with pytest.raises(ModelError, match="vocabulary is 64, not 65"):
        Recycling(VOCABULARY + 1).load(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "recycling.safetensors").write_bytes(b"not a table")
    with pytest.raises(ModelError, match=r"recycling\.safetensors"):
        Recycling(VOCABULARY).load(tmp_path)


def test_the_table_serves_later_requests(target: TransformersBackend) -> None:
    engine = Engine(target, Recycling.for_target(target))
    params = SamplingParams(max_tokens=60)
    first, second = (generate(engine, [1, 2, 3], params).stats for _ in range(2))
    assert second.target_forwards < first.target_forwards


@pytest.mark.parametrize("vocabulary", [5, 64, 2048, 2049, 5000])
def test_the_likeliest_are_those_of_the_whole_vocabulary(vocabulary: int) -> None:
    logits = torch.randn(7, vocabulary, generator=torch.Generator().manual_seed(0))
    ids, _ = likeliest(logits, 8)
    assert torch.equal(torch.from_numpy(ids).long(), logits.topk(min(8, vocabulary)).indices)


def test_of_equal_logits_the_first_come_first() -> None:
    ids, shares = likeliest(torch.zeros(1, 1000), 4)
    assert ids.tolist() == [[0, 1, 2, 3]]
    assert shares[0] == pytest.approx([1e-3] * 4, rel=0.05)


def test_half_precision_is_ranked_too() -> None:
    logits = logits_that_rank([7, 9, 2])
    assert likeliest(logits.to(torch.bfloat16), 3)[0].tolist() == [[7, 9, 2]]


def test_their_probabilities_are_nearly_right() -> None:
    logits = 3 * torch.randn(50, 40_000, generator=torch.Generator().manual_seed(0))
    _, found = likeliest(logits, 8)
    off = torch.from_numpy(found) / logits.softmax(-1).topk(8).values - 1
    assert off.abs().mean() < 0.15 and off.abs().max() < 0.5


def test_a_single_likely_token_has_nearly_all_probability() -> None:
    _, found = likeliest(logits_that_rank([3]), 2)
    assert found[0, 0] == pytest.approx(1, abs=0.01) and found[0, 1] < 0.01
