"""Pieces of the server by themselves: addresses, keys, logs, tokens as bytes, and the command line around them."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft import cli_serve
from foredraft.cli import main
from foredraft.errors import InvalidInputError
from foredraft.serve.access import Keys, is_open, read_keys
from foredraft.serve.logs import JsonFormatter, TextFormatter
from foredraft.serve.run import address, bind, is_local
from foredraft.serve.settings import ServerSettings
from foredraft.serve.token_texts import TokenTexts
from tiny import tiny_metaspace_tokenizer


class TestAddresses:
    @pytest.fixture
    def taken(self) -> Iterator[int]:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            yield other.getsockname()[1]

    def test_a_free_port(self) -> None:
        with bind("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
            assert port and address(listener) == f"http://127.0.0.1:{port}" and is_local(listener)

    def test_all_of_the_machine(self) -> None:
        with bind("0.0.0.0", 0) as listener:
            assert address(listener).startswith("http://127.0.0.1:") and not is_local(listener)

    @pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
    def test_ipv6(self) -> None:
        try:
            listener = bind("::1", 0)
        except InvalidInputError:
            pytest.skip("no IPv6 address here")
        with listener:
            assert address(listener).startswith("http://[::1]:") and is_local(listener)

    def test_a_port_in_use(self, taken: int) -> None:
        with pytest.raises(
            InvalidInputError, match=rf"Cannot serve at 127.0.0.1, port {taken} \(Address already in use"
        ):
            bind("127.0.0.1", taken)

    def test_no_such_host(self) -> None:
        with pytest.raises(InvalidInputError, match=r"There is no host 'nowhere\.invalid' to serve at"):
            bind("nowhere.invalid", 0)

    def test_an_address_of_another_machine(self) -> None:
        with pytest.raises(InvalidInputError, match=r"Cannot serve at 192\.0\.2\.1"):
            bind("192.0.2.1", 0)

    def test_the_command_says_so(self, taken: int, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as end:
            main(["serve", "no-such-model", "--port", str(taken)])
        assert end.value.code == 2 and "choose another with --port" in capsys.readouterr().err


class TestKeys:
    def test_of_options_and_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        file.write_text("# ours\n\n  second \nthird\nfirst\n", encoding="utf-8")
        assert read_keys(["first"], file) == ("first", "second", "third")
        assert read_keys([], None) == ()

    @pytest.mark.parametrize(("content", "match"), [("\n# none\n", "has no API key"), ("a b\n", "white space")])
    def test_wrong_files(self, tmp_path: Path, content: str, match: str) -> None:
        file = tmp_path / "keys"
        file.write_text(content, encoding="utf-8")
        with pytest.raises(InvalidInputError, match=match):
            read_keys([], file)
        with pytest.raises(InvalidInputError, match="Cannot read the API keys"):
            read_keys([], tmp_path / "other")

    def test_which_one(self) -> None:
        keys = Keys(["a", "b"])
        assert [keys.number(f"Bearer {key}") for key in ("a", "b", "c", "")] == [0, 1, None, None]
        assert keys.number("bearer  b ") == 1 and keys.number(None) is None and keys.number("Bearer \udcff") is None

    def test_what_is_open(self) -> None:
        assert is_open("/", False) and is_open("/health", False) and not is_open("/metrics", False)
        assert is_open("/metrics", True) and not is_open("/v1/models", True)


class TestLogs:
    @pytest.fixture
    def record(self) -> logging.LogRecord:
        record = logging.makeLogRecord({"msg": "request", "levelno": logging.INFO, "levelname": "INFO"})
        record.fields = {"id": "r-1", "seconds": 0.123456789, "prompt": ("two\nlines",)}
        return record

    def test_json_is_one_line(self, record: logging.LogRecord) -> None:
        line = JsonFormatter().format(record)
        told = json.loads(line)
        assert "\n" not in line and told["message"] == "request" and told["prompt"] == ["two\nlines"]

    def test_text_is_one_line(self, record: logging.LogRecord) -> None:
        line = TextFormatter().format(record)
        assert "\n" not in line and line.split()[1:5] == ["info", "request", "id=r-1", "seconds=0.1235"]

    def test_tracebacks_follow(self, record: logging.LogRecord) -> None:
        try:
            raise RuntimeError("broken")
        except RuntimeError:
            record.exc_info = sys.exc_info()
        assert "RuntimeError: broken" in TextFormatter().format(record)
        assert "RuntimeError: broken" in json.loads(JsonFormatter().format(record))["traceback"]


class TestTokenTexts:
    def test_byte_level(self, tokenizer: Any) -> None:
        texts, text = TokenTexts(tokenizer), " the hello €"
        ids = tokenizer(text)["input_ids"]
        assert b"".join(texts.bytes_of(token) for token in ids) == text.encode()
        assert texts.text(ids[0]) == " the" and texts.text(ids[-1]) == "bytes:\\xac"
        assert texts.text(tokenizer.eos_token_id) == "<|im_end|>"

    def test_metaspace(self) -> None:
        tokenizer = tiny_metaspace_tokenizer(["one", "two"])
        texts = TokenTexts(tokenizer)
        assert [texts.text(token) for token in tokenizer("one two")["input_ids"]] == [" one", " two"]


@pytest.mark.parametrize(("name", "value"), [("name", " "), ("max_body", 0), ("max_tokens", 0), ("ping", 0)])
def test_settings_check_themselves(name: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"{name} is"):
        ServerSettings(**{"name": "m", name: value})


def test_without_the_extra_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_serve, "find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(SystemExit):
        main(["serve", "m"])
    said = capsys.readouterr().err
    assert "uvicorn, which is not installed" in said and 'pip install "foredraft[serve]"' in said


def test_the_command_line_starts_without_the_servers_packages() -> None:
    code = "import sys, foredraft.cli; print({'fastapi', 'uvicorn', 'pydantic', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
