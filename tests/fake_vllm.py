"""A stand-in for vLLM's server: its routes, its metrics and its errors, with answers that are made up.

    python fake_vllm.py serve MODEL --port N …

`--fake-die-after N` ends it in the middle of the N-th answer, `--fake-never-ready` before it answers at all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

WORDS = ("one ", "two ", "three ", "four ", "five ", "six ", "seven ", "eight ")
DRAFTED, ACCEPTED = 6, 3  # of each answer
METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="m"}} 0.0
# HELP vllm:kv_cache_usage_perc KV-cache usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.25
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{engine="0",model_name="m"}} {prompt}.0
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="m"}} {generated}.0
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {drafted}.0
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {accepted}.0
# HELP vllm:time_to_first_token_seconds Histogram of time to first token in seconds.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.1",model_name="m"}} {answers}.0
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf",model_name="m"}} {answers}.0
vllm:time_to_first_token_seconds_count{{engine="0",model_name="m"}} {answers}.0
vllm:time_to_first_token_seconds_sum{{engine="0",model_name="m"}} 0.5
"""


class Fake:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.answers = self.running = 0
        self.bodies: list[dict[str, Any]] = []
        self.cancelled = 0

    async def health(self, request: Request) -> Response:
        return Response(status_code=503 if self.options.fake_never_ready else 200)

    async def models(self, request: Request) -> Response:
        name = self.options.served_model_name or self.options.model
        return JSONResponse({"data": [{"id": name, "owned_by": "vllm", "max_model_len": 512}]})

    async def metrics(self, request: Request) -> Response:
        n = self.answers
        told = {"running": self.running, "prompt": 3 * n, "generated": len(WORDS) * n, "answers": n}
        return PlainTextResponse(METRICS.format(**told, drafted=DRAFTED * n, accepted=ACCEPTED * n))

    async def seen(self, request: Request) -> Response:
        """For tests: what was asked, and with what it was started."""
        told = {"bodies": self.bodies, "cancelled": self.cancelled, "argv": sys.argv[1:], "pid": os.getpid()}
        return JSONResponse(told)

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        text = json.dumps(body.get("messages") or body.get("prompt"))
        if "too long" in text:
            message = "This model's maximum context length is 512 tokens. Please reduce the length of the prompt."
            return JSONResponse({"error": {"message": message, "type": "BadRequestError", "code": 400}}, 400)
        if "break" in text:
            return JSONResponse({"error": {"message": "EngineCore died", "code": 500}}, 500)
        if self.options.fake_die_after is not None and len(self.bodies) == self.options.fake_die_after:
            asyncio.get_running_loop().call_later(0.05, os._exit, 3)
            await asyncio.sleep(30)
        chat = "messages" in body
        if body.get("stream"):
            return StreamingResponse(self.stream(body, chat, slow="slowly" in text), media_type="text/event-stream")
        if "slowly" in text:
            await asyncio.sleep(30)
        self.answers += 1
        said: dict[str, Any] = (
            {"message": {"role": "assistant", "content": "".join(WORDS)}} if chat else {"text": "".join(WORDS)}
        )
        choices = [{"index": i, "finish_reason": "stop", **said} for i in range(body.get("n") or 1)]
        metrics = self.figures() if len(choices) == 1 else None
        return JSONResponse(
            {**self.head(chat), "choices": choices, "usage": self.usage(len(choices)), "metrics": metrics}
        )

    async def stream(self, body: dict[str, Any], chat: bool, slow: bool) -> AsyncIterator[str]:
        self.running += 1
        try:
            for number, word in enumerate(WORDS):
                last = number == len(WORDS) - 1
                said: dict[str, Any] = {"delta": {"content": word}} if chat else {"text": word}
                choice = {"index": 0, "finish_reason": "stop" if last else None, **said}
                yield f"data: {json.dumps({**self.head(chat), 'choices': [choice]})}\n\n"
                if slow and number == 1:
                    await asyncio.sleep(30)
            self.answers += 1
            end = {**self.head(chat), "choices": [], "usage": self.usage(1), "metrics": self.figures()}
            yield f"data: {json.dumps(end)}\n\n"
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    def head(self, chat: bool) -> dict[str, Any]:
        return {"id": "x", "object": "chat.completion" if chat else "text_completion", "created": 1, "model": "m"}

    def usage(self, n: int) -> dict[str, Any]:
        tokens = n * len(WORDS)
        cached = {"cached_tokens": 2}
        return {
            "prompt_tokens": 3,
            "completion_tokens": tokens,
            "total_tokens": 3 + tokens,
            "prompt_tokens_details": cached,
        }

    def figures(self) -> dict[str, Any]:
        speculation = {"num_draft_tokens": DRAFTED, "num_accepted_draft_tokens": ACCEPTED, "num_spec_steps": 5}
        told = speculation if self.options.speculative_config else None
        return {"time_to_first_token_ms": 5.0, "queue_time_ms": 1.5, "speculative_decoding": told}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("model")
    for name in ("--host", "--served-model-name", "--speculative-config", "--per-request-spec-decode-metrics"):
        parser.add_argument(name)
    parser.add_argument("--port", type=int)
    parser.add_argument("--fake-die-after", type=int)
    for name in ("--enable-per-request-metrics", "--enable-prompt-tokens-details", "--fake-never-ready"):
        parser.add_argument(name, action="store_true")
    options = parser.parse_args()
    fake = Fake(options)
    routes = [
        Route("/health", fake.health),
        Route("/v1/models", fake.models),
        Route("/metrics", fake.metrics),
        Route("/seen", fake.seen),
        Route("/v1/chat/completions", fake.answer, methods=["POST"]),
        Route("/v1/completions", fake.answer, methods=["POST"]),
    ]
    uvicorn.run(Starlette(routes=routes), host=options.host, port=options.port, log_level="error")


if __name__ == "__main__":
    main()
