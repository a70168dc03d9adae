"""What operators take as it is: it must name metrics, labels and options that there are."""

from __future__ import annotations

import configparser
import importlib
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason='needs the extra "serve"')

from foredraft.serve.asks import Limits, Status
from foredraft.serve.metrics import OUTCOMES, STATES, Metrics
from foredraft.types import RoundStats

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
if not DEPLOY.is_dir():
    pytest.skip("deploy/ is in the repository only", allow_module_level=True)

SCRAPED = {"instance", "job"}  # labels that Prometheus adds
DASHBOARD = json.loads((DEPLOY / "grafana-dashboard.json").read_text(encoding="utf-8"))
DOCUMENT = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")


@cache
def rules() -> list[dict[str, Any]]:
    yaml: Any = pytest.importorskip("yaml")
    groups = yaml.safe_load((DEPLOY / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


@cache
def served() -> dict[str, set[str]]:
    """Names of all samples, with their labels."""
    status = Status("ready", 0, 0, 0, 1, 0, 0, None)
    metrics = Metrics(lambda: status, lambda: 1.0)
    metrics.round("none", RoundStats(0, {}, 0, {}, 1, 0, 0.0, 0.0, 0.0))
    metrics._answers.ttft.labels("none")
    metrics._answers.tpot.labels("none")
    metrics._answers.seconds.labels("none")
    found: dict[str, set[str]] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[str]:
    yield from (target["expr"] for panel in panels() for target in panel["targets"])
    yield from (rule["expr"] for rule in rules())


def test_every_metric_and_label_is_served() -> None:
    count = 0
    for expression in expressions():
        names = re.findall(r"foredraft_\w+", expression)
        assert names or 'up{job="foredraft"}' in expression
        for name in names:
            assert name in served(), f"{name}, of {expression}"
            count += 1
        labels = SCRAPED.union(*(served()[name] for name in names))
        grouped = re.findall(r"by \(([^)]*)\)", expression)
        used = {label.strip() for group in grouped for label in group.split(",")}
        used |= set(re.findall(r'[{,](\w+)=~?"', expression))
        assert used <= labels, f"{used - labels}, of {expression}"
    assert count > 60


def test_every_counter_is_shown_somewhere() -> None:
    shown = {name for expression in expressions() for name in re.findall(r"foredraft_\w+", expression)}
    counters = {name for name in served() if name.endswith("_total")}
    assert counters <= shown


def test_values_of_labels_are_real() -> None:
    text = " ".join(expressions())
    for pattern in re.findall(r'outcome=~?"([^"$]+)"', text):
        assert set(pattern.split("|")) <= set(OUTCOMES)
    assert set(re.findall(r'state="([^"]+)"', text)) <= set(STATES)


def test_expressions_are_balanced() -> None:
    for expression in expressions():
        depth = 0
        for sign in re.sub(r'"[^"]*"', "", expression):
            depth += {"(": 1, ")": -1}.get(sign, 0)
            assert depth >= 0, expression
        assert depth == 0, expression


def test_the_dashboard_can_be_imported_anywhere() -> None:
    assert DASHBOARD["templating"]["list"][0] == {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
    }
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in panels():
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$(\w+)", " ".join(target["expr"] for panel in panels() for target in panel["targets"])))
    assert used <= variables | {"__rate_interval"}


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_rules_say_what_to_do() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names)) >= 6
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}


def options() -> dict[str, Any]:
    """The options of `foredraft serve` by name."""
    typer_main = importlib.import_module("typer.main")
    cli = importlib.import_module("foredraft.cli")
    command = typer_main.get_command(cli.app).commands["serve"]
    return {name: option for option in command.params for name in option.opts if name.startswith("--")}


def docker_command() -> list[str]:
    lines = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").splitlines()
    entry, command = (next(line for line in lines if line.startswith(word)) for word in ("ENTRYPOINT", "CMD"))
    return [*json.loads(entry.removeprefix("ENTRYPOINT")), *json.loads(command.removeprefix("CMD"))]


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "foredraft.service", encoding="utf-8")
    return parser


def test_commands_have_options_that_there_are() -> None:
    commands = [docker_command(), shlex.split(unit()["Service"]["ExecStart"])]
    for command in commands:
        assert command[1] == "serve"
        assert Path(command[0]).name == "foredraft"
        assert {word for word in command if word.startswith("--")} <= set(options())


def test_the_service_has_time_to_end_in_peace() -> None:
    service = unit()["Service"]
    command = shlex.split(service["ExecStart"])
    assert float(command[command.index("--grace") + 1]) < float(service["TimeoutStopSec"])
    credential = service["LoadCredential"].split(":")[0]
    assert f"%d/{credential}" in command
    assert "MemoryDenyWriteExecute" not in service, "kernels are compiled while it runs"


def test_the_container_copies_what_the_package_needs() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    copied = {word for line in text.splitlines() if line.startswith("COPY") for word in line.split()[1:-1]}
    assert {"pyproject.toml", "README.md", "LICENSE", "src"} <= copied
    assert all((ROOT / name).exists() for name in copied)
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == copied
    assert "USER foredraft" in text
    assert "HEALTHCHECK" in text


def test_the_document_has_every_option_and_no_other() -> None:
    table = re.search(r"^## Options\n(.*?)^## ", DOCUMENT, re.M | re.S)
    assert table is not None
    told = set(re.findall(r"^\| `(--[\w-]+)", table[1], re.M))
    named = {name for name in options() if not name.startswith("--no-") and name != "--help"}
    assert told == named


def test_the_document_names_limits_as_they_are() -> None:
    limits = Limits()
    for name, value in (("--max-batch", limits.sequences), ("--nodes", limits.nodes), ("--prefill", limits.prefill)):
        assert re.search(rf"^\| `{name}` \| {value} \|", DOCUMENT, re.M)
    assert re.search(rf"^\| `--max-queue` \| {limits.waiting} \|", DOCUMENT, re.M)
    assert re.search(rf"^\| `--timeout` \| {limits.timeout:g} \|", DOCUMENT, re.M)


def test_the_document_names_every_metric() -> None:
    families = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in served()}
    assert {name for name in families if f"`{name}" not in DOCUMENT} == set()
