"""The page of `foredraft trace`: complete, harmless, self-contained, and written whole or not at all."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft import api
from foredraft.backends.transformers import TransformersBackend
from foredraft.cli import main
from foredraft.engine import Engine
from foredraft.errors import InvalidInputError
from foredraft.generation import Request
from foredraft.pages import whole_file
from foredraft.proposers.draft_model import DraftModel
from foredraft.trace import Labels, NodeView, Trace, lay_out, percent, record, render
from foredraft.types import Draft, RoundDetail, SamplingParams, Verdict
from tiny import collect, perturbed, plain_chain, rounds_of, tiny_llama, tiny_metaspace_tokenizer, tokens_of

PROMPT = "assistant\nhell"
NASTY = ["</script>", "<img/src=x/onerror=alert(1)>", "&lt;", "\"'", "{{7*7}}", "{%if%}", "<!--", "\u202eright"]
VOID = {"meta", "link", "input", "path", "br", "img"}
DRAFTERS = ["none", "ngram", "hybrid:ngram+recycling", "draft"]


class Page(HTMLParser):
    """Every element of a page with its attributes, the classes around it and its own text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self._open: list[tuple[str, dict[str, str], list[str]]] = []
        self.feed(page)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element: tuple[str, dict[str, str], list[str]] = (tag, {name: value or "" for name, value in attrs}, [])
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}, []))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, _, text in self._open:
            text.append(data)

    def find(self, tag: str, a_class: str = "") -> list[tuple[dict[str, str], str]]:
        """Attributes and text of all elements of a tag (and a class)."""
        wanted = set(a_class.split())
        return [(a, "".join(t)) for n, a, t in self.elements if n == tag and wanted <= set(a.get("class", "").split())]


@pytest.fixture(scope="module")
def model_with(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The tiny model with a drafter; `draft` is one that is often right."""

    def make(drafter: str) -> Any:
        model = foredraft.load(tiny_folder, "none" if drafter == "draft" else drafter, backend="transformers")
        if drafter == "draft":
            assert isinstance(model.backend, TransformersBackend)
            near = TransformersBackend(perturbed(model.backend.model, 0.1))
            return api.Model(model.backend, model.tokenizer, DraftModel(near, model.backend.vocab_size))
        return model

    return make


@pytest.fixture(scope="module", params=DRAFTERS)
def trace(request: Any, model_with: Callable[[str], Any]) -> Trace:
    """An answer with each kind of drafting, greedy, and sampled where a model drafts."""
    temperature = 1.0 if request.param == "draft" else 0.0
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3)
    return record(model_with(request.param), PROMPT, params, name="tiny")


@pytest.fixture(scope="module")
def page(trace: Trace) -> Page:
    return Page(render(trace))


# What the page holds


def test_the_page_has_every_round_and_every_token_in_order(trace: Trace, page: Page) -> None:
    assert [a["id"] for a, _ in page.find("section")] == [f"round-{r.number}" for r in trace.rounds]
    assert len(trace.rounds) == trace.completion.stats.target_forwards
    tokens = [(a, text) for a, text in page.find("span", "t") if "data-id" in a]
    assert [int(a["data-id"]) for a, _ in tokens] == list(trace.completion.ids)
    assert [a["class"].split()[1] for a, _ in tokens] == list(trace.completion.origins)
    text = "".join(text for a, text in tokens if "special" not in a["class"])
    assert text == trace.completion.text.replace("\r", "\n")  # as HTML has it


def test_each_tree_shows_the_draft_and_marks_the_accepted_path(trace: Trace, page: Page) -> None:
    assert len(page.find("li", "root")) == len(trace.rounds)
    boxes = [a for a, _ in page.find("li") if "--r:" in a.get("style", "")]
    assert len(boxes) == sum(len(r.nodes) for r in trace.rounds)
    assert len(page.find("li", "accepted")) == trace.completion.stats.accepted
    for origin in ("correction", "bonus"):
        assert len(page.find("li", origin)) == trace.completion.origins.count(origin)
    for view in trace.rounds:
        path = [node for node in view.nodes if node.row == 0 and node.state != "root"]
        emitted = [node for node in path if node.state not in ("rejected", "unreached")]
        assert [node.label for node in emitted] == [token.label for token in view.tokens]
        assert [node.column for node in emitted] == list(range(1, len(emitted) + 1))
        assert len(view.nodes) == 1 + view.figures.drafted + len(view.tokens) - view.figures.accepted


def test_the_figures_add_up_to_those_of_the_answer(trace: Trace, page: Page) -> None:
    end, stats = trace.rounds[-1].so_far, trace.completion.stats
    assert (end.rounds, end.drafted, end.accepted) == (stats.target_forwards, stats.drafted, stats.accepted)
    assert end.emitted == stats.tokens
    assert end.mean_accepted_length == pytest.approx(stats.mean_accepted_length)
    for ours, theirs in ((end.draft_ms, stats.draft_seconds), (end.verify_ms, stats.verify_seconds)):
        assert ours == pytest.approx(1e3 * theirs)
    cells = [text for _, text in page.find("td")][-16:]
    assert cells[1:8:2] == [str(end.rounds), str(end.drafted), str(end.accepted), str(end.emitted)]
    assert cells[9] == f"{stats.mean_accepted_length:.2f}"


def test_the_page_is_one_file_that_loads_nothing(trace: Trace, page: Page) -> None:
    for tag, attributes, _ in page.elements:
        assert not {"src", "srcset", "srcdoc", "action"} & attributes.keys()
        assert attributes.get("href", "data:,") == "data:,"
        assert not any(name.startswith("on") for name in attributes)
        assert tag not in ("iframe", "img", "object", "embed", "base")
    text = render(trace)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))
    [policy] = [a["content"] for a, _ in page.find("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")


def test_the_page_says_who_proposed_and_what_the_draft_thought(model_with: Callable[[str], Any]) -> None:
    params = SamplingParams(max_tokens=40)
    hybrid = Page(render(record(model_with("hybrid:ngram+recycling"), PROMPT, params)))
    assert {"ngram", "recycling"} <= {text for _, text in hybrid.find("span", "who")}
    assert any("est. " in text for _, text in hybrid.find("span", "odds"))
    alone = Page(render(record(model_with("ngram"), PROMPT, params)))
    assert not alone.find("span", "who")
    assert not any("est." in text for _, text in alone.find("span", "odds"))
    sampled = record(model_with("draft"), PROMPT, SamplingParams(max_tokens=20, temperature=1, seed=1))
    drafted = [node for view in sampled.rounds for node in view.nodes if node.q is not None]
    assert drafted and all(0 < (node.q or 0) <= 1 for node in drafted)
    assert any(re.match(r"p \S+ q \S+%", text) for _, text in Page(render(sampled)).find("span", "odds"))


def test_what_the_model_writes_is_escaped() -> None:
    tokenizer = tiny_metaspace_tokenizer(NASTY)
    model = foredraft.load(tiny_llama(seed=5, vocabulary=len(NASTY) + 1), "hybrid:ngram+recycling", tokenizer=tokenizer)
    shown = record(model, [1, 2, 3], SamplingParams(max_tokens=60, temperature=1, seed=1), name="<i>model")
    shown = shown._replace(prompt="</script><script>alert(2)</script>")
    page = Page(render(shown))
    assert len(page.find("script")) == 2
    assert not page.find("img") and page.find("title")[0][1].startswith("<i>model: ")
    words = {text.strip() for _, text in page.find("span", "t")}
    assert set(NASTY) <= words
    assert {f"·{word}".replace("\u202e", "\ufffd") for word in NASTY} <= {
        text for _, text in page.find("span", "token")
    }
    assert [text for a, text in page.find("div") if a.get("id") == "prompt"] == [shown.prompt]
    assert not any("alert" in text for _, text in page.find("script"))


# The events behind it


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_probabilities_are_the_targets(temperature: float, model_with: Callable[[str], Any]) -> None:
    model = model_with("hybrid:ngram+recycling")
    prompt = model.encode(PROMPT)
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=1)
    [events] = collect(model.engine, Request(prompt, params, detail=True))
    tokens = [event.token for event in tokens_of(events)]
    history, nodes = list(prompt), 0
    for event in rounds_of(events):
        detail = event.detail
        assert detail is not None and detail.root == history[-1]
        chains = [[*history]]
        for node, parent in enumerate(detail.draft.parents):
            chains.append([*chains[parent + 1], detail.draft.tokens[node]])
            row = plain_chain(model.backend.model, chains[parent + 1])[-1].double()
            p = (row / (temperature or 1)).softmax(-1)[detail.draft.tokens[node]]
            assert detail.p[node] == pytest.approx(float(p), abs=1e-4)
            nodes += 1
        above = chains[detail.verdict.path[-1] + 1 if detail.verdict.path else 0]
        row = plain_chain(model.backend.model, above)[-1].double()
        if detail.p_drawn is not None:
            p = (row / (temperature or 1)).softmax(-1)[detail.verdict.tokens[-1]]
            assert detail.p_drawn == pytest.approx(float(p), abs=1e-4)
        history += detail.verdict.tokens
    assert nodes and history == [*prompt, *tokens]


def test_details_are_made_only_when_asked_for(target: TransformersBackend, monkeypatch: Any) -> None:
    monkeypatch.setattr("foredraft.sampling.SamplingLaw.logprobs", lambda *_: pytest.fail("computed"))
    [events] = collect(Engine(target), Request([1, 2, 3], SamplingParams(max_tokens=3)))
    assert [event.detail for event in rounds_of(events)] == [None] * 3


# The parts


class Letters:
    """A tokenizer of single letters."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + i) for i in ids)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [chr(97 + i) for i in ids]


def laid(draft: Draft, verdict: Verdict, p_drawn: float | None = 0.5) -> dict[str, NodeView]:
    detail = RoundDetail(draft, verdict, 25, (0.5,) * len(draft), p_drawn)
    return {node.label: node for node in lay_out(detail, Labels(Letters()))}


def test_the_emitted_path_is_the_first_row_and_the_rest_lies_close_below() -> None:
    #  z ─ a ─ b ─ c          accepted: d, e, then g as correction
    #    └ d ─ e ─ f
    #        └ h
    tokens, parents = (0, 1, 2, 3, 4, 5, 7), (-1, 0, 1, -1, 3, 4, 3)
    nodes = laid(Draft(tokens, parents), Verdict((3, 4), (3, 4, 6), True))
    places = {label: (node.column, node.row, node.state) for label, node in nodes.items()}
    assert places == {
        "z": (0, 0, "root"),
        "d": (1, 0, "accepted"),
        "e": (2, 0, "accepted"),
        "g": (3, 0, "correction"),
        "f": (3, 1, "rejected"),
        "h": (2, 1, "rejected"),
        "a": (1, 2, "rejected"),
        "b": (2, 2, "unreached"),
        "c": (3, 2, "unreached"),
    }
    assert nodes["a"].after == "z" and nodes["f"].after == "e" and nodes["f"].above == 0


def test_what_follows_the_end_of_the_answer_was_never_judged() -> None:
    nodes = laid(Draft((0, 1, 2, 3), (-1, 0, 1, 0)), Verdict((0,), (0,), False), None)
    assert {label: node.state for label, node in nodes.items()} == {
        "z": "root",
        "a": "accepted",
        "b": "unreached",
        "c": "unreached",
        "d": "unreached",
    }


def test_lines_of_large_trees_do_not_cross() -> None:
    chance = random.Random(1)
    for _ in range(50):
        size = chance.randint(1, 64)
        parents = tuple(chance.randint(max(-1, node - 9), node - 1) for node in range(size))
        detail = RoundDetail(Draft((0,) * size, parents), Verdict((), (1,), True), 2, (0.5,) * size, 0.5)
        nodes = lay_out(detail, Labels(Letters()))
        assert len({(node.column, node.row) for node in nodes}) == len(nodes) == size + 2
        reach: dict[tuple[int, int], int] = {}
        for node in nodes[1:]:
            key = (node.column, node.above)
            reach[key] = max(reach.get(key, 0), node.row)
        for (column, above), lowest in reach.items():  # each trunk ends before the next one in its gap begins
            assert not any(c == column and above < other <= lowest for c, other in reach)


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0, "0%"), (1e-9, "<0.1%"), (0.0012, "0.1%"), (0.0994, "9.9%"), (0.0996, "10%"), (0.5, "50%"), (1, "100%")],
)
def test_probabilities_are_short(share: float, shown: str) -> None:
    assert percent(share) == shown


def test_labels_make_white_space_and_control_characters_visible(tokenizer: Any) -> None:
    labels = Labels(tokenizer)
    [newline] = tokenizer("\n")["input_ids"]
    assert labels.of(newline) == "⏎"
    assert [labels.of(i) for i in tokenizer(" \x1b\x00")["input_ids"]] == ["·", "␛", "␀"]
    assert labels.of(10**6) == "#1000000"
    assert Labels(tiny_metaspace_tokenizer(["sea"])).of(1) == "·sea"


# The command


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_folder: Path) -> Run:
    """`foredraft trace` with the tiny model and few tokens: status, output and errors."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*options: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["trace", str(tiny_folder), PROMPT, "--max-tokens", "12", *map(str, options)])
        return ended.value.code or 0, *capsys.readouterr()  # type: ignore[return-value]

    return run


def test_the_command_writes_the_page_and_nothing_else(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "a page.html"
    status, said, _ = run("--out", out, "--drafter", "hybrid:ngram+recycling")
    assert status == 0
    assert said.startswith(f"written: {out} (12 tokens in ")
    assert list(tmp_path.iterdir()) == [out]
    assert len(Page(out.read_text(encoding="utf-8")).find("section")) >= 1
    assert out.stat().st_mode & 0o444 == 0o444 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("out", ["missing/trace.html", ".", "x" * 300])
def test_a_place_that_cannot_be_written_is_told_before_anything_is_loaded(
    out: str, run: Run, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(api, "load", lambda *_, **__: pytest.fail("loaded"))
    status, said, error = run("--out", tmp_path / out)
    assert status == 2
    assert error.startswith("Error: Cannot write ") and "Traceback" not in error
    assert said == ""
    assert list(tmp_path.iterdir()) == []


def test_wrong_input_leaves_an_older_page_alone(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "trace.html"
    out.write_text("older")
    for wrong in (["--drafter", "ngarm"], ["--draft-tokens", 65], ["--temperature", -1], ["--rule", "lossy-typical"]):
        status, _, error = run("--out", out, *wrong)
        assert status == 2 and error.count("Error: ") == 1
    assert out.read_text() == "older"
    assert list(tmp_path.iterdir()) == [out]
    assert run("--out", out)[0] == 0
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_page_is_replaced_only_whole(tmp_path: Path, monkeypatch: Any) -> None:
    out = tmp_path / "trace.html"
    out.write_text("older")
    with pytest.raises(KeyboardInterrupt), whole_file(out):
        raise KeyboardInterrupt
    assert [out.read_text(), *tmp_path.iterdir()] == ["older", out]

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, whole_file(out) as write:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(InvalidInputError, match="No space left on device"):
            write("newer")
    assert [out.read_text(), *tmp_path.iterdir()] == ["older", out]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link.html").symlink_to(tmp_path / "page.html")
    with whole_file(tmp_path / "link.html") as write:
        write("text\r\n\udcff")
    assert (tmp_path / "page.html").read_bytes() == b"text\r\n?"
    assert (tmp_path / "link.html").is_symlink()


# In a browser

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)

SCRIPT = """<script>
const log = [], key = k => document.body.dispatchEvent(new KeyboardEvent("keydown", {key: k, bubbles: true}));
const note = () => log.push([document.querySelector("section.now").id, document.querySelectorAll("section.now").length,
  document.querySelectorAll("#text .t:not(.future)").length, document.getElementById("said").textContent ===
  document.querySelector("section.now .summary").textContent].join(" "));
note(); for (const k of ["ArrowRight", "ArrowLeft", "ArrowLeft", "End", "ArrowRight", "Home"]) { key(k); note(); }
const slider = document.getElementById("slider");
slider.value = 2; slider.dispatchEvent(new Event("input")); note();
document.getElementById("play").click();
setTimeout(() => { note(); log.push(document.documentElement.scrollWidth <= innerWidth, "end");
  document.body.textContent = log.join("|"); }, 1800);
</script></body>"""


@pytest.mark.skipif(not CHROMIUM, reason="needs a browser (chromium), and there is none here")
def test_keys_slider_and_play_step_through_the_rounds(model_with: Callable[[str], Any], tmp_path: Path) -> None:
    shown = record(model_with("hybrid:ngram+recycling"), PROMPT, SamplingParams(max_tokens=24))
    file = tmp_path / "trace.html"
    file.write_text(render(shown).replace("</body>", SCRIPT), encoding="utf-8", newline="\n")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --dump-dom --virtual-time-budget=4000"
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r"<body>(.*?)\|end", done.stdout, re.DOTALL)
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    last = len(shown.rounds)
    written = [sum(len(view.tokens) for view in shown.rounds[:n]) for n in range(last + 1)]
    expected = [f"round-{n} 1 {written[n]} true" for n in (1, 2, 1, 1, last, last, 1, 2, 3)]
    assert found[1].split("|") == [*expected, "true"]
