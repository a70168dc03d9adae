"""The server's routes over a stand-in for the worker: what is taken, what is refused and how, what a client sees."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from foredraft.api import Model
from foredraft.backends.transformers import TransformersBackend
from foredraft.errors import InvalidInputError, ModelError
from foredraft.proposers.ngram import NGram
from foredraft.serve import reading
from foredraft.serve.app import create_app
from foredraft.serve.asks import AskTimeoutError, DrainingError, QueueFullError, WorkerCrashedError
from foredraft.serve.common import Page
from foredraft.serve.settings import ServerSettings
from foredraft.types import SamplingParams
from serve_fakes import FakeWorker, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello there"}]
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n".encode()
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def model(text_target: TransformersBackend, tokenizer: Any) -> Model:
    return Model(text_target, tokenizer, NGram())


@pytest.fixture(scope="module")
def _served(model: Model) -> Iterator[tuple[FakeWorker, httpx.Client]]:
    worker = FakeWorker(model)
    app = create_app(
        worker,
        ServerSettings(name="tiny", max_body=20_000, log_prompts=True, max_tokens=16),
        metrics=lambda accept: (b"up 1\n", accept or ""),
        page=Page("<p>here</p>", "default-src 'none'"),
    )
    with serving(app) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield worker, client


@pytest.fixture
def worker(_served: tuple[FakeWorker, httpx.Client]) -> FakeWorker:
    worker = _served[0]
    FakeWorker.__init__(worker, worker.model)
    return worker


@pytest.fixture
def client(_served: tuple[FakeWorker, httpx.Client], worker: FakeWorker) -> httpx.Client:
    return _served[1]


def chat(client: httpx.Client, **other: Any) -> httpx.Response:
    return client.post(CHAT, json={"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 0, **other})


def text(client: httpx.Client, prompt: Any = "hello", **other: Any) -> httpx.Response:
    return client.post(TEXT, json={"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, **other})


def chunks(response: httpx.Response) -> list[Any]:
    """The data of a stream's events, without the last one, which is the mark of the end."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *data, last = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert last == "[DONE]"
    return [json.loads(each) for each in data]


def error(response: httpx.Response) -> tuple[int, Any, Any]:
    """Status, param and code, of an error in OpenAI's shape."""
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == ("invalid_request_error" if response.status_code < 500 else "server_error")
    assert response.headers["x-request-id"]
    return response.status_code, body["error"]["param"], body["error"]["code"]


class TestAnswers:
    def test_a_chat_is_what_the_model_says(self, client: httpx.Client, model: Model) -> None:
        body = chat(client, ignore_eos=True).json()
        plain = model.generate(MESSAGES, SamplingParams(max_tokens=8, ignore_eos=True))
        assert body["object"] == "chat.completion"
        assert body["choices"][0]["message"] == {"role": "assistant", "content": plain.text, "refusal": None}
        assert body["choices"][0]["finish_reason"] == "length"
        usage = body["usage"]
        assert usage["completion_tokens"] == 8 and usage["total_tokens"] == usage["prompt_tokens"] + 8
        assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
        told = usage["foredraft"]
        assert told["drafter"] == "ngram" and told["target_forwards"] == plain.stats.target_forwards
        assert told["mean_accepted_length"] == 8 / told["target_forwards"]
        assert told["queue_ms"] == 1 and 0 < told["ttft_ms"] <= 1e3 * told["seconds"]

    def test_a_stream_has_the_same_text(self, client: httpx.Client) -> None:
        whole = chat(client, max_tokens=20).json()
        parts = chunks(chat(client, max_tokens=20, stream=True, stream_options={"include_usage": True}))
        assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        *told, last = parts
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        assert all(part["usage"] is None for part in told)
        joined = "".join(part["choices"][0]["delta"].get("content", "") for part in told)
        assert joined == whole["choices"][0]["message"]["content"]
        assert [part["choices"][0]["finish_reason"] for part in told[-2:]] == [None, "length"]
        assert len({part["id"] for part in parts}) == 1 and parts[0]["object"] == "chat.completion.chunk"

    def test_chunks_tell_no_usage_unless_asked(self, client: httpx.Client) -> None:
        assert not any("usage" in part or "foredraft" in part for part in chunks(chat(client, stream=True)))

    def test_texts_are_continued_one_or_several(self, client: httpx.Client) -> None:
        body = text(client, ["hello", "there"], n=2, seed=4, temperature=1, echo=True).json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert [choice["text"][:5] for choice in body["choices"]] == ["hello", "hello", "there", "there"]
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
        alone = text(client, "there", n=2, seed=4, temperature=1, echo=True).json()
        assert [choice["text"] for choice in alone["choices"]] == [choice["text"] for choice in body["choices"][2:]]

    def test_prompts_may_be_token_ids(self, client: httpx.Client, tokenizer: Any) -> None:
        ids = tokenizer("hello")["input_ids"]
        wanted = text(client).json()["choices"][0]["text"]
        assert text(client, ids).json()["choices"][0]["text"] == wanted
        both = text(client, [ids, ids]).json()["choices"]
        assert [choice["text"] for choice in both] == [wanted, wanted]
        assert text(client, ids, echo=True).json()["choices"][0]["text"] == "hello" + wanted

    @pytest.mark.parametrize("ask", [chat, text])
    def test_choices_may_tell_token_ids(self, client: httpx.Client, tokenizer: Any, ask: Any) -> None:
        choice = ask(client, return_token_ids=True, ignore_eos=True).json()["choices"][0]
        said = choice["text"] if ask is text else choice["message"]["content"]
        assert len(choice["token_ids"]) == 8 and tokenizer.decode(choice["token_ids"]) == said
        parts = chunks(ask(client, return_token_ids=True, ignore_eos=True, stream=True))
        streamed = [each for part in parts for c in part["choices"] for each in c.get("token_ids", ())]
        assert streamed == choice["token_ids"]
        assert "token_ids" not in ask(client).json()["choices"][0]

    def test_a_streamed_text_begins_with_its_echo(self, client: httpx.Client) -> None:
        parts = chunks(text(client, ["hello", "there"], stream=True, echo=True, max_tokens=20))
        for index, prompt in enumerate(("hello", "there")):
            joined = "".join(c["text"] for part in parts for c in part["choices"] if c["index"] == index)
            assert joined == text(client, prompt, echo=True, max_tokens=20).json()["choices"][0]["text"]

    @pytest.mark.parametrize("seed", [-1, 0, 2**63 - 1, -(2**63)])
    def test_any_seed_repeats_itself(self, client: httpx.Client, seed: int) -> None:
        one, two = (text(client, seed=seed, n=2, temperature=1).json()["choices"] for _ in range(2))
        assert one == two and one[0]["text"] != one[1]["text"]

    def test_stop_strings_end_an_answer(self, client: httpx.Client) -> None:
        whole = text(client, max_tokens=30, ignore_eos=True).json()["choices"][0]["text"]
        body = text(client, max_tokens=30, ignore_eos=True, stop=[whole[10:13]]).json()["choices"][0]
        assert body["finish_reason"] == "stop" and body["text"] == whole[: whole.index(whole[10:13])]

    def test_what_openai_has_besides_is_taken_and_ignored(self, client: httpx.Client) -> None:
        other = {"metadata": {"a": "b"}, "store": False, "service_tier": "auto", "prompt_cache_key": "k", "user": "me"}
        nothing = {"tools": None, "functions": None, "audio": None, "stop": None, "seed": None, "n": None}
        assert chat(client, **other, **nothing, modalities=["text"], reasoning_effort="low").status_code == 200

    def test_developer_messages_and_parts(self, client: httpx.Client, worker: FakeWorker, tokenizer: Any) -> None:
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        chat(client, messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}])
        assert tokenizer.decode(worker.asks[-1].prompt) == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_defaults_are_openais(self, client: httpx.Client, worker: FakeWorker) -> None:
        client.post(TEXT, json={"model": "tiny", "prompt": "x"})
        params = worker.asks[-1].params
        assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (1.0, 1.0, 16, None)


class TestLogprobs:
    def test_of_a_chat(self, client: httpx.Client) -> None:
        choice = chat(client, logprobs=True, top_logprobs=3, ignore_eos=True).json()["choices"][0]
        content = choice["logprobs"]["content"]
        assert len(content) == 8
        for entry in content:
            assert len(entry["top_logprobs"]) == 3 and entry["top_logprobs"][0]["logprob"] == entry["logprob"] < 0
        raw = b"".join(bytes(entry["bytes"]) for entry in content)
        assert raw.decode(errors="replace")[:4] == choice["message"]["content"][:4]

    def test_a_stream_tells_the_same(self, client: httpx.Client) -> None:
        whole = chat(client, logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
        parts = chunks(chat(client, logprobs=True, top_logprobs=1, stream=True))
        told = [part["choices"][0]["logprobs"] for part in parts]
        assert [entry for each in told if each for entry in each["content"]] == whole

    def test_of_a_text(self, client: httpx.Client) -> None:
        told = text(client, logprobs=2, temperature=1, seed=1, ignore_eos=True).json()["choices"][0]["logprobs"]
        assert {len(each) for each in told.values()} == {8}
        for token, value, likeliest in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
            assert likeliest[token] == value and len(likeliest) in (2, 3)
        assert told["text_offset"] == sorted(told["text_offset"])

    def test_none_unless_asked(self, client: httpx.Client) -> None:
        assert chat(client).json()["choices"][0]["logprobs"] is None
        only = chat(client, logprobs=True).json()["choices"][0]["logprobs"]["content"]
        assert all(entry["top_logprobs"] == [] for entry in only)


class TestSteering:
    def test_the_body_says_how_to_draft(self, client: httpx.Client, worker: FakeWorker) -> None:
        steering = {"drafter": "ngram", "budget": 3, "rule": "token", "timeout": 5}
        used = chat(client, temperature=1, foredraft=steering).json()["usage"]["foredraft"]
        ask = worker.asks[-1]
        assert (ask.drafter, ask.draft_tokens, ask.rule, ask.timeout) == ("ngram", 3, "token", 5)
        assert (used["drafter"], used["rule"]) == ("ngram", "token")

    def test_so_do_headers_but_the_body_comes_first(self, client: httpx.Client, worker: FakeWorker) -> None:
        headers = {"X-Foredraft-Drafter": "none", "X-Foredraft-Budget": "off", "X-Foredraft-Rule": "seed-exact"}
        body = {"model": "tiny", "messages": MESSAGES, "foredraft": {"drafter": "ngram"}}
        assert client.post(CHAT, json=body, headers=headers).status_code == 200
        ask = worker.asks[-1]
        assert (ask.drafter, ask.draft_tokens, ask.rule) == ("ngram", 0, "seed-exact")

    def test_chunks_tell_origins_and_trees(self, client: httpx.Client) -> None:
        hello = [{"role": "user", "content": "ha ha ha ha ha ha"}]
        parts = chunks(chat(client, messages=hello, stream=True, max_tokens=40, foredraft={"trace": True}))
        traced = [part["foredraft"] for part in parts if "foredraft" in part]
        rounds = [each["round"] for each in traced if "round" in each]
        assert sum(each["emitted"] for each in rounds) == 40
        assert {token["origin"] for each in traced for token in each["tokens"]} >= {"bonus"}
        for each in rounds:
            tree = each["tree"]
            assert len(tree["tokens"]) == len(tree["ids"]) == len(tree["parents"]) == len(tree["p"]) == each["drafted"]
            assert each["accepted"] == len(tree["path"])
        shown = "".join(token["text"] for each in traced for token in each["tokens"])
        assert shown == "".join(part["choices"][0]["delta"].get("content", "") for part in parts)

    @pytest.mark.parametrize("budget", ["65", "-1", "many", "²"])
    def test_a_header_that_is_no_budget(self, client: httpx.Client, budget: str) -> None:
        body = {"model": "tiny", "messages": MESSAGES}
        headers = httpx.Headers([(b"X-Foredraft-Budget", budget.encode())])
        assert error(client.post(CHAT, json=body, headers=headers)) == (400, "X-Foredraft-Budget", "invalid_value")


WRONG_CHATS: list[tuple[dict[str, Any], int, str, str]] = [
    ({"model": "other"}, 404, "model", "model_not_found"),
    ({"model": 3}, 400, "model", "invalid_value"),
    ({"messages": []}, 400, "messages", "invalid_value"),
    ({"messages": "hello"}, 400, "messages", "invalid_value"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role", "invalid_value"),
    ({"messages": [*MESSAGES, {"role": "user"}]}, 400, "messages[1].content", "missing_required_parameter"),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].tool_call_id", "missing_required_parameter"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        400,
        "messages[0].content",
        "unsupported_parameter",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        400,
        "messages[0].content",
        "unsupported_parameter",
    ),
    ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, 400, "messages[0].colour", "unknown_parameter"),
    ({"temprature": 1}, 400, "temprature", "unknown_parameter"),
    ({"temperature": 2.1}, 400, "temperature", "invalid_value"),
    ({"temperature": "1"}, 400, "temperature", "invalid_value"),
    ({"temperature": True}, 400, "temperature", "invalid_value"),
    ({"temperature": 1e-310}, 400, "temperature", "invalid_value"),
    ({"top_p": 0}, 400, "top_p", "invalid_value"),
    ({"top_k": -2}, 400, "top_k", "invalid_value"),
    ({"min_p": 2}, 400, "min_p", "invalid_value"),
    ({"frequency_penalty": 3}, 400, "frequency_penalty", "invalid_value"),
    ({"presence_penalty": -3}, 400, "presence_penalty", "invalid_value"),
    ({"repetition_penalty": 1e-320}, 400, "repetition_penalty", "invalid_value"),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias", "invalid_value"),
    ({"logit_bias": {"99999": 1}}, 400, "logit_bias", "invalid_value"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, 400, "tools[0].function.name", "invalid_value"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "colour"}}}},
        400,
        "response_format.json_schema.schema",
        "invalid_value",
    ),
    ({"messages": [{"content": "x"}]}, 400, "messages[0].role", "missing_required_parameter"),
    ({"messages": [{"role": "assistant"}]}, 400, "messages[0].content", "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": None}]}, 400, "messages[0].content", "invalid_value"),
    ({"seed": 1.5}, 400, "seed", "invalid_value"),
    ({"seed": 2**64}, 400, "seed", "invalid_value"),
    ({"stop": ["a"] * 5}, 400, "stop", "invalid_value"),
    ({"stop": ""}, 400, "stop", "invalid_value"),
    ({"n": 0}, 400, "n", "invalid_value"),
    ({"n": 17}, 400, "n", "invalid_value"),
    ({"max_tokens": 0}, 400, "max_tokens", "invalid_value"),
    ({"min_tokens": 9}, 400, "min_tokens", "invalid_value"),
    ({"top_logprobs": 2}, 400, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "invalid_value"),
    ({"stream_options": {}}, 400, "stream_options", "invalid_value"),
    ({"response_format": {"type": "xml"}}, 400, "response_format.type", "invalid_value"),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format", "invalid_value"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "sch": {}}}},
        400,
        "response_format.json_schema.sch",
        "unknown_parameter",
    ),
    ({"tool_choice": "required"}, 400, "tool_choice", "invalid_value"),
    ({"tools": [{"type": "function"}]}, 400, "tools[0].function", "missing_required_parameter"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "weather"}}],
            "tool_choice": {"type": "function", "function": {"name": "whether"}},
        },
        400,
        "tool_choice.function.name",
        "invalid_value",
    ),
    (
        {
            "tools": [{"type": "function", "function": {"name": "weather"}}],
            "response_format": {"type": "json_object"},
        },
        400,
        "response_format",
        "unsupported_parameter",
    ),
    ({"functions": []}, 400, "functions", "unsupported_parameter"),
    ({"function_call": "auto"}, 400, "function_call", "unsupported_parameter"),
    ({"audio": {}}, 400, "audio", "unsupported_parameter"),
    ({"modalities": ["text", "audio"]}, 400, "modalities", "invalid_value"),
    ({"foredraft": {"drafter": "magic"}}, 400, "foredraft.drafter", "invalid_value"),
    ({"foredraft": {"budget": 65}}, 400, "foredraft.budget", "invalid_value"),
    ({"foredraft": {"rul": "x"}}, 400, "foredraft.rul", "unknown_parameter"),
    ({"foredraft": {"timeout": 601}}, 400, "foredraft.timeout", "invalid_value"),
    ({"messages": [{"role": "user", "content": "x" * 1100}]}, 400, "messages", "context_length_exceeded"),
]

WRONG_TEXTS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": [[]]}, "prompt", "invalid_value"),
    ({"prompt": {"a": 1}}, "prompt", "invalid_value"),
    ({"prompt": [1, "a"]}, "prompt", "invalid_value"),
    ({"prompt": [99999]}, "prompt", "invalid_value"),
    ({"prompt": [-1]}, "prompt", "invalid_value"),
    ({"prompt": ["a"] * 129}, "prompt", "invalid_value"),
    ({"prompt": "x" * 1100}, "prompt", "context_length_exceeded"),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
    ({"suffix": "x"}, "suffix", "unsupported_parameter"),
    ({"echo": True, "logprobs": 1}, "echo", "unsupported_parameter"),
    ({"logprobs": True}, "logprobs", "invalid_value"),
    ({"messages": MESSAGES}, "messages", "unknown_parameter"),
]


class TestRefusals:
    @pytest.mark.parametrize(("other", "status", "param", "code"), WRONG_CHATS, ids=lambda value: str(value)[:40])
    def test_of_chats(self, client: httpx.Client, other: dict[str, Any], status: int, param: str, code: str) -> None:
        response = chat(client, **other)
        assert error(response) == (status, param, code)

    @pytest.mark.parametrize(("other", "param", "code"), WRONG_TEXTS, ids=lambda value: str(value)[:40])
    def test_of_texts(self, client: httpx.Client, other: dict[str, Any], param: str, code: str) -> None:
        response = text(client, **other)
        assert error(response) == (400, param, code)

    def test_messages_are_for_people(self, client: httpx.Client) -> None:
        said = chat(client, temprature=1).json()["error"]["message"]
        assert said == "temprature is not known here. Did you mean 'temperature'?"
        said = chat(client, temperature=3).json()["error"]["message"]
        assert said == "temperature is 3, but must be less than or equal to 2."

    @pytest.mark.parametrize(
        "raw",
        [
            b"",
            b"{",
            b"3",
            b"null",
            b"[]",
            b'{"model": NaN}',
            b'{"temperature": 1e999}',
            b'{"seed": ' + b"9" * 5000 + b"}",
            b"[" * 9000,
            b'{"a":' * 2000 + b"1" + b"}" * 2000,
            b"\xff\xfe{}",
            b'{"model": "\\ud800"}',
            b'{"metadata": {"\\ud800": 1}}',
        ],
        ids=lambda raw: raw[:12].decode(errors="replace"),
    )
    @pytest.mark.parametrize("path", [CHAT, TEXT])
    def test_what_is_no_json(self, client: httpx.Client, path: str, raw: bytes) -> None:
        assert error(client.post(path, content=raw, headers=JSON))[0] == 400

    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
    def test_another_content_type(self, client: httpx.Client, kind: str) -> None:
        response = client.post(CHAT, content=b"{}", headers={"content-type": kind})
        assert error(response) == (400, None, "invalid_content_type")

    def test_a_body_too_large(self, client: httpx.Client) -> None:
        assert error(client.post(CHAT, content=b" " * 20_001, headers=JSON)) == (413, None, "body_too_large")

        def pieces() -> Iterator[bytes]:
            for _ in range(30):
                yield b" " * 1000

        assert error(client.post(CHAT, content=pieces(), headers=JSON)) == (413, None, "body_too_large")

    def test_other_paths_and_methods(self, client: httpx.Client) -> None:
        assert error(client.get("/v2")) == (404, None, "not_found")
        assert error(client.get(CHAT)) == (405, None, "method_not_allowed")
        assert error(client.get("/v1/models/a/b")) == (404, "model", "model_not_found")

    @pytest.mark.parametrize(
        ("refused", "status", "code", "retry"),
        [
            (QueueFullError("full"), 503, "queue_full", "5"),
            (DrainingError("ending"), 503, "shutting_down", "10"),
            (AskTimeoutError("late"), 504, "timeout", None),
            (WorkerCrashedError("broken"), 500, "worker_crashed", "1"),
            (InvalidInputError("The grammar leaves nothing."), 400, "invalid_value", None),
            (ModelError("secret path"), 500, "internal", None),
            (RuntimeError("secret"), 500, "internal", None),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_of_the_worker(
        self, client: httpx.Client, worker: FakeWorker, refused: Exception, status: int, code: str, retry: str | None
    ) -> None:
        worker.refuse = refused
        response = chat(client)
        assert error(response) == (status, None, code) and response.headers.get("retry-after") == retry
        assert "secret" not in response.text

        worker.refuse, worker.error, worker.fail_after = None, refused, 4
        assert error(chat(client)) == (status, None, code)

        *_, last = chunks(chat(client, stream=True))
        assert last["error"]["code"] == code and "secret" not in json.dumps(last)
        assert chat(client, messages=MESSAGES, max_tokens=1).status_code == 200  # it fails only later

    def test_a_worker_that_loses_an_answer(self, client: httpx.Client, worker: FakeWorker) -> None:
        worker.stall_after = 3
        with client.stream("POST", CHAT, json={"model": "tiny", "messages": MESSAGES, "stream": True}) as response:
            first = next(response.iter_lines())
            assert "assistant" in first
        assert worker.cancelled.wait(10)


class TestClientsThatGoAway:
    @pytest.mark.parametrize("stream", [True, False])
    def test_frees_its_place(self, client: httpx.Client, worker: FakeWorker, stream: bool) -> None:
        worker.stall_after = 0
        body = {"model": "tiny", "messages": MESSAGES, "stream": stream}
        with pytest.raises(httpx.ReadTimeout):
            client.post(CHAT, json=body, timeout=httpx.Timeout(10, read=0.2))
        assert worker.cancelled.wait(10)

    def test_all_prompts_of_a_request(self, client: httpx.Client, worker: FakeWorker) -> None:
        worker.stall_after = 0
        body = {"model": "tiny", "prompt": ["a", "b"]}
        with pytest.raises(httpx.ReadTimeout):
            client.post(TEXT, json=body, timeout=httpx.Timeout(10, read=0.2))
        assert worker.cancelled.wait(10)
        assert len(worker.asks) == 2

    def test_before_the_body_has_come(self, client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "foredraft.serve"):
            with socket.create_connection((client.base_url.host, client.base_url.port or 0)) as connection:
                connection.sendall(HEAD + b"{")
            chat(client)
            while not any(vars(each).get("fields", {}).get("outcome") == "cancelled" for each in caplog.records):
                chat(client)
        assert not any(each.levelno >= logging.ERROR for each in caplog.records)

    def test_a_body_that_does_not_come(self, client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reading, "SLOWEST", 0.05)
        with socket.create_connection((client.base_url.host, client.base_url.port or 0)) as connection:
            connection.sendall(HEAD)
            assert connection.recv(1000).startswith(b"HTTP/1.1 408")

    def test_or_read_nothing_are_dropped(self, model: Model) -> None:
        sent: list[Any] = []

        async def read_nothing(message: Any) -> None:
            sent.append(message)
            if len(sent) > 3:
                await asyncio.Event().wait()

        async def receive() -> Any:
            if not sent:
                body = json.dumps({"model": "tiny", "prompt": "hello", "stream": True, "max_tokens": 50}).encode()
                return {"type": "http.request", "body": body, "more_body": False}
            return await asyncio.Event().wait()

        worker = FakeWorker(model)
        app = create_app(worker, ServerSettings(name="tiny", send_timeout=0.05))
        scope = {"type": "http", "method": "POST", "path": TEXT, "raw_path": TEXT.encode(), "query_string": b""}
        scope |= {"headers": [(b"content-type", b"application/json")], "client": ("::1", 1), "http_version": "1.1"}
        asyncio.run(asyncio.wait_for(app(scope, receive, read_nothing), 60))
        assert worker.cancelled.is_set()
        assert app.state.host.recent.listed()[0]["outcome"] == "slow_reader"


class TestAround:
    def test_models(self, client: httpx.Client) -> None:
        (card,) = client.get("/v1/models").json()["data"]
        assert card == client.get("/v1/models/tiny").json()
        assert card["id"] == "tiny" and card["max_model_len"] == 1024

    def test_health(self, client: httpx.Client, worker: FakeWorker) -> None:
        assert client.get("/health").json() == {"state": "ready"}
        worker.state = "draining"
        response = client.get("/health")
        assert (response.status_code, response.json()) == (503, {"state": "draining"})

    def test_a_worker_that_hangs_is_not_healthy(
        self, client: httpx.Client, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hung = worker.status()._replace(seconds_since_round=100.0)
        monkeypatch.setattr(worker, "status", lambda: hung)
        response = client.get("/health")
        assert (response.status_code, response.json()) == (503, {"state": "stuck"})

    def test_metrics_version_and_page(self, client: httpx.Client) -> None:
        metrics = client.get("/metrics", headers={"accept": "text/plain"})
        assert (metrics.text, metrics.headers["content-type"]) == ("up 1\n", "text/plain")
        assert client.get("/version").json()["version"]
        page = client.get("/")
        assert page.text == "<p>here</p>" and page.headers["content-security-policy"] == "default-src 'none'"

    def test_status_tells_the_last_requests_and_no_text(self, client: httpx.Client) -> None:
        chat(client, messages=[{"role": "user", "content": "confidential"}])
        chat(client, temperature=9)
        response = client.get("/foredraft/status")
        told = response.json()
        assert (told["model"], told["default_drafter"]) == ("tiny", "ngram")
        assert told["drafters"] == ["ngram", "none"] and told["plain_tokens_per_second"] == 10
        assert told["status"]["state"] == "ready" and told["limits"]["sequences"] == 16
        wrong, good = told["recent"][:2]
        assert (wrong["outcome"], wrong["drafter"]) == ("invalid_value", None)
        assert good["endpoint"] == CHAT and good["completion_tokens"] <= 8 and good["outcome"] in ("stop", "length")
        assert "confidential" not in response.text
        for _ in range(50):
            chat(client, temperature=9)
        assert len(client.get("/foredraft/status").json()["recent"]) == 50

    def test_request_ids(self, client: httpx.Client) -> None:
        sane = client.get("/health", headers={"X-Request-Id": "abc-1.2:3"})
        assert sane.headers["x-request-id"] == "abc-1.2:3"
        odd = client.get("/health", headers={"X-Request-Id": "a b" * 100})
        assert odd.headers["x-request-id"].startswith("req-")

    def test_one_line_for_each_request(self, client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "foredraft.serve"):
            chat(client, messages=[{"role": "user", "content": "written down"}])
            while not (found := [each for each in caplog.records if each.message == "request"]):
                time.sleep(0.01)  # it is written when the client has its answer already
        (record,) = found
        fields = vars(record)["fields"]
        assert fields["endpoint"] == CHAT and fields["status"] == 200 and fields["drafter"] == "ngram"
        assert "written down" in fields["prompt"][0]  # this server was told to log prompts

    def test_no_cross_origin_by_default(self, client: httpx.Client) -> None:
        response = client.get("/health", headers={"Origin": "https://example.org"})
        assert "access-control-allow-origin" not in response.headers


@pytest.fixture(scope="module")
def guarded_worker(model: Model) -> FakeWorker:
    return FakeWorker(model)


@pytest.fixture(scope="module")
def guarded(guarded_worker: FakeWorker) -> Iterator[httpx.Client]:
    settings = ServerSettings(
        name="tiny", api_keys=("first", "second"), cors_origins=("https://example.org",), max_tokens=4
    )
    app = create_app(guarded_worker, settings, metrics=lambda _: (b"", "text/plain"), page=Page("", ""))
    with serving(app) as url, httpx.Client(base_url=url) as client:
        yield client


class TestGuards:
    @pytest.mark.parametrize(
        "sent", [None, "", "Bearer", "Bearer third", "Basic first", "first", "Bearer first second"]
    )
    @pytest.mark.parametrize("path", [CHAT, "/metrics", "/v1/models", "/foredraft/status", "/nowhere", "/openapi.json"])
    def test_who_has_no_key_stays_out(self, guarded: httpx.Client, path: str, sent: str | None) -> None:
        response = guarded.get(path, headers={} if sent is None else {"Authorization": sent})
        assert error(response) == (401, None, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"

    @pytest.mark.parametrize("path", ["/", "/health"])
    def test_two_paths_are_open(self, guarded: httpx.Client, path: str) -> None:
        assert guarded.get(path).status_code == 200

    @pytest.mark.parametrize(("key", "number"), [("first", 0), ("second", 1)])
    def test_each_key_is_a_user(self, guarded: httpx.Client, guarded_worker: FakeWorker, key: str, number: int) -> None:
        body = {"model": "tiny", "prompt": "x", "user": "someone else"}
        assert guarded.post(TEXT, json=body, headers={"Authorization": f"Bearer {key}"}).status_code == 200
        assert guarded_worker.asks[-1].user == f"key {number}"

    def test_pages_of_one_origin_may_ask(self, guarded: httpx.Client) -> None:
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        good = guarded.options(CHAT, headers={"Origin": "https://example.org", **asked})
        assert good.headers["access-control-allow-origin"] == "https://example.org"
        bad = guarded.options(CHAT, headers={"Origin": "https://example.com", **asked})
        assert "access-control-allow-origin" not in bad.headers
        refused = guarded.get("/v1/models", headers={"Origin": "https://example.org"})
        assert refused.headers["access-control-allow-origin"] == "https://example.org"  # so that pages can read the 401


def test_users_without_keys_are_named_or_known_by_address(client: httpx.Client, worker: FakeWorker) -> None:
    text(client, user="me")
    text(client)
    assert [ask.user for ask in worker.asks] == ["me", "127.0.0.1"]
