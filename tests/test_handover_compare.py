"""`foredraft verify --url`: equal answers pass, wrong ones fail, and what a server's arithmetic explains is told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse

from foredraft.api import Model
from foredraft.backends.transformers import TransformersBackend
from foredraft.bench.peers.base import PeerError
from foredraft.cli import main
from foredraft.errors import InvalidInputError
from foredraft.handover.compare import verify_served
from foredraft.proof import certificate as files
from foredraft.proposers.ngram import NGram
from foredraft.serve.app import create_app
from foredraft.serve.settings import ServerSettings
from foredraft.types import SamplingParams
from serve_fakes import FakeWorker, serving
from tiny import tiny_llama

PROMPTS = ("hello there hello there", "in the hell in the hell")
TOKENS = 12


@pytest.fixture(scope="module")
def model(text_target: TransformersBackend, tokenizer: Any) -> Model:
    return Model(text_target, tokenizer, NGram())


def app_of(model: Model) -> FastAPI:
    return create_app(FakeWorker(model), ServerSettings(name="tiny"))


def test_a_server_of_the_same_model_passes(model: Model, tmp_path: Path) -> None:
    with serving(app_of(model)) as url:
        result = verify_served(model, f"{url}/v1", drafting=model, prompts=PROMPTS, max_tokens=TOKENS)
    (equality,) = result.equality
    tokens = sum(len(model.plain().generate(each, SamplingParams(max_tokens=TOKENS)).ids) for each in PROMPTS)
    assert result.passed and not equality.differences and (equality.prompts, equality.tokens) == (2, tokens)
    assert result.server is not None and result.server["kind"] == "foredraft, model tiny"
    figures = result.server["figures"]
    assert figures["there"]["tokens"] == tokens and figures["there"]["tokens/s"] > 0
    assert figures["there"]["acceptance rate"] is None  # this server counts nothing
    assert figures["predicted"]["mean accepted length"] >= 1
    record, page = files.write(result, tmp_path)
    assert json.loads(record.read_text())["server"]["url"] == f"{url}/v1"
    assert f"{url}/v1" in page.read_text() and "Enumerated laws" not in page.read_text()


def test_a_server_of_another_model_fails(model: Model, tokenizer: Any) -> None:
    other = Model(TransformersBackend(tiny_llama(seed=9, vocabulary=len(tokenizer))), tokenizer, None)
    with serving(app_of(other)) as url:
        result = verify_served(model, f"{url}/v1", prompts=PROMPTS, max_tokens=TOKENS)
    assert not result.passed and result.equality[0].defects


def stub(model: Model, wrong: int, position: int, scores: dict[int, float] | None) -> FastAPI:
    """Says what plain decoding says but for one token, and has scores of its own when asked for a single one."""
    app = FastAPI()

    @app.get("/v1/models")
    def models() -> JSONResponse:
        return JSONResponse({"data": [{"id": "tiny", "owned_by": "vllm"}]})

    @app.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        body = await request.json()
        ids = list(model.plain().generate(body["prompt"], SamplingParams(max_tokens=body["max_tokens"])).ids)
        choice: dict[str, Any] = {"index": 0, "text": "x", "finish_reason": "length"}
        if body.get("logprobs"):
            told = {f"token_id:{token}": score for token, score in (scores or {}).items()}
            choice["logprobs"] = {"top_logprobs": [told] if scores is not None else None}
        else:
            choice["token_ids"] = [*ids[:position], wrong, *ids[position + 1 :]]
        lines = [f"data: {json.dumps({'choices': [choice]})}\n\n", "data: [DONE]\n\n"]
        return StreamingResponse(iter(lines), media_type="text/event-stream")

    return app


@pytest.mark.parametrize("shift", [0.0, 5.0, None])
def test_a_servers_own_scores_may_explain_a_difference(model: Model, shift: float | None) -> None:
    """A server whose scores are far off from ours, and close to each other, wrote another token by its arithmetic."""
    prompt, position = model.encode(PROMPTS[0]), 3
    plain = model.plain().generate(prompt, SamplingParams(max_tokens=TOKENS, logprobs=2))
    assert plain.logprobs is not None
    best, second = sorted(plain.logprobs[position].items(), key=lambda each: -each[1])[:2]
    scores = None if shift is None else {best[0]: best[1] - shift, second[0]: best[1] - shift + 0.01 * bool(shift)}
    if shift == 0.0:
        scores = dict((best, second))  # the same as ours: nothing explains that it wrote the other one
    with serving(stub(model, second[0], position, scores)) as url:
        result = verify_served(model, f"{url}/v1", prompts=PROMPTS[:1], max_tokens=TOKENS)
    (found,) = result.equality[0].differences
    assert (found.position, found.plain_token, found.other_token) == (position, best[0], second[0])
    assert found.verdict == ("near-tie" if shift else "defect")


def test_what_cannot_be_compared(model: Model) -> None:
    with pytest.raises(InvalidInputError, match="no prompt to compare"):
        verify_served(model, "http://127.0.0.1:1/v1", prompts=())
    with pytest.raises(PeerError, match="cannot be reached"):
        verify_served(model, "http://127.0.0.1:1/v1", prompts=PROMPTS)


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def test_the_command_line_compares(
    model: Model, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    options = ("--prompts", tmp_path / "prompts.txt", "--max-tokens", 8, "--backend", "transformers")
    with serving(app_of(model)) as url:
        asked = ("verify", tiny_folder, "--url", f"{url}/v1", *options)
        assert run(*asked, "--drafter", "ngram", "--out", tmp_path / "out") == 0
        said = capsys.readouterr().out
        assert re.search(r"acceptance rate\s", said) and f"passed: the answers of {url}/v1" in said
        assert (tmp_path / "out" / "certificate.html").is_file()
        assert run(*asked, "--break", "list-nothing") == 2
        assert "leave --url or --break out" in capsys.readouterr().err
