"""Which ids of two tokenizers mean the same. Pure: what the ids mean goes in, the map between them comes out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from foredraft.errors import UnsupportedError

LEAST_OVERLAP = 0.5
"""The least share of the smaller vocabulary that the other must have. Not always of the target's: a small model's small
vocabulary may be no quarter of it by count, and yet hold nearly all that it says."""

Meaning = tuple[str, str]
"""The text of an id in the middle of a text, and an empty string. Of part of a character: what it decodes to (U+FFFD)
and the token's own spelling, so that only tokenizers of one kind share such parts. One that spells all text in bytes
and one that has bytes for unknown characters do not take them for the same characters."""


@dataclass(frozen=True)
class Vocabulary:
    """What the ids of one tokenizer mean to a model that has rows for all of them.

    Args:
        tokens: The spelling of every id.
        meanings: Of ordinary ids whose meaning is certain. Where several have the same one (bytes that are letters too)
            the first is the one that the tokenizer itself uses.
        special: Ids that are no text.
        eos: The one that ends a text.
    """

    tokens: Mapping[int, str]
    meanings: Mapping[int, Meaning]
    special: frozenset[int] = frozenset()
    eos: int | None = None


@dataclass(frozen=True)
class VocabularyMap:
    """A one-to-one map between some ids of a target and some of a draft model.

    `overlap` is the share, in [0, 1], of the smaller vocabulary that is in the map.
    """

    target_to_draft: Mapping[int, int]
    draft_to_target: Mapping[int, int]
    overlap: float


def match(target: Vocabulary, draft: Vocabulary) -> VocabularyMap:
    """Map ids that mean the same (Timor et al. 2025, TLI, arXiv 2502.05202).

    Ordinary ids are mapped by meaning; special ids by spelling, if they are special to both; then the two ends of text,
    if neither is mapped yet. An id is never mapped twice: of several with one meaning the others stay out.
    """
    pairs = dict(_by_meaning(target, draft))
    ends = (target.eos, draft.eos)
    if ends[0] is not None and ends[1] is not None and ends[0] not in pairs and ends[1] not in pairs.values():
        pairs[ends[0]] = ends[1]
    smaller = min(len(target.tokens), len(draft.tokens))
    return VocabularyMap(pairs, {d: t for t, d in pairs.items()}, len(pairs) / smaller if smaller else 0.0)


def _by_meaning(target: Vocabulary, draft: Vocabulary) -> Iterator[tuple[int, int]]:
    own: dict[Meaning, int] = {}
    for i, meaning in draft.meanings.items():
        own.setdefault(meaning, i)
    special = {draft.tokens[i]: i for i in draft.special}
    for i, meaning in target.meanings.items():
        if meaning in own:
            yield i, own.pop(meaning)
    for i in sorted(target.special):
        if target.tokens[i] in special:
            yield i, special.pop(target.tokens[i])


def first_difference(target: Mapping[str, int], draft: Mapping[str, int], draft_rows: int) -> str | None:
    """The first of the target's ids that the draft model reads otherwise, in words; `None` if there is none.

    Sizes may differ by padding and by tokens that only the draft model has: such a pair needs no map.

    Args:
        target: The target's tokens, string to id.
        draft: The draft model's.
        draft_rows: Rows of the draft model's embedding: it must be able to read every id of the target.
    """
    meaning = {i: token for token, i in draft.items()}
    for token, i in sorted(target.items(), key=lambda item: item[1]):
        if meaning.get(i, token) != token:
            return f"id {i} is {token!r} to the target and {meaning[i]!r} to the draft model"
        if i >= draft_rows:
            return f"the draft model reads ids below {draft_rows}, and id {i} is {token!r} to the target"
    return None


def refuse_small_overlap(shared: VocabularyMap, target: Vocabulary, draft: Vocabulary, difference: str) -> None:
    """Raise `UnsupportedError`, with the overlap and the first difference, if the map has less than `LEAST_OVERLAP`."""
    if shared.overlap < LEAST_OVERLAP:
        raise UnsupportedError(
            f"The draft model has another vocabulary: of the target's {len(target.tokens)} tokens and its "
            f"{len(draft.tokens)} they share {len(shared.target_to_draft)}, {shared.overlap:.0%} of the smaller, and "
            f"{LEAST_OVERLAP:.0%} are needed. The first difference: {difference}. "
            "Use a draft model whose tokenizer is closer to the target's."
        )
