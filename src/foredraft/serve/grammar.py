"""Grammars: which tokens may come next in an answer that must be JSON, fit a schema, or be calls of tools.

The parser is llguidance's. What is here: the tokens' bytes, limits, a cache, and a mask that can be asked about any
node of a draft.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from torch import Tensor

from foredraft.errors import InvalidInputError, UnsupportedError
from foredraft.serve.spellings import Spellings
from foredraft.serve.trial import refuse_endless

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_BYTES = 64 * 1024  # of a schema
_MOST_DEPTH = 64
_KEPT = 64  # compiled grammars

# Any tokens may spell what is certain to come, not only those that llguidance would choose for it.
_OPTIONS = '%llguidance {"no_forcing": true}\n'

_MOST_TAGS = 16  # in one answer: a small model would go on for ever

# At one place of a text at most two spaces, or a new line that is indented: a small model would else go on with
# white space for ever.
_WHITESPACE = r" {1,2}|\n {0,16}"

_PLACE = re.compile(r"^.*failed to compile JSON schema: ", re.DOTALL)
_REASONS = {
    "NoExtension": "no text of this model's tokens fits it",
    **dict.fromkeys(("TooComplex", "Current row has", "Too many items"), "it is too complex"),
    "is not present in a registry": "a $ref names another document. Put what it names under $defs",
    "coerce_one_of": "the alternatives of oneOf may fit both, which is not supported. Use anyOf",
}
"""What some of llguidance's messages mean to people."""


@dataclass(frozen=True)
class Tag:
    """A piece of an answer: `begin`, JSON that fits `schema`, `end`. See `Grammars.json_schema` for `strict`."""

    begin: str
    schema: Mapping[str, Any]
    end: str
    strict: bool = True


class Grammars:
    """Compiles grammars for the tokens of one model. May be used from several threads at once.

    The last compiled ones are kept, so that asks with one schema compile it once.

    Args:
        tokenizer: The model's.
        vocab_size: Tokens that the model has scores for; those that are not the tokenizer's are never allowed.
        stop_tokens: What ends an answer; it may where the grammar is complete, and nowhere else.

    Raises:
        UnsupportedError: There is no stop token that the model can say, or no token whose text is known.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, stop_tokens: Collection[int]) -> None:
        stops = sorted(i for i in set(stop_tokens) if 0 <= i < vocab_size)
        if not stops:
            raise UnsupportedError("A grammar needs a token that ends the answer, and this model has none.")
        spellings = Spellings(tokenizer, vocab_size)
        texts = [None if i in stops else text for i, text in enumerate(spellings.bytes)]
        if not any(texts):
            raise UnsupportedError("Grammars need tokens whose text is known, and this tokenizer has none.")
        self._tokens = _Tokens(stops, torch.tensor([bool(text) for text in texts]))
        self._tokenizer = _for_llguidance(texts, stops)
        # Less of the lexer's memory (1 to 2 KB a state) than llguidance allows, and more keys that may come next.
        self._limits = LLParserLimits(
            max_lexer_states=25_000, max_items_in_row=10_000, step_max_items=200_000, verbose_errors=False
        )
        # The text begins with a space that decoding takes off.
        self._space = '" "? ' if spellings.drops_space else ""
        self._kept: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def json_object(self) -> CompiledGrammar:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: Mapping[str, Any], *, strict: bool = True) -> CompiledGrammar:
        """JSON that fits a schema (draft 2020-12); the keys of an object come in the order of its `properties`.

        Args:
            schema: The schema, at most 64 KB of JSON.
            strict: Whether to refuse what cannot be enforced; else it is left out of account.

        Raises:
            InvalidInputError: It is no schema, too large, too complex, nothing can fit it, or (if strict) it has
                keywords or formats that are not supported; the message names them.
        """
        return self._compile(f"start: {self._space}@json", {"json": _checked(schema, strict)})

    def tagged(self, trigger: str, tags: Sequence[Tag], *, free: bool, repeat: bool) -> CompiledGrammar:
        r"""One of some tags, or several in lines of their own.

        Args:
            trigger: What every tag begins with, before its own `begin`.
            tags: The tags, at least one.
            free: Whether any text may come before, or nothing but text. The trigger ends it.
            repeat: Whether there may be more than one tag, up to 16, with `\n` between them.

        Raises:
            InvalidInputError: A schema is refused; see `json_schema`.
        """
        opening = json.dumps(trigger)
        rest = f'("\\n" {opening} tag){{0,{_MOST_TAGS - 1}}}' if repeat else ""
        lines = [
            f"start: TEXT | head tag {rest}" if free else f"start: {self._space}{opening} tag {rest}",
            *(("TEXT: /(.|\\n)*/", f"head[lazy]: TEXT {opening}") if free else ()),
            "tag: " + " | ".join(f"tag{n}" for n in range(len(tags))),
            *(f"tag{n}: {json.dumps(tag.begin)} @json{n} {json.dumps(tag.end)}" for n, tag in enumerate(tags)),
        ]
        schemas = {f"json{n}": _checked(tag.schema, tag.strict) for n, tag in enumerate(tags)}
        if sum(len(json.dumps(schema)) for schema in schemas.values()) > _MOST_BYTES:
            raise InvalidInputError(f"The schemas have together more than {_MOST_BYTES // 1024} KB. Leave some out.")
        return self._compile("\n".join(lines), schemas)

    def _compile(self, lark: str, schemas: Mapping[str, Any]) -> CompiledGrammar:
        parts = [{"name": name, "json_schema": schema} for name, schema in schemas.items()]
        text = json.dumps({"grammars": [{"name": "start", "lark_grammar": _OPTIONS + lark}, *parts]})
        with self._lock:
            if text in self._kept:
                self._kept.move_to_end(text)
                return self._kept[text]
        refuse_endless(text)
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)  # others may run meanwhile
        _refuse_errors(matcher)
        grammar = CompiledGrammar(matcher, self._tokens)
        if not bool(grammar.start(0)([]).any()):
            raise InvalidInputError("The grammar cannot be used: no text of this model's tokens fits it.")
        with self._lock:
            self._kept[text] = grammar
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return grammar


@dataclass(frozen=True)
class _Tokens:
    """`stops` end an answer; `text`, a bool mask `[V]`, are those that a grammar can read."""

    stops: list[int]
    text: Tensor


class CompiledGrammar:
    """A `Grammar`: it starts a mask for each answer."""

    def __init__(self, matcher: LLMatcher, tokens: _Tokens) -> None:
        self._matcher = matcher  # stays at the beginning; answers have copies
        self._tokens = tokens
        self._lock = threading.Lock()

    def start(self, prompt_length: int) -> GrammarMask:
        """See `Grammar`."""
        with self._lock:
            return GrammarMask(self._matcher.deep_copy(), self._tokens, prompt_length)


class GrammarMask:
    """`AllowedTokens` of one answer.

    Nodes of a draft are asked about in any order. The matcher goes back to what the asked answer and the last one have
    in common, and on from there: mostly one token back and one on.
    """

    def __init__(self, matcher: LLMatcher, tokens: _Tokens, prompt_length: int) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._prompt_length = prompt_length
        self._read: list[int] = []  # what the matcher has consumed

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """Which tokens may follow all `tokens` so far, prompt included: a bool mask `[V]`.

        After a stop token, and where no answer of the grammar begins with the tokens, it is the stop tokens alone: no
        answer gets there, but drafts run on.

        Raises:
            InvalidInputError: What is written so far has led the grammar into something too complex.
        """
        answer = list(tokens[self._prompt_length :])
        ended = not set(self._tokens.stops).isdisjoint(answer)
        if ended or not self._follow(answer):
            allowed = torch.zeros_like(self._tokens.text)
            complete = True
        else:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            unpacked = np.unpackbits(bits, count=len(self._tokens.text), bitorder="little")
            allowed = torch.from_numpy(unpacked.view(np.bool_)) & self._tokens.text
            complete = self._matcher.is_accepting()
            _refuse_errors(self._matcher)
        allowed[self._tokens.stops] = complete
        return allowed

    def _follow(self, answer: list[int]) -> bool:
        """Bring the matcher to this answer; whether it could go all the way."""
        kept = _common(self._read, answer)
        if kept < len(self._read):
            self._matcher.rollback(len(self._read) - kept)
        rest = answer[kept:]
        count = self._matcher.try_consume_tokens(rest) if rest else 0
        self._read = answer[: kept + count]
        _refuse_errors(self._matcher)
        return count == len(rest)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens they have in common at the beginning."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return next(n for n in range(shorter) if a[n] != b[n])


def _checked(schema: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    """The schema with what it means to us: white space is bounded, and what is not supported is refused or left out."""
    if not isinstance(schema, Mapping):
        raise InvalidInputError(f"A JSON schema is an object, but this is {schema!r:.80}.")
    if _deeper_than(_MOST_DEPTH, schema):
        raise InvalidInputError(f"The JSON schema is nested more than {_MOST_DEPTH} deep. Put parts into $defs.")
    checked = {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE, "lenient": not strict}}
    try:
        size = len(json.dumps(checked, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"The JSON schema is no JSON: {error}.") from None
    if size > _MOST_BYTES:
        raise InvalidInputError(f"The JSON schema has {size} bytes, but {_MOST_BYTES} are allowed. Make it smaller.")
    return checked


def _deeper_than(most: int, value: object) -> bool:
    level = [value]
    for _ in range(most):
        inner = [v.values() if isinstance(v, Mapping) else v for v in level if isinstance(v, (Mapping, list))]
        level = [item for items in inner for item in items]
    return any(isinstance(v, (Mapping, list)) for v in level)


def _refuse_errors(matcher: LLMatcher) -> None:
    """Raise `InvalidInputError` with what llguidance says is wrong, without where it stands in our own text."""
    if matcher.is_error():
        said = " ".join(_PLACE.sub("", matcher.get_error().split("\n   1 |")[0]).split())
        unsupported = re.sub(r"^Unimplemented keys: \[(.*)\]", r"keywords that are not supported: \1", said[:500])
        reason = next((text for kind, text in _REASONS.items() if kind in said), unsupported)
        raise InvalidInputError(f"The grammar cannot be used: {reason.rstrip('.')}.")


class _Wrapped:
    """What llguidance asks a tokenizer for. Text is not tokenised: we take its masks, not its tokens."""

    bos_token_id = None

    def __init__(self, texts: Sequence[bytes | None], stops: Sequence[int]) -> None:
        self.eos_token_id = stops[0]
        self.tokens = [text if text else f"<{i}>".encode() for i, text in enumerate(texts)]
        self.special_token_ids = [i for i, text in enumerate(texts) if not text]

    def __call__(self, text: str | bytes) -> list[int]:
        return []


def _for_llguidance(texts: Sequence[bytes | None], stops: Sequence[int]) -> LLTokenizer:
    wrapper = TokenizerWrapper(_Wrapped(texts, stops))
    return LLTokenizer(wrapper, n_vocab=len(texts), eos_token=list(stops))
