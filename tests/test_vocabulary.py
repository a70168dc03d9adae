"""Drafting across tokenizers: which ids mean the same, how the draft model reads the text, and that the law stays."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import foredraft
from foredraft.acceptance import RULES
from foredraft.backends.base import Backend, Capabilities, KVCache, Query
from foredraft.backends.transformers import TransformersBackend
from foredraft.engine import Engine
from foredraft.errors import ModelError, UnsupportedError
from foredraft.generation import Request
from foredraft.proof.enumeration import Propose, ToyModel, ancestral_law, joint_law, total_variation
from foredraft.proof.toys import toy_model
from foredraft.proposers.base import Verification
from foredraft.proposers.draft_model import DraftModel, DraftModelProposer, TranslatingProposer
from foredraft.proposers.translation import Codec, Reading, Translation, translation_between, vocabulary_of
from foredraft.proposers.vocabulary import Meaning, Vocabulary, VocabularyMap, first_difference, match
from foredraft.randomness import RandomSource, TorchSource
from foredraft.sampling import SamplingLaw
from foredraft.tree import depths
from foredraft.types import Draft, SamplingParams, Verdict
from tiny import CountingBackend, complete, generate, perturbed, plain_chain, tiny_llama, tiny_tokenizer

_FAST: Any = PreTrainedTokenizerFast  # its constructor has no type hints
SAMPLED = SamplingParams(temperature=0.8, top_k=20, top_p=0.95, repetition_penalty=1.3, frequency_penalty=0.2)
GREEDY = SamplingParams()
TEXT = "hello the ten there  in\n\tthe Hell, thee: the inn; é → 😀😁 ends"


def byte_tokenizer(merges: Sequence[str], specials: Sequence[str] = ("</s>",), *, letters: str = "") -> Any:
    """Byte-level BPE: all bytes, or `letters` alone, in an order of its own; the first of the specials ends a text."""
    tokens = list(letters) or sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    pairs = [(first, second) for first, second in (merge.split() for merge in merges)]
    tokens += ["".join(parts) for parts in pairs]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return _FAST(tokenizer_object=bpe, eos_token=specials[0], additional_special_tokens=list(specials[1:]))


def piece_tokenizer(pieces: Sequence[str] = (), *, begins: bool = False) -> Any:
    """BPE as SentencePiece's: ▁ for spaces, one of them before every text, tokens such as <0x41> for unknown bytes."""
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "n"), ("▁", "in"), ("l", "l"), ("Ã", "©"), ("▁", "▁")]
    letters = "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ,.;:é\ufffdÃ©Ġ→"
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁te", "te", "lo", "er"]
    tokens += ["".join(pair) for pair in merges] + list(pieces)
    bpe = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)}, merges=merges, unk_token="<unk>", byte_fallback=True
    )
    made = Tokenizer(bpe)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    other = _FAST(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>", add_bos_token=begins)
    if begins:
        assert other.encode("") == [1]
    return other


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "bytes": tiny_tokenizer,
    "other bytes": lambda: byte_tokenizer(["Ġ i", "Ġi n", "t e", "Ġ te", "l o", "ð Ł"], ["</s>", "<|im_start|>"]),
    "pieces": piece_tokenizer,
}
PAIRS = [(a, b) for a in TOKENIZERS for b in TOKENIZERS if a != b]
made = cache(lambda name: TOKENIZERS[name]())


def vocabulary(tokenizer: Any, size: int = 10**6) -> Vocabulary:
    return vocabulary_of(tokenizer, Codec(tokenizer), size)


def translation(target: Any, draft: Any) -> Translation:
    sizes = len(target), len(draft)
    found = translation_between(target, draft, sizes, len(draft))
    assert found is not None
    return found


@cache
def pair(target: str, draft: str) -> Translation:
    return translation(made(target), made(draft))


def spelled(target: Any, draft: Any) -> dict[str, str]:
    """The map between two tokenizers in the tokens' own spellings."""
    shared = match(vocabulary(target), vocabulary(draft))
    return {target.convert_ids_to_tokens(t): draft.convert_ids_to_tokens(d) for t, d in shared.target_to_draft.items()}


# The map


def worded(words: Mapping[int, str], special: Sequence[int] = (), eos: int | None = None) -> Vocabulary:
    """A vocabulary in which every ordinary token is spelled as it reads."""
    meanings: dict[int, Meaning] = {i: (word, "") for i, word in words.items() if i not in special}
    return Vocabulary(words, meanings, frozenset(special), eos)


def test_ids_are_mapped_by_what_they_mean() -> None:
    shared = match(worded({0: "a", 1: "b", 2: "c"}), worded({7: "c", 8: "a", 9: "d"}))
    assert shared == VocabularyMap({0: 8, 2: 7}, {8: 0, 7: 2}, 2 / 3)


@pytest.mark.parametrize("target_repeats", [False, True])
@pytest.mark.parametrize("draft_repeats", [False, True])
def test_of_several_ids_with_one_meaning_the_first_alone_is_mapped(target_repeats: bool, draft_repeats: bool) -> None:
    target = worded({5: "a", 1: "a" if target_repeats else "b"})
    draft = worded({3: "a", 2: "a" if draft_repeats else "c"})
    shared = match(target, draft)
    assert shared.target_to_draft == {5: 3}
    assert shared.draft_to_target == {3: 5}


def test_special_tokens_are_mapped_only_if_they_are_special_to_both() -> None:
    target = worded({0: "<x>", 1: "<y>", 2: "<z>", 3: "</s>"}, special=[0, 1, 3])
    draft = worded({4: "<x>", 5: "<y>", 6: "<z>", 7: "</s>"}, special=[4, 6])
    assert match(target, draft).target_to_draft == {0: 4}


@pytest.mark.parametrize(
    ("target", "draft", "expected"),
    [
        (worded({0: "</s>"}, [0], eos=0), worded({5: "<end>"}, [5], eos=5), {0: 5}),
        (worded({0: "</s>"}, [0], eos=0), worded({5: "<end>"}, [5]), {}),
        (worded({0: "</s>"}, [0]), worded({5: "<end>"}, [5], eos=5), {}),
        (worded({0: "</s>", 1: "<end>"}, [0, 1], eos=0), worded({5: "<end>"}, [5], eos=5), {1: 5}),
        (worded({0: "</s>"}, [0], eos=0), worded({5: "<end>", 6: "</s>"}, [5, 6], eos=5), {0: 6}),
    ],
)
def test_the_ends_of_text_are_mapped_unless_their_spelling_says_otherwise(
    target: Vocabulary, draft: Vocabulary, expected: dict[int, int]
) -> None:
    assert match(target, draft).target_to_draft == expected


def test_overlap_counts_the_smaller_vocabulary() -> None:
    large, small = worded({i: str(i) for i in range(100)}), worded({i: str(2 * i) for i in range(60)})
    assert match(large, small).overlap == match(small, large).overlap == 50 / 60
    assert match(large, worded({})).overlap == 0


def test_vocabularies_that_agree_where_both_have_a_token_need_no_map() -> None:
    for draft, rows in [({"a": 0, "b": 1}, 2), ({"a": 0, "b": 1, "more": 2}, 3), ({"a": 0}, 2), ({"a": 0, "b": 1}, 64)]:
        assert first_difference({"a": 0, "b": 1}, draft, rows) is None


def test_the_first_id_that_differs_is_named() -> None:
    named = first_difference({"c": 2, "b": 1, "a": 0}, {"a": 0, "x": 1, "y": 2}, 3)
    assert named == "id 1 is 'b' to the target and 'x' to the draft model"
    named = first_difference({"a": 0, "b": 1}, {"a": 0}, 1)
    assert named == "the draft model reads ids below 1, and id 1 is 'b' to the target"


# What the ids of real kinds of tokenizers mean


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_mapped_ids_say_the_same_in_any_text(target: str, draft: str) -> None:
    mine, other = Codec(made(target)), Codec(made(draft))
    shared = pair(target, draft).shared
    ordinary = [(t, d) for t, d in shared.target_to_draft.items() if t not in mine.special]
    assert len(ordinary) > 100
    assert not {d for _, d in ordinary} & other.special
    for t, d in ordinary:
        text = mine.text([t])
        if "\ufffd" not in text or draft == "pieces" or target == "pieces":
            assert text == other.text([d])
        else:  # a part of a character, shared by two tokenizers that spell in bytes
            assert made(target).convert_ids_to_tokens(t) == made(draft).convert_ids_to_tokens(d)


def test_the_same_text_is_found_in_other_spellings() -> None:
    shared = spelled(made("bytes"), made("pieces"))
    assert {"Ġthe": "▁the", "Ġ": "▁", "Ċ": "<0x0A>", "he": "he", "B": "B"}.items() <= shared.items()
    assert "ð" not in shared  # a part of a character
    assert "Ã" not in shared  # another one, which is a letter in pieces
    assert spelled(made("bytes"), made("other bytes"))["ðŁ"] == "ðŁ"


def test_the_same_spelling_of_other_text_is_not_mapped() -> None:
    letters = byte_tokenizer(["Ã ©"])
    assert spelled(letters, made("pieces"))["Ã©"] == "é"  # the two bytes of é, where pieces have "Ã©" too
    assert spelled(piece_tokenizer(["Ġt"]), made("bytes")).get("Ġt") is None


def test_bytes_that_are_letters_too_stay_out() -> None:
    back = spelled(made("pieces"), made("bytes"))
    assert back["A"] == "A" and "<0x41>" not in back
    assert back["<0x21>"] == "!"  # no shorter one


def test_a_token_that_was_added_comes_before_one_of_the_same_text() -> None:
    added = byte_tokenizer(["t e"])
    added.add_tokens(["te"])  # an id of its own? The same string has one
    added.add_tokens(["\t"])
    shared = match(vocabulary(made("bytes")), vocabulary(added))
    tab = made("bytes").convert_tokens_to_ids("ĉ")
    assert shared.target_to_draft[tab] == added.convert_tokens_to_ids("\t") != added.convert_tokens_to_ids("ĉ")


def test_special_tokens_of_real_tokenizers() -> None:
    shared = spelled(made("bytes"), made("other bytes"))
    assert shared["<|im_start|>"] == "<|im_start|>"
    assert shared["<|im_end|>"] == "</s>"  # the ends
    plain = byte_tokenizer([], ["<end>"])
    plain.add_tokens(["<|im_start|>"])  # as a word
    assert "<|im_start|>" not in spelled(made("bytes"), plain)
    assert "<|im_start|>" not in spelled(plain, made("bytes"))


def test_ids_without_rows_are_not_mapped() -> None:
    target, draft = made("bytes"), made("other bytes")
    assert max(vocabulary(target, 100).tokens) == 99
    small = translation_between(target, draft, (200, 220), 220)
    assert small is not None
    assert max(small.shared.target_to_draft) < 200 and max(small.shared.draft_to_target) < 220
    assert small.logits(torch.zeros(1, 220)).shape == (1, 200)


def test_a_tokenizer_without_words_shares_nothing() -> None:
    assert vocabulary(byte_tokenizer([], letters="0123456789")).meanings == {}


def test_logits_outside_the_intersection_are_minus_infinity() -> None:
    between = pair("bytes", "pieces")
    logits = torch.randn(2, len(made("pieces")))
    mapped = between.logits(logits)
    assert mapped.shape == (2, len(made("bytes")))
    for t in range(mapped.shape[1]):
        d = between.shared.target_to_draft.get(t)
        assert torch.equal(mapped[:, t], logits[:, d] if d is not None else torch.full((2,), -torch.inf))


# How the draft model reads


def read(target: str, draft: str, ids: Sequence[int]) -> list[int]:
    return Reading(pair(target, draft)).extend(ids)


def test_tokens_that_both_have_are_read_one_for_one() -> None:
    ids = made("bytes").encode("the heel in the inner heel")
    own = read("bytes", "pieces", ids)
    between = pair("bytes", "pieces").shared.target_to_draft
    assert own == [between[i] for i in ids]
    assert " ".join(made("pieces").convert_ids_to_tokens(own)).startswith("t he ▁ he e l ▁ in ▁the")


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_whatever_is_written_is_read_as_the_same_text(target: str, draft: str) -> None:
    ids = made(target).encode(TEXT, add_special_tokens=False)
    assert any(i not in pair(target, draft).shared.target_to_draft for i in ids)
    own = read(target, draft, ids)
    assert made(draft).decode(own).lstrip() == TEXT
    assert not set(own) & set(made(draft).all_special_ids)


def test_spaces_in_a_row_stay_together() -> None:
    own = read("bytes", "pieces", made("bytes").encode("the→  →"))
    assert made("pieces").convert_ids_to_tokens(own)[-3:] == ["→", "▁▁", "→"]


def test_tokens_that_the_draft_model_has_no_rows_for_are_left_out() -> None:
    draft = piece_tokenizer()
    draft.add_tokens(["hell"])
    between = translation_between(made("bytes"), draft, (len(made("bytes")), len(draft) - 1), len(draft) - 1)
    assert between is not None
    own = Reading(between).extend(made("bytes").encode("in hell the"))
    assert draft.decode(own).split() == ["in", "the"]


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_reading_on_is_reading_from_the_start(target: str, draft: str) -> None:
    dice = random.Random(0)
    for _ in range(20):
        # What models say is not what tokenizers encode.
        ids = [dice.randrange(len(made(target))) for _ in range(10)]
        ids += made(target).encode(TEXT, add_special_tokens=False)
        reading, end = Reading(pair(target, draft)), 0
        while end < len(ids):
            end = min(len(ids), end + dice.randint(1, 6))
            before = list(reading.settled)
            own = reading.extend(ids[:end])
            assert own == read(target, draft, ids[:end])
            assert reading.settled[: len(before)] == before  # what is settled does not change
            assert not own or own[: len(reading.settled)] == reading.settled


def test_within_a_character_that_it_cannot_spell_it_waits() -> None:
    ids = made("bytes").encode("in 😀")
    lengths = [len(read("bytes", "pieces", ids[:end])) for end in range(1, len(ids) + 1)]
    assert [length > 0 for length in lengths] == [True, True, False, False, True]  # ðŁ is one token
    assert read("bytes", "other bytes", ids[:-1]) != []  # it has the same parts


def test_endless_broken_characters_are_read_in_the_end() -> None:
    broken = made("bytes").convert_tokens_to_ids("ð")
    reading = Reading(pair("bytes", "pieces"))
    for count in range(1, 150):
        reading.extend([broken] * count)
    assert len(reading.settled) > 0


@pytest.mark.parametrize("text", ["→" * 300, "x→" * 200, "→ the" * 100])
def test_a_long_text_is_read_in_short_pieces(text: str) -> None:
    """The work for a token does not grow with the text, with spaces and without."""
    ids = made("other bytes").encode(text)
    between = pair("other bytes", "pieces")
    lengths: list[int] = []
    between_read = between.read

    class Watched(Translation):
        def __init__(self) -> None:
            self.__dict__.update(between.__dict__)

        def read(self, piece: Sequence[int], *, closed: bool) -> list[int] | None:
            lengths.append(len(piece))
            return between_read(piece, closed=closed)

    reading = Reading(Watched())
    for end in range(1, len(ids) + 1):
        reading.extend(ids[:end])
    assert max(lengths) <= 64
    assert made("pieces").decode(reading.extend(ids)) == text


def test_text_that_looks_like_a_special_token_stays_text() -> None:
    target = byte_tokenizer(["< /", "</ s"], ["<end>"])
    ids = target.encode("the </s> in")
    assert "</" in target.convert_ids_to_tokens(ids)
    own = Reading(translation(target, made("other bytes"))).extend(ids)
    assert made("other bytes").eos_token_id not in own
    assert made("other bytes").decode(own) == "the </s> in"


def test_special_tokens_that_it_does_not_have_are_read_as_text() -> None:
    ids = made("bytes").encode("<|im_start|>the<|im_end|>the")
    assert made("bytes").eos_token_id in ids
    own = read("bytes", "pieces", ids)
    assert made("pieces").decode(own) == "<|im_start|>the</s>the"
    assert made("pieces").eos_token_id in own  # the ends of text are mapped


def test_the_draft_model_gets_the_beginning_that_it_knows() -> None:
    draft = piece_tokenizer(begins=True)
    the = made("bytes").encode(" the")
    assert Reading(translation(made("bytes"), draft)).extend(the) == [1, *read("bytes", "pieces", the)]
    begun = byte_tokenizer(["h e"], ["</s>", "<begin>"])
    begun.bos_token = "<begin>"
    ids = begun.encode("<begin>he")
    assert Reading(translation(begun, draft)).extend(ids) == [1, draft.convert_tokens_to_ids("he")]
    alike = piece_tokenizer(["more"], begins=True)
    assert Reading(translation(alike, piece_tokenizer(begins=True))).extend(alike.encode("the")) == draft.encode("the")


# What it drafts


def draft_like(model: Any, between: Translation, size: int, noise: float = 0.05, layers: int = 2) -> Any:
    """A model of the other vocabulary that is often right about the mapped tokens: the target's rows in its order."""
    own = tiny_llama(seed=9, layers=layers, vocabulary=size)
    near = perturbed(model, noise)
    own.model.layers, own.model.norm = near.model.layers, near.model.norm
    shared = between.shared.target_to_draft
    with torch.no_grad():
        own.lm_head.weight *= 0.3  # tokens of its own are unlikely
        for rows, theirs in ((own.model.embed_tokens, near.model.embed_tokens), (own.lm_head, near.lm_head)):
            rows.weight[list(shared.values())] = theirs.weight[list(shared)]
    return own


@cache
def target_model(name: str) -> Any:
    """It says more whole characters than broken ones."""
    model = tiny_llama(seed=3, vocabulary=len(made(name)))
    broken = [i for i, (_, part) in vocabulary(made(name)).meanings.items() if part]
    with torch.no_grad():
        model.lm_head.weight[broken] *= 0.3
    return model


@cache
def draft_model(target: str, draft: str) -> Any:
    return draft_like(target_model(target), pair(target, draft), len(made(draft)))


def proposer(backend: Backend, between: Translation, size: int, law: SamplingLaw) -> TranslatingProposer:
    found = DraftModel(backend, size, (), between).proposer(law, TorchSource(torch.Generator().manual_seed(0)))
    assert isinstance(found, TranslatingProposer)
    return found


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_q_is_the_restricted_law_whatever_was_accepted(target: str, draft: str) -> None:
    """Against one plain forward over the text so far, in rounds with random acceptances and random tokens between."""
    dice, between, model = random.Random(0), pair(target, draft), draft_model(target, draft)
    size = len(made(target))
    law = SamplingLaw(SAMPLED, prompt_length=4)
    drafting = proposer(TransformersBackend(model), between, size, law)
    tokens = made(target).encode("the hell", add_special_tokens=False)
    drafts = 0
    for _ in range(40):
        found = drafting.propose(tokens, dice.randint(1, 4))
        drafts += len(found) > 0
        for node, x in enumerate(found.tokens):
            own = read(target, draft, tokens) + [between.shared.target_to_draft[y] for y in found.tokens[:node]]
            logits = between.logits(plain_chain(model, own)[-1:])
            expected = law([*tokens, *found.tokens[:node]], Draft(), logits)[0]
            q = found.q[node]
            assert q is not None and q[x] > 0
            assert torch.allclose(q, expected, atol=1e-4)
            assert set(q.nonzero()[:, 0].tolist()) <= set(between.shared.target_to_draft)
        accepted = dice.randint(0, len(found))
        nothing = torch.empty(0)
        verdict = Verdict(tuple(range(accepted)), (*found.tokens[:accepted], 0), rejected=accepted < len(found))
        drafting.observe(Verification(found, nothing, tokens[-1]), verdict)
        tokens += [*found.tokens[:accepted], dice.randrange(size)]
    assert drafts > 12


def test_it_feeds_only_what_is_new() -> None:
    backend = CountingBackend(TransformersBackend(draft_model("bytes", "pieces")))
    between, size = pair("bytes", "pieces"), len(made("bytes"))
    drafting = proposer(backend, between, size, SamplingLaw(GREEDY))
    tokens = made("bytes").encode("the inner heel")
    draft = drafting.propose(tokens, 4)
    assert len(draft) == 4
    for accepted in (2, 4):
        backend.drafts.clear()
        found = drafting.propose([*tokens, *draft.tokens[:accepted], made("bytes").encode("e")[0]], 1)
        assert len(found) == 1
        assert [1 + len(chain) for chain in backend.drafts] == [2 if accepted == 4 else 1]


def test_a_word_that_is_tokenised_otherwise_in_the_end_is_rolled_back() -> None:
    target = byte_tokenizer(["x y"])  # xy is not in the draft model's vocabulary
    draft = byte_tokenizer(["i n", "in x"], ["<end>"])  # but inx is
    between = translation(target, draft)
    model = tiny_llama(seed=5, layers=1, vocabulary=len(draft))
    backend = CountingBackend(TransformersBackend(model))
    drafting = proposer(backend, between, len(target), SamplingLaw(SAMPLED))
    i, n, xy = target.convert_tokens_to_ids(["i", "n", "xy"])
    assert len(drafting.propose([i, n], 1)) == 1
    found = drafting.propose([i, n, xy], 1).q[0]
    own = draft.convert_tokens_to_ids(["inx", "y"])
    assert found is not None
    logits = between.logits(plain_chain(model, own)[-1:])
    assert torch.allclose(found, SamplingLaw(SAMPLED)([i, n, xy], Draft(), logits)[0], atol=1e-4)


def test_what_was_drafted_and_comes_as_another_token_is_scored_from_the_cache() -> None:
    target = byte_tokenizer(["x y"])
    between, count = translation(target, made("other bytes")), len(made("other bytes"))
    i, n, x, y, xy = target.convert_tokens_to_ids(["i", "n", "x", "y", "xy"])
    following = {n: x, x: y, y: i, i: n}

    def logits(tokens: tuple[int, ...]) -> Tensor:
        row = torch.zeros(count)
        row[between.shared.target_to_draft[following[between.shared.draft_to_target[tokens[-1]]]]] = 1.0
        return row

    backend = CountingBackend(FixedBackend(count, logits))
    drafting = proposer(backend, between, len(target), SamplingLaw(GREEDY))
    assert drafting.propose([i, n], 3).tokens == (x, y, i)
    backend.drafts.clear()
    assert drafting.propose([i, n, xy], 2).tokens == (i, n)  # x and y stand in the cache already
    assert [len(chain) for chain in backend.drafts] == [0, 0]


def test_the_context_of_the_draft_model_counts_its_own_tokens() -> None:
    model = tiny_llama(seed=2, layers=1, vocabulary=len(made("pieces")), context=12)
    drafting = proposer(TransformersBackend(model), pair("bytes", "pieces"), len(made("bytes")), SamplingLaw(GREEDY))
    word = made("bytes").encode("\n→")  # 4 tokens to the target, 2 to the draft model
    assert [len(drafting.propose(word * count, 4)) for count in range(1, 8)] == [4, 4, 4, 4, 2, 0, 0]


class FixedBackend(Backend):
    """Says what a function of the committed tokens and the chain says."""

    name, context, stop_tokens, capabilities = "fixed", None, frozenset[int](), Capabilities()

    def __init__(self, vocab_size: int, logits: Callable[[tuple[int, ...]], Tensor]) -> None:
        self.vocab_size, self._logits = vocab_size, logits

    def new_cache(self, room: int = 0) -> FixedCache:
        return FixedCache()

    def prefill(self, cache: KVCache, tokens: Sequence[int]) -> None:
        assert isinstance(cache, FixedCache)
        cache.tokens += tokens

    def forward(self, queries: Sequence[Query]) -> list[Tensor]:
        rows = []
        for query in queries:
            assert isinstance(query.cache, FixedCache)
            query.cache.pending = [query.root, *query.draft.tokens]
            after = [(*query.cache.tokens, *query.cache.pending[:n]) for n in range(1, len(query.draft) + 2)]
            rows.append(torch.stack([self._logits(tokens) for tokens in after]))
        return rows

    def commit(self, cache: KVCache, path: Sequence[int]) -> None:
        assert isinstance(cache, FixedCache)
        cache.tokens += cache.pending[: 1 + len(path)]

    def truncate(self, cache: KVCache, length: int) -> None:
        assert isinstance(cache, FixedCache)
        del cache.tokens[length:]


class FixedCache(KVCache):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.pending: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)


def test_drafting_ends_where_all_mass_is_outside_the_intersection() -> None:
    between, count = pair("bytes", "pieces"), len(made("pieces"))
    outside = [d for d in range(count) if d not in between.shared.draft_to_target]

    def logits(tokens: tuple[int, ...]) -> Tensor:
        row = torch.zeros(count)
        if len(tokens) >= 4:
            row[list(between.shared.draft_to_target)] = -torch.inf
        return row

    assert outside
    prompt = made("bytes").encode("the")
    for params in (GREEDY, SAMPLED):
        drafting = proposer(FixedBackend(count, logits), between, len(made("bytes")), SamplingLaw(params))
        assert len(drafting.propose(prompt, 8)) == 4 - len(prompt)
    broken = FixedBackend(count, lambda tokens: torch.full((count,), torch.nan))
    with pytest.raises(ModelError, match="NaN"):
        proposer(broken, between, len(made("bytes")), SamplingLaw(SAMPLED)).propose(prompt, 8)


def test_drafting_ends_where_the_settings_leave_only_tokens_outside_the_intersection() -> None:
    between, size = pair("bytes", "pieces"), len(made("bytes"))
    mask = torch.tensor([t not in between.shared.target_to_draft for t in range(size)])
    target = TransformersBackend(target_model("bytes"))
    drafter = DraftModel(TransformersBackend(draft_model("bytes", "pieces")), size, (), between)
    prompt = made("bytes").encode("the hell")

    def only_outside(tokens: Sequence[int]) -> Tensor | None:
        return mask if len(tokens) % 5 == 0 else None

    for params in (SamplingParams(max_tokens=30), SamplingParams(max_tokens=30, temperature=1.0, seed=1)):
        request = Request(prompt, params, allowed=only_outside)
        plain, found = (
            complete(Engine(target), request)[0],
            complete(Engine(target, drafter, rule="seed-exact"), request)[0],
        )
        assert found.ids == plain.ids
        assert found.stats.accepted > 0
        assert sum(not t for t in mask[list(found.ids)].tolist()) > 15


class MaskingLaw:
    """A law of a caller's own, which makes NaN of nothing: after an even number of tokens it leaves `mask` alone."""

    greedy = False

    def __init__(self, mask: Tensor) -> None:
        self._mask = mask

    def __call__(self, history: Sequence[int], draft: Draft, logits: Tensor) -> Tensor:
        even = [(len(history) + depth) % 2 == 0 for depth in depths(draft)]
        scores = [row.masked_fill(~self._mask, -torch.inf) if e else row for e, row in zip(even, logits, strict=True)]
        return torch.stack(scores).double().softmax(-1)

    def logprobs(self, history: Sequence[int], draft: Draft, logits: Tensor) -> Tensor:
        return self(history, draft, logits).log()


def test_a_callers_own_law_may_leave_only_tokens_outside_the_intersection() -> None:
    between, size = pair("bytes", "pieces"), len(made("bytes"))
    law = MaskingLaw(torch.tensor([t not in between.shared.target_to_draft for t in range(size)]))
    target = TransformersBackend(target_model("bytes"))
    drafter = DraftModel(TransformersBackend(draft_model("bytes", "pieces")), size, (), between)
    request = Request(made("bytes").encode("in the"), SamplingParams(max_tokens=30, seed=1), law=law)
    found = complete(Engine(target, drafter, rule="seed-exact"), request)[0]
    assert found.ids == complete(Engine(target), request)[0].ids
    assert 0 < found.stats.drafted < 20


# The law


LETTERS, OTHER_LETTERS = "abcd", "xbdaye"
PROMPT = [0, 2]  # the draft model has no c
SETTINGS = {
    "plain": SamplingParams(temperature=1.0),
    "settings": SamplingParams(temperature=0.7, top_k=3, frequency_penalty=0.8, logit_bias={1: 1.0}),
}
DRAWN = ("token", "block", "seed-exact", "recursive", "hu", "traversal")


class Toy:
    """Two toy models over different letters, behind the production drafter."""

    def __init__(self, seed: int, params: SamplingParams, k: int = 2) -> None:
        target, draft = byte_tokenizer([], letters=LETTERS), byte_tokenizer([], letters=OTHER_LETTERS)
        self.between = translation(target, draft)
        self.k = k
        self._target_law, self._draft_law = toy_model(len(target), seed), toy_model(len(draft), seed + 1)
        self._law = SamplingLaw(params, prompt_length=len(PROMPT))
        self._drafter = DraftModel(FixedBackend(len(draft), self._logits), len(target), [3], self.between)

    def _logits(self, tokens: tuple[int, ...]) -> Tensor:
        """Of the draft model; after `bb` it says only what the target cannot."""
        logits = self._draft_law(tokens).log()
        if tokens[-2:] == (1, 1):
            logits[list(self.between.shared.draft_to_target)] = -torch.inf
        return logits

    def target(self, tokens: tuple[int, ...]) -> Tensor:
        return self._law([*PROMPT, *tokens], Draft(), self._target_law(tokens).log()[None])[0]

    def propose(self, source: RandomSource) -> Draft:
        return self._drafter.proposer(self._law, source).propose(PROMPT, self.k)

    def propose_with_unrestricted_q(self, source: RandomSource) -> Draft:
        """The mistake: tokens drawn from q', and q said to be the draft model's whole law."""
        draft = self.propose(source)
        own = Reading(self.between).extend(PROMPT)
        rows = []
        for x in draft.tokens:
            q = self._logits(tuple(own)).softmax(-1)
            rows.append(self.between.logits(q[None].log())[0].exp())
            own.append(self.between.shared.target_to_draft[x])
        return Draft.chain(draft.tokens, rows)

    def distance(self, rule: str, propose: Propose | None = None) -> float:
        target: ToyModel = self.target
        law = joint_law(RULES[rule].decide, propose or self.propose, target, self.k + 1)
        return total_variation(law, ancestral_law(target, self.k + 1))


def test_the_toys_share_some_letters_only() -> None:
    toy = Toy(0, SETTINGS["plain"])
    assert toy.between.shared.target_to_draft == {0: 3, 1: 1, 3: 2, 4: 6}  # a, b, d and the end
    lengths = {len(toy.propose(TorchSource(torch.Generator().manual_seed(seed)))) for seed in range(30)}
    assert lengths == {1, 2}  # d ends a draft


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("rule", DRAWN)
def test_the_output_law_is_the_targets(rule: str, settings: str) -> None:
    for seed in range(3):
        assert Toy(2 * seed, SETTINGS[settings]).distance(rule) < 1e-9


@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_output_law_is_the_targets_where_drafts_end_early(rule: str) -> None:
    assert Toy(10, SETTINGS["plain"], k=3).distance(rule) < 1e-9


@pytest.mark.parametrize("rule", [rule for rule in DRAWN if rule != "seed-exact"])
def test_control_verifying_with_the_unrestricted_q_is_caught(rule: str) -> None:
    toy = Toy(0, SETTINGS["plain"])
    assert toy.distance(rule, toy.propose_with_unrestricted_q) > 1e-3


# The whole engine


def save(folder: Path, model: Any, tokenizer: Any) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_greedy_and_seeded_answers_are_those_of_plain_decoding(target: str, draft: str) -> None:
    backend = TransformersBackend(target_model(target))
    other = TransformersBackend(draft_model(target, draft))
    drafter = DraftModel(other, backend.vocab_size, (), pair(target, draft))
    requests = [
        Request(
            made(target).encode(text, add_special_tokens=False),
            SamplingParams(max_tokens=40, temperature=temperature, seed=7, repetition_penalty=1.1),
        )
        for text in ("the hell", TEXT)
        for temperature in (0.0, 0.7)
    ]
    plain = complete(Engine(backend, tokenizer=made(target)), *requests)
    found = complete(Engine(backend, drafter, tokenizer=made(target), rule="seed-exact"), *requests)
    assert [c.ids for c in found] == [c.ids for c in plain]
    assert [c.text for c in found] == [c.text for c in plain]
    drafted, accepted = (sum(getattr(c.stats, name) for c in found) for name in ("drafted", "accepted"))
    assert 0 < accepted < drafted


def test_folders_of_two_tokenizers_load_and_draft(tmp_path: Path) -> None:
    target = save(tmp_path / "target", target_model("bytes"), made("bytes"))
    draft = save(tmp_path / "draft", draft_model("bytes", "pieces"), made("pieces"))
    model = foredraft.load(target, f"draft:{draft}")
    assert isinstance(model.drafter, DraftModel) and model.drafter.translation is not None
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    found = model.generate("the hell", params)
    assert found.ids == model.plain().generate("the hell", params).ids
    assert found.stats.accepted > 0
    assert found.stats.draft_forwards == found.stats.drafted
    assert found.stats.drafter == "draft"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_vocabularies(temperature: float, tmp_path: Path) -> None:
    """Both models have rows without a token, and would say nothing else."""
    sizes = {name: len(made(name)) for name in ("bytes", "other bytes")}
    folders = {}
    for padding, (name, size) in zip((22, 38), sizes.items(), strict=True):
        model = tiny_llama(seed=padding, vocabulary=size + padding)
        with torch.no_grad():
            model.lm_head.weight[size:] *= 100
            model.lm_head.weight[size + 1 :: 2] = -model.lm_head.weight[size::2]
        folders[name] = save(tmp_path / name, model, made(name))
    model = foredraft.load(folders["bytes"], f"draft:{folders['other bytes']}", rule="seed-exact")
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=1, ignore_eos=True)
    found = model.generate("the hell", params)
    assert found.ids == model.plain().generate("the hell", params).ids
    assert max(found.ids) < sizes["bytes"]
    assert found.stats.drafted > 0


def test_the_same_map_has_the_direct_path_whatever_its_size(tmp_path: Path) -> None:
    size = len(made("bytes"))
    target = save(tmp_path / "target", target_model("bytes"), made("bytes"))
    longer = tiny_tokenizer()
    longer.add_tokens(["more", "and more"])
    for name, tokenizer, rows in (
        ("same", made("bytes"), size),
        ("padded", made("bytes"), size + 9),
        ("longer", longer, size + 2),
    ):
        folder = save(tmp_path / name, tiny_llama(seed=4, layers=1, vocabulary=rows), tokenizer)
        drafter = foredraft.load(target, f"draft:{folder}").drafter
        assert isinstance(drafter, DraftModel) and drafter.translation is None
        made_proposer = drafter.proposer(SamplingLaw(GREEDY), TorchSource(torch.Generator()))
        assert type(made_proposer) is DraftModelProposer


def test_a_target_of_more_tokens_than_the_draft_model_can_read_is_translated(tmp_path: Path) -> None:
    longer = tiny_tokenizer()
    longer.add_tokens(["more"])
    base = target_model("bytes")
    large = tiny_llama(seed=3, vocabulary=len(longer))
    target = save(tmp_path / "target", large, longer)
    draft = save(tmp_path / "draft", base, made("bytes"))
    model = foredraft.load(target, f"draft:{draft}", rule="seed-exact")
    assert isinstance(model.drafter, DraftModel) and model.drafter.translation is not None
    shared = model.drafter.translation.shared
    assert shared.target_to_draft == {i: i for i in range(len(made("bytes")))}
    params = SamplingParams(max_tokens=30, temperature=0.5, seed=3)
    prompt = "the more the more"
    found = model.generate(prompt, params)
    assert found.ids == model.plain().generate(prompt, params).ids
    assert found.stats.drafted > 0


def test_too_small_an_overlap_is_refused_when_the_engine_is_built(tmp_path: Path) -> None:
    strange = byte_tokenizer([], letters="".join(map(chr, range(0x4E00, 0x4E80))) + "a")
    target = save(tmp_path / "target", target_model("bytes"), made("bytes"))
    draft = save(tmp_path / "draft", tiny_llama(seed=1, layers=1, vocabulary=len(strange)), strange)
    message = (
        rf"of the target's {len(made('bytes'))} tokens and its {len(strange)} they share 2, 2% of the smaller, and 50% "
        r"are needed\. The first difference: id 0 is '!' to the target and '一' to the draft model\."
    )
    with pytest.raises(UnsupportedError, match=message):
        foredraft.load(target, f"draft:{draft}")


def test_a_draft_that_ends_the_text_ends_the_answer() -> None:
    """The two ends of text are mapped: an answer whose end was drafted is the plain one."""
    between = pair("bytes", "other bytes")
    target = TransformersBackend(target_model("bytes"))
    end = made("bytes").eos_token_id
    plain = Engine(target, stop_tokens=[end])
    drafter = DraftModel(TransformersBackend(draft_model("bytes", "other bytes")), target.vocab_size, [end], between)
    params = SamplingParams(max_tokens=60, logit_bias={end: 6.0}, temperature=0.7, seed=5)
    prompt = made("bytes").encode("the hell")
    expected = generate(plain, prompt, params)
    found = generate(Engine(target, drafter, stop_tokens=[end], rule="seed-exact"), prompt, params)
    assert expected.finish_reason == found.finish_reason == "stop_token"
    assert expected.ids == found.ids
