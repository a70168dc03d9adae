"""The sampling pipeline at every node of a draft, with that node's own history: transformers' own where it has one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from foredraft.acceptance import RULES
from foredraft.backends.transformers import TransformersBackend
from foredraft.engine import Engine
from foredraft.errors import InvalidInputError
from foredraft.generation import Request
from foredraft.proposers.ngram import NGram
from foredraft.randomness import KeyedSource, RandomSource, TorchSource
from foredraft.sampling import AllowedTokens, SamplingLaw, one_hot_argmax
from foredraft.text import word_ids
from foredraft.tree import paths
from foredraft.types import Completion, Draft, SamplingParams, TokenEvent
from tiny import DRAFTER_MAKERS, VOCABULARY, Oracle, collect, complete, drafter_over, generate, plain_chain, tokens_of

FEW = 24
PROMPT, ANSWER = [3, 5, 3, 7, 9, 9], [5, 11, 3]
HISTORY = [*PROMPT, *ANSWER]
TREE = Draft((11, 3, 9, 3, 20, 9, 5, 11), (-1, -1, 0, 0, 2, 1, 5, -1))
"""Branches, with tokens that prompt and answer have already, that repeat on a path, and that no other row has."""
STOP = (1, 20)
BAD_WORDS = ([13], [11, 9], [9, 3, 20], [3, 9, 5])


def logits(seed: int = 0, rows: int = len(TREE) + 1) -> Tensor:
    return 3 * torch.randn(rows, FEW, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def node_histories(draft: Draft = TREE) -> list[list[int]]:
    return [[*HISTORY, *path] for path in [(), *paths(draft)]]


def no_token_twice_in_a_row(tokens: Sequence[int]) -> Tensor:
    """Something that depends on the history, as a grammar does."""
    mask = torch.ones(FEW, dtype=torch.bool)
    mask[tokens[-1]] = False
    return mask


# Transformers' own


def processors(params: SamplingParams, bad_words: Sequence[Sequence[int]], allowed: AllowedTokens | None) -> list[Any]:
    """The library's processors for these settings, in its order."""
    made: list[tuple[bool, Callable[[], Any]]] = [
        (
            bool(params.logit_bias),
            lambda: SequenceBiasLogitsProcessor([[[i], b] for i, b in params.logit_bias.items()]),
        ),
        (params.repetition_penalty != 1, lambda: RepetitionPenaltyLogitsProcessor(params.repetition_penalty)),
        (bool(bad_words), lambda: NoBadWordsLogitsProcessor([list(word) for word in bad_words])),
        (
            params.min_tokens > 0,
            lambda: MinNewTokensLengthLogitsProcessor(len(PROMPT), params.min_tokens, list(STOP), device="cpu"),
        ),
        (
            allowed is not None,
            lambda: PrefixConstrainedLogitsProcessor(lambda _, ids: _listed(allowed, ids.tolist()), num_beams=1),
        ),
        (not params.greedy, lambda: TemperatureLogitsWarper(params.temperature)),
        (params.top_k > 0, lambda: TopKLogitsWarper(params.top_k)),
        (params.top_p < 1, lambda: TopPLogitsWarper(params.top_p)),
        (params.min_p > 0, lambda: MinPLogitsWarper(params.min_p)),
    ]
    return [make() for wanted, make in made if wanted]


def _listed(allowed: AllowedTokens | None, tokens: list[int]) -> list[int]:
    mask = allowed(tokens) if allowed is not None else None
    assert mask is not None
    return mask.nonzero()[:, 0].tolist()


def by_transformers(
    params: SamplingParams, bad_words: Sequence[Sequence[int]], allowed: AllowedTokens | None, rows: Tensor
) -> Tensor:
    """What the library makes of each row, called for each node alone."""
    chain: Any = LogitsProcessorList(processors(params, bad_words, allowed))
    scores = [chain(torch.tensor([ids]), row[None]) for ids, row in zip(node_histories(), rows, strict=True)]
    return torch.cat(scores).softmax(-1)


SETTINGS: dict[str, SamplingParams] = {
    "plain": SamplingParams(temperature=1.0),
    "bias": SamplingParams(temperature=1.0, logit_bias={0: 4.0, 11: -100.0, 23: 100.0, 9: 0.5}),
    "repetition": SamplingParams(temperature=1.0, repetition_penalty=1.7),
    "reward": SamplingParams(temperature=1.0, repetition_penalty=0.6),
    "bias and repetition": SamplingParams(temperature=1.0, logit_bias={9: -3.0, 5: 3.0}, repetition_penalty=1.7),
    "minimum": SamplingParams(temperature=1.0, min_tokens=5),
    "minimum reached": SamplingParams(temperature=1.0, min_tokens=3),
    "together": SamplingParams(
        temperature=0.7,
        top_k=12,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.3,
        logit_bias={9: 2.0, 4: -1.0},
        min_tokens=5,
    ),
}


@pytest.mark.parametrize("allowed", [None, no_token_twice_in_a_row], ids=["any token", "mask"])
@pytest.mark.parametrize("bad_words", [(), BAD_WORDS], ids=["any word", "bad words"])
@pytest.mark.parametrize("params", SETTINGS.values(), ids=SETTINGS)
def test_every_node_has_the_law_of_transformers(
    params: SamplingParams, bad_words: Sequence[Sequence[int]], allowed: AllowedTokens | None
) -> None:
    law = SamplingLaw(params, prompt_length=len(PROMPT), stop_tokens=STOP, bad_words=bad_words, allowed=allowed)
    for seed in range(10):
        rows = logits(seed)
        p, expected = law(HISTORY, TREE, rows), by_transformers(params, bad_words, allowed, rows)
        reachable = reachable_rows(p)
        assert torch.allclose(p[reachable], expected[reachable], atol=1e-12)
        assert torch.equal(p[reachable] > 0, expected[reachable] > 0)
        assert law.logprobs(HISTORY, TREE, rows)[reachable].allclose(expected.log()[reachable], atol=1e-9)


def reachable_rows(p: Tensor) -> list[int]:
    """The root and the nodes whose token, and those above, have mass: below others there is nothing to compare."""
    reachable = [True]
    for parent, token in zip(TREE.parents, TREE.tokens, strict=True):
        reachable.append(reachable[parent + 1] and bool(p[parent + 1, token] > 0))
    return [row for row, good in enumerate(reachable) if good]


def test_the_order_is_that_of_generate(tiny_target: Any) -> None:
    found: list[str] = []

    def look(model: Any, input_ids: Tensor, logits_processor: Any, **_: Any) -> Tensor:
        found.extend(type(processor).__name__ for processor in logits_processor)
        return input_ids

    tiny_target.generate(
        torch.tensor([PROMPT]),
        custom_generate=look,
        prefix_allowed_tokens_fn=lambda _, ids: [0],
        do_sample=True,
        sequence_bias=[[[9], 1.0]],
        repetition_penalty=1.3,
        bad_words_ids=[[13]],
        min_new_tokens=3,
        max_new_tokens=9,
        eos_token_id=1,
        pad_token_id=1,
        temperature=0.7,
        top_k=9,
        top_p=0.9,
        min_p=0.1,
    )
    ours = processors(SETTINGS["together"], BAD_WORDS, no_token_twice_in_a_row)
    found.remove("MinLengthLogitsProcessor")  # which generate adds beside the one of new tokens
    assert found == [type(processor).__name__ for processor in ours]


@given(
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 4]),
    top_p=st.sampled_from([1.0, 0.8, 0.1]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    repetition=st.sampled_from([1.0, 1.5, 0.5]),
    frequency=st.sampled_from([0.0, 2.0, -1.0]),
    presence=st.sampled_from([0.0, 1.5]),
    bias=st.dictionaries(st.integers(0, FEW - 1), st.floats(-100, 100), max_size=3),
    masked=st.booleans(),
)
def test_rows_are_distributions_and_depend_on_their_own_path_alone(
    seed: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition: float,
    frequency: float,
    presence: float,
    bias: dict[int, float],
    masked: bool,
) -> None:
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        logit_bias=bias,
        min_tokens=4 if masked else 0,
    )
    words = BAD_WORDS if masked else ()
    law = SamplingLaw(params, prompt_length=len(PROMPT), stop_tokens=STOP, bad_words=words)
    rows = logits(seed)

    def distributions(history: Sequence[int], draft: Draft, rows: Tensor) -> Tensor:
        found = law(history, draft, rows)
        return one_hot_argmax(found).double() if law.greedy else found  # of greedy rows only the argmax counts

    p = distributions(HISTORY, TREE, rows)
    assert p.dtype == torch.float64 and not p.isnan().any() and (p >= 0).all()
    assert torch.allclose(p.sum(-1), torch.ones(len(rows), dtype=torch.float64), atol=1e-12)
    for row in reachable_rows(p):
        alone = distributions(node_histories()[row], Draft(), rows[row : row + 1])
        assert torch.equal(alone[0], p[row])


@given(seed=st.integers(0, 2**31), name=st.sampled_from(sorted(RULES)), setting=st.sampled_from(sorted(SETTINGS)))
def test_no_rule_emits_what_the_settings_forbid(seed: int, name: str, setting: str) -> None:
    rule = RULES[name]
    params = replace(SETTINGS[setting], temperature=0.0 if rule.greedy else 1.5, top_k=4)
    law = SamplingLaw(
        params, prompt_length=len(PROMPT), stop_tokens=STOP, bad_words=BAD_WORDS, allowed=no_token_twice_in_a_row
    )
    draft = TREE if rule.trees else Draft.chain(TREE.tokens)
    p = law(HISTORY, draft, logits(seed))
    source: RandomSource = KeyedSource(seed) if rule.keyed else TorchSource(torch.Generator().manual_seed(seed))
    tokens = list(HISTORY)
    for token in rule.decide(draft, p, source).tokens:
        assert token != 13 and not (len(tokens) - len(PROMPT) < params.min_tokens and token in STOP)
        tokens.append(token)
        assert tokens[-1] != tokens[-2]
        assert not any(tokens[-len(word) :] == word for word in BAD_WORDS)


# Penalties


def penalised(row: Tensor, ids: Sequence[int], frequency: float, presence: float) -> list[float]:
    """What OpenAI's reference says the logits become, token by token."""
    counts = Counter(ids[len(PROMPT) :])
    return [value - frequency * counts[x] - presence * (counts[x] > 0) for x, value in enumerate(row.tolist())]


@pytest.mark.parametrize(("frequency", "presence"), [(1.5, 0.0), (0.0, 1.2), (-0.7, 0.4), (2.0, -2.0)])
def test_frequency_and_presence_count_the_answer_alone(frequency: float, presence: float) -> None:
    params = SamplingParams(temperature=0.8, frequency_penalty=frequency, presence_penalty=presence)
    law, rows = SamplingLaw(params, prompt_length=len(PROMPT)), logits()
    expected = torch.tensor(
        [penalised(row, ids, frequency, presence) for row, ids in zip(rows, node_histories(), strict=True)],
        dtype=torch.float64,
    )
    assert torch.allclose(law(HISTORY, TREE, rows), (expected / 0.8).softmax(-1), atol=1e-12)


def test_penalties_do_not_touch_their_input() -> None:
    rows = logits()
    before = rows.clone()
    for params in SETTINGS.values():
        SamplingLaw(params, prompt_length=len(PROMPT), stop_tokens=STOP, bad_words=BAD_WORDS)(HISTORY, TREE, rows)
    assert torch.equal(rows, before)


OFF: Any = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
STRONG = [
    {"repetition_penalty": 1.8},
    {"frequency_penalty": 2.0},
    {"presence_penalty": 2.0},
    {"repetition_penalty": 0.7, "frequency_penalty": 0.5},  # repeats itself, so that drafts are accepted as well
]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("penalties", STRONG, ids=str)
@pytest.mark.parametrize("drafter", DRAFTER_MAKERS)
def test_rejected_tokens_do_not_count(
    target: TransformersBackend, drafter: str, penalties: dict[str, float], temperature: float
) -> None:
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3, **penalties)  # type: ignore[arg-type]
    plain = generate(Engine(target), [1, 2, 3, 1, 2], params)
    engine = Engine(target, drafter_over(target, drafter), rule="seed-exact")
    completion = generate(engine, [1, 2, 3, 1, 2], params)
    assert completion.ids == plain.ids
    assert completion.ids != generate(Engine(target), [1, 2, 3, 1, 2], replace(params, **OFF)).ids


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_wrong_drafts_do_not_count_even_where_all_are_rejected(target: TransformersBackend, temperature: float) -> None:
    params = SamplingParams(
        max_tokens=30,
        temperature=temperature,
        seed=3,
        frequency_penalty=2.0,
        presence_penalty=2.0,
        repetition_penalty=1.5,
    )
    plain = generate(Engine(target), [1, 2, 3], params)
    wrong = [(i + 1) % VOCABULARY for i in plain.ids]
    completion = generate(Engine(target, Oracle([1, 2, 3], wrong), draft_tokens=4), [1, 2, 3], params)
    assert completion.ids == plain.ids and completion.stats.accepted == 0 < completion.stats.drafted


# Masks


def test_a_mask_holds_at_every_node(target: TransformersBackend) -> None:
    def even_then_odd(tokens: Sequence[int]) -> Tensor:
        return torch.arange(VOCABULARY) % 2 != tokens[-1] % 2

    for name, temperature in itertools.product(DRAFTER_MAKERS, (0.0, 1.0)):
        params = SamplingParams(max_tokens=30, temperature=temperature, seed=1)
        requests = [Request(prompt, params, allowed=even_then_odd) for prompt in ([1, 2, 3], [4, 5] * 6)]
        plain = complete(Engine(target), *requests)
        completions = complete(Engine(target, drafter_over(target, name), rule="seed-exact"), *requests)
        assert [c.ids for c in completions] == [c.ids for c in plain]
        for request, completion in zip(requests, completions, strict=True):
            ids = [request.prompt[-1], *completion.ids]
            assert all(a % 2 != b % 2 for a, b in itertools.pairwise(ids))


def test_a_mask_may_leave_everything_to_the_law(target: TransformersBackend) -> None:
    params = SamplingParams(max_tokens=10)
    free = complete(Engine(target), Request([1, 2, 3], params, allowed=lambda tokens: None))[0]
    assert free.ids == generate(Engine(target), [1, 2, 3], params).ids


def test_a_mask_is_asked_only_about_text_that_it_allows(target: TransformersBackend) -> None:
    """A grammar knows nothing to say below a drafted token that it forbids itself."""
    answer = list(range(40, 60))

    def exactly_the_answer(tokens: Sequence[int]) -> Tensor:
        said = list(tokens[len(prompt) :])
        assert said == answer[: len(said)], "asked about text that cannot come to be"
        mask = torch.zeros(VOCABULARY, dtype=torch.bool)
        mask[answer[len(said)]] = True
        return mask

    prompt = [40, 41, 42, 7, 40, 41]  # ngram drafts 42, 7: forbidden from the second token on
    for drafter in (NGram(), Oracle(prompt, [*answer[:3], 9, *answer[4:]])):
        for params in (SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, temperature=1.0)):
            request = Request(prompt, params, allowed=exactly_the_answer)
            assert list(complete(Engine(target, drafter), request)[0].ids) == answer[:12]


def test_a_mask_that_leaves_nothing_is_refused(target: TransformersBackend) -> None:
    nothing = torch.zeros(VOCABULARY, dtype=torch.bool)
    request = Request([1, 2, 3], SamplingParams(), allowed=lambda tokens: nothing)
    with pytest.raises(InvalidInputError, match="leave no token to continue with"):
        complete(Engine(target), request)


def test_masks_that_together_leave_nothing_are_refused() -> None:
    only_a_stop = torch.zeros(FEW, dtype=torch.bool)
    only_a_stop[STOP[0]] = True
    law = SamplingLaw(SamplingParams(min_tokens=2), stop_tokens=STOP, allowed=lambda tokens: only_a_stop)
    with pytest.raises(InvalidInputError, match="Bad words, min_tokens and the allowed tokens leave no token"):
        law([3], Draft(), logits(rows=1))


# Bias


def test_a_bias_of_an_id_past_the_vocabulary_is_refused(target: TransformersBackend) -> None:
    law = SamplingLaw(SamplingParams(logit_bias={FEW: 1.0}))
    with pytest.raises(InvalidInputError, match=f"logit_bias names token id {FEW}, but the last id is {FEW - 1}"):
        law([3], Draft(), logits(rows=1))


def test_it_is_refused_before_any_request_starts(target: TransformersBackend) -> None:
    wrong = SamplingParams(logit_bias={VOCABULARY - 1: 1.0, VOCABULARY: 1.0})
    requests = [Request([1, 2, 3]), Request([1, 2, 3], wrong)]
    with pytest.raises(InvalidInputError, match=f"names token id {VOCABULARY}, but the last id is {VOCABULARY - 1}"):
        next(Engine(target).run(requests))


def test_a_bias_of_a_hundred_decides(target: TransformersBackend) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0, logit_bias={17: 100.0}, seed=1)
    assert generate(Engine(target, NGram()), [1, 2, 3], params).ids == (17,) * 8


# Bad words and the minimum, on the engine


@pytest.fixture(scope="module")
def text_ids(tokenizer: Any) -> dict[str, list[int]]:
    return {text: tokenizer.encode(text, add_special_tokens=False) for text in ("the", " the", "hell", " hell")}


def test_bad_words_are_meant_with_and_without_a_leading_space(tokenizer: Any, text_ids: dict[str, list[int]]) -> None:
    assert word_ids(tokenizer, ["the", "hell"]) == [text_ids[text] for text in ("the", " the", "hell", " hell")]
    assert len(text_ids["the"]) == 2 and len(text_ids[" the"]) == 1
    assert word_ids(tokenizer, ["the", "the"]) == [text_ids["the"], text_ids[" the"]]
    assert word_ids(tokenizer, ()) == []


def has(ids: Sequence[int], word: Sequence[int]) -> bool:
    return any(list(ids[i : i + len(word)]) == list(word) for i in range(len(ids)))


@pytest.mark.parametrize("drafter", DRAFTER_MAKERS)
def test_bad_words_are_never_said(
    text_target: TransformersBackend, tokenizer: Any, text_ids: dict[str, list[int]], drafter: str
) -> None:
    t, he = text_ids["the"]
    wanted = {t: 60.0, he: 68.0, text_ids[" the"][0]: 60.0, 7: 60.0}  # nothing else is ever said
    params = SamplingParams(max_tokens=40, temperature=2.0, logit_bias=wanted, seed=1)
    engines = [Engine(text_target, tokenizer=tokenizer)]
    engines += [Engine(text_target, drafter_over(text_target, drafter), tokenizer=tokenizer, rule="seed-exact")]
    for engine in engines:
        ids = generate(engine, [t, he, t, he], params).ids
        assert has(ids, text_ids["the"]) and has(ids, text_ids[" the"])
    plain, speculative = (generate(engine, [t, he, t], replace(params, bad_words="the")).ids for engine in engines)
    assert speculative == plain
    assert not has([t, *plain], text_ids["the"]) and not has(plain, text_ids[" the"])  # nor across the prompt's end
    assert t in plain and he in plain


def test_bad_words_equal_those_of_generate(text_target: TransformersBackend, tokenizer: Any) -> None:
    prompt = tokenizer.encode("the hell in the", add_special_tokens=False)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    free = generate(Engine(text_target, tokenizer=tokenizer), prompt, params)
    words = [tokenizer.decode([i]) for i in free.ids[2:12:3] if "\ufffd" not in tokenizer.decode([i]).strip()]
    ids = torch.tensor([prompt])
    expected = text_target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=30,
        do_sample=False,
        bad_words_ids=word_ids(tokenizer, words),
        pad_token_id=0,
    )
    completion = generate(
        Engine(text_target, NGram(), tokenizer=tokenizer), prompt, replace(params, bad_words=tuple(words))
    )
    assert words and completion.ids != free.ids
    assert list(completion.ids) == expected[0, len(prompt) :].tolist()


def test_bad_words_need_a_tokenizer(target: TransformersBackend) -> None:
    with pytest.raises(InvalidInputError, match="bad words need a tokenizer"):
        generate(Engine(target), [1], SamplingParams(bad_words="the"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("minimum", [0, 1, 5, 12])
@pytest.mark.parametrize("drafter", ["none", *DRAFTER_MAKERS])
def test_no_stop_token_comes_before_the_minimum(
    target: TransformersBackend, drafter: str, minimum: int, temperature: float
) -> None:
    eager = SamplingParams(  # wants to stop at once, always
        max_tokens=20, temperature=temperature, min_tokens=minimum, logit_bias={9: 100.0, 10: 90.0}, seed=1
    )
    engine = Engine(target, drafter_over(target, drafter), stop_tokens=[9, 10])
    completion = generate(engine, [1, 2, 3, 1, 2], eager)
    assert len(completion.ids) == minimum + 1 and completion.ids[-1] == 9
    assert not {9, 10} & set(completion.ids[:-1])
    assert completion.finish_reason == "stop_token"


def test_a_stop_token_that_the_model_does_not_have_does_no_harm(target: TransformersBackend) -> None:
    params = SamplingParams(max_tokens=6, min_tokens=6)
    completion = generate(Engine(target, stop_tokens=[VOCABULARY + 3]), [1, 2, 3], params)
    assert completion.ids == generate(Engine(target), [1, 2, 3], params).ids


# Log-probabilities

SAMPLED = SamplingParams(
    max_tokens=40,
    temperature=0.8,
    top_p=0.95,
    frequency_penalty=0.2,
    logit_bias={5: 4.0, 6: 4.0, 7: 4.0},  # repeats itself, so that drafts are accepted as well
    seed=5,
    logprobs=4,
)


def reported(completion: Completion) -> list[Mapping[int, float]]:
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.ids)
    return list(completion.logprobs)


def own_law(model: Any, prompt: Sequence[int], ids: Sequence[int], params: SamplingParams) -> Tensor:
    """The target's law at every emitted token, from one plain forward."""
    rows = plain_chain(model, [*prompt, *ids])[len(prompt) - 1 : -1]
    return SamplingLaw(params, prompt_length=len(prompt)).logprobs(prompt, Draft.chain(ids[:-1]), rows)


@pytest.mark.parametrize("params", [SAMPLED, replace(SAMPLED, temperature=0.0)], ids=["sampled", "greedy"])
@pytest.mark.parametrize("drafter", ["none", *DRAFTER_MAKERS])
def test_logprobs_are_the_targets_law(target: TransformersBackend, drafter: str, params: SamplingParams) -> None:
    prompt = [5, 6, 5, 6, 5]
    rule = "seed-exact" if drafter != "none" else None
    completion = generate(Engine(target, drafter_over(target, drafter), rule=rule), prompt, params)
    law = own_law(target.model, prompt, completion.ids, params)
    for token, noted, row in zip(completion.ids, reported(completion), law, strict=True):
        assert next(iter(noted)) == token
        best = [i for i in row.topk(4).indices.tolist() if row[i] > -torch.inf]
        assert set(noted) == {token, *best}
        assert all(value == pytest.approx(float(row[i]), abs=1e-4) for i, value in noted.items())


def test_logprobs_of_a_greedy_answer_are_those_at_temperature_one(target: TransformersBackend) -> None:
    completion = generate(Engine(target), [5, 6], SamplingParams(max_tokens=5, logprobs=VOCABULARY_LIMIT))
    rows = plain_chain(target.model, [5, 6, *completion.ids])[1:-1].double().log_softmax(-1)
    for token, noted, row in zip(completion.ids, reported(completion), rows, strict=True):
        assert max(noted, key=lambda i: noted[i]) == token
        assert noted[token] == pytest.approx(float(row.max()), abs=1e-4)
        assert len(noted) == VOCABULARY_LIMIT


VOCABULARY_LIMIT = 20  # the largest n


@pytest.mark.parametrize("drafter", DRAFTER_MAKERS)
@pytest.mark.parametrize("params", [SAMPLED, replace(SAMPLED, temperature=0.0)], ids=["sampled", "greedy"])
def test_logprobs_are_the_same_without_speculation(
    target: TransformersBackend, drafter: str, params: SamplingParams
) -> None:
    prompt = [5, 6, 5, 6, 5]
    plain = generate(Engine(target), prompt, params)
    completion = generate(Engine(target, drafter_over(target, drafter), rule="seed-exact"), prompt, params)
    assert completion.ids == plain.ids and completion.stats.accepted > 0
    for a, b in zip(reported(plain), reported(completion), strict=True):
        assert a.keys() == b.keys()
        assert all(b[i] == pytest.approx(value, abs=1e-4) for i, value in a.items())


def test_logprobs_end_where_a_cut_answer_ends(text_target: TransformersBackend, tokenizer: Any) -> None:
    whole = generate(Engine(text_target, tokenizer=tokenizer), [1, 2, 3], SamplingParams(max_tokens=30))
    known = Oracle([1, 2, 3], whole.ids)
    stop = whole.text[6:8]
    for params, stops in (
        (SamplingParams(max_tokens=30, logprobs=2, stop=stop), ()),
        (SamplingParams(max_tokens=30, logprobs=2), [whole.ids[4]]),
        (SamplingParams(max_tokens=5, logprobs=2), ()),
    ):
        engine = Engine(text_target, known, tokenizer=tokenizer, stop_tokens=stops)
        events = collect(engine, Request([1, 2, 3], params))[0]
        completion = complete(engine, Request([1, 2, 3], params))[0]
        assert len(completion.ids) < 30
        assert all(token in noted for token, noted in zip(completion.ids, reported(completion), strict=True))
        assert [event.logprobs for event in tokens_of(events)] == reported(completion)
        assert [event.token for event in events if isinstance(event, TokenEvent)] == list(completion.ids)


def test_no_logprobs_unless_asked_and_none_but_the_tokens_own_for_zero(target: TransformersBackend) -> None:
    silent = generate(Engine(target), [1, 2], SamplingParams(max_tokens=4))
    assert silent.logprobs is None
    own = generate(Engine(target), [1, 2], SamplingParams(max_tokens=4, logprobs=0))
    assert [list(noted) for noted in reported(own)] == [[token] for token in own.ids]


def test_tokens_without_probability_are_not_reported(target: TransformersBackend) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0, top_k=2, logprobs=10, seed=1)
    completion = generate(Engine(target), [1, 2], params)
    assert all(len(noted) == 2 and min(noted.values()) > -torch.inf for noted in reported(completion))


def test_a_vocabulary_may_be_smaller_than_what_is_asked_for(target: TransformersBackend) -> None:
    small = TransformersBackend(target.model, vocab_size=6)
    completion = generate(Engine(small), [1, 2], SamplingParams(max_tokens=3, logprobs=20))
    assert all(set(noted) == set(range(6)) for noted in reported(completion))
