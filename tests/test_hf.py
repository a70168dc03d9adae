"""foredraft inside transformers: `generate` with `custom_generate` returns what `generate` returns without it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkingConfig,
    TextIteratorStreamer,
)

import foredraft
from foredraft.errors import InvalidInputError, UnsupportedError
from foredraft.proof.statistics import g_test
from foredraft.proposers.ngram import NGram
from tiny import Oracle, perturbed, seeded, tiny_llama

PAD = 0
PROMPT = torch.tensor([[5, 9, 13, 5, 9, 13, 5, 9]])
BATCH = torch.tensor([[0, 0, 0, 5, 9, 13, 5, 9], [3, 4, 3, 4, 3, 4, 3, 4], [0, 0, 0, 0, 0, 0, 7, 8]])
MASK = (BATCH != PAD).long()
ONE = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
MANY = {"input_ids": BATCH, "attention_mask": MASK}


@pytest.fixture(scope="module")
def model() -> Any:
    model = tiny_llama(seed=1)
    model.generation_config.pad_token_id = PAD
    return model


@pytest.fixture(scope="module")
def near(model: Any) -> Any:
    """A draft model that is often right."""
    return perturbed(model, 0.1)


@pytest.fixture(params=["ngram", "draft model"])
def drafter(request: pytest.FixtureRequest, near: Any) -> Any:
    return near if request.param == "draft model" else "ngram"


@pytest.fixture(scope="module")
def plain(model: Any) -> Any:
    """What the model greedily says to each row of `BATCH`."""
    return model.generate(**MANY, do_sample=False, max_new_tokens=24)[:, BATCH.shape[1] :]


@pytest.fixture(scope="module")
def answer(model: Any) -> list[int]:
    """What the model greedily says to `PROMPT`."""
    ids: list[int] = model.generate(**ONE, do_sample=False, max_new_tokens=24)[0, PROMPT.shape[1] :].tolist()
    return ids


def both(model: Any, drafter: Any, inputs: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """What `generate` returns without and with `custom_generate`, greedily."""
    options = {"do_sample": False, "max_new_tokens": 24, **options}
    if "max_length" in options:
        del options["max_new_tokens"]
    return tuple(
        model.generate(**inputs, **options, **method)
        for method in ({}, {"custom_generate": foredraft.custom_generate(drafter)})
    )


class Ends(StoppingCriteria):
    """Ends a row once it has emitted a token three times in all."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        return (input_ids[:, BATCH.shape[1] :] == self.token).sum(1) >= 3


class EndsEachRowAfter(StoppingCriteria):
    """Ends row i of the batch after `counts[i]` tokens."""

    def __init__(self, *counts: int) -> None:
        self.counts = torch.tensor(counts)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        return input_ids.shape[1] - BATCH.shape[1] >= self.counts


class PrefersEvenAfterOdd(LogitsProcessor):
    """A processor of a user's own, which looks at the history."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        even = (torch.arange(scores.shape[1]) % 2 == 0).float()
        odd_before = (input_ids[:, -1:] % 2).float()
        return scores + 3 * odd_before * even


class FavoursOneTokenPerRow(LogitsProcessor):
    """A processor that holds something for each row of the batch."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(scores))
        changed = scores.clone()
        changed[rows, 20 + rows] += 4
        return changed


# Greedy: the same ids


def test_greedy_ids_of_one_prompt(model: Any, drafter: Any) -> None:
    expected, got = both(model, drafter, ONE)
    assert torch.equal(got, expected)


def test_greedy_ids_of_a_left_padded_batch(model: Any, drafter: Any) -> None:
    expected, got = both(model, drafter, MANY)
    assert torch.equal(got, expected)


def test_greedy_ids_without_an_attention_mask(model: Any, drafter: Any) -> None:
    expected, got = both(model, drafter, {"input_ids": BATCH})  # generate infers it from the padding
    assert torch.equal(got, expected)


def test_greedy_ids_of_a_mask_with_holes(model: Any, drafter: Any) -> None:
    ids = torch.tensor([[5, 9, 1, 1, 13, 4]])
    expected, got = both(model, drafter, {"input_ids": ids, "attention_mask": (ids != 1).long()})
    assert torch.equal(got, expected)


def test_greedy_ids_of_a_model_with_learned_positions(drafter: Any) -> None:
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    config.bos_token_id = config.eos_token_id = None
    model = seeded(GPT2LMHeadModel, config)
    model.generation_config.pad_token_id = PAD
    expected, got = both(model, drafter, MANY)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("length", [9, 10, 30])
def test_max_length(length: int, model: Any, drafter: Any) -> None:
    expected, got = both(model, drafter, MANY, max_length=length)
    assert got.shape[1] == length
    assert torch.equal(got, expected)


@pytest.mark.parametrize("count", [1, 2, 13])
def test_max_new_tokens(count: int, model: Any, drafter: Any) -> None:
    expected, got = both(model, drafter, MANY, max_new_tokens=count)
    assert got.shape[1] == BATCH.shape[1] + count
    assert torch.equal(got, expected)


@pytest.mark.parametrize("places", [(0, 0), (7, 3), (12, 1), (23, 23)])
def test_rows_that_end_at_different_places_are_padded(
    places: tuple[int, int], model: Any, drafter: Any, plain: Any
) -> None:
    ends = [int(plain[0, places[0]]), int(plain[1, places[1]])]
    expected, got = both(model, drafter, MANY, eos_token_id=ends, pad_token_id=63)
    assert torch.equal(got, expected)


def test_a_single_end_token(model: Any, drafter: Any, answer: list[int]) -> None:
    expected, got = both(model, drafter, ONE, eos_token_id=answer[9])
    assert got.shape[1] < PROMPT.shape[1] + 24
    assert torch.equal(got, expected)


def test_padding_is_the_end_token_where_none_is_set(drafter: Any, plain: Any) -> None:
    model = tiny_llama(seed=1)
    expected, got = both(model, drafter, MANY, eos_token_id=[int(plain[0, 3]), 1])
    assert torch.equal(got, expected)


def test_several_sequences_a_prompt_are_all_the_greedy_one(model: Any) -> None:
    method = foredraft.custom_generate()
    got = model.generate(
        **ONE, do_sample=True, top_k=1, num_return_sequences=3, max_new_tokens=8, custom_generate=method
    )
    assert torch.equal(got, model.generate(**ONE, do_sample=False, max_new_tokens=8).expand(3, -1))


def test_an_answer_may_go_past_the_models_context_as_in_generate(drafter: Any) -> None:
    model = tiny_llama(seed=1, context=16)
    model.generation_config.pad_token_id = PAD
    expected, got = both(model, drafter, ONE)
    assert got.shape[1] == PROMPT.shape[1] + 24
    assert torch.equal(got, expected)


SETTINGS: dict[str, dict[str, Any]] = {
    "min_new_tokens": {"min_new_tokens": 15, "eos_token_id": [51, 60, 8], "pad_token_id": PAD},
    "min_length": {"min_length": 20, "eos_token_id": [51, 60, 8], "pad_token_id": PAD},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[4], [47, 21], [8, 8]]},
    "sequence_bias": {"sequence_bias": {(3,): 5.0, (4, 5): 4.0}},
    "suppress_tokens": {"suppress_tokens": [47, 60], "begin_suppress_tokens": [3, 4]},
    "forced_eos_token_id": {"forced_eos_token_id": 7},
    "exponential_decay": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": [51], "pad_token_id": PAD},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "remove_invalid_values": {"remove_invalid_values": True, "renormalize_logits": True},
    "all together": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": [[4]], "min_new_tokens": 9},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_settings_of_generate_hold_at_every_drafted_position(
    settings: dict[str, Any], model: Any, drafter: Any, plain: Any
) -> None:
    for inputs in (ONE, MANY):
        expected, got = both(model, drafter, inputs, **settings)
        assert torch.equal(got, expected)


def test_the_settings_above_change_something(model: Any, plain: Any) -> None:
    unchanged = {"remove_invalid_values", "no cache", "static cache", "encoder_no_repeat_ngram_size"}
    for name, settings in SETTINGS.items():
        if name not in unchanged:
            got = model.generate(**MANY, do_sample=False, max_new_tokens=24, **settings)[:, BATCH.shape[1] :]
            assert not torch.equal(got, plain), name


def test_a_function_of_allowed_tokens_is_asked_about_each_row(model: Any, drafter: Any) -> None:
    allowed = [list(range(10)), list(range(20, 30)), list(range(40, 60))]

    def prefix_allowed_tokens(row: int, ids: torch.Tensor) -> list[int]:
        assert torch.equal(ids[: BATCH.shape[1]], BATCH[row])
        return allowed[row]

    expected, got = both(model, drafter, MANY, prefix_allowed_tokens_fn=prefix_allowed_tokens)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("processor", [PrefersEvenAfterOdd, FavoursOneTokenPerRow])
def test_a_users_own_processor(processor: Callable[[], LogitsProcessor], model: Any, drafter: Any, plain: Any) -> None:
    expected, got = both(model, drafter, MANY, logits_processor=LogitsProcessorList([processor()]))
    assert torch.equal(got, expected)
    assert not torch.equal(got[:, BATCH.shape[1] :], plain)


@pytest.mark.parametrize("criteria", [Ends(8), Ends(47), EndsEachRowAfter(3, 11, 1)])
def test_a_users_own_criterion_for_the_end(criteria: StoppingCriteria, model: Any, drafter: Any) -> None:
    options = {"stopping_criteria": StoppingCriteriaList([criteria])}
    expected, got = both(model, drafter, MANY, eos_token_id=1, pad_token_id=PAD, **options)
    assert torch.equal(got, expected)
    assert not torch.equal(got, both(model, drafter, MANY)[0])


def test_stop_strings_as_a_criterion(text_target: Any, tokenizer: Any) -> None:
    model = text_target.model
    inputs = tokenizer("the hell in the hell", return_tensors="pt")
    text = tokenizer.decode(
        model.generate(**inputs, do_sample=False, max_new_tokens=24)[0, len(inputs["input_ids"][0]) :]
    )
    stop = next(text[i : i + 2] for i in range(4, len(text)) if text[i : i + 2].isascii())
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, [stop])])
    expected, got = both(model, "ngram", dict(inputs), stopping_criteria=criteria)
    assert torch.equal(got, expected)
    assert got.shape[1] < len(inputs["input_ids"][0]) + 24


# What drafts


def test_a_drafter_object_that_knows_the_answer_saves_forwards(model: Any, answer: list[int]) -> None:
    forwards: list[int] = []
    hook = model.lm_head.register_forward_hook(lambda *_: forwards.append(1))
    method = foredraft.custom_generate(Oracle(PROMPT[0].tolist(), answer), draft_tokens=5)
    got = model.generate(**ONE, do_sample=False, max_new_tokens=24, custom_generate=method)
    hook.remove()
    assert got[0, PROMPT.shape[1] :].tolist() == answer
    assert len(forwards) == 4  # of 6 tokens each


def test_the_same_method_serves_several_models(model: Any, near: Any) -> None:
    method = foredraft.custom_generate("ngram")
    for each in (model, near, model):
        expected = each.generate(**ONE, do_sample=False, max_new_tokens=8, pad_token_id=PAD)
        got = each.generate(**ONE, do_sample=False, max_new_tokens=8, pad_token_id=PAD, custom_generate=method)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("drafter", ["none", None, NGram()])
def test_other_ways_to_name_a_drafter(drafter: Any, model: Any) -> None:
    expected, got = both(model, drafter, MANY)
    assert torch.equal(got, expected)


def test_a_draft_model_by_reference(tiny_folder: Path, text_target: Any, tokenizer: Any) -> None:
    method = foredraft.custom_generate(f"draft:{tiny_folder}", tokenizer=tokenizer)
    inputs = tokenizer("the hell in the hell", return_tensors="pt")
    expected = text_target.model.generate(**inputs, do_sample=False, max_new_tokens=24)
    forwards: list[int] = []
    hook = text_target.model.lm_head.register_forward_hook(lambda *_: forwards.append(1))
    got = text_target.model.generate(**inputs, do_sample=False, max_new_tokens=24, custom_generate=method)
    hook.remove()
    assert torch.equal(got, expected)
    assert len(forwards) < 24  # the draft model is the target itself


def test_a_draft_model_by_reference_needs_the_tokenizer(tiny_folder: Path) -> None:
    with pytest.raises(InvalidInputError, match="needs the target's tokenizer to compare with: pass tokenizer="):
        foredraft.custom_generate(f"draft:{tiny_folder}")


def test_a_draft_model_of_another_vocabulary_is_refused(text_target: Any, model: Any) -> None:
    with pytest.raises(UnsupportedError, match="64 token ids and the target"):
        text_target.model.generate(**ONE, max_new_tokens=4, custom_generate=foredraft.custom_generate(model))


def test_an_unknown_drafter_is_refused_at_once() -> None:
    with pytest.raises(InvalidInputError, match="Did you mean 'ngram'"):
        foredraft.custom_generate("ngarm")


# Outputs and caches


def test_a_dict_holds_the_sequences_and_a_cache_as_long_as_generates_own(
    model: Any, drafter: Any, answer: list[int]
) -> None:
    for options in ({}, {"eos_token_id": answer[10]}, {"max_new_tokens": 1}):
        expected, got = both(model, drafter, ONE, return_dict_in_generate=True, **options)
        assert type(got) is type(expected)
        assert torch.equal(got.sequences, expected.sequences)
        assert got.cache.get_seq_length() == expected.cache.get_seq_length()
        assert got.scores is None


def test_the_cache_holds_what_generates_own_holds(model: Any, drafter: Any) -> None:
    expected, got = both(model, drafter, ONE, return_dict_in_generate=True)
    for ours, theirs in zip(got.cache.layers, expected.cache.layers, strict=True):
        assert torch.allclose(ours.keys, theirs.keys, atol=1e-5)
        assert torch.allclose(ours.values, theirs.values, atol=1e-5)


def test_a_dict_of_a_batch_holds_the_sequences(model: Any, drafter: Any) -> None:
    expected, got = both(model, drafter, MANY, return_dict_in_generate=True)
    assert torch.equal(got.sequences, expected.sequences)
    assert got.cache is None  # each row had one of its own


def filled(model: Any, ids: torch.Tensor) -> Any:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, cache=cache, use_cache=True)
    return cache


@pytest.mark.parametrize("cached", [1, 4, 7])
def test_a_filled_cache_is_continued(cached: int, model: Any, drafter: Any, answer: list[int]) -> None:
    cache = filled(model, PROMPT[:, :cached])
    method = foredraft.custom_generate(drafter)
    got = model.generate(
        **ONE, do_sample=False, max_new_tokens=24, cache=cache, return_dict_in_generate=True, custom_generate=method
    )
    assert got.sequences[0, PROMPT.shape[1] :].tolist() == answer
    assert got.cache is cache
    assert cache.get_seq_length() == PROMPT.shape[1] + 23


@pytest.mark.parametrize("first", ["generate", "custom_generate"])
@pytest.mark.parametrize("second", ["generate", "custom_generate"])
def test_a_conversation_goes_on_in_the_cache_of_its_first_part(
    first: str, second: str, model: Any, drafter: Any
) -> None:
    method = {"generate": {}, "custom_generate": {"custom_generate": foredraft.custom_generate(drafter)}}
    options = {"do_sample": False, "max_new_tokens": 8, "return_dict_in_generate": True}
    part = model.generate(**ONE, **options, **method[first])
    longer = torch.cat([part.sequences, torch.tensor([[7, 5, 9]])], 1)
    inputs = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
    with torch.inference_mode():  # the first part's cache may have been made in this mode
        got = model.generate(**inputs, **options, cache=part.cache, **method[second]).sequences
    assert torch.equal(got, model.generate(**inputs, **options).sequences)


def test_an_empty_cache_is_filled(model: Any, drafter: Any, answer: list[int]) -> None:
    cache = DynamicCache(config=model.config)
    method = foredraft.custom_generate(drafter)
    got = model.generate(**ONE, do_sample=False, max_new_tokens=24, cache=cache, custom_generate=method)
    assert got[0, PROMPT.shape[1] :].tolist() == answer
    assert cache.get_seq_length() == PROMPT.shape[1] + 23


# Sampling

VOCABULARY = 4
SAMPLES, AT_ONCE = 600, 50
LAWS: dict[str, tuple[str, dict[str, Any]]] = {
    "ngram, plain": ("ngram", {"top_k": 0}),
    "ngram, top-p": ("ngram", {"top_p": 0.8}),
    "ngram, history": ("ngram", {"repetition_penalty": 1.8, "no_repeat_ngram_size": 3, "top_k": 0}),
    "draft model, temperature and top-k": ("draft model", {"temperature": 0.7, "top_k": 3}),
    "draft model, min-p and typical-p": ("draft model", {"min_p": 0.1, "typical_p": 0.9}),
    "draft model, history": ("draft model", {"repetition_penalty": 1.8, "no_repeat_ngram_size": 3, "top_k": 0}),
}


@pytest.fixture(scope="module")
def small() -> Any:
    model = tiny_llama(seed=5, vocabulary=VOCABULARY)
    model.generation_config.pad_token_id = PAD
    return model


def own_law(model: Any, prompt: Sequence[int], length: int, **options: Any) -> dict[tuple[int, ...], float]:
    """The exact law of the next tokens under `generate`, from the scores that it reports itself."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, mass in law.items():
            ids = torch.tensor([[*prompt, *tokens]])
            scores = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                max_new_tokens=1,
                return_dict_in_generate=True,
                output_scores=True,
                **options,
            ).scores[0]
            for token, p in enumerate(scores[0].double().softmax(-1).tolist()):
                longer_by_one = (*tokens, token)
                longer[longer_by_one] = mass * p
        law = longer
    return law


def samples(model: Any, drafter: Any, prompt: Sequence[int], length: int, **options: Any) -> list[tuple[int, ...]]:
    ids = torch.tensor([list(prompt)])
    method = foredraft.custom_generate(drafter, draft_tokens=2)
    drawn: list[tuple[int, ...]] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        for _ in range(SAMPLES // AT_ONCE):
            got = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                max_new_tokens=length,
                num_return_sequences=AT_ONCE,
                custom_generate=method,
                **options,
            )
            drawn += [tuple(row) for row in got[:, len(prompt) :].tolist()]
    return drawn


@pytest.mark.parametrize(("kind", "options"), LAWS.values(), ids=LAWS.keys())
def test_samples_follow_generates_own_law(kind: str, options: dict[str, Any], small: Any) -> None:
    """Fails by chance with odds of 1e-9, for a seed that is not this one."""
    prompt = [1, 2, 1, 3, 2, 1, 2, 1]  # so that ngram drafts at once
    drafter = perturbed(small, 0.3) if kind == "draft model" else "ngram"
    drawn = samples(small, drafter, prompt, 3, **options)
    assert g_test(Counter(drawn), own_law(small, prompt, 3, **options)).passed


def test_the_test_above_tells_laws_apart(small: Any) -> None:
    prompt = [1, 2, 1, 3, 2, 1, 2, 1]
    drawn = samples(small, "ngram", prompt, 3, temperature=0.7, top_k=0)
    assert not g_test(Counter(drawn), own_law(small, prompt, 3, temperature=1.0, top_k=0)).passed


def test_the_law_past_an_end_token_is_generates_own(small: Any) -> None:
    prompt, end = [1, 2, 1, 3, 2, 1, 2, 1], 3
    drawn = samples(small, "ngram", prompt, 3, eos_token_id=end, top_k=0)
    law: dict[tuple[int, ...], float] = {}
    for tokens, mass in own_law(small, prompt, 3, top_k=0).items():
        kept = [*itertools.takewhile(lambda token: token != end, tokens)]
        cut = [*kept, end][:3]
        padded = tuple(cut + [PAD] * (3 - len(cut)))
        law[padded] = law.get(padded, 0.0) + mass
    assert g_test(Counter(drawn), law).passed


def test_sampling_draws_from_torchs_global_generator(model: Any, drafter: Any) -> None:
    method = foredraft.custom_generate(drafter)
    runs = []
    with torch.random.fork_rng(devices=[]):
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            runs.append(model.generate(**MANY, do_sample=True, max_new_tokens=12, custom_generate=method))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_several_samples_a_prompt_differ(model: Any, drafter: Any) -> None:
    """Two of these 12-token samples are equal with odds far below 1e-6; the seed is fixed."""
    method = foredraft.custom_generate(drafter)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        got = model.generate(**MANY, do_sample=True, num_return_sequences=2, max_new_tokens=12, custom_generate=method)
    assert got.shape == (6, BATCH.shape[1] + 12)
    assert torch.equal(got[:, : BATCH.shape[1]], BATCH.repeat_interleave(2, 0))
    assert len({tuple(row) for row in got.tolist()}) == 6


# Streamers


class Recorder:
    def __init__(self) -> None:
        self.put_in: list[list[Any]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.put_in.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_receives_what_it_does_from_generate(model: Any, drafter: Any) -> None:
    theirs, ours = Recorder(), Recorder()
    model.generate(**ONE, do_sample=False, max_new_tokens=12, streamer=theirs)
    method = foredraft.custom_generate(drafter, streamer=ours)
    model.generate(**ONE, do_sample=False, max_new_tokens=12, custom_generate=method)
    assert ours.put_in == theirs.put_in
    assert ours.ended == theirs.ended == 1


def test_a_text_streamer_shows_the_answer_alone(text_target: Any, tokenizer: Any) -> None:
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    inputs = tokenizer("the hell in the hell", return_tensors="pt")
    method = foredraft.custom_generate(streamer=streamer)
    got = text_target.model.generate(**inputs, do_sample=False, max_new_tokens=12, custom_generate=method)
    answer = got[0, inputs["input_ids"].shape[1] :]
    assert "".join(streamer) == tokenizer.decode(answer, skip_special_tokens=True)


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "the settings ask for beam_search: set num_beams=1"),
        ({"num_beams": 2, "do_sample": True}, "the settings ask for beam_sample"),
        ({"penalty_alpha": 0.5, "top_k": 4}, "the settings ask for contrastive_search"),
        ({"prompt_lookup_num_tokens": 3}, "the settings ask for assisted_generation"),
        ({"dola_layers": "low"}, "the settings ask for dola_generation"),
        ({"output_scores": True, "return_dict_in_generate": True}, "does not return output_scores: leave it out"),
        (
            {"output_logits": True, "output_hidden_states": True, "return_dict_in_generate": True},
            "does not return output_logits, output_hidden_states",
        ),
        ({"output_attentions": True, "return_dict_in_generate": True}, "does not return output_attentions"),
        ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor keeps a state from call to call"),
        (
            {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3), "do_sample": True},
            "SynthIDTextWatermarkLogitsProcessor keeps a state from call to call",
        ),
        ({"position_ids": torch.arange(8)[None] + 3}, "numbers positions itself: leave position_ids out"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(options: dict[str, Any], message: str, model: Any) -> None:
    with pytest.raises(UnsupportedError, match=message):
        model.generate(**ONE, max_new_tokens=4, custom_generate=foredraft.custom_generate(), **options)


def test_scores_that_would_not_be_returned_are_no_reason_to_refuse(model: Any, drafter: Any) -> None:
    expected, got = both(model, drafter, ONE, output_scores=True)
    assert torch.equal(got, expected)


def test_embeddings_are_refused(model: Any) -> None:
    embeddings = torch.zeros(1, 3, 32)
    with pytest.raises(UnsupportedError, match="takes text alone, but was given inputs_embeds"):
        model.generate(inputs_embeds=embeddings, max_new_tokens=4, custom_generate=foredraft.custom_generate())


def test_an_argument_that_the_decoding_does_not_know_is_refused(model: Any) -> None:
    decode = foredraft.custom_generate()
    nothing = LogitsProcessorList()
    with pytest.raises(UnsupportedError, match="was given pixel_values, token_type_ids: leave it out"):
        decode(model, PROMPT, nothing, None, model.generation_config, token_type_ids=PROMPT, pixel_values=PROMPT)


def test_a_constraint_is_asked_only_about_text_that_it_allows(model: Any) -> None:
    """ngram drafts 42, 7, of which the constraint allows the first alone; below 7 it has nothing to say."""
    ids = torch.tensor([[40, 41, 42, 7, 40, 41, 42, 7, 40, 41]])
    answer = list(range(42, 48))

    def constraint(_: int, ids: torch.Tensor) -> list[int]:
        said = ids.tolist()[10:]
        return [answer[len(said)]] if said == answer[: len(said)] else []

    got = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=len(answer),
        prefix_allowed_tokens_fn=constraint,
        custom_generate=foredraft.custom_generate(),
    )
    assert got[0, 10:].tolist() == answer


def test_padding_on_the_right_is_refused(model: Any) -> None:
    ids = torch.tensor([[5, 9, 13, PAD, PAD], [3, 4, 3, 4, 3]])
    with pytest.raises(UnsupportedError, match="pad on the left"):
        model.generate(
            input_ids=ids,
            attention_mask=(ids != PAD).long(),
            max_new_tokens=4,
            custom_generate=foredraft.custom_generate(),
        )


def test_a_cache_that_leaves_nothing_to_feed_is_refused(model: Any) -> None:
    cache = filled(model, PROMPT)
    with pytest.raises(UnsupportedError, match=r"leaves at least one id to feed \(it holds 8 tokens of 8\)"):
        model.generate(**ONE, max_new_tokens=4, cache=cache, custom_generate=foredraft.custom_generate())


def test_a_filled_cache_of_a_batch_is_refused(model: Any) -> None:
    cache = filled(model, BATCH[:, :4])
    with pytest.raises(UnsupportedError, match="continues a filled cache only if it is a DynamicCache of one sequence"):
        model.generate(**MANY, max_new_tokens=4, cache=cache, custom_generate=foredraft.custom_generate())


def test_a_filled_cache_with_padding_is_refused(model: Any) -> None:
    inputs = {"input_ids": BATCH[:1], "attention_mask": MASK[:1]}
    cache = model.generate(**inputs, max_new_tokens=1, return_dict_in_generate=True).cache
    longer = torch.cat([BATCH[:1], torch.tensor([[7, 8]])], 1)
    mask = (longer != PAD).long()
    with pytest.raises(UnsupportedError, match="without padding"):
        model.generate(
            input_ids=longer,
            attention_mask=mask,
            max_new_tokens=4,
            cache=cache,
            custom_generate=foredraft.custom_generate(),
        )


def test_new_ids_alone_beside_a_cache_are_refused(model: Any) -> None:
    cache = filled(model, PROMPT[:, :5])
    with pytest.raises(UnsupportedError, match="3 ids with a mask or positions of another length: give all ids"):
        model.generate(
            input_ids=PROMPT[:, 5:],
            attention_mask=torch.ones_like(PROMPT),
            max_new_tokens=4,
            cache=cache,
            custom_generate=foredraft.custom_generate(),
        )


def test_a_streamer_for_several_sequences_is_refused(model: Any) -> None:
    method = foredraft.custom_generate(streamer=Recorder())
    with pytest.raises(UnsupportedError, match="A streamer follows one sequence, but there are 3"):
        model.generate(**MANY, max_new_tokens=4, custom_generate=method)


@pytest.mark.parametrize("draft_tokens", [-1, 65])
def test_draft_tokens_out_of_range_are_refused(draft_tokens: int, model: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"must be an integer in \[0, 64\]"):
        model.generate(**ONE, max_new_tokens=4, custom_generate=foredraft.custom_generate(draft_tokens=draft_tokens))
