"""`foredraft serve --engine vllm` over a stand-in for vLLM: what is passed on, what is refused, and its life."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from foredraft.bench.peers.prometheus import parse_metrics

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are ended by signals")

FAKE = Path(__file__).with_name("fake_vllm.py")
CONFIG = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WORDS = "one two three four five six seven eight "


class Served:
    """A running `foredraft serve`, and the vLLM behind it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.lines = process, list[str]()
        assert process.stderr is not None
        for line in process.stderr:
            self.lines.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                self.client = httpx.Client(base_url=found[0], timeout=30)
                break
        else:
            raise AssertionError("".join(self.lines))
        threading.Thread(target=lambda: self.lines.extend(process.stderr or ()), daemon=True).start()

    def chat(self, content: str = "hello", **other: Any) -> httpx.Response:
        return self.client.post(
            CHAT, json={"model": "tiny", "messages": [{"role": "user", "content": content}], **other}
        )

    def status(self) -> Any:
        return self.client.get("/foredraft/status").json()

    def inner(self) -> Any:
        """What the fake says of itself; its address is in the arguments of its process."""
        arguments = Path(f"/proc/{self.status()['engine']['pid']}/cmdline").read_bytes().decode().split("\0")
        port = arguments[arguments.index("--port") + 1]
        return httpx.get(f"http://127.0.0.1:{port}/seen").json()

    def until(self, done: Callable[[], bool]) -> None:
        """Looks again and again, and fails after half a minute."""
        for _ in range(600):
            if done():
                return
            time.sleep(0.05)
        raise AssertionError("it did not come about")


@contextmanager
def served(*more: str, arguments: str = "", config: str | None = CONFIG) -> Iterator[Served]:
    command = [sys.executable, "-m", "foredraft", "serve", "org/tiny", "--served-name", "tiny", "--port", "0"]
    command += ["--engine", "vllm", "--vllm", f"'{sys.executable}' '{FAKE}'", "--vllm-args", arguments, *more]
    command += ["--speculative-config", config] if config is not None else []
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "400"}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        server = None
        try:
            server = Served(process)
            yield server
        finally:
            if server is not None:
                server.client.close()
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("--timeout", "20") as found:
        yield found


def chunks(response: httpx.Response) -> list[Any]:
    *data, last = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert last == "[DONE]"
    return [json.loads(each) for each in data]


# Answers


def test_an_answer_has_the_figures_of_its_own(server: Served) -> None:
    answer = server.chat().json()
    assert answer["choices"][0]["message"]["content"] == WORDS
    assert "metrics" not in answer
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 8)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    told = usage["foredraft"]
    expected = {"drafter": "ngram", "rule": "token", "backend": "vllm", "drafted": 6, "accepted": 3}
    assert {name: told[name] for name in expected} == expected
    assert told["target_forwards"] == 5 and told["mean_accepted_length"] == pytest.approx(8 / 5)
    assert told["acceptance_rate"] == 0.5 and told["queue_ms"] == 1.5 and told["ttft_ms"] == 5.0
    assert told["draft_forwards"] is None  # vLLM does not tell
    assert told["seconds"] > 0 and told["tpot_ms"] == pytest.approx((1e3 * told["seconds"] - 5.0) / 7)


def test_what_vllm_does_not_tell_is_null(server: Served) -> None:
    told = server.chat(n=2).json()["usage"]["foredraft"]
    for name in ("drafted", "accepted", "acceptance_rate", "target_forwards", "mean_accepted_length", "tpot_ms"):
        assert told[name] is None, name


@pytest.mark.parametrize("include", [True, False])
def test_streams_pass_through(server: Served, include: bool) -> None:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if include else {}
    events = chunks(server.chat(stream=True, **options))
    said = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["delta"].get("content", "") for choice in said) == WORDS
    usages = [event["usage"] for event in events if event.get("usage")]
    assert len(usages) == include
    if include:
        assert usages[0]["foredraft"]["accepted"] == 3 and usages[0]["foredraft"]["ttft_ms"] > 0
        assert all("usage" in event for event in events)
    assert all("metrics" not in event for event in events)


def test_completions_and_openais_client(server: Served) -> None:
    client = openai.OpenAI(base_url=str(server.client.base_url).rstrip("/") + "/v1", api_key="none")
    assert client.completions.create(model="tiny", prompt="hello").choices[0].text == WORDS
    assert [model.id for model in client.models.list()] == ["tiny"]
    with client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hello"}], stream=True
    ) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == WORDS
    client.close()


def test_requests_mean_the_same_as_with_foredraft(server: Served) -> None:
    server.chat(seed=-1, top_k=-1, foredraft={"drafter": "ngram"}, metadata={"a": "b"}, prediction=None)
    body = server.inner()["bodies"][-1]
    assert body["temperature"] == 1.0 and body["top_p"] == 1.0 and body["min_p"] == 0.0  # not the model's own defaults
    assert body["top_k"] == 0 and body["max_tokens"] == 2048 and 0 <= body["seed"] < 2**63
    assert not {"foredraft", "metadata", "prediction"} & body.keys()


def test_vllm_is_started_with_the_configuration(server: Served) -> None:
    arguments = server.inner()["argv"]
    assert arguments[:2] == ["serve", "org/tiny"]
    assert json.loads(arguments[arguments.index("--speculative-config") + 1]) == json.loads(CONFIG)
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1"
    assert "--enable-per-request-metrics" in arguments


# Refusals


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({"model": "other"}, 404, "model", "model_not_found"),
        ({"temperature": -1}, 400, "temperature", "invalid_value"),
        ({"nonsense": 1}, 400, "nonsense", "unknown_parameter"),
        ({"foredraft": {"drafter": "suffix"}}, 400, "foredraft.drafter", "invalid_value"),
        ({"foredraft": {"budget": 2}}, 400, "foredraft.budget", "unsupported_parameter"),
        ({"foredraft": {"rule": "block"}}, 400, "foredraft.rule", "unsupported_parameter"),
        ({"foredraft": {"trace": True}}, 400, "foredraft.trace", "unsupported_parameter"),
        ({"foredraft": {"timeout": 100}}, 400, "foredraft.timeout", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options", "invalid_value"),
    ],
)
def test_bad_requests_do_not_reach_vllm(server: Served, body: Any, status: int, param: str, code: str) -> None:
    before = len(server.inner()["bodies"])
    response = server.chat(**body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (status, param, code)
    assert len(server.inner()["bodies"]) == before


def test_headers_are_not_left_out_in_silence(server: Served) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    response = server.client.post(CHAT, json=body, headers={"X-Foredraft-Budget": "off"})
    assert response.status_code == 400 and response.json()["error"]["param"] == "foredraft.budget"
    assert server.client.post(CHAT, json=body, headers={"X-Foredraft-Drafter": "ngram"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_vllms_errors_have_our_shape(server: Served, stream: bool) -> None:
    response = server.chat("too long", stream=stream)
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
    response = server.chat("break", stream=stream)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (500, "worker_crashed", "server_error")
    assert "EngineCore" not in error["message"]


def test_a_request_may_have_less_time(server: Served) -> None:
    response = server.chat("slowly", foredraft={"timeout": 0.2})
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
    *_, last = chunks(server.chat("slowly", stream=True, foredraft={"timeout": 0.3}))
    assert last["error"]["code"] == "timeout"


def test_a_client_that_goes_away_is_forgotten(server: Served) -> None:
    before = server.inner()["cancelled"]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "slowly"}], "stream": True}
    with server.client.stream("POST", CHAT, json=body) as response:
        next(response.iter_lines())
    server.until(lambda: server.inner()["cancelled"] > before)
    server.until(lambda: server.status()["recent"][0]["outcome"] == "cancelled")


# What is told


def test_metrics_have_foredrafts_names_and_vllms(server: Served) -> None:
    server.chat()
    text = server.client.get("/metrics").text
    found = parse_metrics(text)
    answers = found["vllm:generation_tokens_total"] / 8
    assert found["foredraft_generated_tokens_total"] == 8 * answers
    assert found["foredraft_drafted_tokens_total"] == 6 * answers
    assert found["foredraft_accepted_tokens_total"] == 3 * answers
    assert found["foredraft_target_forwards_total"] == 5 * answers
    assert found["foredraft_accepted_at_position_total[1]"] == 3 * answers
    assert found["foredraft_ttft_seconds_count"] == answers and found["foredraft_requests_running"] == 0
    assert 'foredraft_worker_state{state="ready"} 1.0' in text
    assert 'foredraft_requests_total{outcome="stop"}' in text
    assert "foredraft_draft_forwards_total" not in found  # vLLM does not tell


def test_status_and_page(server: Served) -> None:
    status = server.status()
    assert (status["model"], status["backend"], status["context"]) == ("tiny", "vllm", 512)
    assert status["engine"]["method"] == "ngram" and status["status"]["state"] == "ready"
    assert status["status"]["kv_share"] == 0.25 and status["status"]["kv_bytes"] is None
    assert status["plain_tokens_per_second"] is None
    assert "<html" in server.client.get("/").text and server.client.get("/openapi.json").status_code == 200
    assert server.client.get("/v1/models/tiny").json()["max_model_len"] == 512
    assert server.client.get("/v1/models/other").status_code == 404


# Life


def test_vllm_is_started_again_when_it_ends(tmp_path: Path) -> None:
    with served(arguments="--fake-die-after 2") as server:
        assert server.chat().status_code == 200
        first = server.status()["engine"]["pid"]
        response = server.chat()
        assert response.status_code == 500 and response.json()["error"]["code"] == "worker_crashed"
        server.until(lambda: server.status()["status"]["restarts"] == 1 and server.client.get("/health").is_success)
        assert server.chat().status_code == 200 and server.status()["engine"]["pid"] != first
        assert "status 3" in server.status()["engine"]["last_end"]


def test_a_vllm_that_does_not_come_back_ends_the_server(tmp_path: Path) -> None:
    program = tmp_path / "once.sh"
    program.write_text(f'#!/bin/sh\n[ -e "{tmp_path}/ran" ] && exit 4\ntouch "{tmp_path}/ran"\nexec "$@"\n')
    program.chmod(0o755)
    with served("--vllm", f"'{program}' '{sys.executable}' '{FAKE}'", arguments="--fake-die-after 1") as server:
        assert server.chat().status_code == 500
        assert server.process.wait(60) == 2
        server.until(lambda: "vLLM does not run (status 4)" in "".join(server.lines))


def test_both_end_together_and_streams_end_first() -> None:
    with served("--grace", "0.2", config=None) as server:
        pid = server.status()["engine"]["pid"]
        body = {"model": "tiny", "messages": [{"role": "user", "content": "slowly"}], "stream": True}
        with server.client.stream("POST", CHAT, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        data = [line.removeprefix("data: ") for line in rest if line.startswith("data: ")]
        assert data[-1] == "[DONE]" and json.loads(data[-2])["error"]["code"] == "worker_crashed"
        assert server.process.wait(30) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_plain_decoding_has_drafted_nothing() -> None:
    with served(config=None) as server:
        told = server.chat().json()["usage"]["foredraft"]
        assert (told["drafter"], told["drafted"], told["accepted"], told["target_forwards"]) == ("none", 0, 0, 8)
        assert "--speculative-config" not in server.inner()["argv"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "foredraft", "serve", "org/tiny", "--port", "0", "--engine", "vllm", *arguments]
    environment = {**os.environ, "COLUMNS": "1000"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vllm", "no-such-program"], "vLLM does not run ('no-such-program' cannot be started"),
        (["--rule", "block"], "--rule is of foredraft's own engine"),
        (["--memory", "there"], "--memory is of foredraft's own engine"),
        (["--dtype", "bfloat16"], "--dtype is of foredraft's own engine"),
        (["--drafter", "ngram", "--speculative-config", CONFIG], "leave --drafter out"),
        (["--speculative-config", '{"method": "ngrm"}'], "Did you mean 'ngram'?"),
        (["--speculative-config", "nowhere.json"], "is no JSON object, and no file can be read there"),
    ],
)
def test_what_cannot_start_says_why(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and message in done.stderr, done.stderr
