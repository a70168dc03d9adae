"""Bodies that are wrong in every way: each is answered, soon, and never with a 5xx."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from foredraft.api import Model
from foredraft.backends.transformers import TransformersBackend
from foredraft.proposers.ngram import NGram
from foredraft.serve.app import create_app
from foredraft.serve.settings import ServerSettings
from foredraft.serve.wire import ChatRequest, CompletionRequest
from serve_fakes import FakeWorker, serving

PATHS: dict[str, Any] = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/completions": {"model": "tiny", "prompt": "x", "max_tokens": 2},
}
QUICK = settings(
    max_examples=150,
    phases=[Phase.generate],  # nothing to make smaller: a failure shows its body
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def client(text_target: TransformersBackend, tokenizer: Any) -> Iterator[httpx.Client]:
    worker = FakeWorker(Model(text_target, tokenizer, NGram()))
    app = create_app(worker, ServerSettings(name="tiny", max_tokens=2, max_body=50_000))
    with serving(app) as url, httpx.Client(base_url=url, timeout=20) as client:
        yield client


def check(client: httpx.Client, path: str, raw: bytes) -> None:
    response = client.post(path, content=raw, headers={"content-type": "application/json"})
    assert response.status_code < 500, (raw, response.text)
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", PATHS)
@QUICK
@given(data=st.data())
def test_one_field_is_anything(client: httpx.Client, path: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*PATHS[path].model_fields, "nonsense"]))
    body = {**GOOD[path], name: data.draw(anything)}
    if body.get("max_tokens") is None or body.get("max_completion_tokens"):
        body["max_tokens"] = 2
    check(client, path, json.dumps(body).encode())


@pytest.mark.parametrize("path", PATHS)
@QUICK
@given(data=st.data())
def test_bytes_are_wrong(client: httpx.Client, path: str, data: st.DataObject) -> None:
    raw = bytearray(json.dumps(GOOD[path]).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        raw = raw or bytearray(b" ")
    check(client, path, bytes(raw))


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("path", PATHS)
def test_what_the_document_describes(client: httpx.Client, path: str, mode: GenerationMode) -> None:
    schema: Any = schemathesis.openapi.from_dict(client.get("/openapi.json").json())

    @settings(parent=QUICK, max_examples=60)
    @given(case=schema[path]["POST"].as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        body = case.body
        if isinstance(body, dict):
            body = {**body, **({"model": "tiny"} if isinstance(body.get("model"), str) else {})}
        check(client, path, json.dumps(body, default=str).encode())

    send()
