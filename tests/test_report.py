"""The report: complete, self-contained, readable by everybody, and right about what it says in words."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench_runs import PEER, PLAIN, SUFFIX, answer, made, measured, results, write
from foredraft.bench.comparison import MEASURES, changes, clear
from foredraft.bench.figures import Interval
from foredraft.bench.records import Cell, Measurement
from foredraft.bench.report import write_report
from foredraft.bench.results import Results
from foredraft.bench.sentences import equality, headline
from foredraft.bench.views import page_of
from foredraft.cli import main
from foredraft.errors import InvalidInputError
from test_trace import CHROMIUM, NASTY, Page

SECTIONS = [
    "All methods",
    "By kind of text",
    "Acceptance by position",
    "Tokens of a round",
    "Waiting times",
    "Where the time goes",
    "Predicted and measured",
    "The same text",
    "Not there",
    "Settings and provenance",
]
WARM = Cell("draft:tiny", rule="block", temperature=0.8)
EVERYTHING = (PLAIN, SUFFIX, PEER, Cell("none", temperature=0.8), WARM)


def written(folder: Path, *runs: Results) -> tuple[str, str]:
    """The report's page and its Markdown."""
    write_report(runs, folder / "report.html", folder / "report.md")
    return tuple((folder / f"report.{kind}").read_text(encoding="utf-8") for kind in ("html", "md"))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """That of one run with all there can be."""
    return written(tmp_path_factory.mktemp("one"), results(cells=EVERYTHING))


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """That of two runs, the second one faster and with a cell less."""
    after = results("after", cells=EVERYTHING[:3], factor=0.7, provenance={"foredraft": "0.2.0"})
    return written(tmp_path_factory.mktemp("two"), results(cells=EVERYTHING), after)


@pytest.fixture(scope="module", params=["report", "comparison"])
def page(request: Any) -> Page:
    return Page(request.getfixturevalue(request.param)[0])


# What is on it


def test_a_page_has_every_part(report: tuple[str, str]) -> None:
    page = Page(report[0])
    assert [text for _, text in page.find("h2")] == SECTIONS
    assert page.find("h1")[0][1] == page.find("title")[0][1] == headline(results(cells=EVERYTHING)).title
    assert len(page.find("svg")) == 2 * 8
    text = " ".join(text for _, text in page.find("td") + page.find("th"))
    for shown in (
        "suffix",
        "llama.cpp: prompt-lookup 4",
        "draft:tiny block T=0.8",
        "not installed",
        "machine.cpu",
        "two cores",
    ):
        assert shown in text
    assert "another engine's arithmetic" in text or "the same text" in text


def test_every_figure_of_the_main_table_is_the_one_computed(report: tuple[str, str]) -> None:
    run = results(cells=EVERYTHING)
    [suffix] = [f for f in run.figures if f.cell == SUFFIX and not f.category]
    assert suffix.speedup is not None and suffix.tpot is not None
    cells = re.search(r'<tr class="best">.*?</tr>', report[0], re.DOTALL)
    assert cells is not None
    shown = re.sub(r"<[^>]*>", " ", cells[0].replace("<wbr/>", "")).split()
    assert shown[:2] == ["suffix", "fastest"]
    assert f"{suffix.speedup.value:.2f}×" in shown and f"{suffix.speedup.low:.2f}–{suffix.speedup.high:.2f}" in shown
    assert f"{suffix.throughput:.1f}" in shown and f"{suffix.mean_accepted_length:.2f}" in shown
    assert f"{1e3 * suffix.tpot.median:.2f}" in shown
    row = next(line for line in report[1].splitlines() if line.startswith("| suffix |"))
    assert f"| {suffix.speedup.value:.2f}× ({suffix.speedup.low:.2f}–{suffix.speedup.high:.2f}) |" in row
    assert f"| {suffix.throughput:.1f} | {suffix.mean_accepted_length:.2f} |" in row


def test_the_comparison_has_ratios_differences_and_both_runs(comparison: tuple[str, str]) -> None:
    page = Page(comparison[0])
    assert [text.split(":")[0] for _, text in page.find("h2")] == [
        "“after” against “before”",
        "All methods of all runs",
        "What differs between the runs",
        "before",
        "after",
    ]
    assert [text for _, text in page.find("h3")].count("Where the time goes") == 2
    differing = [text for a, text in page.find("tr") if a.get("class") == "differs"]
    assert len(differing) == 3 and differing[0].startswith("foredraft differs0.1.00.2.0")  # and what only one has
    assert page.find("td", "up") and "not in it" in comparison[0]
    assert "| foredraft | 0.1.0 | 0.2.0 |" in comparison[1] and "max\\_tokens" not in comparison[1]


def test_a_page_loads_nothing(page: Page) -> None:
    for tag, attributes, _ in page.elements:
        assert not {"src", "srcset", "action", "xlink:href"} & attributes.keys()
        assert attributes.get("href", "#").startswith(("#", "data:,"))
        assert not any(name.startswith("on") for name in attributes)
        assert tag not in ("script", "iframe", "img", "object", "embed", "base")
    assert [a["href"] for a, _ in page.find("link")] == ["data:,"]
    [policy] = [a["content"] for a, _ in page.find("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "script" not in policy


def test_nothing_refers_to_elsewhere(report: tuple[str, str], comparison: tuple[str, str]) -> None:
    for text in (*report, *comparison):
        assert not re.search(r"https?:|www\.|@import|url\((?!#)", text)
        assert "DOCTYPE svg" not in text and "<?xml" not in text


def test_tables_can_be_read_aloud(page: Page) -> None:
    kinds = [tag for tag, _, _ in page.elements]
    assert kinds.count("table") == kinds.count("caption") > 8
    assert all(text.strip() for _, text in page.find("caption"))
    assert {a.get("scope") for a, _ in page.find("th")} == {"row", "col"}
    tables = " ".join(kind for kind in kinds if kind in ("table", "caption", "th", "tr"))
    assert not re.search(r"table (?!caption tr th)", tables)  # a caption, and a heading in every row
    assert not re.search(r"tr (?!th)", tables)
    for attributes, _ in page.find("div", "scroll"):
        assert attributes["tabindex"] == "0" and attributes["role"] == "region"


def test_the_page_can_be_found_through_by_name(page: Page) -> None:
    names = [a["id"] for _, a, _ in page.elements if "id" in a]
    assert len(names) == len(set(names))
    for _, attributes, _ in page.elements:
        for name in (attributes.get("href", "")[1:], attributes.get("aria-labelledby", "")):
            assert not name or name == "ata:," or name in names
    for attributes, _ in page.find("svg"):
        assert attributes["role"] == "img" and len(attributes["aria-label"]) > 20
    levels = [int(tag[1]) for tag, _, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))
    assert page.find("a", "skip")[0][0]["href"] == "#main" and "main" in names


def test_a_chart_says_what_it_shows(report: tuple[str, str]) -> None:
    labels = [a["aria-label"] for a, _ in Page(report[0]).find("svg")]
    [suffix] = [f for f in results(cells=EVERYTHING).figures if f.cell == SUFFIX and not f.category]
    assert suffix.speedup is not None
    assert f"suffix {suffix.speedup.value:.2f}× ({suffix.speedup.low:.2f}–{suffix.speedup.high:.2f})" in labels[0]
    assert len(set(labels)) == 8  # each at two widths


def test_what_users_and_models_write_is_escaped(tmp_path: Path) -> None:
    for number, text in enumerate((*NASTY, "$\\frac{1}{2$", "中文 |a|b", "long " * 30, "a\x00b\x1b")):
        cells = (PLAIN, Cell(f"draft:{text}"), Cell(text, engine=text))
        run = results(
            text,
            cells=cells,
            categories=(text, "code"),
            items=1,
            absent={text: text},
            settings={text: text, "model": text},
        )
        html, markdown = written(tmp_path, run, run) if number % 2 else written(tmp_path, run)
        page = Page(html)
        assert not page.find("script") and not page.find("img")
        assert any(f"draft:{text}".split()[0] in shown for _, shown in page.find("th"))
        tables = [line for line in markdown.splitlines() if line.startswith("|")]
        for line, following in pairwise(tables):
            if following.startswith("| --- |"):
                assert len(re.findall(r"(?<!\\)\|", line)) == len(re.findall(r"(?<!\\)\|", following))
        assert not re.search(r"(?<!\\)<", markdown)


def test_runs_of_any_kind_have_a_report(tmp_path: Path) -> None:
    """Of plain decoding alone, of peers alone, of one short answer, with no draft, and without a curve."""
    one = [measured(cell, "a", answer(made([0]))) for cell in (PLAIN, SUFFIX)]
    runs = [
        results(cells=(PLAIN,)),
        results(cells=(PEER,)),
        results(cells=(SUFFIX,), curve=None, absent={}, settings={}, provenance={}),
        Results("one", {}, {}, (PLAIN, SUFFIX, Cell("ngram")), tuple(one)),
    ]
    for run in runs:
        html, markdown = written(tmp_path, run)
        assert Page(html).find("h1")[0][1] in html and markdown.startswith("## ")
    assert "Without any answer yet: ngram." in html
    assert "There is nothing to compare it with" in written(tmp_path, runs[0])[0]


def test_without_matplotlib_the_page_has_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = Page(written(tmp_path, results(), results("after"))[0])
    assert not page.find("svg") and len(page.find("table")) > 8
    assert any("pip install 'foredraft[bench]'" in text for _, text in page.find("p"))
    assert all("open" in a for a, text in page.find("details") if "All counts" not in text)


def test_a_report_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="There is no run to report"):
        write_report([], tmp_path / "r.html", tmp_path / "r.md")
    with pytest.raises(InvalidInputError, match="The run empty has no answers yet"):
        write_report([Results("empty", {}, {}, (PLAIN,))], tmp_path / "r.html", tmp_path / "r.md")
    with pytest.raises(InvalidInputError, match="Cannot write"):
        write_report([results()], tmp_path / "missing" / "r.html", tmp_path / "r.md")
    assert list(tmp_path.iterdir()) == []


# What it says


def answers(cell: Cell, seconds: Sequence[float], first: int = 0) -> list[Measurement]:
    """An answer of ten tokens to each item, in so many seconds."""
    turns = [answer(made([0] * 10), other=s - 0.165, first=first) for s in seconds]
    return [measured(cell, f"{i}", turn) for i, turn in enumerate(turns)]


def about(*found: list[Measurement], cells: Sequence[Cell] = (PLAIN, SUFFIX, PEER)) -> Results:
    return Results("run", {}, {}, tuple(cells), tuple(m for each in found for m in each))


def test_the_headline_is_of_the_fastest_method() -> None:
    ngram = Cell("ngram")
    run = about(
        answers(PLAIN, [2, 4]), answers(SUFFIX, [1, 2]), answers(ngram, [1.6, 3.2]), answers(PEER, [4, 8]),
        cells=(PLAIN, SUFFIX, ngram, PEER),
    )  # fmt: skip
    head = headline(run)
    assert head.title == "suffix is 2.00× as fast as plain decoding"
    assert head.gain.startswith("It is the fastest of 2 ways of drafting: 6.7 tokens per second")
    assert head.text == "All 4 answers that must have the text of plain decoding have it, token for token."
    assert head.peer == "It has 4.00× the speed of llama.cpp: prompt-lookup 4, the fastest of the other engines."


def test_a_gain_that_is_not_sure_is_not_claimed() -> None:
    plain, unsure, ngram = answers(PLAIN, [2, 2, 2, 2]), answers(SUFFIX, [0.5, 2.1, 2.1, 2.1]), Cell("ngram")
    head = headline(about(plain, unsure))
    assert head.title == "No method is surely faster than plain decoding here; suffix leads with 1.18×"
    cells = (PLAIN, SUFFIX, ngram)
    head = headline(about(plain, unsure, answers(ngram, [1.9, 1.8, 1.9, 1.8]), cells=cells))
    assert head.title == "ngram is 1.08× as fast as plain decoding"
    assert head.gain.startswith(
        "It is the only one of 2 ways of drafting that surely gains: 5.4 tokens per second; the 95"
    )
    slower = headline(about(answers(PLAIN, [2, 2]), answers(SUFFIX, [4, 4])))
    assert slower.title == "Nothing was faster than plain decoding here; suffix came closest, at 0.50×"
    run = page_of([about(answers(PLAIN, [2, 2]), answers(SUFFIX, [4, 4]))]).runs[0]
    assert {row.cell: run.kind(row) for row in run.rows} == {PLAIN: "plain", SUFFIX: "own"}  # no row is called fastest


def test_different_text_is_told_where_it_must_be_the_same() -> None:
    run = about(answers(PLAIN, [2, 2]), answers(SUFFIX, [1, 1], first=5), answers(PEER, [3, 3], first=5))
    assert headline(run).text.startswith("2 of 2 answers differ from plain decoding where they must not")
    meanings = {row.cell: equality(row) for row in page_of([run]).runs[0].rows}
    assert meanings[SUFFIX] == ("different text: a near-tie, or a defect", True)
    assert meanings[PEER] == ("another engine's arithmetic", False)
    assert meanings[PLAIN] == ("what the others are compared with", False)


@pytest.mark.parametrize(
    ("cell", "meaning"),
    [
        (Cell("draft:tiny", rule="block", temperature=1), "same law, other draws"),
        (Cell("ngram", rule="lossy-typical", temperature=1), "another law (lossy rule)"),
        (Cell("none", temperature=1, engine="transformers"), "another engine's draws"),
    ],
)
def test_other_draws_are_no_fault(cell: Cell, meaning: str) -> None:
    run = about(answers(cell.plain, [2, 2]), answers(cell, [1, 1], first=5), cells=(cell.plain, cell))
    [row] = [row for row in page_of([run]).runs[0].rows if row.cell == cell]
    assert equality(row) == (meaning, False) and (row.equal, row.different) == (0, 2)
    assert headline(run).text == "No answer had a plain one beside it whose text it must have."


def test_changes_are_ratios_of_the_second_run_over_the_first() -> None:
    before = about(answers(PLAIN, [2, 2]), answers(SUFFIX, [2, 4]))
    after = about(answers(PLAIN, [1, 1]), answers(SUFFIX, [0.5, 1], first=3))
    plain, suffix = changes(before, after)
    found = {measure.title: ratio for measure, ratio in suffix.ratios.items()}
    assert found["tokens/s"] == pytest.approx((4.0, 4.0, 4.0))
    assert found["speedup over plain"] == pytest.approx((2.0, 2.0, 2.0))
    tpot = found["mean TPOT"]
    assert tpot is not None and tpot.value == pytest.approx((1.5 - 2 * 0.0615) / (6 - 2 * 0.0615))
    assert found["tokens per forward"] == (1.0, 1.0, 1.0) and found["acceptance rate"] is None
    assert (suffix.equal, suffix.different, suffix.answers, suffix.must_be_equal) == (0, 2, 2, True)
    assert (plain.equal, plain.different) == (2, 0) and MEASURES[1] not in plain.ratios
    assert changes(before, about(answers(PEER, [1]))) == []


@pytest.mark.parametrize(
    ("interval", "better", "word"),
    [
        (Interval(1.2, 1.1, 1.3), 1, "better"),
        (Interval(1.2, 1.1, 1.3), -1, "worse"),
        (Interval(0.8, 0.7, 0.9), 1, "worse"),
        (Interval(0.8, 0.7, 0.9), -1, "better"),
        (Interval(1.2, 0.9, 1.3), 1, ""),
        (None, 1, ""),
    ],
)
def test_only_clear_changes_are_called_so(interval: Interval | None, better: int, word: str) -> None:
    assert clear(interval, better) == word


def test_long_lists_are_shortened_but_compared_whole() -> None:
    items = [f"item-{i}" for i in range(100)]
    others = [*items[:50], "another", *items[51:]]
    first, second = page_of([results(settings={"items": each, "seed": None}) for each in (items, others)]).settings
    assert (first.name, first.differs, second.name, second.differs) == ("items", True, "seed", False)
    assert first.values[0] == first.values[1] and first.values[0].startswith("100: item-0, item-1,")
    assert first.values[0].endswith("…, item-94, item-95, item-96, item-97, item-98, item-99")
    assert second.values == ("–", "–")


def test_cells_without_answers_wait_but_not_for_a_peer_that_is_absent() -> None:
    cells = (PLAIN, SUFFIX, Cell("ngram"), Cell("none", engine="openvino"))
    run = replace(results(cells=(PLAIN, SUFFIX)), cells=cells)
    assert page_of([run]).runs[0].waiting == (Cell("ngram"),)


# The command


def run(capsys: Any, *arguments: object) -> tuple[int, str, str]:
    """`foredraft report`: status, output and errors."""
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, arguments)])
    return ended.value.code or 0, *capsys.readouterr()


def test_the_command_writes_into_the_runs_folder(tmp_path: Path, capsys: Any) -> None:
    folder = write(results(items=1), tmp_path / "a run")
    status, said, _ = run(capsys, folder)
    assert status == 0
    assert said == f"written: {folder / 'report.html'} and {folder / 'report.md'}\n"
    assert {file.name for file in folder.iterdir()} == {"settings.json", "answers.jsonl", "report.html", "report.md"}


def test_the_command_compares_several_runs(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [write(results(items=1, seed=seed), tmp_path / str(seed) / "run") for seed in (1, 2)]
    monkeypatch.chdir(tmp_path)
    assert run(capsys, *folders)[:2] == (0, "written: report.html and report.md\n")
    assert "run (1)" in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert run(capsys, *folders, "--out", tmp_path / "both.html")[0] == 0
    assert (tmp_path / "both.md").exists()


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: Any) -> None:
    folder = write(results(items=1), tmp_path / "run")
    for arguments, why in (
        ([tmp_path], "There is no run in"),
        ([folder, "--out", "report.pdf"], "must end in .html"),
        ([folder, "--out", tmp_path / "missing" / "r.html"], "Cannot write"),
    ):
        status, said, error = run(capsys, *arguments)
        assert status == 2 and said == "" and error.count("Error: ") == 1 and why in error


# In a browser

SCRIPT = """<script>addEventListener("load", () => {
  const right = document.documentElement.clientWidth + 0.5;
  const wide = [...document.querySelectorAll("body *")].filter(e => e.getBoundingClientRect().right > right
    && !e.parentElement.closest(".scroll, svg") && !e.matches(".skip")).map(e => e.outerHTML.slice(0, 80));
  const charts = [...document.querySelectorAll("svg")].filter(e => e.getBoundingClientRect().width > 0);
  const outside = charts.flatMap(svg => [...svg.querySelectorAll("text")].filter(t => {
    const a = t.getBoundingClientRect(), b = svg.getBoundingClientRect();
    return a.left < b.left - 2 || a.right > b.right + 2 || a.top < b.top - 2 || a.bottom > b.bottom + 2;
  }).map(t => t.textContent));
  parent.postMessage({width: innerWidth, scroll: document.documentElement.scrollWidth, wide, outside,
    charts: charts.length}, "*");
});</script></body>"""
HOST = """<!doctype html><script>addEventListener("message", e => {
  document.body.textContent = JSON.stringify(e.data) + "|end"; });</script>
<body><iframe src="report.html" style="border: 0; width: WIDTHpx; height: 900px"></iframe></body>"""


@pytest.mark.skipif(not CHROMIUM, reason="needs a browser (chromium), and there is none here")
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("kind", ["report", "comparison"])
def test_nothing_is_wider_than_the_page(kind: str, width: int, tmp_path: Path, request: Any) -> None:
    """In a frame, for a browser's own window cannot be as narrow as a phone."""
    page = request.getfixturevalue(kind)[0].replace("</body>", SCRIPT)
    page = page.replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'")
    (tmp_path / "report.html").write_text(page, encoding="utf-8", newline="\n")
    host = tmp_path / "host.html"
    host.write_text(HOST.replace("WIDTH", str(width)))
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --hide-scrollbars --enable-logging=stderr --dump-dom"
    command = [CHROMIUM, *flags.split(), "--virtual-time-budget=4000", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run([*command, host.as_uri()], capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r"<body>(.*?)\|end", done.stdout, re.DOTALL)
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    charts = 8 if kind == "report" else 1 + 8 + 8
    expected = {"width": width, "scroll": width, "wide": [], "outside": [], "charts": charts}
    assert json.loads(unescape(found[1])) == expected
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]
