"""A target's tokens in the ids of a draft model that has another tokenizer, and its logits in the target's ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foredraft.proposers.vocabulary import (
    Meaning,
    Vocabulary,
    VocabularyMap,
    first_difference,
    match,
    refuse_small_overlap,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNFINISHED = "\ufffd"  # what a part of a character decodes to
_SPACES = "▁Ġ"  # how tokenizers spell a leading space
_LONGEST_PIECE = 16  # tokens that are tokenised anew together, where no space ends a piece before
_HOPELESS_PIECE = 64  # the same where no character ends either


class Codec:
    """A tokenizer in the middle of a text: without what it adds or drops at a beginning.

    A word that it has as a token stands before whatever is decoded or encoded, and is taken off again.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        self.special = frozenset(tokenizer.all_special_ids) | {
            i for i, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        words = sorted(
            (i, token.lstrip(_SPACES)) for token, i in tokenizer.get_vocab().items() if i not in self.special
        )
        self._before = next(([i] for i, word in words if word.isascii() and word.isalpha()), [])
        self._before_text = self._decode(self._before)
        self._before_ids = self._encode(self._before_text)

    def text(self, ids: Sequence[int]) -> str:
        """What the ids say; it ends with U+FFFD where they end within a character."""
        return self._decode([*self._before, *ids]).removeprefix(self._before_text)

    def ids(self, text: str) -> list[int]:
        """The tokenizer's own ids of the text, none of them special."""
        whole, count = self._encode(self._before_text + text), len(self._before_ids)
        return whole[count:] if whole[:count] == self._before_ids else self._encode(text)

    def texts(self, ids: Sequence[int]) -> dict[int, str]:
        """What each of the ids says between two words; those that have no text of their own there are left out."""
        word, before = self._before, self._before_text
        behind = self._decode(word * 2)[len(before) :]
        found: dict[int, str] = {}
        for i in ids:
            text = self._decode([*word, i, *word])
            if text.startswith(before) and text.endswith(behind) and len(text) > len(before) + len(behind):
                found[i] = text[len(before) : len(text) - len(behind)]
        return found if word else {}

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _encode(self, text: str) -> list[int]:
        # Text that merely looks like a special token must not become one.
        return [int(i) for i in self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)]


def vocabulary_of(tokenizer: PreTrainedTokenizerBase, codec: Codec, size: int) -> Vocabulary:
    """What the ids below `size` mean, whether the tokenizer spells in bytes (Ġ), in pieces (▁) or in another way."""
    tokens = {i: token for token, i in sorted(tokenizer.get_vocab().items()) if i < size}
    added = tokenizer.added_tokens_decoder
    # An added token is found before all others; a byte's token is for text that has no shorter one.
    order = sorted(tokens.keys() - codec.special, key=lambda i: (i not in added, len(tokens[i]), i))
    meanings: dict[int, Meaning] = {
        i: (text, tokens[i] if _UNFINISHED in text else "") for i, text in codec.texts(order).items()
    }
    eos: Any = tokenizer.eos_token_id
    return Vocabulary(tokens, meanings, codec.special & tokens.keys(), eos if eos in tokens else None)


class Translation:
    """Between a target's vocabulary and a draft model's; made once for a pair.

    Args:
        shared: The ids that both have.
        texts: Of the target's ids that are whole characters.
        target: The target's tokenizer.
        draft: The draft model's.
        sizes: Ids that each of the two has rows for.
        beginning: What the draft model's tokenizer puts before a text.
        bos: What the target's does.
    """

    def __init__(
        self,
        shared: VocabularyMap,
        texts: Mapping[int, str],
        target: Codec,
        draft: Codec,
        *,
        sizes: tuple[int, int],
        beginning: Sequence[int] = (),
        bos: int | None = None,
    ) -> None:
        self.shared = shared
        self.beginning = list(beginning)
        self._texts, self._target, self._draft, self._bos = texts, target, draft, bos
        self._draft_size = sizes[1]
        self._columns = torch.full((sizes[0],), -1)
        self._columns[list(shared.target_to_draft)] = torch.tensor(list(shared.draft_to_target), dtype=torch.long)

    def logits(self, draft_logits: Tensor) -> Tensor:
        """`[n, V_target]` of the draft model's `[n, V_draft]`: minus infinity for tokens that it does not have."""
        self._columns = self._columns.to(draft_logits.device)
        nothing = torch.nn.functional.pad(draft_logits, (0, 1), value=-torch.inf)
        return nothing[:, self._columns]

    def starts(self, token: int) -> bool:
        """Whether it is the target's own mark of a beginning, for which `beginning` stands already."""
        return token == self._bos and self.shared.target_to_draft.get(token) in (None, *self.beginning)

    def separate(self, piece: Sequence[int], token: int) -> bool:
        """Whether `token` begins another piece of text: tokenizers hardly ever join over such a place."""
        last = piece[-1]
        if last in self._target.special or token in self._target.special:
            return True
        if len(piece) >= _LONGEST_PIECE:
            return len(piece) >= _HOPELESS_PIECE or not self._target.text(piece).endswith(_UNFINISHED)
        before, after = self._texts.get(last), self._texts.get(token)
        if before is None or after is None:  # within a character, as far as one knows
            return False
        return after[0].isspace() and not before[-1].isspace()

    def read(self, piece: Sequence[int], *, closed: bool) -> list[int] | None:
        """A piece of target tokens in the draft model's ids: token for token if it has them all, else its text anew.

        Returns:
            The ids; `None` if more tokens will come (not `closed`) and the text ends within a character.
        """
        own = [self.shared.target_to_draft[token] for token in piece if token in self.shared.target_to_draft]
        if len(own) == len(piece):
            return own
        text = self._target.text(piece)
        if text.endswith(_UNFINISHED) and not closed:
            return None
        return [i for i in self._draft.ids(text) if i < self._draft_size]


class Reading:
    """The text of one sequence in the draft model's ids. It grows with the sequence; only its last piece can change."""

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        self._piece: list[int] = []  # target tokens
        self._count = 0
        self.settled = list(translation.beginning)
        """Ids of all pieces but the last."""

    def extend(self, tokens: Sequence[int]) -> list[int]:
        """Ids of all `tokens` so far, or none while they end within a character that the draft model cannot spell."""
        translation = self._translation
        for place, token in enumerate(tokens[self._count :], start=self._count):
            if place == 0 and translation.starts(token):
                continue
            if self._piece and translation.separate(self._piece, token):
                self.settled += translation.read(self._piece, closed=True) or []
                self._piece = []
            self._piece.append(token)
        self._count = len(tokens)
        last = translation.read(self._piece, closed=False)
        return [] if last is None else [*self.settled, *last]


def translation_between(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, sizes: tuple[int, int], draft_rows: int
) -> Translation | None:
    """What a draft model needs to draft for a target of another tokenizer; `None` if every id means the same to both.

    Args:
        target: The target's tokenizer.
        draft: The draft model's.
        sizes: Ids that the two models have logits for.
        draft_rows: Rows of the draft model's embedding.

    Raises:
        UnsupportedError: They share too few tokens; see `vocabulary.LEAST_OVERLAP`.
    """
    difference = first_difference(target.get_vocab(), draft.get_vocab(), draft_rows)
    if difference is None:
        return None
    codecs = Codec(target), Codec(draft)
    theirs, own = (vocabulary_of(*each) for each in zip((target, draft), codecs, sizes, strict=True))
    shared = match(theirs, own)
    refuse_small_overlap(shared, theirs, own, difference)
    texts = {i: text for i, (text, unfinished) in theirs.meanings.items() if not unfinished}
    bos: Any = draft.bos_token_id
    beginning = [i for i in draft.encode("")[:1] if i == bos and i in own.tokens]
    opening: Any = target.bos_token_id
    return Translation(shared, texts, *codecs, sizes=sizes, beginning=beginning, bos=opening)
