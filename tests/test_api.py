"""The Python front door: what loads, what drafts, what a prompt may be, and that the text is the target's own."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

import foredraft
from foredraft import api, models
from foredraft.api import Model
from foredraft.backends.native.backend import NativeBackend
from foredraft.errors import InvalidInputError, ModelError, UnsupportedError
from foredraft.loading import cache_folder, parse_drafter
from foredraft.proposers.draft_model import DraftModel
from foredraft.proposers.ngram import NGram
from foredraft.types import FinishEvent, RoundEvent, SamplingParams, TokenEvent
from tiny import perturbed, seeded, tiny_llama, tiny_metaspace_tokenizer

PROMPT = "the hell in the hell of the "
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


def save(folder: Path, model: Any, tokenizer: Any) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text_model(text_target: Any) -> Any:
    """The model in `tiny_folder`."""
    return text_target.model


@pytest.fixture(scope="module")
def near_model(text_model: Any) -> Any:
    """A draft model that is often right."""
    return perturbed(text_model, 0.05)


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory, near_model: Any, tokenizer: Any) -> Path:
    return save(tmp_path_factory.mktemp("draft model"), near_model, tokenizer)


@pytest.fixture(scope="module")
def plain_ids(tiny_folder: Path) -> tuple[int, ...]:
    """What the target says to `PROMPT` by itself."""
    return foredraft.load(tiny_folder, "none").generate(PROMPT, PARAMS).ids


# What loads


def test_a_folder_loads_with_auto_as_its_drafter(tiny_folder: Path, plain_ids: tuple[int, ...]) -> None:
    completion = foredraft.load(str(tiny_folder)).generate(PROMPT, PARAMS)
    assert completion.ids == plain_ids
    assert completion.stats.drafter == "auto"
    assert completion.stats.backend == "native"
    assert completion.stats.rule == "greedy"


def test_a_transformers_model_loads_with_its_tokenizer(
    text_model: Any, tokenizer: Any, plain_ids: tuple[int, ...]
) -> None:
    model = foredraft.load(text_model, "ngram", tokenizer=tokenizer)
    assert model.generate(PROMPT, PARAMS).ids == plain_ids
    assert model.tokenizer is tokenizer


def test_a_transformers_model_without_tokenizer_is_refused(text_model: Any) -> None:
    with pytest.raises(InvalidInputError, match="without its tokenizer: pass tokenizer="):
        foredraft.load(text_model)


def test_what_takes_time_is_announced(tiny_folder: Path, draft_folder: Path) -> None:
    said: list[str] = []
    foredraft.load(tiny_folder, f"draft:{draft_folder}", backend="transformers", notify=said.append)
    assert said == [f"Loading {tiny_folder}", f"Loading {draft_folder}"]
    said.clear()
    foredraft.load(tiny_folder, notify=said.append)
    assert said[0] == f"Loading {tiny_folder}" and said[1].startswith(f"Preparing {tiny_folder}")


def test_the_dtype_is_passed_on_to_both_models(tiny_folder: Path, draft_folder: Path) -> None:
    model = foredraft.load(tiny_folder, f"draft:{draft_folder}", dtype="bfloat16", device="cpu")
    assert isinstance(model.drafter, DraftModel)
    for backend in (model.backend, model.drafter.backend):
        assert backend.model.dtype == torch.bfloat16  # type: ignore[attr-defined]
    assert len(model.generate(PROMPT, PARAMS).ids) == 24


def test_an_encoder_decoder_is_refused_by_name(tokenizer: Any) -> None:
    config = T5Config(vocab_size=len(tokenizer), d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedError, match="'t5' is an encoder-decoder"):
        foredraft.load(seeded(T5ForConditionalGeneration, config), tokenizer=tokenizer)


def test_unknown_arguments_are_refused(tiny_folder: Path) -> None:
    with pytest.raises(TypeError, match="draft_token"):
        foredraft.load(tiny_folder, draft_token=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("draft_tokens", [-1, 65])
def test_draft_tokens_out_of_range_are_refused(draft_tokens: int, tiny_folder: Path) -> None:
    message = rf"draft_tokens is {draft_tokens}, but must be an integer in \[0, 64\]"
    with pytest.raises(InvalidInputError, match=message):
        foredraft.load(tiny_folder, draft_tokens=draft_tokens)


def test_an_unknown_rule_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(InvalidInputError, match="no acceptance rule 'magic'; known: greedy, token"):
        foredraft.load(tiny_folder, rule="magic")


def test_the_rule_is_passed_on(tiny_folder: Path, plain_ids: tuple[int, ...]) -> None:
    model = foredraft.load(tiny_folder, rule="token")
    assert model.generate(PROMPT, replace(PARAMS, temperature=1.0)).stats.rule == "token"
    greedy = model.generate(PROMPT, PARAMS)
    assert greedy.stats.rule == "greedy"  # what every rule comes to there
    assert greedy.ids == plain_ids


# What drafts


def test_every_choice_of_drafter_gives_the_targets_own_ids(
    tiny_folder: Path, draft_folder: Path, near_model: Any, tokenizer: Any, plain_ids: tuple[int, ...]
) -> None:
    choices: list[tuple[Any, str]] = [
        ("none", "none"),
        (None, "none"),
        ("ngram", "ngram"),
        (NGram(), "ngram"),
        (f"draft:{draft_folder}", "draft"),
        (near_model, "draft"),
    ]
    for choice, name in choices:
        completion = foredraft.load(tiny_folder, choice).generate(PROMPT, PARAMS)
        assert completion.ids == plain_ids, choice
        assert completion.stats.drafter == name


@pytest.mark.parametrize("kind", ["folder", "object"])
def test_a_draft_model_that_is_loaded_is_used(
    kind: str, tiny_folder: Path, draft_folder: Path, near_model: Any, plain_ids: tuple[int, ...]
) -> None:
    drafter = near_model if kind == "object" else f"draft:{draft_folder}"
    stats = foredraft.load(tiny_folder, drafter).generate(PROMPT, PARAMS).stats
    assert stats.accepted > 0
    assert stats.draft_forwards == stats.drafted > 0
    assert stats.target_forwards < len(plain_ids)


def test_draft_tokens_bound_each_draft(tiny_folder: Path, near_model: Any) -> None:
    model = foredraft.load(tiny_folder, near_model, draft_tokens=2)
    rounds = [event.stats for event in model.stream(PROMPT, PARAMS) if isinstance(event, RoundEvent)]
    assert max(r.drafted for r in rounds) == 2


def test_no_draft_tokens_are_plain_decoding(tiny_folder: Path, near_model: Any, plain_ids: tuple[int, ...]) -> None:
    completion = foredraft.load(tiny_folder, near_model, draft_tokens=0).generate(PROMPT, PARAMS)
    assert completion.ids == plain_ids
    assert completion.stats.drafter == "none"
    assert completion.stats.draft_forwards == 0
    assert completion.stats.mean_accepted_length == 1.0


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("ngarm", r"no drafter 'ngarm'\. Did you mean 'ngram'\? Known: none, ngram\[:MIN-MAX\], suffix"),
        ("drat:x", r"no drafter 'drat'\. Did you mean 'draft'\?"),
        ("", r"no drafter ''\. Known: "),
        ("heron", r"no drafter 'heron'\."),
        ("draft", "'draft' needs more: draft:REF with a model"),
        ("draft:", "'draft' needs more: draft:REF with a model"),
        ("recycling:3", "'recycling' takes no argument, but was given '3'"),
        ("ngram:3", "'ngram:3' must be ngram:MIN-MAX"),
        ("suffix:depth=3", "names 'depth', but knows max_depth"),
        ("none:x", "'none' takes no argument"),
        (3, "A drafter is a name, a transformers model or a Drafter, but this is int"),
        (Path("x"), "but this is .*Path"),
    ],
)
def test_a_wrong_drafter_is_told_before_anything_is_loaded(drafter: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        foredraft.load("/no/such/model", drafter)


@pytest.mark.parametrize("drafter", [None, "none", "none:"])
def test_plain_decoding_has_no_drafter(drafter: str | None) -> None:
    assert parse_drafter(drafter) is None


def test_a_draft_model_that_is_not_there_is_told(tiny_folder: Path) -> None:
    with pytest.raises(ModelError, match=r"no model '/no/such/draft'"):
        foredraft.load(tiny_folder, "draft:/no/such/draft")


def test_a_draft_model_object_of_fewer_ids_is_refused(tiny_folder: Path, tokenizer: Any) -> None:
    small = tiny_llama(seed=1, layers=1, vocabulary=50)
    with pytest.raises(UnsupportedError, match=rf"has 50 token ids and the target {len(tokenizer)}"):
        foredraft.load(tiny_folder, small)


# Vocabularies


def edited(folder: Path, source: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a model's folder with another tokenizer."""
    shutil.copytree(source, folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    edit(content)
    file.write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize("drafter", ["draft", "hybrid:ngram+draft"])
def test_a_draft_model_of_another_vocabulary_drafts_the_tokens_that_both_have(
    drafter: str, tiny_folder: Path, draft_folder: Path, tmp_path: Path, tokenizer: Any, plain_ids: tuple[int, ...]
) -> None:
    b, k = (tokenizer.convert_tokens_to_ids(token) for token in "BK")

    def swap(content: dict[str, Any]) -> None:
        content["model"]["vocab"] |= {"B": k, "K": b}

    other = edited(tmp_path / "other", draft_folder, swap)
    completion = foredraft.load(tiny_folder, f"{drafter}:{other}").generate(PROMPT, PARAMS)
    assert completion.ids == plain_ids
    assert completion.stats.accepted > 0


def test_a_draft_model_whose_vocabulary_hardly_overlaps_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    words = tiny_metaspace_tokenizer([f"word{i}" for i in range(50)])
    folder = save(tmp_path / "words", tiny_llama(seed=1, layers=1, vocabulary=len(words)), words)
    with pytest.raises(
        UnsupportedError, match=r"share \d, \d% of the smaller, and 50% are needed. The first diff.* id 0"
    ):
        foredraft.load(tiny_folder, f"draft:{folder}")


def padded(model_seed: int, tokenizer: Any, padding: int, **other: Any) -> Any:
    """A model with more rows than its tokenizer has ids, whose every argmax is one of those rows."""
    size = len(tokenizer)
    model = tiny_llama(seed=model_seed, vocabulary=size + padding, **other)
    with torch.no_grad():
        rows = model.lm_head.weight[size:]
        rows *= 100
        rows[1::2] = -rows[::2]  # of each pair one is large and positive
    with torch.inference_mode():
        assert (model(input_ids=torch.arange(20)[None]).logits.argmax(-1) >= size).all()
    return model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["none", "ngram", "draft"])
def test_padding_of_the_vocabulary_is_never_emitted(
    drafter: str, temperature: float, tokenizer: Any, tmp_path: Path
) -> None:
    target = save(tmp_path / "target", padded(3, tokenizer, 22), tokenizer)
    if drafter == "draft":
        drafter = f"draft:{save(tmp_path / 'draft', padded(4, tokenizer, 38, layers=1), tokenizer)}"
    model = foredraft.load(target, drafter)
    assert model.backend.vocab_size == len(tokenizer)
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=1, ignore_eos=True)
    completion = model.generate(PROMPT, params)
    assert len(completion.ids) == 40
    assert max(completion.ids) < len(tokenizer)
    if temperature == 0:
        assert completion.ids == model.plain().generate(PROMPT, params).ids


def test_the_same_vocabulary_with_other_padding_is_accepted(tiny_folder: Path, tmp_path: Path, tokenizer: Any) -> None:
    draft = save(tmp_path / "draft", padded(4, tokenizer, 38), tokenizer)
    stats = foredraft.load(tiny_folder, f"draft:{draft}").generate(PROMPT, PARAMS).stats
    assert stats.drafted > 0


# What comes out


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_generate_is_the_stream_joined(temperature: float, tiny_folder: Path) -> None:
    model = foredraft.load(tiny_folder, "ngram")  # one that drafts the same the second time
    params = SamplingParams(max_tokens=32, temperature=temperature, seed=7, ignore_eos=True)
    whole = model.generate(PROMPT, params)
    events = list(model.stream(PROMPT, params))
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    rounds = [event for event in events if isinstance(event, RoundEvent)]
    end = events[-1]
    assert isinstance(end, FinishEvent)
    assert tuple(event.token for event in tokens) == end.completion.ids == whole.ids
    assert tuple(event.origin for event in tokens) == end.completion.origins == whole.origins
    assert "".join(event.text for event in tokens) + end.text == end.completion.text == whole.text
    assert len(rounds) == end.completion.stats.target_forwards == whole.stats.target_forwards


def test_the_text_is_the_tokenizers_text_of_the_ids(tiny_folder: Path) -> None:
    model = foredraft.load(tiny_folder)
    completion = model.generate(PROMPT, PARAMS)
    assert completion.text == model.tokenizer.decode(list(completion.ids), skip_special_tokens=True)


def test_the_same_seed_gives_the_same_text_and_another_seed_another(tiny_folder: Path) -> None:
    model = foredraft.load(tiny_folder)
    runs = [
        model.generate(PROMPT, SamplingParams(max_tokens=16, temperature=1.0, seed=seed, ignore_eos=True)).ids
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_a_seed_that_was_drawn_is_reported_and_repeats_the_answer(tiny_folder: Path) -> None:
    model = foredraft.load(tiny_folder)
    first = model.generate(PROMPT, SamplingParams(max_tokens=16, temperature=1.0))
    assert first.settings.seed is not None
    assert model.generate(PROMPT, first.settings).ids == first.ids


def test_plain_is_the_same_target_without_drafting(tiny_folder: Path, near_model: Any, tokenizer: Any) -> None:
    model = foredraft.load(tiny_folder, near_model)
    plain = model.plain()
    assert plain.backend is model.backend
    assert plain.tokenizer is model.tokenizer
    assert plain.drafter is None
    completion = plain.generate(PROMPT, PARAMS)
    assert completion.stats.drafter == "none"
    assert completion.stats.drafted == completion.stats.draft_forwards == 0
    assert completion.stats.target_forwards == len(completion.ids)
    assert set(completion.origins) == {"bonus"}
    assert model.drafter is not None


def test_the_defaults_are_greedy_and_256_tokens(tiny_folder: Path) -> None:
    completion = foredraft.load(tiny_folder).generate(PROMPT)
    assert completion.settings.greedy
    assert completion.settings.max_tokens == 256
    assert len(completion.ids) <= 256


def test_the_tokenizers_own_end_ends_an_answer(text_model: Any, tokenizer: Any, plain_ids: tuple[int, ...]) -> None:
    end = next(i for i, token in enumerate(plain_ids) if i >= 5 and token not in plain_ids[:i])
    other = copy.deepcopy(tokenizer)
    other.eos_token = other.convert_ids_to_tokens(plain_ids[end])
    model = foredraft.load(text_model, tokenizer=other)
    completion = model.generate(PROMPT, SamplingParams(max_tokens=24))
    assert completion.ids == plain_ids[: end + 1]
    assert completion.finish_reason == "stop_token"


def test_the_models_own_ends_end_an_answer(text_model: Any, tokenizer: Any, plain_ids: tuple[int, ...]) -> None:
    end = next(i for i, token in enumerate(plain_ids) if i >= 5 and token not in plain_ids[:i])
    other = copy.deepcopy(text_model)
    other.generation_config.eos_token_id = [plain_ids[end], tokenizer.eos_token_id]
    completion = foredraft.load(other, tokenizer=tokenizer).generate(PROMPT, SamplingParams(max_tokens=24))
    assert completion.ids == plain_ids[: end + 1]


# What a prompt may be


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Model:
    return foredraft.load(tiny_folder)


@pytest.fixture(scope="module")
def model_without_template(text_model: Any, tokenizer: Any) -> Model:
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    return foredraft.load(text_model, tokenizer=bare)


def test_a_string_goes_into_the_chat_template_if_there_is_one(model: Model) -> None:
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    expected = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert model.encode("hello") == model.encode("hello", chat=True) == expected
    assert model.tokenizer.eos_token_id in expected  # the template's markers are single tokens


def test_without_chat_a_string_is_taken_as_it_is(model: Model) -> None:
    assert model.encode("hello", chat=False) == model.tokenizer("hello")["input_ids"]


def test_without_a_template_a_string_is_taken_as_it_is(model_without_template: Model, model: Model) -> None:
    assert model_without_template.encode("hello") == model.encode("hello", chat=False)


def test_messages_go_into_the_chat_template(model: Model) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "the end?"},
    ]
    expected: Any = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert model.encode(messages) == expected["input_ids"]
    assert model.encode(messages[1:2]) == model.encode("hello")


def test_ids_are_taken_as_they_are(model: Model) -> None:
    assert model.encode([5, 9, 13]) == [5, 9, 13]
    assert model.encode(torch.tensor([5, 9, 13])) == [5, 9, 13]  # type: ignore[arg-type]
    assert model.generate([5, 9, 13], PARAMS).ids == model.generate((5, 9, 13), PARAMS).ids


def test_a_template_adds_no_second_beginning_of_text(text_model: Any, tokenizer: Any) -> None:
    marked = copy.deepcopy(tokenizer)
    marked.chat_template = "<|im_start|>" + tokenizer.chat_template
    ids = foredraft.load(text_model, tokenizer=marked).encode("hello")
    assert ids.count(marked.convert_tokens_to_ids("<|im_start|>")) == 3


@pytest.mark.parametrize("prompt", ["hello", [{"role": "user", "content": "hello"}]])
def test_chat_without_a_template_is_refused(prompt: Any, model_without_template: Model) -> None:
    with pytest.raises(InvalidInputError, match=r"no chat template: give plain text instead \(chat=False, --no-chat\)"):
        model_without_template.generate(prompt, chat=True)


@pytest.mark.parametrize("prompt", ["", [], ()])
def test_an_empty_prompt_is_refused(prompt: Any, model: Model) -> None:
    with pytest.raises(InvalidInputError, match="The prompt is empty: give "):
        model.generate(prompt)


@pytest.mark.parametrize("prompt", [None, 5, 1.5, ["hello"], [1.5], [None], [[1, 2]]])
def test_a_prompt_of_another_kind_is_refused(prompt: Any, model: Model) -> None:
    with pytest.raises(InvalidInputError, match="A prompt is a string, chat messages or token ids, but this is "):
        model.generate(prompt)


def test_a_prompt_that_is_not_unicode_is_refused(model: Model) -> None:
    with pytest.raises(InvalidInputError, match="not valid Unicode"):
        model.generate(b"caf\xe9".decode(errors="surrogateescape"))


@pytest.mark.parametrize("strange", [-1, 10**6])
def test_an_id_outside_the_vocabulary_is_refused(strange: int, model: Model) -> None:
    with pytest.raises(InvalidInputError, match=f"Token id {strange} in the prompt is outside the vocabulary"):
        model.generate([5, strange])


def test_a_prompt_longer_than_the_context_is_refused(model: Model) -> None:
    assert model.backend.context == 1024
    with pytest.raises(InvalidInputError, match="The prompt has 1024 tokens, but the model's context is 1024"):
        model.generate([5] * 1024)
    assert len(model.generate([5] * 1023, PARAMS).ids) == 1


# The cache


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.setenv("FOREDRAFT_CACHE", "~/mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert cache_folder() == tmp_path / "mine"


@pytest.mark.parametrize("unset", [True, False])
def test_the_cache_is_else_in_the_platforms_folder(unset: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if unset:
        monkeypatch.delenv("FOREDRAFT_CACHE", raising=False)
    else:
        monkeypatch.setenv("FOREDRAFT_CACHE", "")
    assert cache_folder() == Path(platformdirs.user_cache_dir("foredraft", appauthor=False))


def test_bundled_models_are_looked_for_in_that_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Path] = []

    def fetch(model: models.BundledModel, cache: Path, notify: models.Notify) -> Path:
        asked.append(cache)
        raise ModelError("stopped here")

    monkeypatch.setattr(models, "fetch_bundled", fetch)
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "mine"))
    for given in (None, tmp_path / "given"):
        with pytest.raises(ModelError, match="stopped here"):
            api.load("smollm2-135m", cache=given)
    assert asked == [tmp_path / "mine", tmp_path / "given"]


# The package


def test_the_package_offers_what_it_says() -> None:
    for name in foredraft.__all__:
        assert getattr(foredraft, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        foredraft.nonsense  # noqa: B018


# Which backend


def test_auto_takes_the_native_backend_on_a_cpu_for_models_it_knows(tiny_folder: Path, caplog: Any) -> None:
    caplog.set_level("INFO", "foredraft")
    model = foredraft.load(tiny_folder, "none", device="cpu")
    assert model.backend.name == "native"
    assert f"Backend native for {tiny_folder}: " in caplog.text


def test_auto_takes_transformers_for_other_models_and_says_why(tmp_path: Path, tokenizer: Any, caplog: Any) -> None:
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    caplog.set_level("INFO", "foredraft")
    assert foredraft.load(tmp_path, "none", device="cpu").backend.name == "transformers"
    assert "does not know model type 'gpt2'" in caplog.text
    with pytest.raises(UnsupportedError, match=r"does not know model type 'gpt2'.* Use --backend transformers"):
        foredraft.load(tmp_path, "none", device="cpu", backend="native")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "llama"}, "backend is 'llama', but must be one of auto, native, transformers"),
        ({"weights": "q4"}, "weights is 'q4', but must be one of auto, f32, bf16, q8"),
        ({"threads": 0}, r"threads is 0, but must be an integer in \[1, 1024\]"),
        ({"kv": "f16"}, "kv is 'f16', but must be one of f32, bf16"),
        (
            {"backend": "transformers", "weights": "q8"},
            "weights, threads and kv belong to, cannot be taken: back",
        ),
        ({"dtype": "bfloat16", "threads": 2}, "cannot be taken: dtype belongs to the transformers backend"),
        ({"backend": "native", "dtype": "bfloat16"}, "which you asked for, cannot be taken: dtype"),
    ],
)
def test_engines_that_cannot_be_are_refused_before_anything_is_loaded(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        foredraft.load("no such model", "none", device="cpu", **options)


@pytest.mark.parametrize("options", [{"weights": "q8"}, {"weights": "bf16", "threads": 1}, {"kv": "bf16"}])
def test_the_native_backend_runs_as_it_is_told(tiny_folder: Path, options: dict[str, Any]) -> None:
    model = foredraft.load(tiny_folder, "ngram", device="cpu", **options)
    assert isinstance(model.backend, NativeBackend)
    weights = options.get("weights", "f32")
    assert model.backend.weights.formats == {{"q8": "q8_0"}.get(weights, weights)}
    assert model.backend.team.threads == options.get("threads", model.backend.team.threads)
    assert model.backend.kv_format == options.get("kv", "f32")
    assert model.generate(PROMPT, PARAMS).ids == model.plain().generate(PROMPT, PARAMS).ids


def test_a_transformers_model_runs_on_the_native_backend_if_asked(
    text_model: Any, tokenizer: Any, plain_ids: tuple[int, ...]
) -> None:
    model = foredraft.load(text_model, "suffix", tokenizer=tokenizer, backend="native")
    assert model.backend.name == "native"
    assert model.generate(PROMPT, PARAMS).ids == plain_ids


def test_a_long_prompt_is_reported_as_it_is_read(tiny_folder: Path) -> None:
    said: list[tuple[int, int]] = []
    prompt = [5] * 500
    model = foredraft.load(tiny_folder, "none")
    for _ in model.stream(prompt, SamplingParams(max_tokens=1), progress=lambda *figures: said.append(figures)):
        pass
    assert said == [(499, 499)]
