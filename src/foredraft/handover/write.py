"""Writes a hand-over into a folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from foredraft.backends.checkpoint import load_checkpoint
from foredraft.errors import ModelError, UnsupportedError
from foredraft.handover.page import markdown
from foredraft.handover.plan import Handover, is_local, quoted
from foredraft.handover.vllm import command, manifest, ray_app
from foredraft.heads.files import bundled_heads
from foredraft.models import BUNDLED, ModelFiles, Notify, is_bundled, resolve
from foredraft.pages import make_folder, whole_file

PAGE = "handover.md"


def write(plan: Handover, folder: Path) -> list[Path]:
    """Write configuration, command, manifest, Ray app and page; return their paths.

    Raises:
        InvalidInputError: They cannot be written there.
    """
    config = json.dumps(plan.config, indent=2) + "\n" if plan.config is not None else None
    texts = {
        "speculative-config.json": config,
        "vllm-serve.sh": f"#!/bin/sh\nexec {quoted(command(plan))}\n",
        "kubernetes.yaml": manifest(plan),
        "ray_app.py": ray_app(plan),
        PAGE: markdown(plan),
    }
    return write_texts({name: text for name, text in texts.items() if text is not None}, folder)


def write_texts(texts: dict[str, str], folder: Path) -> list[Path]:
    """Write files of these names, each whole or not at all."""
    make_folder(folder)
    written = []
    for name, text in texts.items():
        with whole_file(folder / name) as write_file:
            write_file(text)
        written.append(folder / name)
    return written


def files_here(model: str, cache: Path, notify: Notify = lambda _: None) -> ModelFiles | None:
    """The files of a model that is bundled or lies here; `None` of a hub id, for which nothing is fetched.

    Raises:
        ModelError: They are damaged or incomplete.
    """
    return resolve(model, cache, notify) if model in BUNDLED or is_local(model) else None


def loadable(files: ModelFiles, converted: Path, notify: Notify = lambda _: None) -> str:
    """The model as other engines load it: the reference itself, or the folder `converted` made of a GGUF file.

    Raises:
        ModelError: The file cannot be read, or is too large to be kept converted.
        InvalidInputError: The folder cannot be made.
    """
    if not files.is_gguf:
        return files.reference
    if not (converted / "config.json").is_file():
        notify("Writing the GGUF weights as a folder that vLLM loads")
        make_folder(converted.parent)
        load_checkpoint(files.path, device="cpu", dtype="float32", converted=converted)
    if not (converted / "config.json").is_file():
        raise ModelError(
            f"{files.reference} is a GGUF file too large to be written anew: give the folder or hub id that it was "
            "made from with --served-model."
        )
    return str(converted.resolve())


def own_head(files: ModelFiles, kind: str, folder: Path) -> str | None:
    """The head that comes with foredraft for this model, copied beside the page; `None` where the model has its own.

    Raises:
        UnsupportedError: There is none for this model.
    """
    if kind == "mtp":
        return None
    for name, bundled in bundled_heads(kind).items():
        if name in BUNDLED and is_bundled(files, BUNDLED[name]):
            copy = folder / f"{kind}-head"
            make_folder(copy)
            for file in ("config.json", "model.safetensors"):
                shutil.copyfile(bundled / file, copy / file)
            return str(copy.resolve())
    raise UnsupportedError(
        f"No {kind} head comes with foredraft for {files.reference}: name one (--drafter {kind}:REF), or train one "
        f"(foredraft train {kind} {files.reference})."
    )
