"""`foredraft report`: the report of one benchmark run, or several against the first of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foredraft.errors import InvalidInputError


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders that foredraft bench wrote.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page to write, FILE.html; the same as Markdown goes beside it. The default is report.html in the "
            "folder, of several runs in the current one."
        ),
    ] = None,
) -> None:
    """Write the report of a benchmark run; of several runs, what became of the first one in the others."""
    from foredraft.bench.report import write_report
    from foredraft.bench.results import Results

    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise InvalidInputError(f"out is {str(out)!r}, but must end in .html: the Markdown goes beside it, in .md.")
    page = out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    runs = [Results.read(folder) for folder in folders]
    write_report(runs, page, page.with_suffix(".md"))
    typer.echo(f"written: {page} and {page.with_suffix('.md')}")
