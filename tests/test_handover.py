"""Hand-over: what is translated, what is refused and why, what is written, and what should be gained."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bench_runs
from foredraft.bench.records import Cell
from foredraft.bench.results import Results
from foredraft.cli import main
from foredraft.costs import CostCurve, Costs
from foredraft.errors import ForedraftError, InvalidInputError, UnsupportedError
from foredraft.handover.check import Parallel, check_config
from foredraft.handover.expected import CARDS, Gain, card_machine, gains, measured_machine, schedule_of
from foredraft.handover.facts import Facts, facts_of
from foredraft.handover.incoming import incoming
from foredraft.handover.keys import VERSIONS, keys_of
from foredraft.handover.measured import Acceptance, Measured, Record, read_record
from foredraft.handover.others import llama_cpp, sglang
from foredraft.handover.page import markdown
from foredraft.handover.plan import Handover, planned
from foredraft.handover.reading import parse_config, read_config
from foredraft.handover.translate import translate
from foredraft.handover.vllm import command, manifest, ray_app
from foredraft.handover.write import own_head, write
from foredraft.models import ModelFiles

GOLDEN = Path(__file__).parent / "golden" / "handover"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
EAGLE = {"method": "eagle3", "model": "org/head", "num_speculative_tokens": 3}
DRAFT = {"method": "draft_model", "model": "org/small", "num_speculative_tokens": 3}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 8}
CURVE = CostCurve([1, 2, 4, 8, 16], [16], [[0.010, 0.010, 0.011, 0.016, 0.036]])


def measured(drafter: str = "ngram", rates: tuple[float, ...] = (0.8, 0.7, 0.6), share: float = 1.0) -> Measured:
    depths = (1.0 - share, *[0.0] * (len(rates) - 1), share)
    return Measured(drafter, len(rates), 1.5, 2.0, 0.6, Acceptance(rates, depths), False, 0.01)


def record(*drafters: Measured) -> Record:
    return Record("a benchmark", "org/model", drafters or (measured(),), Costs({1: CURVE}), 100.0)


# What vLLM would refuse, or would take and not do


@pytest.mark.parametrize("config", [NGRAM, EAGLE, DRAFT, SUFFIX, {"method": "mtp"}, {"method": "suffix"}])
@pytest.mark.parametrize("version", VERSIONS)
def test_good_configurations_pass(config: dict[str, Any], version: str) -> None:
    check_config(config, version=version, parallel=Parallel(2, 1, 1))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**NGRAM, "tensor_parallel_size": 2}, "'tensor_parallel_size' is no key of it.* --tensor-parallel-size"),
        ({**SUFFIX, "rejection_sample_method": "block"}, "'block' is ignored with method 'suffix'.* model runner V1"),
        ({**NGRAM, "rejection_sample_method": "block"}, "'block' does nothing under 'ngram'"),
        (
            {**DRAFT, "use_heterogeneous_vocab": True, "rejection_sample_method": "block"},
            "'block' is ignored with use_heterogeneous_vocab",
        ),
        (
            {**EAGLE, "rejection_sample_method": "block", "draft_sample_method": "greedy"},
            "'block' with draft_sample_method 'greedy' gains nothing",
        ),
        ({**EAGLE, "rejection_sample_method": "synthetic"}, "'synthetic' acceptance keeps drafted tokens by chance"),
        ({**EAGLE, "synthetic_acceptance_length": 2}, "'synthetic' acceptance keeps"),
        ({**EAGLE, "rejection_sample_method": "fly"}, "'fly' acceptance keeps tokens that the target would not"),
        ({**NGRAM, "prompt_lookup_min": 5}, "prompt_lookup_min is 5 and prompt_lookup_max 4"),
        ({**NGRAM, "prompt_lookup_min": 0}, "prompt_lookup_min is 0, but must be an integer >= 1"),
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens is 0, but must be an integer >= 1"),
        ({**NGRAM, "num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({**NGRAM, "num_speculative_token": 3}, "Did you mean 'num_speculative_tokens'"),
        ({"method": "ngram"}, "method 'ngram' needs 'num_speculative_tokens'"),
        ({"method": "eagle3", "num_speculative_tokens": 3}, "method 'eagle3' needs 'model'.*the head"),
        ({"num_speculative_tokens": 3}, "neither 'method' nor 'model'"),
        ({"method": "suffx"}, "no method 'suffx'. Did you mean 'suffix'"),
        ({"method": "dflash", "model": "a/b"}, "'dflash' has no counterpart here"),
        ({"method": "medusa", "model": "a/b", "num_speculative_tokens": 3}, "'medusa' was removed in vLLM 0.33"),
        ({**EAGLE, "prompt_lookup_max": 3}, "'prompt_lookup_max' belongs to method ngram or ngram_gpu"),
        ({**NGRAM, "suffix_decoding_max_tree_depth": 3}, "belongs to method suffix"),
        ({**NGRAM, "model": "a/b"}, "'model' belongs to method draft_model"),
        ({**EAGLE, "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size is 2, but must be 1"),
        ({**DRAFT, "use_heterogeneous_vocab": True, "draft_sample_method": "probabilistic"}, "takes .* 'greedy' only"),
        (
            {**DRAFT, "use_heterogeneous_vocab": True, "use_local_argmax_reduction": True},
            "use_heterogeneous_vocab and use_local_argmax_reduction exclude",
        ),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": []}, "is empty"),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": [[2, 4, 1]]}, "where one from 1 on must stand"),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 4, 9]]}, "has 9 tokens"),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 4]]}, "must be a list of"),
        ({**SUFFIX, "suffix_decoding_min_token_prob": 1.5}, r"must be a number in \[0, 1\]"),
        ({**EAGLE, "draft_sample_method": "sampled"}, "must be one of greedy, probabilistic"),
    ],
)
def test_wrong_combinations_are_refused_with_the_reason(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        check_config(config)


def test_keys_and_methods_have_their_versions() -> None:
    assert keys_of("0.33").keys() - keys_of("0.32").keys() >= {"draft_lm_head_quantization", "fly_window_size"}
    with pytest.raises(InvalidInputError, match=r"'xpress_topc' is newer than vLLM 0\.32"):
        check_config({**EAGLE, "xpress_topc": 1}, version="0.32")
    check_config({"method": "medusa", "model": "a/b", "num_speculative_tokens": 3}, version="0.32")
    with pytest.raises(InvalidInputError, match=r"vLLM 0\.11 is not in the table"):
        check_config(NGRAM, version="0.11")


def test_a_schedule_does_not_go_with_data_parallelism() -> None:
    config = {**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 8, 4], [9, 64, 1]]}
    check_config(config)
    with pytest.raises(InvalidInputError, match="switched off by vLLM under data parallelism"):
        check_config(config, parallel=Parallel(1, 1, 2))


@pytest.mark.parametrize(
    ("config", "draft", "error", "message"),
    [
        (EAGLE, Facts("org/head", hidden=64), UnsupportedError, "states of 64, and t has 32"),
        (EAGLE, Facts("org/head", kind="mtp"), UnsupportedError, "of kind mtp, and the method is 'eagle3'"),
        (EAGLE, Facts("org/head", vocabulary=9), UnsupportedError, "vocabulary of 9, and t has 100"),
        (DRAFT, Facts("org/small", vocabulary=9), UnsupportedError, "set use_heterogeneous_vocab"),
        ({"method": "mtp", "num_speculative_tokens": 5}, Facts("t", steps=2), InvalidInputError, "a multiple of 2"),
    ],
)
def test_heads_and_models_for_another_target(
    config: dict[str, Any], draft: Facts, error: type[ForedraftError], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_config(config, target=Facts("t", hidden=32, vocabulary=100), draft=draft)


def test_facts_are_read_from_folders_only(tiny_folder: Path, tmp_path: Path) -> None:
    facts = facts_of(str(tiny_folder))
    assert facts is not None and facts.hidden and facts.vocabulary and facts.kind is None
    assert facts_of("org/model") is None
    (tmp_path / "config.json").write_text("[")
    assert facts_of(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"method": "ngram"', "is no JSON"),
        ('["ngram"]', "must be a JSON object"),
        ('{"method": "ngram", "method": "suffix"}', "names 'method' twice"),
    ],
)
def test_what_is_no_configuration(text: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        parse_config(text)


def test_a_configuration_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps(NGRAM))
    assert read_config(str(tmp_path / "c.json")) == NGRAM == read_config(json.dumps(NGRAM))


# The way in


@pytest.mark.parametrize(
    ("config", "drafter", "tokens", "rule"),
    [
        (NGRAM, "ngram:2-4", 4, None),
        ({"method": "ngram", "num_speculative_tokens": 2}, "ngram:5-5", 2, None),
        ({"method": "ngram_gpu", "num_speculative_tokens": 2, "prompt_lookup_max": 3}, "ngram:3-3", 2, None),
        (
            {**SUFFIX, "suffix_decoding_max_tree_depth": 32, "suffix_decoding_max_cached_requests": 0},
            "suffix:max_depth=32/factor=1.0/offset=0.0/floor=0.1/smoothing=0.0/global_smoothing=0.0/global_bytes=0/"
            "chains_only=true",
            8,
            None,
        ),
        (DRAFT, "draft:org/small", 3, "token"),
        ({"model": "org/small", "num_speculative_tokens": 3}, "draft:org/small", 3, "token"),
        ({**EAGLE, "rejection_sample_method": "block"}, "eagle3:org/head", 3, "block"),
        ({"method": "deepseek_mtp", "num_speculative_tokens": 1}, "mtp", 1, "token"),
        ({"method": "medusa", "model": "a/b", "num_speculative_tokens": 3}, "medusa:a/b", 3, "token"),
        ({**EAGLE, "draft_tensor_parallel_size": 1, "enforce_eager": True}, "eagle3:org/head", 3, "token"),
    ],
)
def test_vllms_json_is_a_drafter_of_ours(config: dict[str, Any], drafter: str, tokens: int, rule: str | None) -> None:
    found = incoming(json.dumps(config))
    assert (found.drafter, found.draft_tokens, found.rule) == (drafter, tokens, rule)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 4, 2]]},
            "'num_speculative_tokens_per_batch_size' has no",
        ),
        (
            {**SUFFIX, "suffix_decoding_max_cached_requests": 5},
            "'suffix_decoding_max_cached_requests' has no counterpart",
        ),
        ({**DRAFT, "draft_sample_method": "greedy"}, "draft_sample_method 'greedy' has no counterpart"),
        ({**DRAFT, "quantization": "fp8"}, "'quantization' has no counterpart in foredraft"),
        ({**EAGLE, "parallel_drafting": True}, "'parallel_drafting' has no counterpart"),
        ({**NGRAM, "num_speculative_tokens": 65}, "num_speculative_tokens is 65, but foredraft drafts 64 at most"),
        ({**NGRAM, "prompt_lookup_max": 65}, "prompt_lookup_max is 65"),
        ({**NGRAM, "tensor_parallel_size": 2}, "--tensor-parallel-size"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ForedraftError, match=message):
        incoming(json.dumps(config))


# The way out


@pytest.mark.parametrize(
    ("drafter", "method", "stands_in"),
    [
        ("none", "", False),
        ("ngram", "ngram", False),
        ("ngram:1-3", "ngram", False),
        ("suffix", "suffix", False),
        ("draft:org/small", "draft_model", False),
        ("eagle:org/head", "eagle", False),
        ("eagle3", "eagle3", False),
        ("mtp", "mtp", False),
        ("recycling", "suffix", True),
        ("lookahead", "ngram", True),
        ("medusa:org/heads", "suffix", True),
        ("early_exit:4", "suffix", True),
        ("hybrid:suffix+recycling", "suffix", True),
        ("auto", "suffix", True),
        ("auto:suffix+draft:org/small", "draft_model", True),
        ("ssd:draft:org/small", "draft_model", True),
    ],
)
def test_every_drafter_has_a_method_or_a_stand_in(drafter: str, method: str, stands_in: bool) -> None:
    found = translate(drafter)
    assert (found.method, found.stands_in is not None) == (method, stands_in)
    config = found.config(4)
    if config is not None:
        for version in VERSIONS:
            check_config({**config, **({"model": "org/head"} if method == "eagle3" else {})}, version=version)


@pytest.mark.parametrize("config", [NGRAM, {**DRAFT, "rejection_sample_method": "block"}])
def test_there_and_back_is_the_same(config: dict[str, Any]) -> None:
    found = incoming(json.dumps(config))
    there = translate(found.drafter).config(found.draft_tokens or 0) or {}
    assert {name: there[name] for name in config} == config


# Measured


def test_acceptance_by_position_foretells_shorter_chains() -> None:
    acceptance = Acceptance((0.8, 0.5), (0.25, 0.0, 0.75))
    assert acceptance.tokens(2) == pytest.approx(1 + 0.75 * (0.8 + 0.4))
    assert acceptance.tokens(1) == pytest.approx(1 + 0.75 * 0.8)
    assert (acceptance.drafted(1), acceptance.drafted(2)) == (0.75, 1.5)


def bench_folder(folder: Path) -> Path:
    cells = (Cell("none"), Cell("ngram", 2), Cell("suffix"), Cell("prompt-lookup", engine="llama.cpp"))
    plain = bench_runs.made([0] * 12)
    answers = {
        cells[0]: plain,
        cells[1]: bench_runs.made([2, 1, 0, 2, 1], 2),
        cells[2]: bench_runs.made([3, 3, 2], 4),
        cells[3]: plain,
    }
    found = [bench_runs.measured(cell, "a", bench_runs.answer(rounds)) for cell, rounds in answers.items()]
    return bench_runs.write(
        Results("run", {"model": "org/model"}, {}, cells, tuple(found), curve=bench_runs.CURVE), folder
    )


def test_a_benchmark_tells_drafters_and_their_acceptance(tmp_path: Path) -> None:
    found = read_record(bench_folder(tmp_path / "run"))
    assert [each.drafter for each in found.drafters] == ["suffix", "ngram"]  # the fastest first; no peers
    ngram = found.choose("ngram")
    assert ngram.acceptance.rates == pytest.approx((4 / 5, 2 / 4)) and ngram.acceptance.depths == (0, 0, 1)
    assert ngram.draft_tokens == 2 and found.choose("suffix").draft_tokens == 8 and found.costs is not None
    with pytest.raises(InvalidInputError, match=r"measured no drafter 'recycling'.*it has: suffix, ngram"):
        found.choose("recycling")


def tuned(folder: Path) -> Path:
    trial = {
        **{"drafter": "ngram", "draft_tokens": 4, "rounds": 100, "tokens": 180, "drafted": 200, "accepted": 80},
        **{"draft_ms": 0.1, "speedup": 1.4, "best_draft_tokens": 3, "expected": 1.5, "acceptance_rate": 0.4},
    }
    found = {
        "model": "org/model",
        "context": 16,
        "plain_tokens_per_second": 100.0,
        "drafters": [trial],
        "costs": Costs({1: CURVE}).to_json(),
    }
    file = folder / "tune.json"
    file.write_text(json.dumps(found))
    return file


def test_a_tuning_tells_the_same_of_its_sums(tmp_path: Path) -> None:
    file = tuned(tmp_path)
    for path in (file, tmp_path):
        (ngram,) = read_record(path).drafters
        assert ngram.acceptance.tokens(4) == pytest.approx(1.8) and ngram.acceptance.drafted(4) == pytest.approx(2.0)
        assert ngram.draft_steps == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "nothing measured"),
        ("{", "no whole JSON"),
        ("{}", "no record of a tuning"),
        ('{"drafters": [{}], "costs": 1}', "is damaged"),
    ],
)
def test_what_is_no_record(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "tune.json").write_text(text)
    with pytest.raises(InvalidInputError, match=message):
        read_record(tmp_path)


# Expected


def test_gains_follow_the_curve_and_fall_with_the_batch() -> None:
    machine = measured_machine(Costs({1: CURVE}), "here")
    found = gains(measured(), machine, (1, 2, 8))
    assert [gain.batch for gain in found] == [1, 2, 8]
    first = found[0]
    tokens = 1 + 0.8 + 0.8 * 0.7 + 0.8 * 0.7 * 0.6
    assert first.draft_tokens == 3 and first.gain == pytest.approx(tokens * 0.010 / (0.011 + 0.01 * 0.010))
    assert first.gain > found[1].gain > found[2].gain == 1.0 and found[2].draft_tokens == 0
    assert schedule_of(found) == [[1, 1, 3], [2, 5, found[1].draft_tokens], [6, 16, 0]]
    assert schedule_of([Gain(1, 3, 1.5, 2.0), Gain(8, 3, 1.2, 2.0)]) is None


def test_a_card_is_a_bound_by_bandwidth_and_arithmetic() -> None:
    machine = card_machine("H100", 8_000_000_000, Parallel(2))
    assert machine.seconds(1, 1) == pytest.approx(16e9 / (2 * 3350e9)) == machine.seconds(1, 100)
    assert machine.seconds(1, 1000) == pytest.approx(2 * 8e9 * 1000 / (2 * 989e12))
    assert not machine.measured and "NVIDIA's data sheet" in machine.source and "not a measurement" in machine.source
    with pytest.raises(InvalidInputError, match="no figure for the GPU 'H1000'; known: T4, "):
        card_machine("H1000", 1, Parallel())
    assert all(card.bandwidth > 1e11 and card.arithmetic > 1e13 and card.source for card in CARDS.values())


@pytest.mark.parametrize("batches", [(), (0,), (True,)])
def test_batches_are_sizes(batches: Any) -> None:
    with pytest.raises(InvalidInputError, match="batch is"):
        gains(measured(), measured_machine(Costs({1: CURVE}), "here"), batches)


# Written


def plans() -> dict[str, Handover]:
    """One of each kind."""
    machine = measured_machine(Costs({1: CURVE}), "a benchmark")
    eagle = measured("eagle3:org/head")
    joined = measured("hybrid:suffix+recycling")
    return {
        "ngram": planned("org/model", record(), None, machine=machine, batches=(1, 8)),
        "eagle3": planned("org/model", record(eagle), None, machine=machine, parallel=Parallel(2, 2, 3), gpu="H100"),
        "stand-in": planned("org/model", record(joined), None, draft_tokens=2),
        "schedule": planned("org/model", record(), "ngram", machine=machine, batches=(1, 2, 8), schedule=True),
        "plain": planned("org/model", None, "none"),
        "draft": planned("org/model", None, "draft:org/small", version="0.32"),
    }


@pytest.mark.parametrize("name", plans())
def test_files_are_as_they_were(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    plan = plans()[name]
    plan.check()
    write(plan, tmp_path)
    names = {"ray_app.py": "ray_app.txt"}  # no module of the tests
    written = {names.get(file.name, file.name): file.read_text() for file in sorted(tmp_path.iterdir())}
    folder = GOLDEN / name
    if request.config.getoption("--golden"):
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in written.items():
            (folder / file).write_text(text)
    assert written == {file.name: file.read_text() for file in sorted(folder.iterdir())}


def test_the_command_is_one_for_a_shell() -> None:
    plan = plans()["eagle3"]
    parts = command(plan)
    assert parts[:3] == ["vllm", "serve", "org/model"]
    assert json.loads(parts[parts.index("--speculative-config") + 1]) == plan.config
    text = re.search(r"exec (.*)", (GOLDEN / "eagle3" / "vllm-serve.sh").read_text(), re.DOTALL)
    assert text is not None and shlex.split(text[1].replace("\\\n", " ")) == parts


def test_the_manifest_is_yaml_and_mounts_what_lies_here(tmp_path: Path) -> None:
    yaml: Any = pytest.importorskip("yaml")
    (tmp_path / "model").mkdir()
    plan = planned(str(tmp_path / "model"), None, "ngram", name="my/Model_1", parallel=Parallel(2, 1, 3))
    deployment, service = yaml.safe_load_all(manifest(plan))
    spec = deployment["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert spec["replicas"] == 3 and container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert "--data-parallel-size" not in container["args"] and container["args"][0] == str(tmp_path / "model")
    assert json.loads(container["args"][container["args"].index("--speculative-config") + 1]) == plan.config
    assert {"name": "files-0", "mountPath": str(tmp_path / "model"), "readOnly": True} in container["volumeMounts"]
    assert deployment["metadata"]["name"] == service["metadata"]["name"] == "model-1"


def test_the_ray_app_is_python_with_the_same_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    class Module:
        def LLMConfig(self, **values: Any) -> Any:  # noqa: N802 (Ray's name)
            given.update(values)
            return values

        def build_openai_app(self, arguments: Any) -> Any:
            return arguments

    for name in ("ray", "ray.serve", "ray.serve.llm"):
        monkeypatch.setitem(sys.modules, name, Module())
    plan, found = plans()["eagle3"], dict[str, Any]()
    exec(compile(ray_app(plan), "ray_app.py", "exec"), found)
    assert given["engine_kwargs"]["speculative_config"] == plan.config
    assert given["engine_kwargs"]["tensor_parallel_size"] == 2 and given["accelerator_type"] == "H100"
    assert given["deployment_config"] == {"num_replicas": 3} and found["app"] == {"llm_configs": [given]}


def test_the_page_says_what_is_not_the_same() -> None:
    page = markdown(plans()["stand-in"])
    assert "stands in: vLLM joins no drafters: of suffix and recycling it gets suffix alone" in page
    for what in ("trees", "recycling", "hybrids", "Medusa"):
        assert what in page


# Others


@pytest.mark.parametrize(
    ("drafter", "expected"),
    [
        ("ngram", {"--speculative-algorithm": "NGRAM", "--speculative-num-draft-tokens": "5"}),
        ("recycling", {"--speculative-algorithm": "NGRAM"}),
        ("draft:org/small", {"--speculative-algorithm": "STANDALONE", "--speculative-num-steps": "4"}),
        ("eagle3:org/head", {"--speculative-algorithm": "EAGLE3", "--speculative-eagle-topk": "1"}),
        ("mtp", {"--speculative-algorithm": "NEXTN"}),
        ("auto", {"--speculative-algorithm": "NGRAM"}),
        ("none", {}),
    ],
)
def test_sglang(drafter: str, expected: dict[str, str]) -> None:
    found = sglang("org/model", drafter, 4, Parallel(2, 1, 1))
    options = dict(zip(found.command, found.command[1:], strict=False))
    assert expected.items() <= options.items() and options["--tp-size"] == "2"
    assert ("--speculative-algorithm" in options) == bool(expected)
    assert (found.stands_in is not None) == (drafter in ("recycling", "auto"))


def test_sglang_verifies_trees() -> None:
    found = sglang("org/model", "eagle:org/head", 15, Parallel())
    options = dict(zip(found.command, found.command[1:], strict=False))
    assert options["--speculative-num-draft-tokens"] == "16" and options["--speculative-eagle-topk"] == "4"


@pytest.mark.parametrize(
    ("drafter", "expected"),
    [
        ("ngram", {"--spec-type": "ngram-simple", "--spec-ngram-simple-size-m": "4"}),
        ("suffix", {"--spec-type": "ngram-map-k4v"}),
        ("draft:small.gguf", {"--spec-type": "draft-simple", "--spec-draft-model": "small.gguf"}),
        ("eagle3:head.gguf", {"--spec-type": "draft-eagle3", "--spec-draft-n-max": "4"}),
        ("mtp", {"--spec-type": "draft-mtp"}),
    ],
)
def test_llama_cpp(drafter: str, expected: dict[str, str]) -> None:
    found = llama_cpp("org/model", drafter, 4, Parallel())
    options = dict(zip(found.command, found.command[1:], strict=False))
    assert expected.items() <= options.items() and "--hf-repo" in options and "# llama.cpp" in found.page()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: llama_cpp("m", "medusa:a/b", 4, Parallel()), "llama.cpp has nothing like 'medusa:a/b'"),
        (lambda: llama_cpp("m", "ngram", 4, Parallel(2)), "no tensor, pipeline or data parallel sizes"),
        (lambda: sglang("m", "eagle3", 4, Parallel()), "EAGLE3 needs the folder or hub id of a head"),
    ],
)
def test_what_others_cannot_do(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        make()


# The command line


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def test_the_command_writes_everything(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    run_folder = bench_folder(tmp_path / "run")
    options = ("--from", run_folder, "--out", out, "--drafter", "ngram", "--batch", "1,4", "--vllm-version", "0.32")
    assert run("handover", "vllm", tiny_folder, *options, "--tensor-parallel", 2) == 0
    said, beside = capsys.readouterr()
    assert "batch   1:" in said and "handover.md" in said and "is of 'org/model', and this is for" in beside
    assert {file.name for file in out.iterdir()} == {
        *("handover.md", "speculative-config.json", "vllm-serve.sh", "kubernetes.yaml", "ray_app.py"),
    }
    assert json.loads((out / "speculative-config.json").read_text())["method"] == "ngram"


def test_the_head_that_comes_with_foredraft_goes_along(tmp_path: Path) -> None:
    bundled = ModelFiles("smollm2-135m", tmp_path)
    head = own_head(bundled, "eagle3", tmp_path / "out")
    assert head is not None and {file.name for file in Path(head).iterdir()} == {"config.json", "model.safetensors"}
    plan = planned("org/model", None, "eagle3", draft=head)
    plan.check(Facts("org/model", hidden=576, vocabulary=49152))
    with pytest.raises(UnsupportedError, match="made for a target with states of 576, and org/model has 64"):
        plan.check(Facts("org/model", hidden=64))
    assert own_head(bundled, "mtp", tmp_path) is None


def test_gains_for_a_card_and_for_a_curve(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--from", tuned(tmp_path), "--out", tmp_path / "out", "--batch", "1")
    assert run("handover", "vllm", tiny_folder, *options, "--gpu", "H100") == 0
    page = (tmp_path / "out" / "handover.md").read_text()
    assert "H100: reckoned from 3,350 GB/s and 989 TFLOPS" in page
    (tmp_path / "curve.csv").write_text("rows,ms\n1,10\n2,20\n8,80\n")
    assert run("handover", "vllm", tiny_folder, *options, "--costs", tmp_path / "curve.csv") == 0
    assert "drafting does not pay" in capsys.readouterr().out


@pytest.mark.parametrize("engine", ["sglang", "llama.cpp"])
def test_other_engines_on_the_command_line(
    engine: str, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("handover", engine, tiny_folder, "--drafter", "suffix", "--out", tmp_path) == 0
    assert (tmp_path / f"{engine}.md").is_file() and (tmp_path / f"{engine}.sh").is_file()
    assert engine in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "Nothing says what to draft with: give --from"),
        (("--drafter", "sufix"), "Did you mean 'suffix'?"),
        (("--drafter", "eagle3"), "No eagle3 head comes with foredraft for"),
        (("--drafter", "ngram", "--gpu", "H1000"), "no figure for the GPU 'H1000'"),
        (("--drafter", "ngram", "--tensor-parallel", 0), "tensor-parallel is 0"),
        (("--drafter", "ngram", "--vllm-version", "0.1"), "vLLM 0.1 is not in the table"),
        (("--from", "nowhere"), "nothing measured in nowhere"),
    ],
)
def test_bad_input_ends_with_a_sentence(
    options: tuple[object, ...], message: str, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("handover", "vllm", tiny_folder, "--out", tmp_path, *options) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("command_line", [("handover", "vllm"), ("handover", "sglang"), ("handover", "llama.cpp")])
def test_help(command_line: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command_line, "--help") == 0
    assert "--from" in capsys.readouterr().out


def test_generate_takes_vllms_json(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--speculative-config", json.dumps(NGRAM), "--max-tokens", 12, "--json", "--threads", 1)
    assert run("generate", tiny_folder, "hello hello hello", *options) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["drafter"] == "ngram:2-4" and found["settings"]["draft_tokens"] == 4
    assert run("generate", tiny_folder, "hello", *options, "--drafter", "suffix") == 2
    assert "leave --drafter out" in capsys.readouterr().err


def test_bench_takes_vllms_json(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("hello hello hello\n")
    config = json.dumps({**SUFFIX, "suffix_decoding_max_tree_depth": 16})
    options = ("--workload", lines, "--drafters", "none", "--max-tokens", 8, "--out", tmp_path / "run", "--threads", 1)
    assert run("bench", tiny_folder, *options, "--speculative-config", config) == 0
    found = Results.read(tmp_path / "run")
    assert [cell.drafter.partition(":")[0] for cell in found.cells] == ["none", "suffix"]
    assert found.cells[1].draft_tokens == 8 and "max_depth=16" in found.cells[1].drafter
    assert "suffix" in capsys.readouterr().out
