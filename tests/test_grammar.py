"""Grammars: the right tokens at every node, for every kind of tokenizer, and no schema that takes the server down."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from foredraft.backends.transformers import TransformersBackend
from foredraft.engine import Engine
from foredraft.errors import InvalidInputError, UnsupportedError
from foredraft.generation import Request
from foredraft.proof.enumeration import ancestral_law
from foredraft.proof.statistics import g_test
from foredraft.sampling import SamplingLaw
from foredraft.serve import grammar as grammar_module
from foredraft.serve import trial
from foredraft.serve.grammar import Grammars, Tag
from foredraft.serve.spellings import Spellings
from foredraft.tree import paths
from foredraft.types import Completion, Draft, SamplingParams
from tiny import (
    BACKENDS,
    complete,
    drafter_over,
    plain_chain,
    tiny_llama,
    tiny_metaspace_tokenizer,
    tiny_tokenizer,
)

_FAST: Any = PreTrainedTokenizerFast

PADDING = 5  # ids that the model has and the tokenizer has not


def tiny_byte_fallback_tokenizer() -> Any:
    """SentencePiece's kind: pieces with ▁ for a space, and bytes for what has no piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *'{}[]:,"0123456789', *"abcdefgrnt", "re", "▁re", "ab", "▁ab"]
    merges = [("r", "e"), ("▁", "re"), ("a", "b"), ("▁", "ab")]
    bpe = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    bpe.decoder = decoders.Sequence(parts)
    return _FAST(tokenizer_object=bpe, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "bytes": tiny_tokenizer,
    "words": lambda: tiny_metaspace_tokenizer(["{", "}", "[", "]", ":", ",", '"ab"', "12", "3", "true", "word"]),
    "byte fallback": tiny_byte_fallback_tokenizer,
}


def grammars_for(tokenizer: Any) -> Grammars:
    return Grammars(tokenizer, len(tokenizer) + PADDING, [tokenizer.eos_token_id])


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return grammars_for(tokenizer)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]


def allowed(mask: Tensor | None) -> set[int]:
    assert mask is not None and mask.dtype == torch.bool
    return set(mask.nonzero()[:, 0].tolist())


# Which tokens


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_spellings_of_a_texts_tokens_are_its_bytes(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]()
    words = st.sampled_from(["{", '"ab"', "12", "word", "}"])
    texts = st.lists(words).map(" ".join) if name == "words" else st.text(st.characters(codec="utf-8"))
    text = data.draw(texts)
    spellings = Spellings(tokenizer, len(tokenizer) + PADDING)
    spelled = b"".join(spellings.bytes[i] or b"?" for i in ids_of(tokenizer, text))
    assert spelled.removeprefix(b" " if spellings.drops_space and not text.startswith(" ") else b"") == text.encode()
    assert spellings.bytes[-PADDING:] == [None] * PADDING
    assert all(spellings.bytes[i] is None for i in tokenizer.all_special_ids)


def test_a_space_that_decoding_drops_is_known() -> None:
    drops = {name: Spellings(make(), 300).drops_space for name, make in TOKENIZERS.items()}
    assert drops == {"bytes": False, "words": True, "byte fallback": True}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_are_allowed_that_begin_a_text_of_the_grammar(name: str) -> None:
    """Compared with a search in all texts that there are."""
    tokenizer = TOKENIZERS[name]()
    values = ["ab", "abé", 12, 123, True]
    mask = grammars_for(tokenizer).json_schema({"enum": values}).start(0)
    spellings = Spellings(tokenizer, len(tokenizer))
    texts = {json.dumps(value, ensure_ascii=False).encode() for value in values}
    if spellings.drops_space:
        texts |= {b" " + text for text in texts}
    fringe: list[tuple[list[int], bytes]] = [([], b"")]
    ends = set()
    while fringe:
        ids, text = fringe.pop()
        longer = {i: text + piece for i, piece in enumerate(spellings.bytes) if piece}
        fitting = {i for i, whole in longer.items() if any(t.startswith(whole) for t in texts)}
        assert allowed(mask(ids)) == fitting | ({tokenizer.eos_token_id} if text in texts else set())
        fringe += [([*ids, i], longer[i]) for i in fitting]
        ends |= {str(tokenizer.decode(ids))} if text in texts else set()
    spelled = {json.dumps(value, ensure_ascii=False) for value in values}
    assert ends == (spelled - {'"abé"', "123"} if name == "words" else spelled)


PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["the red", "the green"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}


def fits_person(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "kind", "tags"]
        and len(value["name"]) <= 6
        and 0 <= value["age"] <= 120
        and value["kind"] in ("the red", "the green")
        and len(value["tags"]) <= 3
        and all(isinstance(tag, bool) for tag in value["tags"])
    )


@given(data=st.data())
def test_nodes_are_asked_in_any_order(grammars: Grammars, tokenizer: Any, data: st.DataObject) -> None:
    grammar = grammars.json_schema(PERSON)
    prompt = data.draw(st.lists(st.integers(0, 200), max_size=3))
    mask = grammar.start(len(prompt))
    answers: list[list[int]] = [[]]
    for _ in range(data.draw(st.integers(1, 30))):
        answer = data.draw(st.sampled_from(answers))
        found = allowed(mask([*prompt, *answer]))
        assert found == allowed(grammar.start(0)(answer))
        wrong = data.draw(st.booleans()) and data.draw(st.integers(0, len(tokenizer) - 1))
        answers.append([*answer, wrong or data.draw(st.sampled_from(sorted(found)))])


def test_stop_tokens_alone_where_it_is_complete_has_ended_or_was_left(grammars: Grammars, tokenizer: Any) -> None:
    mask = grammars.json_schema({"enum": ["the"]}).start(1)
    whole = ids_of(tokenizer, '"the"')
    end = tokenizer.eos_token_id
    for tokens in ([7, *whole], [7, *whole, end], [7, *whole, end, 8], [7, 8], [7, *whole, 8], [7, end]):
        assert allowed(mask(tokens)) == {end}
    assert allowed(mask([7])) == {ids_of(tokenizer, '"')[0]}
    assert end not in allowed(mask([7, *whole[:-1]]))


def test_it_may_end_where_it_may_be_complete(grammars: Grammars, tokenizer: Any) -> None:
    found = allowed(grammars.json_schema({"type": "integer"}).start(0)(ids_of(tokenizer, "12")))
    assert found == {tokenizer.eos_token_id, *(ids_of(tokenizer, digit)[0] for digit in "0123456789")}


def test_a_stop_token_is_no_text_even_if_it_could_be(tokenizer: Any) -> None:
    one, end = ids_of(tokenizer, "1")[0], tokenizer.eos_token_id
    mask = Grammars(tokenizer, len(tokenizer), [one, end, 10**6]).json_schema({"type": "integer"}).start(0)
    assert one not in allowed(mask([]))
    assert {one, end} <= allowed(mask(ids_of(tokenizer, "2")))


@pytest.mark.parametrize("name", ["bytes", "byte fallback"])
def test_white_space_ends(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    mask = grammars_for(tokenizer).json_object().start(0)
    spellings = Spellings(tokenizer, len(tokenizer)).bytes
    ids = ids_of(tokenizer, '{"ab":')
    run = 0
    while blank := [i for i in allowed(mask(ids)) if not (spellings[i] or b"x").strip()]:
        ids.append(max(blank, key=lambda i: spellings[i] == b"\n"))
        run += 1
    assert run == 17  # a line's end and sixteen spaces


def test_a_tag_is_enforced_once_it_has_begun(grammars: Grammars, tokenizer: Any) -> None:
    tags = [Tag("a=", {"type": "integer"}, ";"), Tag("b=", {"enum": ["the"]}, ";")]
    end = tokenizer.eos_token_id

    def possible(text: str, *, free: bool, repeat: bool) -> bool:
        mask = grammars.tagged("<x>", tags, free=free, repeat=repeat).start(0)
        ids = [*ids_of(tokenizer, text), end]
        return all(token in allowed(mask(ids[:n])) for n, token in enumerate(ids))

    for repeat in (False, True):
        for text in ("<x>a=12;", '<x>b="the";'):
            assert possible(text, free=False, repeat=repeat)
            assert possible(f"hell {text}", free=True, repeat=repeat)
            assert not possible(f"hell {text}", free=False, repeat=repeat)
            assert possible(f"{text}\n<x>a=1;", free=False, repeat=True)
            assert not possible(f"{text}\n<x>a=1;", free=True, repeat=False)
        assert possible("é <x", free=True, repeat=repeat) and possible("", free=True, repeat=repeat)
        for wrong in ("<x>", "<x>c=1;", "<x>a=the;", "<x>a=1; the", "the <x> the"):
            assert not possible(wrong, free=True, repeat=repeat)
        assert not possible("", free=False, repeat=repeat)


# What it does to answers

EQUAL = ("none", "ngram", "suffix", "recycling", "draft", "auto")


@pytest.fixture(scope="module")
def repeating(tokenizer: Any) -> list[int]:
    """A prompt that says already what the grammar wants."""
    return ids_of(tokenizer, '{"name": "the", "age": 12, "kind": "the red", "tags": [true, false]}' * 2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("drafter", EQUAL)
def test_answers_are_those_of_plain_decoding(
    text_target: TransformersBackend, tokenizer: Any, repeating: list[int], drafter: str, backend: str
) -> None:
    """Robustness rows 1, 5 and 12: whatever drafts, the ids are the same, and the answer is what was asked for."""
    target = BACKENDS[backend](text_target.model)
    common: dict[str, Any] = {"tokenizer": tokenizer, "stop_tokens": [tokenizer.eos_token_id], "rule": "seed-exact"}
    fitted = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id]).json_schema(PERSON)

    def answers(name: str) -> list[Completion]:
        requests = [
            Request(
                repeating,
                SamplingParams(max_tokens=200, temperature=temperature, seed=seed, logprobs=1),
                allowed=fitted.start(len(repeating)),
            )
            for temperature in (0.0, 1.0)
            for seed in range(3)
        ]
        return complete(Engine(target, drafter_over(target, name), **common), *requests)

    plain, drafted = answers("none"), answers(drafter)
    assert [c.ids for c in drafted] == [c.ids for c in plain]
    assert all(c.finish_reason == "stop_token" and fits_person(c.text) for c in drafted)
    assert drafter == "none" or 0 < sum(c.stats.accepted for c in drafted) < sum(c.stats.drafted for c in drafted)


def test_every_node_of_a_tree_has_the_mask_of_its_own_text(grammars: Grammars, tokenizer: Any) -> None:
    """Robustness row 3: a law that masks the first position only is caught here."""
    grammar = grammars.json_schema(PERSON)
    history = ids_of(tokenizer, '{"name": "t')
    letter, quote, comma, wrong = (ids_of(tokenizer, text)[0] for text in ("r", '"', ",", "}"))
    draft = Draft(
        tokens=(letter, quote, wrong, quote, comma, wrong, letter), parents=(-1, -1, -1, 0, 3, 3, 5)
    )  # nothing gets to the last one, below a wrong one
    size = len(tokenizer) + PADDING
    logits = torch.randn(len(draft) + 1, size, generator=torch.Generator().manual_seed(0))
    law = SamplingLaw(SamplingParams(temperature=1.0), allowed=grammar.start(0))
    rows = law(history, draft, logits)
    for row, path in enumerate([(), *paths(draft)][:6]):
        tokens = [*history, *path]
        alone = SamplingLaw(SamplingParams(temperature=1.0), allowed=grammar.start(0))
        assert torch.equal(rows[row], alone(tokens, Draft(), logits[row : row + 1])[0])
        assert set(rows[row].nonzero()[:, 0].tolist()) == allowed(grammar.start(0)(tokens))
    assert rows[0][wrong] > 0 and rows[4][wrong] == 0


WORDS = ["[", "]", "1", "12", ",", "null", "true", "word"]
POSITIONS = 4
SAMPLES = 2000
SAMPLED = SamplingParams(max_tokens=POSITIONS, temperature=1.2, ignore_eos=True)
LIST: dict[str, Any] = {"type": "array", "items": {"enum": [1, 12, None, True]}}


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("drafter", ["ngram", "draft"])
def test_the_law_of_answers_is_the_targets_under_the_grammar(drafter: str, rule: str) -> None:
    """Robustness row 4, under a grammar. Odds of false failure and what is found out: as in test_lossless."""
    tokenizer = tiny_metaspace_tokenizer(WORDS)
    grammar = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id]).json_schema(LIST)
    model = tiny_llama(seed=2, vocabulary=len(tokenizer))
    prompt = ids_of(tokenizer, "[ 1 , 12 , 1 , 12 , 1")
    law = SamplingLaw(SAMPLED, prompt_length=len(prompt), allowed=grammar.start(len(prompt)))

    def target(context: tuple[int, ...]) -> Tensor:
        history = [*prompt, *context]
        return law(history, Draft(), plain_chain(model, history)[-1:])[0]

    engine = Engine(
        BACKENDS["native"](model),
        drafter_over(BACKENDS["native"](model), drafter, noise=0.2),
        draft_tokens=2,
        rule=rule,
        stop_tokens=[tokenizer.eos_token_id],
    )
    requests = [
        Request(prompt, replace(SAMPLED, seed=seed), allowed=grammar.start(len(prompt))) for seed in range(SAMPLES)
    ]
    exact = ancestral_law(target, POSITIONS)
    drawn = complete(engine, *requests)
    test = g_test(Counter(completion.ids for completion in drawn), exact)
    assert len(exact) > 10 and sum(c.stats.drafted for c in drawn) > 0
    assert test.passed and test.detectable < 0.04


def test_min_tokens_that_the_grammar_cannot_fill_fail_that_answer_alone(
    text_target: TransformersBackend, tokenizer: Any
) -> None:
    end = tokenizer.eos_token_id
    grammar = Grammars(tokenizer, len(tokenizer), [end]).json_schema({"enum": ["the"]})
    engine = Engine(text_target, drafter_over(text_target, "ngram"), tokenizer=tokenizer, stop_tokens=[end])
    params = SamplingParams(max_tokens=40)
    with pytest.raises(InvalidInputError, match="leave no token"):
        complete(engine, Request([1, 2], replace(params, min_tokens=30), allowed=grammar.start(2)))
    assert complete(engine, Request([1, 2], params, allowed=grammar.start(2)))[0].text == '"the"'


def test_a_grammar_that_turns_out_to_have_no_end_fails_that_answer_alone(grammars: Grammars, tokenizer: Any) -> None:
    endless = {"$defs": {"x": {"$ref": "#/$defs/x"}}, "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"]}
    grammar = grammars.json_schema({"type": "object", **endless})
    bad, good = grammar.start(0), grammar.start(0)
    with pytest.raises(InvalidInputError, match="no text of this model's tokens fits"):
        bad(ids_of(tokenizer, '{"a":'))
    assert allowed(good([])) == set(ids_of(tokenizer, "{"))


# What is refused

REFUSED: dict[str, tuple[Any, str]] = {
    "keyword": ({"if": {}, "not": {}}, 'keywords that are not supported: "if", "not"'),
    "type": ({"type": "foo"}, "Invalid type: foo"),
    "format": ({"type": "string", "format": "foo"}, "Unknown format: foo"),
    "pattern": ({"type": "string", "pattern": "["}, "unclosed character class"),
    "look-around": ({"type": "string", "pattern": "(?=a)b"}, "look-ahead and look-behind, is not supported"),
    "reference": ({"$ref": "#/$defs/x"}, "does not exist"),
    "remote": ({"$ref": "https://example.org/x"}, "another document"),
    "loop": ({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}, "no text of this model's tokens fits"),
    "nothing fits": ({"type": "integer", "minimum": 5, "maximum": 3}, r"minimum \(5\) is greater than maximum \(3\)"),
    "oneOf": ({"oneOf": [{"type": "object"}, {"type": "object"}]}, "Use anyOf"),
    "large": ({"enum": ["x" * 70_000]}, "65536 are allowed"),
    "NaN": ({"const": float("nan")}, "is no JSON"),
    "no JSON": ({"const": object()}, "is no JSON"),
    "number": ({"type": "integer", "minimum": 10**400}, "number out of range"),
    "no schema": ([1, 2], r"A JSON schema is an object, but this is \[1, 2\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_schemas_are_refused_with_the_reason(grammars: Grammars, name: str) -> None:
    schema, reason = REFUSED[name]
    with pytest.raises(InvalidInputError, match=reason):
        grammars.json_schema(schema)


def test_deep_schemas_are_refused(grammars: Grammars) -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):  # json.dumps would fail as well
        deep = {"items": deep}
    with pytest.raises(InvalidInputError, match="nested more than 64 deep"):
        grammars.json_schema(deep)


def test_what_is_not_strict_leaves_out_what_is_not_supported(grammars: Grammars, tokenizer: Any) -> None:
    schema = {"type": "string", "format": "foo", "not": {"const": "a"}}
    assert allowed(grammars.json_schema(schema, strict=False).start(0)([])) == set(ids_of(tokenizer, '"'))


def test_options_of_the_parser_are_not_for_clients(grammars: Grammars) -> None:
    with pytest.raises(InvalidInputError, match="not supported"):
        grammars.json_schema({"not": {}, "x-guidance": {"lenient": True}})


def test_what_would_take_for_ever_is_refused(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_SECONDS", 1.0)
    with pytest.raises(InvalidInputError, match="too much time or memory"):
        grammars.json_schema({"multipleOf": 2**31})


def test_models_without_stop_tokens_or_text_have_no_grammars(tokenizer: Any) -> None:
    with pytest.raises(UnsupportedError, match="a token that ends the answer"):
        Grammars(tokenizer, len(tokenizer), [len(tokenizer)])
    with pytest.raises(UnsupportedError, match="whose text is known"):
        Grammars(tiny_metaspace_tokenizer(["[", "]"]), 4, [3])


KEYWORDS: dict[str, st.SearchStrategy[Any]] = {
    "type": st.sampled_from(["object", "array", "string", "number", "integer", "null", ["string", "null"], 3]),
    "enum": st.lists(st.none() | st.integers() | st.text(max_size=5), max_size=4),
    "const": st.integers() | st.lists(st.booleans(), max_size=2),
    "required": st.lists(st.sampled_from("abc"), max_size=2),
    "$ref": st.sampled_from(["#", "#/$defs/a", "#/properties/a", "#a", "x", ""]),
    "pattern": st.text("ab(){}[]*+?|\\d^$.,01é/", max_size=8),
    "format": st.sampled_from(["date-time", "uuid", "email", "foo"]),
    **{
        name: st.integers(-3, 2**64) | st.floats(allow_nan=False)
        for name in ("minimum", "maximum", "exclusiveMinimum", "minLength", "maxLength", "minItems", "maxItems")
    },
}


def with_parts(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(st.sampled_from(["a", "b", '"', "é", ""]), schemas, max_size=3)
    parts = {
        **{name: st.lists(schemas, max_size=3) for name in ("anyOf", "allOf", "oneOf", "prefixItems")},
        **dict.fromkeys(("properties", "$defs", "patternProperties"), named),
        **dict.fromkeys(("items", "additionalProperties", "not"), schemas),
    }
    return st.fixed_dictionaries({}, optional={**KEYWORDS, **parts})


SCHEMAS = st.recursive(st.fixed_dictionaries({}, optional=KEYWORDS), with_parts, max_leaves=6)


@settings(max_examples=200)
@given(schema=SCHEMAS, strict=st.booleans(), draws=st.lists(st.integers(0, 10**6), min_size=30, max_size=30))
def test_any_schema_is_refused_or_leads_to_json(
    grammars: Grammars, tokenizer: Any, schema: dict[str, Any], strict: bool, draws: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_module, "refuse_endless", lambda text: None)  # a process for each would take long
        with contextlib.suppress(InvalidInputError):
            mask = grammars.json_schema(schema, strict=strict).start(0)
            ids: list[int] = []
            for draw in draws:
                found = sorted(allowed(mask(ids)))
                ids.append(found[draw % len(found)])
                if ids[-1] == tokenizer.eos_token_id:
                    json.loads(tokenizer.decode(ids[:-1]))
                    break


# Kept, and used by several threads


def test_the_last_grammars_are_kept(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "_KEPT", 2)
    grammars = grammars_for(tokenizer)
    first, second = grammars.json_object(), grammars.json_schema({"type": "null"})
    assert grammars.json_schema({"type": "object"}) is first
    grammars.json_schema({"type": "boolean"})
    assert grammars.json_object() is first
    assert grammars.json_schema({"type": "null"}) is not second


def test_keys_come_in_the_order_of_each_schema(grammars: Grammars, tokenizer: Any) -> None:
    for first, second in (("a", "b"), ("b", "a")):
        properties = {first: {"type": "null"}, second: {"type": "null"}}
        schema = {"type": "object", "properties": properties, "required": ["a", "b"]}
        (key,) = allowed(grammars.json_schema(schema).start(0)(ids_of(tokenizer, '{"')))
        assert tokenizer.decode([key]) == first


def test_threads_compile_while_others_decode(grammars: Grammars, tokenizer: Any) -> None:
    ids = ids_of(tokenizer, '{"name": "hell", "age": 12, "kind": "the red"')
    grammar = grammars.json_schema(PERSON)
    expected = [allowed(grammar.start(0)(ids[:n])) for n in range(len(ids))]
    wrong: list[int] = []

    def decode() -> None:
        for _ in range(20):
            mask = grammar.start(0)
            wrong.extend(n for n in range(len(ids)) if allowed(mask(ids[:n])) != expected[n])

    def compile_more() -> None:
        for n in range(3):
            grammars.json_schema({**PERSON, "title": f"{n} {threading.get_ident()}"})

    threads = [threading.Thread(target=work) for work in (decode, decode, compile_more, compile_more)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
