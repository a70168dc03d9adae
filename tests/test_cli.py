"""The command line: what goes where, what it says, and that bad input ends with a sentence and status 2."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging as transformers_logging

import foredraft
from foredraft import api, calibration, models
from foredraft.acceptance import RULES
from foredraft.cli import main
from foredraft.loading import KNOWN_DRAFTERS
from foredraft.proof.controls import CONTROLS
from foredraft.types import Completion, FinishEvent, SamplingParams, TokenEvent
from tiny import perturbed, seeded

PROMPT = "assistant\nhell"  # the template ends with the same word, so ngram has something to copy
STATS = {
    *("tokens", "target_forwards", "draft_forwards", "drafted", "accepted", "acceptance_rate", "mean_accepted_length"),
    *("ttft_ms", "tpot_ms", "tokens_per_second", "seconds", "drafter", "rule", "backend"),
}


class Result(NamedTuple):
    status: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Run]:
    """Runs the command line in this process; what it sets for the whole process is put back."""
    for variable in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TQDM_DISABLE", "1")  # as the command line would
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))

    def run(*arguments: object, stdin: str | bytes = "") -> Result:
        content = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        status = ended.value.code
        assert status is None or isinstance(status, int)
        return Result(status or 0, *capsys.readouterr())

    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    level = logging.getLogger("httpx").level
    yield run
    transformers_logging.set_verbosity(verbosity)
    if bars:
        transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    logging.getLogger("httpx").setLevel(level)


@pytest.fixture
def generate(run: Run, tiny_folder: Path) -> Run:
    """`foredraft generate` with the tiny model, a prompt and few tokens; more options may follow."""
    return lambda *options, prompt=PROMPT, **other: run(
        "generate", tiny_folder, prompt, "--max-tokens", 24, *options, **other
    )


@pytest.fixture(scope="module")
def answer(tiny_folder: Path) -> Completion:
    """What the tiny model says to `PROMPT`, from Python."""
    return foredraft.load(tiny_folder).generate(PROMPT, SamplingParams(max_tokens=24))


@pytest.fixture(scope="module")
def near_folder(tmp_path_factory: pytest.TempPathFactory, text_target: Any, tokenizer: Any) -> Path:
    """A draft model that is often right."""
    folder = tmp_path_factory.mktemp("draft")
    perturbed(text_target.model, 0.1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def without_colour(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


# The answer


def test_the_answer_goes_to_stdout_and_everything_else_to_stderr(generate: Run, answer: Completion) -> None:
    result = generate()
    assert result.status == 0
    assert result.out == answer.text + "\n"
    assert "Loading" in result.err
    for figure in ("tokens/s", "TTFT", "TPOT", "target forwards", "mean accepted length", "acceptance rate", "auto"):
        assert figure in result.err
    assert "\x1b" not in result.err


def test_the_prompt_may_come_from_stdin(generate: Run, answer: Completion) -> None:
    assert generate(prompt="-", stdin=PROMPT).out == answer.text + "\n"


def test_an_answer_in_a_file_is_exactly_the_text(generate: Run, answer: Completion, monkeypatch: Any) -> None:
    text = "a\tb\r\n  two  \n\x0c你好🌍" + " " * 300 + "end"
    completion = dataclasses.replace(answer, text=text)

    class Speaks:
        memory = None

        def stream(self, *_: Any, **__: Any) -> Iterator[Any]:
            yield from (TokenEvent(0, "bonus", character) for character in text[:-1])
            yield FinishEvent(text[-1], completion)

    monkeypatch.setattr(api, "load", lambda *_, **__: Speaks())
    assert generate().out == text + "\n"


def test_max_tokens_and_stop_strings_end_the_answer(generate: Run, answer: Completion) -> None:
    stop = next(character for character in answer.text[3:] if character != "\ufffd")
    report = json.loads(generate("--json", "--stop", "never", "--stop", stop).out)
    assert report["text"] == answer.text[: answer.text.index(stop)]
    assert report["finish_reason"] == "stop_string"
    assert report["settings"]["stop"] == ["never", stop]
    assert json.loads(generate("--json", "--max-tokens", 3).out)["ids"] == list(answer.ids[:3])


def test_without_chat_the_prompt_is_continued_as_it_is(generate: Run, tiny_folder: Path, answer: Completion) -> None:
    report = json.loads(generate("--json", "--no-chat").out)
    model = foredraft.load(tiny_folder)
    assert report["ids"] == list(model.generate(PROMPT, SamplingParams(max_tokens=24), chat=False).ids)
    assert report["ids"] != list(answer.ids)
    assert report["settings"]["chat"] is False


def test_a_seed_repeats_a_sampled_answer(generate: Run) -> None:
    options = ("--json", "--temperature", 1, "--top-k", 40, "--top-p", 0.95, "--min-p", 0.01)
    reports = [json.loads(generate(*options, "--seed", seed).out) for seed in (1, 1, 2)]
    assert reports[0]["ids"] == reports[1]["ids"] != reports[2]["ids"]
    settings = reports[0]["settings"]
    assert (settings["temperature"], settings["top_k"], settings["top_p"], settings["min_p"]) == (1.0, 40, 0.95, 0.01)
    assert settings["seed"] == 1
    assert reports[0]["stats"]["rule"] == "seed-exact"


def test_every_sampling_setting_is_passed_on(generate: Run) -> None:
    options: dict[str, Any] = {
        "--repetition-penalty": 1.2,
        "--frequency-penalty": 0.3,
        "--presence-penalty": -0.2,
        "--min-tokens": 4,
        "--logprobs": 2,
    }
    flat = [each for pair in options.items() for each in pair]
    more = ["--logit-bias", "5=2.5", "--logit-bias", "7=-1", "--bad-word", "the", "--bad-word", "hell"]
    settings = json.loads(generate("--json", *flat, *more).out)["settings"]
    assert {name: settings[name.strip("-").replace("-", "_")] for name in options} == options
    assert settings["logit_bias"] == {"5": 2.5, "7": -1.0}
    assert settings["bad_words"] == ["the", "hell"]


def test_json_holds_log_probabilities_of_every_token(generate: Run) -> None:
    report = json.loads(generate("--json", "--logprobs", 3, "--top-k", 2, "--temperature", 1, "--seed", 1).out)
    assert len(report["logprobs"]) == len(report["ids"])
    for token, noted in zip(report["ids"], report["logprobs"], strict=True):
        assert str(token) in noted and len(noted) == 2  # top-k leaves no third
        assert all(value <= 0 for value in noted.values())
    assert json.loads(generate("--json").out)["logprobs"] is None


@pytest.mark.parametrize("rule", ["token", "block", "seed-exact", "walk", "recursive", "hu", "traversal"])
def test_every_rule_can_be_named(rule: str, generate: Run) -> None:
    report = json.loads(generate("--json", "--rule", rule, "--temperature", 1, "--seed", 1).out)
    assert report["stats"]["rule"] == report["settings"]["rule"] == rule


def test_seeded_text_is_the_same_with_and_without_speculation(generate: Run, near_folder: Path) -> None:
    options = ("--compare", "--temperature", 0.8, "--seed", 5, "--rule", "seed-exact")
    for drafter in ("ngram", f"draft:{near_folder}"):
        result = generate(*options, "--drafter", drafter)
        assert result.status == 0
        assert "identical to plain decoding: yes" in result.err


def test_a_lossy_answer_says_so_everywhere(generate: Run, near_folder: Path) -> None:
    options = ("--lossy-typical", "--temperature", 1, "--seed", 1, "--drafter", f"draft:{near_folder}")
    result = generate(*options, "--compare")
    assert result.status == 0
    assert "Warning: Rule 'lossy-typical' is lossy" in result.err
    assert "not expected (rule 'lossy-typical': another law)" in result.err
    report = json.loads(generate("--json", *options).out)
    assert report["stats"]["rule"] == report["settings"]["rule"] == "lossy-typical"
    assert any("lossy" in warning for warning in report["warnings"])
    assert "lossy" not in generate("--temperature", 1, "--drafter", f"draft:{near_folder}").err


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft"])
def test_every_drafter_can_be_named(drafter: str, generate: Run, near_folder: Path, answer: Completion) -> None:
    reference = f"draft:{near_folder}" if drafter == "draft" else drafter
    report = json.loads(generate("--json", "--drafter", reference, "--draft-tokens", 3).out)
    assert report["ids"] == list(answer.ids)
    assert report["stats"]["drafter"] == drafter
    assert report["settings"]["drafter"] == reference
    assert report["settings"]["draft_tokens"] == 3
    assert (report["stats"]["draft_forwards"] > 0) == (drafter == "draft")
    assert (report["stats"]["drafted"] > 0) == (drafter != "none")


# verify


@pytest.fixture
def verify(run: Run, tiny_folder: Path, tmp_path: Path) -> Run:
    """`foredraft verify` with the tiny model, two prompts and few tokens; more options may follow."""
    (tmp_path / "prompts.txt").write_text("the hell in the hell\n\nin the hell of the\n", encoding="utf-8")
    few = ("--prompts", tmp_path / "prompts.txt", "--max-tokens", 16, "--samples", 30)
    return lambda *options: run("verify", tiny_folder, *few, *options)


def test_verify_of_a_right_program_passes_and_writes_a_certificate(verify: Run, tmp_path: Path) -> None:
    result = verify("--out", tmp_path / "proof")
    assert result.status == 0
    assert "law of greedy" in result.out and "law of seed-exact" in result.out
    assert result.out.count("2 prompts, 32 tokens") == 2 and result.out.count("0 defects, 0 near-ties") == 2
    assert "30 answers" in result.out and "p-value" in result.out
    assert "FAILED" not in result.out
    assert "passed: speculation with auto and rule seed-exact" in result.out
    assert f"written: {tmp_path / 'proof' / 'certificate.json'} and certificate.html" in result.out
    record = json.loads((tmp_path / "proof" / "certificate.json").read_text(encoding="utf-8"))
    assert record["passed"] is True
    assert record["settings"]["prompts"] == ["the hell in the hell", "in the hell of the"]
    assert "Comparing with plain decoding: greedy" in result.err


def test_verify_takes_drafter_and_rule(verify: Run, near_folder: Path) -> None:
    result = verify("--drafter", f"draft:{near_folder}", "--rule", "token", "--samples", 0)
    assert result.status == 0
    assert "law of token" in result.out and "answers" not in result.out
    assert "passed: speculation with draft and rule token" in result.out


@pytest.mark.parametrize("control", CONTROLS)
def test_verify_with_a_mistake_fails(control: str, verify: Run, tmp_path: Path) -> None:
    result = verify("--break", control, "--out", tmp_path)
    assert result.status == 1
    assert "FAILED: speculation with auto" in result.out
    assert re.search(r"^(law of|same text) .*FAILED", result.out, re.MULTILINE)
    record = json.loads((tmp_path / "certificate.json").read_text(encoding="utf-8"))
    assert record["passed"] is False and record["control"] == control
    assert "FAILED" in (tmp_path / "certificate.html").read_text(encoding="utf-8")


def test_verify_explains_each_difference(verify: Run) -> None:
    result = verify("--break", "stale-cache")
    assert re.search(
        r"^greedy, prompt \d, token \d+: plain \d+, speculative \d+, lead \S+, drift \S+: defect", result.out, re.M
    )


def test_verify_lists_the_mistakes_it_can_make(run: Run) -> None:
    result = run("verify", "/no/such/model", "--break", "list")  # nothing is loaded for this
    assert result.status == 0
    assert [line.split()[0] for line in result.out.splitlines()] == list(CONTROLS)
    assert all(control.mistake in result.out for control in CONTROLS.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--break", "nonsense"], "Error: There is no negative control 'nonsense'; known: residual,"),
        (
            ["--break", "stale-cache", "--drafter", "none"],
            "Error: Control 'stale-cache' shows where drafts are rejected",
        ),
        (["--prompts", "/no/such/file"], "Error: Cannot read /no/such/file ("),
        (["--prompts", "/dev/null"], "Error: There is no prompt to compare: give at least one."),
        (["--samples", "-1"], "Error: samples is -1, but must be an integer >= 0."),
        (["--max-tokens", "0"], "Error: max_tokens is 0, but must be an integer >= 1"),
        (["--rule", "greedy"], "Error: Rule 'greedy' fits temperature 0 only"),
        (["--rule", "magic"], "Error: There is no acceptance rule 'magic'"),
    ],
)
def test_verify_refuses_what_is_wrong(options: list[str], message: str, verify: Run) -> None:
    refused(verify(*options), message)


# --json


def test_json_is_one_object_and_nothing_else(generate: Run, answer: Completion, tiny_folder: Path) -> None:
    result = generate("--json")
    assert result.status == 0
    assert result.out.count("\n") == 1 and result.out.endswith("}\n")
    report = json.loads(result.out)
    assert report["text"] == answer.text
    assert report["ids"] == list(answer.ids)
    assert report["finish_reason"] == answer.finish_reason
    assert report["settings"]["model"] == str(tiny_folder)
    assert report["settings"]["max_tokens"] == 24
    assert report["versions"]["foredraft"] == foredraft.__version__
    assert {"foredraft", "torch", "transformers", "python"} <= report["versions"].keys()
    assert report["stats"].keys() >= STATS
    assert report["stats"]["tokens"] == len(answer.ids)
    assert 0 < report["stats"]["target_forwards"] <= len(answer.ids)  # auto decides by times, which differ
    assert report["stats"]["drafter"] == "auto"
    assert report["stats"]["rule"] == "greedy"
    assert report["stats"]["backend"] == "native"


def test_json_of_a_single_token_has_no_tpot(generate: Run) -> None:
    stats = json.loads(generate("--json", "--max-tokens", 1).out)["stats"]
    assert stats["tpot_ms"] is None
    assert stats["acceptance_rate"] is None
    assert stats["tokens"] == 1


def test_json_keeps_characters_as_they_are(generate: Run) -> None:
    result = generate("--json", "--stop", "好🌍")
    assert "好🌍" in result.out


def test_json_with_compare_holds_both_runs(generate: Run) -> None:
    result = generate("--json", "--compare")
    report = json.loads(result.out)
    assert result.status == 0
    assert report["compare"]["identical"] is True
    assert report["compare"]["ids"] == report["ids"]
    assert report["compare"]["stats"].keys() >= STATS
    assert report["compare"]["stats"]["drafter"] == "none"


# --compare


@pytest.mark.parametrize("drafter", ["ngram", "draft"])
def test_compare_says_identical_and_shows_both(
    drafter: str, generate: Run, near_folder: Path, answer: Completion
) -> None:
    result = generate("--compare", "--drafter", f"draft:{near_folder}" if drafter == "draft" else drafter)
    assert result.status == 0
    assert result.out == answer.text + "\n"
    assert f"identical to plain decoding: yes ({len(answer.ids)} tokens)" in result.err
    [head] = [line.split() for line in result.err.splitlines() if line.split()[:1] == ["plain"]]
    assert head == ["plain", drafter]
    [forwards] = [line.split() for line in result.err.splitlines() if line.startswith("target forwards")]
    assert int(forwards[-2]) == len(answer.ids) >= int(forwards[-1])
    assert re.search(r"speedup +1\.00x +\d+\.\d\dx", result.err)


def test_compare_of_sampled_runs_says_why_they_may_differ(generate: Run, near_folder: Path) -> None:
    result = generate("--compare", "--temperature", 1, "--seed", 5, "--drafter", f"draft:{near_folder}")
    assert result.status == 0
    assert "identical to plain decoding: not expected (rule 'block': the same law, other draws)" in result.err


def test_compare_that_finds_a_difference_says_where_and_fails(
    generate: Run, monkeypatch: Any, answer: Completion
) -> None:
    other = dataclasses.replace(answer, ids=(*answer.ids[:5], answer.ids[5] + 1, *answer.ids[6:]))

    class Other:
        def generate(self, *_: Any, **__: Any) -> Completion:
            return other

    monkeypatch.setattr(api.Model, "plain", lambda _: Other())
    result = generate("--compare")
    assert result.status == 1
    assert f"identical to plain decoding: no (first difference at token 6 of {len(answer.ids)})" in result.err
    result = generate("--compare", "--json")
    assert result.status == 1
    assert json.loads(result.out)["compare"]["identical"] is False


# --memory


@pytest.mark.parametrize("drafter", ["suffix", "recycling", "hybrid:suffix+recycling"])
def test_a_second_run_goes_on_from_the_memory(drafter: str, generate: Run, answer: Completion, tmp_path: Path) -> None:
    options = ("--drafter", drafter, "--memory", tmp_path / "memory", "--json")
    first, second = (json.loads(generate(*options).out) for _ in range(2))
    assert first["ids"] == second["ids"] == list(answer.ids)
    assert second["stats"]["target_forwards"] < first["stats"]["target_forwards"]
    assert second["settings"]["memory"] == str(tmp_path / "memory")
    assert json.loads(generate("--json").out)["settings"]["memory"] is None


def test_a_memory_for_who_learns_nothing_is_refused(generate: Run, tmp_path: Path) -> None:
    result = generate("--memory", tmp_path, "--drafter", "ngram")
    refused(
        result,
        "Error: Drafter 'ngram' learns nothing that a memory could keep. Use suffix[:SETTINGS], recycling, "
        "auto[:A+B] or ",
    )


def test_explain_tells_what_auto_did(generate: Run) -> None:
    shown = generate("--explain", "--max-tokens", 24)
    assert shown.status == 0
    for said in ("A plain step takes", "rounds were plain", "suffix", "recycling", "tokens/s"):
        assert said in shown.err
    report = json.loads(generate("--explain", "--json", "--max-tokens", 24).out)
    parts = report["explanation"]["parts"]
    assert [part["name"] for part in parts] == ["suffix", "recycling"]
    assert report["explanation"]["rounds"] == report["stats"]["target_forwards"]
    assert report["explanation"]["plain_rounds"] == report["stats"]["plain_rounds"]
    assert report["explanation"]["plain_ms"] > 0


def test_explain_needs_auto(generate: Run) -> None:
    message = "Error: --explain tells what auto or ssd decided, but the drafter is 'ngram': leave one of them out."
    refused(generate("--explain", "--drafter", "ngram"), message)


def test_a_damaged_memory_is_refused_before_anything_is_generated(generate: Run, tmp_path: Path) -> None:
    file = tmp_path / "memory" / "suffix.safetensors"
    file.parent.mkdir()
    file.write_bytes(b"not a memory")
    options = ("--memory", file.parent, "--drafter", "hybrid:recycling+suffix")
    refused(generate(*options), f"Error: Cannot read {file} (")
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("json_too", [False, True])
def test_a_full_disk_is_told_after_the_answer(
    json_too: bool, generate: Run, answer: Completion, tmp_path: Path, monkeypatch: Any
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("foredraft.proposers.files.save_file", fail)
    result = generate("--memory", tmp_path / "memory", "--drafter", "suffix", *["--json"] * json_too)
    assert result.status == 2
    assert (json.loads(result.out)["text"] if json_too else result.out[:-1]) == answer.text
    shown = " ".join(result.err.split())
    assert "Error: Cannot keep what was learned in" in shown and "No space left on device" in shown
    assert "Traceback" not in result.err
    assert list((tmp_path / "memory").iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BrokenPipeError(32, "Broken pipe")])
def test_who_stops_an_answer_keeps_what_was_learned(
    error: BaseException, generate: Run, tmp_path: Path, monkeypatch: Any
) -> None:
    shown: list[str] = []

    def show(_: Any, text: str, style: str = "") -> None:
        shown.append(text)
        if len(shown) == 5:
            raise error

    monkeypatch.setattr("foredraft.terminal._show", show)
    monkeypatch.setattr(sys.stderr, "close", lambda: None)
    result = generate("--memory", tmp_path / "memory", "--drafter", "recycling")
    assert result.status not in (0, 2) and "Traceback" not in result.err
    table = load_file(tmp_path / "memory" / "recycling.safetensors")["candidates"]
    assert 0 < (table[:, 0] >= 0).sum() <= 5


# --color


def test_colour_tells_the_three_origins_apart(generate: Run, near_folder: Path, answer: Completion) -> None:
    drafter = ("--drafter", f"draft:{near_folder}", "--draft-tokens", 1)
    result = generate("--color", "always", "--compare", *drafter)
    assert result.status == 0
    shown, legend = result.out.split("\x1b[32mdraft\x1b[0m")
    assert without_colour(shown).rstrip("\n") == re.sub(r"[\r\x07-\x08\x0b-\x0c]", "", answer.text).expandtabs(8)
    for style in ("32", "1;33", "4;36"):
        assert f"\x1b[{style}m" in shown
    assert "\x1b[1;33mcorrection\x1b[0m" in legend
    assert "\x1b[4;36mbonus\x1b[0m" in legend
    counts = re.findall(r"^(?:draft|correction|bonus)? +(\d+)  \w", without_colour(legend), re.MULTILINE)
    assert sum(map(int, counts)) == len(answer.ids)
    assert f"identical to plain decoding: yes ({len(answer.ids)} tokens)" in without_colour(legend)
    assert "speedup" in legend
    assert "identical" not in result.err


@pytest.mark.parametrize("color", ["never", "auto"])
def test_there_is_no_colour_where_nobody_sees_it(color: str, generate: Run) -> None:
    result = generate("--color", color, "--compare")
    assert "\x1b" not in result.out + result.err


# The models


def test_models_are_listed_with_where_they_are(run: Run, tmp_path: Path) -> None:
    result = run("models")
    assert result.status == 0
    [row] = [line for line in result.out.splitlines() if "smollm2-135m" in line]
    assert "Apache-2.0" in row and "98 MB" in row and row.rstrip().endswith("no")
    file = models.bundled_path(models.BUNDLED["smollm2-135m"], tmp_path / "cache")
    file.parent.mkdir(parents=True)
    file.touch()
    assert "yes" in run("models").out


def test_models_pull_prints_where_the_file_lies(run: Run, monkeypatch: Any, tmp_path: Path) -> None:
    def fetch(model: models.BundledModel, cache: Path, notify: models.Notify) -> Path:
        notify("Fetching it")
        return models.bundled_path(model, cache)

    monkeypatch.setattr(models, "fetch_bundled", fetch)
    result = run("models", "pull", "smollm2-135m")
    assert result.status == 0
    assert Path(result.out.rstrip("\n")) == models.bundled_path(models.BUNDLED["smollm2-135m"], tmp_path / "cache")
    assert "Fetching it" in result.err


def test_models_pull_of_an_unknown_name_is_refused(run: Run) -> None:
    result = run("models", "pull", "smollm3")
    assert result.status == 2
    assert "no bundled model 'smollm3'; known: smollm2-135m" in result.err
    assert result.out == ""


def test_models_show_tells_what_a_model_is(run: Run, tiny_folder: Path) -> None:
    result = run("models", "show", str(tiny_folder))
    assert result.status == 0
    rows = dict(line.split(maxsplit=1) for line in result.out.splitlines() if line.strip())
    assert (rows["architecture"].strip(), rows["context"].strip()) == ("llama", "1024 tokens")
    assert rows["tensors"].strip().endswith(" F32") and rows["weights"].strip().endswith(" MB")
    assert "native" in rows["backend"] and "read for a token" in result.out


def test_models_show_tells_why_a_model_is_not_native(run: Run, tmp_path: Path) -> None:
    config = GPT2Config(n_layer=1, n_embd=32, n_head=2)
    seeded(GPT2LMHeadModel, config).save_pretrained(tmp_path)
    result = run("models", "show", str(tmp_path))
    assert result.status == 0
    assert "Not native: it does not know model type 'gpt2', only llama" in result.out
    report = json.loads(run("models", "show", str(tmp_path), "--json").out)
    assert (report["architecture"], report["backend"]) == ("gpt2", "transformers")
    assert report["tensors"].keys() == {"F32"} and report["bytes_per_token"] is None


def test_models_show_of_what_is_not_there_is_refused(run: Run) -> None:
    refused(run("models", "show", "nonsense"), "There is no model 'nonsense'")


# What is refused


def refused(result: Result, message: str) -> None:
    assert result.status == 2
    assert message in result.err
    assert "Traceback" not in result.err
    assert result.out == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--drafter", "ngarm"],
            "Error: There is no drafter 'ngarm'. Did you mean 'ngram'? Known: none, ngram[:MIN-MAX], suffix",
        ),
        (["--drafter", "draft"], "Error: Drafter 'draft' needs more: draft:REF with a model"),
        (["--drafter", "recycling:3"], "Error: Drafter 'recycling' takes no argument"),
        (["--drafter", "ngram:3"], "Error: Drafter 'ngram:3' must be ngram:MIN-MAX"),
        (["--drafter", "draft:/no/such/model"], "Error: There is no model '/no/such/model'"),
        (["--draft-tokens", "65"], "Error: draft_tokens is 65, but must be an integer in [0, 64]"),
        (["--draft-tokens", "-1"], "Error: draft_tokens is -1, but must be an integer in [0, 64]"),
        (["--max-tokens", "0"], "Error: max_tokens is 0, but must be an integer >= 1"),
        (["--temperature", "-0.5"], "Error: temperature is -0.5, but must be 0 (greedy), or a number >= 1e-12"),
        (["--temperature", "nan"], "Error: temperature is nan, but must be 0 (greedy), or a number >= 1e-12"),
        (["--top-k", "-1"], "Error: top_k is -1, but must be an integer >= 0"),
        (["--top-p", "0"], "Error: top_p is 0.0, but must be a number in (0, 1]"),
        (["--top-p", "1.5"], "Error: top_p is 1.5, but must be a number in (0, 1]"),
        (["--min-p", "2"], "Error: min_p is 2.0, but must be a number in [0, 1]"),
        (["--repetition-penalty", "0"], "Error: repetition_penalty is 0.0, but must be a number in [0.001, 1000]"),
        (["--frequency-penalty", "3"], "Error: frequency_penalty is 3.0, but must be a number in [-2, 2]"),
        (["--presence-penalty", "-3"], "Error: presence_penalty is -3.0, but must be a number in [-2, 2]"),
        (["--logit-bias", "5"], "Error: logit-bias is '5', but must be ID=VALUE, such as 314=-5"),
        (["--logit-bias", "a=1"], "Error: logit-bias is 'a=1', but must be ID=VALUE"),
        (
            ["--logit-bias", "5=101"],
            "Error: logit_bias is {5: 101.0}, but must be a mapping of token ids to numbers in",
        ),
        (["--logit-bias", "99999=1"], "Error: logit_bias names token id 99999, but the last id is"),
        (
            ["--bad-word", ""],
            "Error: bad_words is ('',), but must be a string or a list of strings, none of them empty",
        ),
        (["--min-tokens", "25"], "Error: min_tokens is 25, but must be an integer in [0, max_tokens = 24]"),
        (["--logprobs", "21"], "Error: logprobs is 21, but must be an integer in [0, 20], or None for none"),
        (["--rule", "magic"], "Error: There is no acceptance rule 'magic'; known: greedy, token, block"),
        (["--rule", "lossy-typical"], "Error: Rule 'lossy-typical' changes the text: ask for it by --lossy-typical"),
        (["--lossy-typical", "--rule", "token"], "Error: --lossy-typical is a rule of its own: leave --rule token out"),
        (
            ["--rule", "greedy", "--temperature", "1"],
            "Error: Rule 'greedy' fits temperature 0 only: leave the rule open",
        ),
        (["--seed", "-1"], "Error: seed is -1, but must be an integer in [0, 2**63)"),
        (["--stop", ""], "Error: stop is ('',), but must be a string or a list of strings, none of them empty"),
        (["--device", "nonsense"], "Error: Device 'nonsense' cannot be used here"),
        (["--device", "cuda:99"], "Error: Device 'cuda:99' cannot be used here"),
        (["--dtype", "int3"], "Error: dtype is 'int3', but must be one of auto, float32, bfloat16, float16"),
        (["--draft-token", "3"], "No such option: --draft-token"),
        (["--draft-tokens", "many"], "Invalid value for '--draft-tokens': "),
        (["--color", "sometimes"], "Invalid value for '--color'"),
        (["another argument"], "unexpected extra argument"),
    ],
)
def test_a_wrong_option_is_refused(options: list[str], message: str, generate: Run) -> None:
    refused(generate(*options), message)


@pytest.mark.parametrize("json_too", [False, True])
@pytest.mark.parametrize(
    ("prompt", "stdin", "message"),
    [
        ("", "", "The prompt is empty: give some text."),
        (" \n", "", "The prompt is empty: give some text."),
        ("-", "", "The prompt is empty: give some text."),
        ("the " * 2000, "", "but the model's context is 1024 and one more must fit: shorten the prompt."),
        ("-", b"caf\xe9", "not valid Unicode"),
        (b"caf\xe9".decode(errors="surrogateescape"), "", "not valid Unicode"),
    ],
)
def test_a_wrong_prompt_is_refused(
    prompt: str, stdin: str | bytes, message: str, json_too: bool, generate: Run
) -> None:
    refused(generate(*["--json"] * json_too, prompt=prompt, stdin=stdin), message)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smolm2-135m", "Error: There is no model 'smolm2-135m'. Did you mean 'smollm2-135m'?"),
        ("/no/such/folder", "Error: There is no model '/no/such/folder'. Give a bundled name"),
        ("Tell me something about the sea. " * 20, "Error: There is no model 'Tell me"),
    ],
)
def test_an_unknown_model_is_refused(model: str, message: str, run: Run) -> None:
    refused(run("generate", model, PROMPT), message)


def test_a_file_that_is_no_gguf_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_text("<!DOCTYPE html>")
    refused(run("generate", tmp_path / "a.gguf", PROMPT), "does not begin with the GGUF magic but with b'<!DO'")


def test_a_gguf_file_cut_short_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    options = ("generate", tmp_path / "a.gguf", PROMPT, "--backend")
    refused(run(*options, "transformers"), f"Error: Cannot read the model {tmp_path / 'a.gguf'} (")
    refused(run(*options, "auto"), f"Error: {tmp_path / 'a.gguf'} ")


def test_a_folder_without_a_model_is_refused(run: Run, tmp_path: Path) -> None:
    refused(run("generate", tmp_path, PROMPT), "has no config.json, so it is not a model")


def test_weights_cut_short_are_refused(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "cut"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:9999])
    refused(run("generate", folder, PROMPT, "--backend", "transformers"), f"Error: Cannot read the model {folder} (")
    refused(run("generate", folder, PROMPT), f"Error: Cannot read {weights} (")


def test_a_draft_model_of_another_vocabulary_is_translated(
    generate: Run, tiny_folder: Path, tmp_path: Path, tokenizer: Any
) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "other"))
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    b, k = (tokenizer.convert_tokens_to_ids(token) for token in "BK")
    content["model"]["vocab"] |= {"B": k, "K": b}
    file.write_text(json.dumps(content), encoding="utf-8")
    result = generate("--drafter", f"draft:{folder}", "--compare")
    assert result.status == 0
    assert "identical to plain decoding: yes" in result.err


def test_a_model_that_does_not_fit_is_refused(generate: Run, monkeypatch: Any) -> None:
    monkeypatch.setattr("foredraft.backends.checkpoint.available_memory", lambda _: 1000)
    refused(generate(), "Error: The model does not fit: it takes 0.00 GB of weights")


@pytest.mark.parametrize(
    "arguments", [["generate"], ["generate", "model"], ["nonsense"], ["models", "nonsense"], ["-x"]]
)
def test_a_wrong_command_shows_how_it_is_used(arguments: list[str], run: Run) -> None:
    refused(run(*arguments), "Usage: foredraft")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BrokenPipeError(32, "Broken pipe")])
def test_who_stops_it_sees_no_traceback(error: BaseException, generate: Run, monkeypatch: Any) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(api, "load", load)
    monkeypatch.setattr(sys.stderr, "close", lambda: None)
    result = generate()
    assert result.status not in (0, 2)
    assert "Traceback" not in result.err


# Help, version and the real program


def test_help_reads_well(run: Run) -> None:
    result = run("--help")
    assert result.status == 0
    assert "Lossless speculative decoding" in result.out
    for command in ("generate", "verify", "models"):
        assert command in result.out
    text = without_colour(run("generate", "--help").out)
    for option in ("--drafter", "--draft-tokens", "--temperature", "--top-k", "--top-p", "--min-p", "--seed"):
        assert option in text
    for option in ("--rule", "--lossy-typical", "--logprobs", "--logit-bias", "--bad-word", "--min-tokens"):
        assert option in text
    assert "--break" in without_colour(run("verify", "--help").out)
    for option in (
        "--max-tokens",
        "--stop",
        "--no-chat",
        "--memory",
        "--compare",
        "--json",
        "--device",
        "--dtype",
        "--color",
    ):
        assert option in text
    assert "pull" in run("models", "--help").out


def test_the_version_is_shown(run: Run) -> None:
    assert run("--version") == (0, f"foredraft {foredraft.__version__}\n", "")


def test_help_does_not_load_torch() -> None:
    code = (
        "import sys; from foredraft.cli import main\n"
        "try: main(['generate', '--help'])\n"
        "except SystemExit: pass\n"
        "slow = {'torch', 'transformers', 'huggingface_hub', 'numpy'} & sys.modules.keys()\n"
        "assert not slow, slow"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--drafter" in without_colour(done.stdout)


def test_the_program_runs_as_a_module(tiny_folder: Path, answer: Completion, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "foredraft", "generate", tiny_folder, "-", "--json", "--verbose", "--max-tokens", "24"],
        input=PROMPT,
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONUTF8": "1", "COLUMNS": "200", "FOREDRAFT_CACHE": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ids"] == list(answer.ids)
    assert "GB of weights" in done.stderr
    assert "Warning" not in done.stderr


@pytest.fixture
def tune(run: Run, tiny_folder: Path, tmp_path: Path) -> Run:
    """`foredraft tune` of the tiny model on two short texts, as quickly as can be; more options may follow."""
    texts = tmp_path / "texts.txt"
    texts.write_text("hello hello hello\n\nthe end of the end\n", encoding="utf-8")
    quickly = ("--prompts", texts, "--max-tokens", 6, "--seconds", 0.01)
    return lambda *options: run("tune", tiny_folder, *quickly, *options)


def test_tune_shows_the_curve_and_who_pays_and_keeps_the_costs(tune: Run, tmp_path: Path) -> None:
    plot = tmp_path / "curve.svg"
    result = tune("--plot", plot)
    assert result.status == 0, result.err
    for words in ("v(n)", "break-even", "█", "plain decoding", "hybrid:suffix+recycling", "sequences"):
        assert words in result.out
    assert "Use " in result.out or "pays here" in result.out
    (file,) = (tmp_path / "cache" / "costs").iterdir()
    assert f"kept for later runs: {file}" in result.out and f"written: {plot}" in result.out
    assert plot.read_text(encoding="utf-8").startswith("<svg")
    assert "Timing forwards" in result.err and "text 2 of 2" in result.err


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_tune_as_json_is_one_object_with_what_a_later_run_finds(
    tune: Run, tiny_folder: Path, tmp_path: Path, backend: str
) -> None:
    result = tune("--json", "--backend", backend)
    assert result.status == 0, result.err
    report = json.loads(result.out)
    assert report["model"] == str(tiny_folder) and len(report["drafters"]) == 4
    loaded = foredraft.load(tiny_folder, None, backend=backend, cache=tmp_path / "cache")
    assert loaded.files is not None
    about = calibration.key_of(loaded.backend, loaded.files)
    assert report["file"] == str(calibration.costs_file(about, tmp_path / "cache"))
    found = calibration.costs_for(loaded.backend, loaded.files, tmp_path / "cache")
    assert found.to_json() == report["costs"] and found.about["backend"] == backend


def test_tune_that_cannot_keep_its_costs_says_so_and_goes_on(tune: Run, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "costs").write_text("in the way")
    result = tune("--json", "--backend", "transformers")
    assert result.status == 0 and json.loads(result.out)["file"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seconds", "0"], "seconds is 0.0, but must be a number > 0."),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--prompts", "nowhere.txt"], "Cannot read nowhere.txt"),
        (["--prompts", os.devnull], "has no prompts"),
        (["--plot", "no/such/folder/curve.svg"], "Cannot write no/such/folder/curve.svg"),
        (["--backend", "fast"], "backend is 'fast'"),
    ],
)
def test_tune_refuses_what_is_wrong_before_it_measures(options: list[str], message: str, tune: Run) -> None:
    result = tune(*options)
    refused(result, message)
    assert "Timing" not in result.err


@pytest.mark.parametrize(("searched", "run_on"), [("native", "transformers"), ("transformers", "native")])
def test_tune_skip_writes_a_set_that_layer_skip_loads_on_every_backend(
    run: Run, generate: Run, tiny_folder: Path, tmp_path: Path, searched: str, run_on: str
) -> None:
    texts, out = tmp_path / "prompts.txt", tmp_path / "set.json"
    texts.write_text("hello\nthe end\n", encoding="utf-8")
    options = ("--out", str(out), "--max-tokens", "8", "--steps", "6")
    result = run("tune-skip", str(tiny_folder), str(texts), *options, "--backend", searched)
    assert result.status == 0 and "of the weights" in result.out
    for backend in (searched, run_on):
        assert generate("--drafter", f"layer_skip:{out}", "--compare", "--backend", backend).status == 0


def test_the_help_names_every_drafter_and_rule(run: Run) -> None:
    shown = " ".join(run("generate", "--help").out.replace("│", " ").split())
    for drafter in KNOWN_DRAFTERS.split(", "):
        assert drafter in shown
    for rule in RULES.values():
        assert rule.greedy or rule.name in shown
