"""The suffix tree counts what a search counts, drafts what a search drafts, forgets without a trace, and is kept."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from foredraft.backends.transformers import TransformersBackend
from foredraft.compiled import entry
from foredraft.engine import Engine
from foredraft.errors import InvalidInputError, ModelError
from foredraft.proposers.base import OFFER, Proposer
from foredraft.proposers.suffix import Suffix, SuffixSettings
from foredraft.proposers.suffix_kernels import Limits
from foredraft.proposers.suffix_tree import SuffixTree
from foredraft.randomness import TorchSource
from foredraft.sampling import SamplingLaw
from foredraft.types import Draft, SamplingParams
from tiny import VOCABULARY, generate

DEPTH = 6
Run = tuple[int, ...]
Node = tuple[int, int]

LOOSE = Limits(budget=8, factor=0.0, offset=64.0, floor=0.0, smoothing=1.0, chain=False)

texts = st.integers(1, 4).flatmap(lambda letters: st.lists(st.integers(0, letters - 1), min_size=1, max_size=30))
libraries = st.lists(texts, min_size=1, max_size=4)
limits = st.builds(
    Limits,
    budget=st.integers(1, 12),
    factor=st.sampled_from([0.0, 0.5, 1.0, 2.5]),
    offset=st.sampled_from([0.0, 1.0, 64.0]),
    floor=st.sampled_from([0.0, 0.05, 0.3]),
    smoothing=st.sampled_from([0.0, 1.0, 7.0]),
    chain=st.booleans(),
)


class Search:
    """What a suffix tree should know of some sequences, found by looking at all runs in them."""

    def __init__(self, sequences: Sequence[Sequence[int]], depth: int = DEPTH) -> None:
        self.depth = depth
        self.counts: Counter[Run] = Counter()
        self.newest: dict[Run, int] = {}
        read = 0
        for sequence in sequences:
            for end in range(1, len(sequence) + 1):
                for start in range(max(0, end - depth), end):
                    self.counts[tuple(sequence[start:end])] += 1
                    self.newest[tuple(sequence[start:end])] = read + end
            read += len(sequence)
        self.tokens = sorted({run[0] for run in self.counts})

    def after(self, run: Run, token: int) -> int:
        longer = (*run, token)
        return self.counts[longer]

    def followers(self, run: Run, chain: bool) -> list[tuple[int, int, int]]:
        """What followed a run, the most recent first: tokens, how often each, how often any."""
        found = [token for token in self.tokens if self.after(run, token)]
        found.sort(key=lambda token: self.newest.get((*run, token), 0), reverse=True)
        total = sum(self.after(run, token) for token in found)
        if chain and found:
            found = [max(found, key=lambda token: self.after(run, token))]
        return [(token, self.after(run, token), total) for token in found]

    def grow(self, run: Run, budget: int, limits: Limits) -> tuple[list[Node], list[float]]:
        nodes: list[Node] = []
        scores: list[float] = []
        open_ones: list[tuple[float, int, Run]] = []  # score, parent, the run down to the token

        def expand(above: float, number: int, run: Run) -> None:
            for token, seen, total in self.followers(run, limits.chain):
                score = above * (seen / (total + limits.smoothing / len(run)))
                if score >= limits.floor:
                    open_ones.append((score, number, (*run, token)))

        expand(1.0, -1, run)
        while open_ones and len(nodes) < budget:
            likeliest = max(open_ones, key=lambda candidate: candidate[0])  # of equals the first
            open_ones.remove(likeliest)
            score, parent, path = likeliest
            nodes.append((path[-1], parent))
            scores.append(score)
            expand(score, len(nodes) - 1, path)
        return nodes, scores

    def propose(self, tail: Sequence[int], limits: Limits) -> tuple[list[Node], list[float]]:
        best: tuple[list[Node], list[float]] = ([], [])
        for length in range(min(len(tail), self.depth - 1), 0, -1):
            budget = min(limits.budget, int(limits.factor * length + limits.offset))
            found = self.grow(tuple(tail[-length:]), budget, limits)
            if sum(found[1]) > sum(best[1]):
                best = found
        return best


def tree_of(sequences: Sequence[Sequence[int]], unfinished: Sequence[int] = (), depth: int = DEPTH) -> SuffixTree:
    tree = SuffixTree(depth)
    for sequence in sequences:
        assert tree.add(sequence)
    tree.extend(unfinished)
    return tree


def proposed(tree: SuffixTree, tail: Sequence[int], limits: Limits = LOOSE) -> tuple[list[Node], list[float]]:
    found = np.zeros(limits.budget, dtype=OFFER)
    count, total = tree.propose(np.array(tail, dtype=np.int32), limits, found, np.zeros(1 + limits.budget))
    nodes = found[:count].tolist()
    scores = [score for _, _, score in nodes]
    assert total == pytest.approx(sum(scores))
    return [(token, parent) for token, parent, _ in nodes], scores


def assert_equal(tree: SuffixTree, search: Search) -> None:
    """The same counts of all runs that occur, and of no others."""
    for run in [(), *search.counts]:
        for token in [*search.tokens, -7]:
            if len(run) < search.depth:
                assert tree.count((*run, token)) == search.after(run, token)


@given(sequences=libraries, unfinished=st.lists(texts, max_size=4))
def test_counts_equal_those_of_a_search_while_a_sequence_is_read(
    sequences: list[list[int]], unfinished: list[list[int]]
) -> None:
    tree, read = tree_of(sequences), list[int]()
    assert_equal(tree, Search(sequences))
    for piece in unfinished:
        tree.extend(piece)
        read += piece
        assert_equal(tree, Search([*sequences, read]))


@given(sequences=libraries, tail=texts, limits=limits)
def test_drafts_from_closed_sequences_equal_those_of_a_search(
    sequences: list[list[int]], tail: list[int], limits: Limits
) -> None:
    tail = tail[-DEPTH + 1 :]
    assert proposed(tree_of(sequences), tail, limits) == Search(sequences).propose(tail, limits)


@given(sequences=st.lists(texts, max_size=2), text=texts, limits=limits)
def test_drafts_from_the_text_itself_equal_those_of_a_search(
    sequences: list[list[int]], text: list[int], limits: Limits
) -> None:
    tree, search = tree_of(sequences, text), Search([*sequences, text])
    tail = text[-DEPTH + 1 :]
    assert proposed(tree, tail, limits) == search.propose(tail, limits)


@given(sequences=libraries, more=texts, forgotten=st.integers(1, 5), limits=limits)
def test_forgetting_the_oldest_equals_never_having_read_them(
    sequences: list[list[int]], more: list[int], forgotten: int, limits: Limits
) -> None:
    tree = tree_of(sequences)
    forgotten = min(forgotten, len(sequences))
    for _ in range(forgotten):
        tree.forget_oldest()
    tree.add(more)
    rest = [*sequences[forgotten:], more]
    fresh = tree_of(rest)
    assert_equal(tree, Search(rest))
    assert tree.nodes == fresh.nodes
    assert [s.tolist() for s in tree.sequences] == rest
    tail = more[-DEPTH + 1 :]
    assert proposed(tree, tail, limits) == proposed(fresh, tail, limits)


@given(pieces=st.lists(texts, min_size=1, max_size=6))
def test_reading_bit_by_bit_equals_reading_at_once(pieces: list[list[int]]) -> None:
    text = [token for piece in pieces for token in piece]
    tree = SuffixTree(DEPTH)
    for piece in pieces:
        tree.extend(piece)
    tree.close()
    at_once = tree_of([text])
    assert tree.nodes == at_once.nodes
    assert proposed(tree, text[-5:]) == proposed(at_once, text[-5:])


def random_text(length: int, letters: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, letters, length).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("depth", [2, 3, 64])
@pytest.mark.parametrize("letters", [1, 2, 300])
def test_long_texts_of_any_depth(depth: int, letters: int) -> None:
    text = random_text(900, letters, seed=depth)
    text += text[100:300]
    tree, search = tree_of([], text, depth), Search([text], depth)
    assert tree.nodes <= 2 * len(text)
    assert all(tree.count(run) == count for run, count in search.counts.items())
    assert proposed(tree, text[-depth // 2 :]) == search.propose(text[-depth // 2 :], LOOSE)


@pytest.mark.parametrize(
    ("text", "budget", "nodes"),
    [
        ([1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 2, [(4, -1), (3, -1)]),
        ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 3, [(3, -1), (4, -1), (8, 0)]),
        ([5, 6, 7, 8, 5, 6], 8, [(7, -1), (8, 0), (5, 1), (6, 2)]),
        ([1, 2, 3], 8, []),
    ],
    ids=[
        "of equals the most recent first",
        "what came more often first",
        "as far as the text goes",
        "nothing seen before, nothing drafted",
    ],
)
def test_drafts(text: list[int], budget: int, nodes: list[Node]) -> None:
    assert proposed(tree_of([], text, depth=64), text, LOOSE._replace(budget=budget))[0] == nodes


def test_memory_stays_within_its_bound_and_the_newest_are_kept() -> None:
    bound = 60_000
    tree = SuffixTree(16, most_bytes=bound)
    library = [random_text(100, 50, seed=i) for i in range(60)]
    for number, sequence in enumerate(library, start=1):
        assert tree.add(sequence)
        assert tree.nbytes <= bound
        kept = [s.tolist() for s in tree.sequences]
        assert kept == library[number - len(kept) : number]
    assert 3 <= len(kept) < len(library)
    assert tree.nodes == tree_of(kept, depth=16).nodes
    assert tree.nbytes > bound / 2


def test_the_same_answer_again_and_again_costs_its_text_alone() -> None:
    tree = SuffixTree(16, most_bytes=60_000)
    answer = random_text(100, 50, seed=0)
    for _ in range(50):
        tree.add(answer)
        assert tree.nbytes <= 60_000
    assert tree.nodes <= 2 * (len(answer) + 16)
    assert len(tree.sequences) > 5


def test_a_sequence_too_long_for_the_bound_is_left_out() -> None:
    tree = SuffixTree(16, most_bytes=60_000)
    tree.add([1, 2, 3])
    assert not tree.add(random_text(5_000, 50, seed=0))
    assert [s.tolist() for s in tree.sequences] == [[1, 2, 3]]


def test_a_hundred_thousand_tokens_take_less_than_the_promised_memory() -> None:
    tree = tree_of([], random_text(100_000, 30_000, seed=1), depth=64)
    assert tree.nbytes < 20e6


def suffix(**settings: Any) -> Suffix:
    return Suffix(VOCABULARY, SuffixSettings(**settings))


def proposer(drafter: Suffix) -> Proposer:
    return drafter.proposer(SamplingLaw(SamplingParams()), TorchSource())


def draft_of(drafter: Suffix, tokens: Sequence[int], budget: int = 8) -> Draft:
    return proposer(drafter).propose(tokens, budget)


def answered(drafter: Suffix, prompt: Sequence[int], answer: Sequence[int]) -> None:
    """Let a request run its course."""
    one = proposer(drafter)
    one.propose(prompt, 4)
    one.finish([*prompt, *answer])


@given(text=texts, budget=st.integers(0, 70), chain=st.booleans())
def test_drafts_keep_budget_order_and_law_of_probability(text: list[int], budget: int, chain: bool) -> None:
    draft = draft_of(suffix(global_bytes=0, chains_only=chain), text * 3, budget)
    assert len(draft) <= budget
    assert set(draft.q) <= {None}
    assert len(draft.scores) == len(draft)
    assert len(set(zip(draft.tokens, draft.parents, strict=True))) == len(draft)
    assert list(draft.scores) == sorted(draft.scores, reverse=True)
    for score, parent in zip(draft.scores, draft.parents, strict=True):
        assert 0 < score <= (draft.scores[parent] if parent >= 0 else 1.0)
    siblings: Counter[int] = Counter()
    for score, parent in zip(draft.scores, draft.parents, strict=True):
        siblings[parent] += score  # type: ignore[assignment]
    assert all(s <= (draft.scores[parent] if parent >= 0 else 1.0) + 1e-12 for parent, s in siblings.items())
    assert draft.is_chain or not chain


@given(pieces=st.lists(texts, min_size=1, max_size=6))
def test_a_proposer_that_saw_every_round_drafts_as_one_that_saw_all_at_once(pieces: list[list[int]]) -> None:
    drafter = suffix()
    answered(drafter, [1, 2], [3, 0, 1, 2, 0])
    growing, tokens = proposer(drafter), list[int]()
    for piece in pieces:
        tokens += piece
        assert growing.propose(tokens, 8) == draft_of(drafter, tokens, 8)


def test_sequences_do_not_share_what_they_read_before_it_is_an_answer() -> None:
    drafter = suffix()
    first = proposer(drafter)
    assert len(first.propose([1, 2, 3, 4, 5, 1, 2], 8)) > 0
    assert len(draft_of(drafter, [6, 1, 2])) == 0
    first.finish([1, 2, 3, 4, 5, 1, 2, 3])
    assert draft_of(drafter, [6, 1, 2]).tokens[0] == 3


def test_an_earlier_answer_is_drafted_from_its_first_token_on() -> None:
    drafter = suffix()
    prompt, answer = list(range(20)), [20, 21, 22, 23]
    answered(drafter, prompt, answer)
    assert draft_of(drafter, prompt).tokens == (20, 21, 22, 23)
    assert draft_of(drafter, [*prompt, 20, 21]).tokens == (22, 23)


def test_without_a_global_tree_nothing_is_kept() -> None:
    drafter = suffix(global_bytes=0)
    answered(drafter, [10, 11, 12], [20, 21, 22, 23])
    assert len(draft_of(drafter, [10, 11, 12])) == 0
    assert drafter.global_tree.sequences == []


def test_a_request_that_never_drafted_or_said_nothing_is_not_kept() -> None:
    drafter = suffix()
    proposer(drafter).finish([1, 2, 3])
    answered(drafter, [1, 2, 3], [])
    assert drafter.global_tree.sequences == []


def test_the_text_itself_wins_where_it_promises_more() -> None:
    drafter = suffix()
    answered(drafter, [1, 2], [30, 31])
    text = [1, 2, 40, 41, 1, 2, 40, 41, 1, 2]
    assert draft_of(drafter, text).tokens[0] == 40


def test_of_a_long_prompt_only_the_end_is_kept_with_the_answer() -> None:
    drafter = suffix(max_depth=8)
    answered(drafter, list(range(20)), [30, 31])
    assert [s.tolist() for s in drafter.global_tree.sequences] == [[16, 17, 18, 19, 30, 31]]


def test_depth_bounds_match_and_draft() -> None:
    period = list(range(40))
    assert len(draft_of(suffix(max_depth=4, floor=0.0), period * 2, 64)) == 2
    assert len(draft_of(suffix(max_depth=64, floor=0.0), period * 2, 64)) > 30


def test_a_kept_global_tree_is_taken_up_again(tmp_path: Path) -> None:
    drafter = suffix()
    for seed in range(5):
        answered(drafter, random_text(40, VOCABULARY, seed), random_text(30, 4, seed))
    drafter.save(tmp_path / "new folder")
    fresh = suffix()
    fresh.load(tmp_path / "new folder")
    assert [s.tolist() for s in fresh.global_tree.sequences] == [s.tolist() for s in drafter.global_tree.sequences]
    assert draft_of(fresh, [0, 1, 2, 3, 1]) == draft_of(drafter, [0, 1, 2, 3, 1]) != Draft()
    fresh.load(tmp_path / "new folder")
    assert len(fresh.global_tree.sequences) == 10


def test_an_empty_global_tree_is_kept_too_and_no_file_is_nothing(tmp_path: Path) -> None:
    drafter = suffix()
    drafter.load(tmp_path)
    drafter.save(tmp_path)
    drafter.load(tmp_path)
    assert drafter.global_tree.sequences == []


def test_a_smaller_bound_takes_up_the_newest(tmp_path: Path) -> None:
    drafter = suffix()
    library = [random_text(4_000, VOCABULARY, seed) for seed in range(12)]
    for answer in library:
        drafter.global_tree.add(answer)
    drafter.save(tmp_path)
    small = suffix(global_bytes=2**20)
    small.load(tmp_path)
    kept = [s.tolist() for s in small.global_tree.sequences]
    assert 1 <= len(kept) < 12
    assert kept == library[-len(kept) :]


def rewritten(change: Callable[[dict[str, torch.Tensor], dict[str, str]], object]) -> Callable[[Path], None]:
    def apply(file: Path) -> None:
        arrays = load_file(file)
        about = {"foredraft": "suffix", "version": "1", "vocabulary": str(VOCABULARY)}
        change(arrays, about)
        save_file(arrays, file, metadata=about)

    return apply


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: file.write_bytes(b"something else, of some length"), "Cannot read"),
        (lambda file: file.write_bytes(file.read_bytes()[:-5]), "Cannot read"),
        (lambda file: file.write_bytes(file.read_bytes()[:6]), "Cannot read"),
        (lambda file: file.write_bytes(b""), "Cannot read"),
        (rewritten(lambda arrays, about: about.update(version="2")), "version is 2, not 1"),
        (rewritten(lambda arrays, about: about.update(foredraft="recycling")), "foredraft is recycling, not suffix"),
        (rewritten(lambda arrays, about: about.update(vocabulary="65")), "vocabulary is 65, not 64"),
        (rewritten(lambda arrays, about: about.clear()), "does not fit"),
        (rewritten(lambda arrays, about: arrays["lengths"].add_(1)), "is damaged"),
        (rewritten(lambda arrays, about: arrays["lengths"].neg_()), "is damaged"),
        (rewritten(lambda arrays, about: arrays["tokens"].add_(VOCABULARY)), "is damaged"),
        (rewritten(lambda arrays, about: arrays["tokens"].sub_(VOCABULARY)), "is damaged"),
        (rewritten(lambda arrays, about: arrays.update(tokens=arrays["tokens"].float())), "is damaged"),
        (rewritten(lambda arrays, about: arrays.update(tokens=arrays["tokens"][None])), "is damaged"),
        (rewritten(lambda arrays, about: arrays.pop("tokens")), "is damaged"),
    ],
)
def test_a_bad_file_is_named_and_changes_nothing(tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    drafter = suffix()
    answered(drafter, [1, 2, 3], [4, 5])
    drafter.save(tmp_path)
    spoil(tmp_path / "suffix.safetensors")
    fresh = suffix()
    with pytest.raises(ModelError, match=message) as error:
        fresh.load(tmp_path)
    assert "suffix.safetensors" in str(error.value)
    assert fresh.global_tree.sequences == []


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = suffix()
    answered(drafter, [1, 2, 3], [4, 5])
    drafter.save(tmp_path)
    answered(drafter, [1, 2, 3], [6, 7])

    def fail(arrays: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("foredraft.proposers.files.save_file", fail)
    with pytest.raises(ModelError, match="No space left"):
        drafter.save(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["suffix.safetensors"]
    fresh = suffix()
    fresh.load(tmp_path)
    assert [s.tolist() for s in fresh.global_tree.sequences] == [[1, 2, 3, 4, 5]]
    assert len(drafter.global_tree.sequences) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_depth", 1),
        ("max_depth", 2.0),
        ("max_depth", 1025),
        ("factor", -1.0),
        ("factor", float("nan")),
        ("offset", float("inf")),
        ("floor", 1.5),
        ("floor", True),
        ("smoothing", -0.1),
        ("global_smoothing", "1"),
        ("global_bytes", 1000),
        ("global_bytes", -1),
        ("global_bytes", None),
        ("chains_only", 1),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidInputError, match=f"^{name} is .* but must be"):
        SuffixSettings(**{name: value})  # type: ignore[arg-type]


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(TypeError):
        SuffixSettings(depth=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_output_equals_plain_decoding(target: TransformersBackend, temperature: float, chain: bool) -> None:
    drafter = suffix(chains_only=chain)
    assert drafter.trees is not chain
    fast, plain = Engine(target, drafter, draft_tokens=12), Engine(target)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8] * 2
    params = SamplingParams(max_tokens=48, temperature=temperature, seed=5, top_k=4)
    expected = generate(plain, prompt, params)
    first, second = (generate(fast, prompt, params) for _ in range(2))
    assert first.ids == second.ids == expected.ids
    assert second.stats.target_forwards < first.stats.target_forwards
    assert second.stats.mean_accepted_length > 3


def test_compiled_code_that_cannot_be_kept_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    exec("def double(x): return 2 * x", found)  # has no file, so numba finds no folder for it
    assert entry(found["double"])(21) == 42

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def triple(x: int) -> int:
        return 3 * x

    monkeypatch.setattr("numba.core.caching.FunctionCache.save_overload", fail)
    assert entry(triple)(14) == 42


def test_numba_is_loaded_for_those_alone_who_draft_by_suffixes() -> None:
    code = "import sys, foredraft.api; assert 'numba' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_settings_may_stand_in_the_name() -> None:
    settings = SuffixSettings(max_depth=24, floor=0.1, chains_only=True, global_bytes=0)
    assert SuffixSettings.parse(str(settings)) == settings and SuffixSettings.parse("") == SuffixSettings()
    assert str(settings) == "max_depth=24/floor=0.1/global_bytes=0/chains_only=true"


@pytest.mark.parametrize("text", ["depth=3", "floor", "floor=x", "floor=2", "chains_only=1"])
def test_wrong_settings_in_the_name_are_refused(text: str) -> None:
    with pytest.raises(InvalidInputError):
        SuffixSettings.parse(text)
