"""SmolLM2-135M-Instruct: every way of drafting says what the model says by itself, id for id, on both backends."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from transformers import LlamaForCausalLM

import foredraft
from foredraft.api import Model
from foredraft.backends.base import Query
from foredraft.loading import Loader
from foredraft.proposers.auto import Auto
from foredraft.types import Draft, FinishEvent, SamplingParams, TokenEvent
from tiny import plain_chain

pytestmark = pytest.mark.real_model

TOKENS = 40
PARAMS = SamplingParams(max_tokens=TOKENS)
PROMPTS = [
    "Write the word 'tomato' ten times, separated by commas.",
    "Repeat this sentence word for word: The grey cat sat on the warm roof and watched the grey pigeons on the roof.",
    "Which is heavier, a kilogram of feathers or a kilogram of iron? Explain in two sentences.",
    "Correct the spelling and give the whole text back: Yesterday we walkt to the harbour and lookt at the old ships.",
]
LAYERS = 8  # of the model's 30, for a draft model


@pytest.fixture(scope="module", autouse=True)
def all_threads() -> Iterator[None]:
    """The tiny models' single thread is too few here."""
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(all_threads: None) -> Model:
    """The bundled model, fetched if it is not in the cache yet."""
    return foredraft.load("smollm2-135m", "ngram", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def target(model: Model) -> Any:
    """The transformers model inside."""
    return model.backend.model  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def truncated(target: Any) -> Any:
    """The first layers of the target as a model of its own; the weights are shared."""
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = LAYERS
    with torch.device("meta"):
        draft: Any = LlamaForCausalLM(config)
    wanted = draft.state_dict().keys()
    draft.load_state_dict({name: w for name, w in target.state_dict().items() if name in wanted}, assign=True)
    draft.tie_weights()
    draft.model.rotary_emb = copy.deepcopy(target.model.rotary_emb)  # its buffers are not in the state
    return draft.eval()


class Plain(NamedTuple):
    prompt: list[int]
    answer: list[int]


@pytest.fixture(scope="module")
def plain(model: Model) -> list[Plain]:
    """Plain decoding of each prompt."""
    return [Plain(model.encode(p), list(model.plain().generate(p, PARAMS).ids)) for p in PROMPTS]


def assert_same(model: Any, prompt: Sequence[int], expected: Sequence[int], got: Sequence[int]) -> None:
    """Fails with the two top logits at the first difference: a near-tie there is rounding, a wide gap is a fault."""
    if list(got) == list(expected):
        return
    pairs = zip(expected, got, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(got)))
    if first == min(len(expected), len(got)):
        pytest.fail(f"one answer ends after {len(got)} tokens, the other after {len(expected)}")
    top = plain_chain(model, [*prompt, *expected[:first]])[-1].topk(2)
    kind = "a near-tie" if top.values[0] - top.values[1] < 1e-3 else "no near-tie"
    pytest.fail(
        f"token {first}: {got[first]} instead of {expected[first]}. The two top logits are {kind}: "
        f"{top.indices[0]} with {top.values[0]:.6f} and {top.indices[1]} with {top.values[1]:.6f}"
    )


def test_plain_decoding_says_what_generate_says(target: Any, plain: list[Plain]) -> None:
    for prompt, answer in plain:
        ids = torch.tensor([prompt])
        got = target.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS
        )
        assert_same(target, prompt, got[0, len(prompt) :].tolist(), answer)


def test_ngram_says_what_plain_decoding_says(target: Any, plain: list[Plain], model: Model) -> None:
    accepted = 0
    for prompt, answer in plain:
        completion = model.generate(prompt, PARAMS)
        assert_same(target, prompt, answer, completion.ids)
        accepted += completion.stats.accepted
    assert accepted > 0


def test_a_truncated_copy_as_draft_model_says_what_plain_decoding_says(
    target: Any, truncated: Any, plain: list[Plain], model: Model
) -> None:
    speculative = foredraft.load(target, truncated, tokenizer=model.tokenizer, draft_tokens=2)
    accepted = 0
    for prompt, answer in plain:
        completion = speculative.generate(prompt, PARAMS)
        assert_same(target, prompt, answer, completion.ids)
        assert completion.stats.drafter == "draft"
        accepted += completion.stats.accepted
    assert accepted > 0


def test_custom_generate_says_what_generate_says(target: Any, truncated: Any, plain: list[Plain]) -> None:
    method = foredraft.custom_generate(truncated, draft_tokens=2)
    for prompt, answer in plain[:2]:
        ids = torch.tensor([prompt])
        got = target.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=TOKENS,
            custom_generate=method,
        )
        assert_same(target, prompt, answer, got[0, len(prompt) :].tolist())


def test_custom_generate_of_a_padded_batch_says_what_generate_says(target: Any, plain: list[Plain]) -> None:
    """Forwards of a batch round differently, so the answers to each prompt alone are the ones to compare with."""
    width = max(len(row.prompt) for row in plain)
    pad = target.generation_config.pad_token_id
    ids = torch.tensor([[pad] * (width - len(row.prompt)) + row.prompt for row in plain])
    mask = torch.tensor([[0] * (width - len(row.prompt)) + [1] * len(row.prompt) for row in plain])
    got = target.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=TOKENS,
        custom_generate=foredraft.custom_generate("ngram"),
    )
    for row, answer in zip(plain, got[:, width:].tolist(), strict=True):
        assert_same(target, row.prompt, row.answer, answer[: len(row.answer)])
        assert set(answer[len(row.answer) :]) <= {pad}


TEMPERATURES = (0.3, 0.7, 1.0)


def seeded(model: Model, temperature: float, seed: int) -> SamplingParams:
    """24 tokens with everything on: top-p, a penalty, and a bias against the commonest word."""
    (the,) = model.tokenizer.encode(" the", add_special_tokens=False)
    return SamplingParams(
        max_tokens=24,
        temperature=temperature,
        top_p=0.95,
        repetition_penalty=1.1,
        logit_bias={int(the): -1.5},
        seed=seed,
        ignore_eos=True,
    )


@pytest.fixture(scope="module")
def seeded_plain(model: Model) -> dict[tuple[float, int], Sequence[int]]:
    """Plain decoding of the prompts at each temperature, with the prompt's number as the seed."""
    plain = model.plain()
    return {
        (temperature, number): plain.generate(prompt, seeded(model, temperature, number)).ids
        for temperature in TEMPERATURES
        for number, prompt in enumerate(PROMPTS)
    }


@pytest.mark.parametrize("kind", ["ngram", "draft model"])
def test_seeded_text_is_that_of_plain_decoding(
    kind: str, target: Any, truncated: Any, model: Model, seeded_plain: dict[tuple[float, int], Sequence[int]]
) -> None:
    """288 tokens. Rounding decides one in less than 1e5, and then the two scores are a near-tie."""
    speculative = model
    if kind == "draft model":
        speculative = foredraft.load(target, truncated, tokenizer=model.tokenizer, rule="seed-exact")
    completions = {
        (temperature, number): speculative.generate(PROMPTS[number], seeded(model, temperature, number))
        for temperature, number in seeded_plain
    }
    assert {which: completion.ids for which, completion in completions.items()} == seeded_plain
    assert {completion.stats.rule for completion in completions.values()} == {"seed-exact"}
    assert sum(completion.stats.accepted for completion in completions.values()) > 0
    assert sum(len(ids) for ids in seeded_plain.values()) == 288


@pytest.mark.parametrize(
    "prompt",
    [
        "你好，世界！今天天气很好，我们去公园散步吧。你好，世界！今天天气很好，",
        "🌍 🚀 👩‍👩‍👧 🇫🇷 🌍 🚀 👩‍👩‍👧 🇫🇷 🌍 🚀",
    ],
    ids=["Chinese", "emoji"],
)
def test_a_stream_never_splits_a_character(prompt: str, model: Model) -> None:
    pieces = []
    for event in model.stream(prompt, SamplingParams(max_tokens=64, ignore_eos=True), chat=False):
        if isinstance(event, TokenEvent):
            pieces.append(event.text)
        elif isinstance(event, FinishEvent):
            assert "".join(pieces) + event.text == event.completion.text
            assert event.completion.text == model.tokenizer.decode(list(event.completion.ids), skip_special_tokens=True)
    assert not any("\ufffd" in piece for piece in pieces)
    assert sum(len(piece.encode()) > len(piece) for piece in pieces) > 3  # there was something to split
    assert "" in pieces


# The native engine


@pytest.fixture(scope="module")
def native() -> Model:
    """The bundled model on the native engine, as its file has it."""
    return foredraft.load("smollm2-135m", "hybrid:suffix+recycling", backend="native", draft_tokens=8)


@pytest.mark.parametrize("weights", ["auto", "f32"])
def test_native_logits_are_those_of_transformers(target: Any, plain: list[Plain], weights: str) -> None:
    """4-bit blocks, and the same weights as float32: in both cases only the order of additions differs."""
    backend = foredraft.load("smollm2-135m", "none", backend="native", weights=weights).backend
    prompt, answer = plain[1]
    cache = backend.new_cache()
    backend.prefill(cache, prompt[:-1])
    rows = backend.forward([Query(cache, prompt[-1], Draft.chain(answer[:-1]))])[0]
    assert (rows - plain_chain(target, [*prompt, *answer[:-1]])[len(prompt) - 1 :]).abs().max() < 1e-3


def test_native_text_is_that_of_transformers(target: Any, plain: list[Plain], native: Model) -> None:
    for prompt, answer in plain:
        assert_same(target, prompt, answer, native.plain().generate(prompt, PARAMS).ids)


def test_native_text_is_the_same_with_and_without_drafts(native: Model) -> None:
    """No near-ties to allow for: the bits are the same."""
    accepted = 0
    for number, prompt in enumerate(PROMPTS):
        for params in (SamplingParams(max_tokens=96), seeded(native, 0.7, number), seeded(native, 1.0, number)):
            speculative = native.generate(prompt, params)
            assert speculative.ids == native.plain().generate(prompt, params).ids
            accepted += speculative.stats.accepted
    assert accepted > 50


def with_the_bundled_head(held: Model) -> Model:
    drafter = Loader().drafter(("eagle3", ""), held.backend, held.tokenizer, held.files)
    assert drafter is not None and drafter.name == "eagle3"
    return Model(held.backend, held.tokenizer, drafter)


def test_the_bundled_head_drafts_for_its_model(native: Model) -> None:
    """It was measured at 1.6 tokens a forward and more on other prompts; below 1.2 something is wrong with it."""
    drafted, tokens, forwards = with_the_bundled_head(native), 0, 0
    for prompt in PROMPTS:
        for temperature in (0.0, 0.8):
            params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=3)
            answer = drafted.generate(prompt, params)
            assert answer.ids == native.plain().generate(prompt, params).ids
            tokens, forwards = tokens + answer.stats.tokens, forwards + answer.stats.target_forwards
    assert tokens > 1.2 * forwards


def test_auto_has_the_head_that_comes_with_the_model() -> None:
    """It drafts of itself, and as seldom as its trials where its drafts do not pay; the text stays the model's."""
    model = foredraft.load("smollm2-135m", backend="native")
    assert model.drafter is not None and model.drafter.name == "auto"
    assert isinstance(model.drafter, Auto)
    assert [part.name for part in model.drafter.parts] == ["suffix", "recycling", "eagle3"]
    for prompt in PROMPTS:
        for params in (PARAMS, SamplingParams(max_tokens=TOKENS, temperature=0.8, seed=3)):
            answer = model.generate(prompt, params)
            assert answer.ids == model.plain().generate(prompt, params).ids
    assert model.drafter.arms["asked"][2] > 0


def test_the_bundled_head_drafts_in_transformers(model: Model, target: Any, plain: list[Plain]) -> None:
    drafted = with_the_bundled_head(model)
    for prompt, (ids, expected) in zip(PROMPTS[2:], plain[2:], strict=True):
        assert_same(target, ids, expected, drafted.generate(prompt, PARAMS).ids)
