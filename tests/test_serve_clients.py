"""A contract with clients as they are: OpenAI's own and LangChain's, against the server with its real worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from foredraft.loading import EngineChoice, Loader
from foredraft.serve.app import create_app
from foredraft.serve.asks import Limits
from foredraft.serve.methods import Methods
from foredraft.serve.settings import ServerSettings
from foredraft.serve.worker import Worker
from serve_fakes import serving

HELLO: Any = [{"role": "user", "content": "hello there"}]
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "old": {"type": "boolean"}},
    "required": ["size", "old"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "Look out.", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def url(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    loader = Loader(tmp_path_factory.mktemp("cache"), EngineChoice(backend="transformers", device="cpu"))
    methods = Methods(loader, str(tiny_folder), default="suffix", others=("ngram",))
    worker = Worker(methods, Limits(sequences=4))
    worker.start()
    with serving(create_app(worker, ServerSettings(name="tiny", api_keys=("key",)))) as address:
        yield f"{address}/v1"
    worker.close()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="key", max_retries=0, timeout=60) as client:
        yield client


def chat(client: openai.OpenAI, **other: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "tiny", "messages": HELLO, "max_completion_tokens": 12, "temperature": 0, **other}
    )


class TestOpenAI:
    def test_chat(self, client: openai.OpenAI) -> None:
        found = chat(client)
        assert found.object == "chat.completion" and found.choices[0].message.role == "assistant"
        assert found.choices[0].finish_reason in ("stop", "length")
        assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
        assert found.usage.foredraft["drafter"] == "suffix"
        assert chat(client).choices == found.choices

    def test_a_stream_and_its_usage(self, client: openai.OpenAI) -> None:
        whole = chat(client, extra_body={"ignore_eos": True})
        extra = {"ignore_eos": True, "foredraft": {"drafter": "none"}}
        *parts, last = chat(client, stream=True, stream_options={"include_usage": True}, extra_body=extra)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
        assert parts[-1].choices[0].finish_reason == "length"
        assert last.choices == [] and last.usage.completion_tokens == 12
        assert last.usage.foredraft["mean_accepted_length"] == 1

    def test_several_answers(self, client: openai.OpenAI) -> None:
        found = chat(client, n=2, temperature=1, seed=7)
        one, two = (choice.message.content for choice in found.choices)
        assert one != two
        texts = ["", ""]
        for part in chat(client, n=2, temperature=1, seed=7, stream=True):
            for choice in part.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [one, two]

    def test_logprobs(self, client: openai.OpenAI) -> None:
        content = chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
        assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content)
        old = client.completions.create(model="tiny", prompt="hello", logprobs=1, max_tokens=3, temperature=0)
        logprobs = old.choices[0].logprobs
        assert logprobs is not None and len(logprobs.token_logprobs or ()) == len(logprobs.tokens or ()) <= 3

    def test_completions(self, client: openai.OpenAI) -> None:
        found = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=5, echo=True)
        assert [choice.text[0] for choice in found.choices] == ["a", "b"]
        stream = client.completions.create(model="tiny", prompt="a", max_tokens=5, stream=True, echo=True)
        assert "".join(part.choices[0].text for part in stream).startswith("a")

    def test_json_that_fits_a_schema(self, client: openai.OpenAI) -> None:
        form: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
        for temperature in (0, 1):
            said = chat(client, response_format=form, temperature=temperature, seed=3, max_completion_tokens=80)
            thing = json.loads(said.choices[0].message.content)
            assert said.choices[0].finish_reason == "stop"
            assert set(thing) == {"size", "old"} and thing["size"] in ("small", "large")

    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
    def test_tools(self, client: openai.OpenAI, choice: Any) -> None:
        asked: Any = {"tools": [WEATHER], "tool_choice": choice, "max_completion_tokens": 200, "seed": 1}
        found = chat(client, **asked, parallel_tool_calls=False).choices[0]
        (call,) = found.message.tool_calls
        assert found.finish_reason == "tool_calls" and found.message.content is None
        assert call.function.name == "weather" and set(json.loads(call.function.arguments)) == {"size", "old"}
        pieces, names = "", []
        for part in chat(client, **asked, parallel_tool_calls=False, stream=True):
            for delta in part.choices[0].delta.tool_calls or ():
                pieces += delta.function.arguments or ""
                names += [delta.function.name] if delta.function.name else []
        assert (names, pieces) == (["weather"], call.function.arguments)
        history = [*HELLO, found.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "wet"}]
        assert chat(client, messages=history, tools=[WEATHER], tool_choice="none").choices[0].message.tool_calls is None
        assert chat(client, messages=history).choices

    def test_errors(self, client: openai.OpenAI, url: str) -> None:
        with pytest.raises(openai.NotFoundError) as found:
            chat(client, model="gpt-4o")
        assert (found.value.code, found.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError, match="temperature is 9, but must be less than or equal to 2"):
            chat(client, temperature=9)
        with pytest.raises(openai.BadRequestError, match="This server has no drafter 'magic'; it has suffix, none"):
            chat(client, extra_body={"foredraft": {"drafter": "magic"}})
        with pytest.raises(openai.BadRequestError, match="context is 1024"):
            chat(client, messages=[{"role": "user", "content": "x" * 1100}])
        with (
            openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as stranger,
            pytest.raises(openai.AuthenticationError, match="needs an API key"),
        ):
            stranger.models.list()

    def test_models(self, client: openai.OpenAI) -> None:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").owned_by == "foredraft"

    def test_raw_headers(self, client: openai.OpenAI) -> None:
        raw = client.chat.completions.with_raw_response.create(
            model="tiny",
            messages=HELLO,
            max_tokens=2,
            extra_headers={"X-Request-Id": "mine", "X-Foredraft-Drafter": "none"},
        )
        assert raw.headers["x-request-id"] == "mine"
        usage: Any = raw.parse().usage
        assert usage.foredraft["drafter"] == "none"


class TestLangChain:
    @pytest.fixture
    def model(self, url: str) -> ChatOpenAI:
        settings: Any = {"base_url": url, "api_key": "key", "model": "tiny", "temperature": 0, "max_retries": 0}
        return ChatOpenAI(**settings, max_completion_tokens=100, seed=1)

    def test_invoke_and_stream(self, model: ChatOpenAI) -> None:
        said = model.invoke("hello there")
        assert said.usage_metadata is not None and said.usage_metadata["output_tokens"] > 0
        assert "".join(str(part.content) for part in model.stream("hello there")) == said.content

    def test_tools(self, model: ChatOpenAI) -> None:
        said: Any = model.bind_tools([WEATHER], tool_choice="weather").invoke("hello there")
        (call,) = said.tool_calls
        assert call["name"] == "weather" and set(call["args"]) == {"size", "old"}
        answer = ToolMessage("wet", tool_call_id=call["id"])
        assert model.invoke([HumanMessage("hello there"), said, answer]).content is not None

    def test_structured_output(self, model: ChatOpenAI) -> None:
        thing: Any = model.with_structured_output({"title": "thing", **SCHEMA}, method="json_schema").invoke("hello")
        assert thing["size"] in ("small", "large")
