"""`verify` passes what is right, finds every planted mistake, tells near-ties from defects, and writes it all down."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import foredraft
from foredraft.api import Model
from foredraft.backends.base import Query
from foredraft.backends.transformers import TransformersBackend
from foredraft.engine import Engine
from foredraft.errors import InvalidInputError
from foredraft.models import ModelFiles
from foredraft.proof import certificate as files
from foredraft.proof.audit import Difference, Equality, audit, sampled
from foredraft.proof.controls import CONTROLS
from foredraft.proof.verify import PROMPTS, Certificate, verify
from foredraft.types import SamplingParams
from tiny import CountingBackend, Oracle, drafter_over, generate, perturbed, seeded

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]
GREEDY = SamplingParams(max_tokens=12)
SEEDED = SamplingParams(max_tokens=12, temperature=0.8, seed=4)
FEW = {"prompts": ("the hell in the hell", "in the hell of the"), "max_tokens": 16, "samples": 60}


# What the audit says about a difference


class Tampered(CountingBackend):
    """Logits as `change` makes them of the right ones, which are `[rows, V]`."""

    def __init__(self, inner: TransformersBackend, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(inner)
        self.change = change

    def forward(self, queries: Sequence[Query]) -> list[Tensor]:
        return [self.change(logits.clone()) for logits in super().forward(queries)]


A, B = 20, 30


def two_equal(logits: Tensor) -> Tensor:
    """Two tokens share the top, and the second gains a rounding where several rows are scored together."""
    logits[:, [A, B]] = logits.amax(-1, keepdim=True) + 1
    if len(logits) > 1:
        logits[:, B] += 1e-5
    return logits


def ten_apart(logits: Tensor) -> Tensor:
    """As `two_equal`, but the first leads by much more than a rounding where it is alone."""
    logits = two_equal(logits)
    logits[:, A] += 1e-3
    return logits


def drafting(backend: Any) -> Engine:
    """Always drafts, and is right as long as the answer is A alone."""
    return Engine(backend, Oracle(PROMPT, [A] * 40), draft_tokens=3)


@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, repetition_penalty=1.1)], ids=["plain", "penalised"])
def test_a_near_tie_is_called_one(target: TransformersBackend, params: SamplingParams) -> None:
    backend = Tampered(target, two_equal)
    found = audit(Engine(backend), drafting(backend), backend, [PROMPT], params, "greedy")
    (difference,) = found.differences
    assert difference.verdict == "near-tie" and found.defects == 0
    assert (difference.prompt, difference.position) == (0, 0)
    assert (difference.plain_token, difference.other_token) == (A, B)
    assert difference.gap == pytest.approx(0, abs=1e-9)
    assert 4e-6 < difference.drift < 1.1e-5  # of log-probabilities, whose sum moves as well
    assert {A, B} <= set(difference.plain_candidates) and {A, B} <= set(difference.other_candidates)


def test_a_near_tie_further_on_is_called_one(target: TransformersBackend) -> None:
    backend = Tampered(target, two_equal)  # ngram drafts once A has been said a few times
    engine = Engine(backend, drafter_over(target, "ngram"))
    (difference,) = audit(Engine(backend), engine, backend, [[1, 2, 3]], GREEDY, "greedy").differences
    assert difference.verdict == "near-tie" and difference.position >= 2
    assert 4e-6 < difference.drift < 1.1e-5  # of log-probabilities, whose sum moves as well


def test_a_near_tie_at_the_end_of_the_context_is_called_one() -> None:
    config = GPT2Config(
        vocab_size=64, n_positions=10, n_embd=32, n_layer=1, n_head=4, bos_token_id=0, eos_token_id=None
    )
    backend = Tampered(TransformersBackend(seeded(GPT2LMHeadModel, config)), two_equal)
    found = audit(Engine(backend), drafting(backend), backend, [PROMPT], GREEDY, "greedy")
    assert [d.verdict for d in found.differences] == ["near-tie"]


def test_a_seeded_near_tie_is_called_one(target: TransformersBackend) -> None:
    """The noise itself is near a tie at some position of some seed: the drift there is made larger than the lead."""

    def unsteady(logits: Tensor) -> Tensor:
        if len(logits) > 1:
            logits[:, ::2] += 0.05
        return logits

    backend = Tampered(target, unsteady)
    verdicts: list[str] = []
    for seed in range(8):
        params = replace(SEEDED, seed=seed, max_tokens=40)
        engine = Engine(backend, drafter_over(target, "draft"), rule="seed-exact")
        found = audit(Engine(backend), engine, backend, [PROMPT], params, "seeded")
        verdicts += [difference.verdict for difference in found.differences]
    assert verdicts and set(verdicts) == {"near-tie"}


def test_a_lead_larger_than_the_drift_is_a_defect(target: TransformersBackend) -> None:
    """The engine under test takes B where the model, replayed with any number of rows, says A."""
    backend = Tampered(target, ten_apart)
    wrong = Tampered(target, lambda logits: ten_apart(logits) - 0.01 * torch.nn.functional.one_hot(torch.tensor(A), 64))
    found = audit(Engine(backend), drafting(wrong), backend, [PROMPT], GREEDY, "greedy")
    (difference,) = found.differences
    assert difference.verdict == "defect" and found.defects == 1
    assert difference.gap == pytest.approx(1e-3, rel=0.1) and difference.drift < 1e-4


LOADED = {"logit_bias": {40: 6.0, 41: 6.0, 42: 6.0}, "frequency_penalty": 2.0, "top_k": 20}


@pytest.mark.parametrize(
    "params",
    [GREEDY, SEEDED, replace(GREEDY, **LOADED), replace(SEEDED, **LOADED)],  # type: ignore[arg-type]
    ids=["greedy", "seeded", "greedy with settings", "seeded with settings"],
)
def test_a_wrong_model_is_a_defect(target: TransformersBackend, params: SamplingParams) -> None:
    expected = generate(Engine(target), PROMPT, params).ids

    def wrong(logits: Tensor) -> Tensor:
        logits[:, expected[3]] -= 5.0
        return logits

    engine = Engine(Tampered(target, wrong), drafter_over(target, "draft"), rule="seed-exact")
    found = audit(Engine(target), engine, target, [[1, 2, 3], PROMPT], params, "wrong")
    assert found.defects >= 1 and {d.verdict for d in found.differences} == {"defect"}
    difference = next(d for d in found.differences if d.prompt == 1)
    assert difference.plain_token == expected[difference.position]
    assert max(difference.plain_candidates, key=lambda i: difference.plain_candidates[i]) == difference.plain_token
    assert difference.gap > 10 * difference.drift > 0


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_an_answer_that_ends_early_is_a_defect(target: TransformersBackend, params: SamplingParams) -> None:
    expected = generate(Engine(target), PROMPT, params).ids
    stops = Engine(target, drafter_over(target, "ngram"), stop_tokens=[expected[4]])
    found = audit(Engine(target), stops, target, [PROMPT], params, "cut")
    (difference,) = found.differences
    assert difference.verdict == "defect"
    assert difference.position == expected.index(expected[4]) + 1
    assert difference.gap == math.inf


def test_equal_answers_are_counted_and_nothing_else(target: TransformersBackend) -> None:
    prompts = [[1, 2, 3], PROMPT, [9]]
    found = audit(Engine(target), Engine(target, drafter_over(target, "ngram")), target, prompts, GREEDY, "greedy")
    assert found == Equality("greedy", 3, 36, ())
    assert found.defects == 0


# The sampled test


@pytest.mark.parametrize(("drafter", "rule"), [("ngram", "seed-exact"), ("draft", "block"), ("draft", "seed-exact")])
def test_right_samples_pass(target: TransformersBackend, drafter: str, rule: str) -> None:
    """Odds of failing for a right engine: 1e-9 over seeds."""
    test = sampled(Engine(target, drafter_over(target, drafter), rule=rule), target, PROMPT, 150)
    assert test.passed and test.samples == 150


def test_samples_of_another_law_fail(target: TransformersBackend) -> None:
    engine = Engine(target, drafter_over(target, "draft"), rule="lossy-typical")
    assert not sampled(engine, target, PROMPT, 400).passed


# verify


@pytest.fixture(scope="module")
def near(text_target: TransformersBackend) -> Any:
    """A draft model that is often right."""
    return perturbed(text_target.model, 0.1)


@pytest.fixture(scope="module")
def passed(tiny_folder: Path) -> Certificate:
    """What verify says about the tiny model with ngram."""
    return verify(foredraft.load(tiny_folder, "ngram"), **FEW)  # type: ignore[arg-type]


def test_ngram_passes(passed: Certificate) -> None:
    assert passed.passed and passed.control is None
    assert {row.rule for row in passed.enumerated} == {"greedy", "seed-exact"}
    assert all(row.passed and row.cases > 0 for row in passed.enumerated)
    assert [row.prompts for row in passed.equality] == [2, 2]  # greedy, and seeded with settings
    assert [row.tokens for row in passed.equality] == [32, 32]
    assert passed.sampled is not None and passed.sampled.samples == 60
    assert passed.settings["drafter"] == "ngram" and passed.settings["rule"] == "seed-exact"


@pytest.mark.parametrize(("rule", "audits"), [(None, 1), ("block", 1), ("seed-exact", 2)])
def test_a_draft_model_passes(tiny_folder: Path, near: Any, rule: str | None, audits: int) -> None:
    said: list[str] = []
    result = verify(foredraft.load(tiny_folder, near, rule=rule), notify=said.append, **FEW)  # type: ignore[arg-type]
    assert result.passed
    assert {row.rule for row in result.enumerated} == {"greedy", rule or "block"}
    assert len(result.equality) == audits  # at temperatures above 0 only keyed rules repeat plain decoding
    assert result.settings["drafter"] == "draft"
    assert said[0] == "Enumerating output laws" and said[-1] == "Drawing 60 answers"
    assert len(said) == audits + 2


def test_plain_decoding_passes(tiny_folder: Path) -> None:
    result = verify(foredraft.load(tiny_folder, None, rule="walk"), prompts=["the"], max_tokens=4, samples=0)
    assert result.passed and result.sampled is None
    assert result.settings["drafter"] == "none"


def test_a_lossy_rule_fails(tiny_folder: Path, near: Any) -> None:
    result = verify(foredraft.load(tiny_folder, near, rule="lossy-typical"), prompts=["the"], max_tokens=4, samples=0)
    assert not result.passed
    assert not any(row.passed for row in result.enumerated if row.rule == "lossy-typical")


@pytest.mark.parametrize("drafter", ["ngram", "draft", "early_exit:1"])
@pytest.mark.parametrize("control", CONTROLS)
def test_every_control_fails(tiny_folder: Path, near: Any, control: str, drafter: str) -> None:
    model = foredraft.load(tiny_folder, near if drafter == "draft" else drafter)
    result = verify(model, control=control, **FEW)  # type: ignore[arg-type]
    assert not result.passed and result.control == control
    if CONTROLS[control].breaks_the_cache:
        assert sum(row.defects for row in result.equality) > 0
    else:
        assert max(row.total_variation for row in result.enumerated) > 1e-4


def test_a_stale_cache_keeps_the_models_settings(tiny_folder: Path, near: Any) -> None:
    """With a keyed rule both settings are compared, and both differ: with another rule the second would anyway."""
    model = foredraft.load(tiny_folder, near, rule="seed-exact", draft_tokens=3)
    result = verify(model, control="stale-cache", **FEW)  # type: ignore[arg-type]
    assert result.settings["rule"] == "seed-exact"
    assert all(row.defects > 0 for row in result.equality) and len(result.equality) == 2


@pytest.mark.parametrize(
    ("drafter", "options", "message"),
    [
        ("ngram", {"control": "nonsense"}, "There is no negative control 'nonsense'; known: residual, block-weight"),
        (None, {"control": "stale-cache"}, "'stale-cache' shows where drafts are rejected: it needs a drafter"),
        ("ngram", {"prompts": []}, "There is no prompt to compare"),
        ("ngram", {"samples": -1}, "samples is -1, but must be an integer >= 0"),
        ("ngram", {"max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_what_cannot_be_verified_is_refused(
    tiny_folder: Path, drafter: str | None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        verify(foredraft.load(tiny_folder, drafter, rule="walk"), **options)


def test_a_certificate_fails_if_any_part_does(passed: Certificate) -> None:
    assert passed.sampled is not None
    law = replace(passed.enumerated[0], total_variation=1e-3)
    tie = Difference(0, 0, 1, 2, {}, {}, 0.0, 1.0, "near-tie")
    defect = replace(tie, verdict="defect")
    text = passed.equality[0]
    assert not replace(passed, enumerated=(*passed.enumerated, law)).passed
    assert not replace(passed, equality=(replace(text, differences=(tie, defect)),)).passed
    assert replace(passed, equality=(replace(text, differences=(tie,)),)).passed
    assert not replace(passed, sampled=passed.sampled._replace(p_value=1e-10)).passed
    assert replace(passed, sampled=None).passed


# The certificate


def test_the_certificate_names_model_versions_settings_and_results(passed: Certificate, tiny_folder: Path) -> None:
    record = passed.to_dict()
    digest = hashlib.sha256((tiny_folder / "model.safetensors").read_bytes()).hexdigest()
    assert record["model"] == {"reference": str(tiny_folder), "sha256": digest}
    assert record["versions"]["python"] == platform.python_version()
    assert {p: record["versions"][p] for p in ("foredraft", "torch", "transformers")} == {
        p: version(p) for p in ("foredraft", "torch", "transformers")
    }
    assert record["settings"]["prompts"] == list(FEW["prompts"])  # type: ignore[call-overload]
    assert record["settings"]["max_tokens"] == 16
    assert {row["setting"] for row in record["equality"]} == {row.setting for row in passed.equality}
    assert all(row["tokens"] == 32 and list(row["differences"]) == [] for row in record["equality"])
    assert set(record["sampled"]) == {"samples", "cells", "statistic", "p_value", "detectable"}
    assert record["false_failure"] == 1e-9
    assert record["passed"] is True and record["control"] is None
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", record["created"])


def test_a_model_in_memory_has_no_hash(text_target: TransformersBackend, tokenizer: Any) -> None:
    model = foredraft.load(text_target.model, tokenizer=tokenizer, rule="walk")  # the quickest to enumerate
    result = verify(model, prompts=["the"], max_tokens=2, samples=0)
    assert result.model == {"reference": "a model in memory", "sha256": "not a file"}


def test_a_gguf_file_is_hashed_itself(
    passed: Certificate, text_target: TransformersBackend, tokenizer: Any, tmp_path: Path
) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF and more")
    model = Model(text_target, tokenizer, None, rule="walk", files=ModelFiles("mine", file))
    result = verify(model, prompts=["the"], max_tokens=2, samples=0)
    assert result.model == {"reference": "mine", "sha256": hashlib.sha256(b"GGUF and more").hexdigest()}


@pytest.fixture(scope="module")
def stale(tiny_folder: Path) -> Certificate:
    """A failed certificate, with differences."""
    return verify(foredraft.load(tiny_folder, "ngram"), control="stale-cache", **FEW)  # type: ignore[arg-type]


def strict(text: str) -> Any:
    """JSON as the standard has it: no NaN, no infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("name", ["passed", "stale"])
def test_the_files_hold_everything(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    made: Certificate = request.getfixturevalue(name)
    record, page = files.write(made, tmp_path / "new" / "folder")
    assert (record.name, page.name) == ("certificate.json", "certificate.html")
    assert strict(record.read_text(encoding="utf-8")) == json.loads(json.dumps(made.to_dict()))
    html = page.read_text(encoding="utf-8")
    assert "<title>" in html and ("passed" if name == "passed" else "FAILED") in html.split("</title>")[0]
    wanted = [made.model["sha256"], made.created, *made.versions.values(), *made.settings["prompts"]]
    wanted += [made.settings[key] for key in ("drafter", "rule", "backend", "machine")]
    wanted += [row.kind for row in made.enumerated] + [row.setting for row in made.equality]
    wanted += [str(row.tokens) for row in made.equality]
    if made.sampled is not None:
        wanted += ["1e-9", f"{made.sampled.samples} short answers", f"p-value {made.sampled.p_value:.2g}"]
    for row in made.equality:
        for d in row.differences:
            wanted.append(f"plain {d.plain_token}, speculative")
            wanted.append(f">{d.verdict}</b>")
    text = re.sub(r"\s+", " ", html)
    assert [each for each in wanted if each not in text] == []
    assert made.model["reference"].replace("&", "&amp;") in text
    assert ("on purpose" in text) == (made.control is not None)


def test_the_page_needs_nothing_from_elsewhere(passed: Certificate, tmp_path: Path) -> None:
    html = files.write(passed, tmp_path)[1].read_text(encoding="utf-8")
    for reference in ("http:", "https:", "//", "src=", "href=", "url(", "@import", "<script", "<link"):
        assert reference not in html, reference


def test_prompts_are_text_to_the_page(passed: Certificate, tmp_path: Path) -> None:
    odd = replace(passed, settings={**passed.settings, "prompts": ["<script>alert('你好')</script> & more"]})
    record, page = files.write(odd, tmp_path)
    html = page.read_text(encoding="utf-8")
    assert "<script" not in html and "&lt;script&gt;" in html and "你好" in html
    assert strict(record.read_text(encoding="utf-8"))["settings"]["prompts"] == odd.settings["prompts"]


def test_numbers_that_json_lacks_are_null(passed: Certificate, tmp_path: Path) -> None:
    cut = Difference(0, 3, -1, -1, {}, {}, math.inf, 0.0, "defect")
    assert passed.sampled is not None
    impossible = passed.sampled._replace(statistic=math.inf, p_value=0.0)
    made = replace(passed, equality=(replace(passed.equality[0], differences=(cut,)),), sampled=impossible)
    record, page = files.write(made, tmp_path)
    written = strict(record.read_text(encoding="utf-8"))
    assert written["equality"][0]["differences"][0] == {
        **json.loads(json.dumps(asdict(cut) | {"gap": None})),
    }
    assert written["sampled"]["statistic"] is None and written["passed"] is False
    assert "FAILED" in page.read_text(encoding="utf-8")


def test_the_prompts_of_the_program_are_sensible() -> None:
    assert len(PROMPTS) >= 4 and all(prompt.strip() for prompt in PROMPTS)
    assert len(set(PROMPTS)) == len(PROMPTS)
