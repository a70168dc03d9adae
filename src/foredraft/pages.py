"""What is written for people to keep: pages from templates, and text files that are whole or not there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jinja2

from foredraft.errors import InvalidInputError

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("foredraft", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
)


def render(template: str, **values: object) -> str:
    """The page of a template of this package, named by its path in it. Values are escaped."""
    return _TEMPLATES.get_template(template).render(**values)


@contextmanager
def whole_file(path: Path) -> Iterator[Callable[[str], None]]:
    """Yields what writes the text of `path`: whole or not at all. An older file stays until then.

    Raises:
        InvalidInputError: `path` cannot be written; told before the block begins wherever that can be known.
    """
    try:
        target = path.resolve()
        if target.exists() and not (target.is_file() and os.access(target, os.W_OK)):
            raise InvalidInputError(f"Cannot write {path}: it is no file, or is protected. Give another name.")
        beside = target.with_name(f".{secrets.token_hex(8)}.part")
        beside.touch(exist_ok=False)
    except (OSError, RuntimeError) as error:  # the latter for links in a circle
        raise _cannot_write(path, error) from error

    def write(text: str) -> None:
        try:
            beside.write_text(text, encoding="utf-8", errors="replace", newline="\n")
            beside.replace(target)
        except OSError as error:
            raise _cannot_write(path, error) from error

    try:
        yield write
    finally:
        beside.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, if they are not there.

    Raises:
        InvalidInputError: It cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(f"Cannot make the folder {folder} ({error.strerror}): give another.") from error


def _cannot_write(path: Path, error: OSError | RuntimeError) -> InvalidInputError:
    why = getattr(error, "strerror", None) or error
    return InvalidInputError(f"Cannot write {path} ({why}): give a file in a folder that exists and has room.")
