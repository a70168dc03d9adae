"""Any server with OpenAI's API: timed at the client, from sending the request to the last streamed token."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foredraft.bench.peers.base import Peer, PeerError, PeerOptions, PeerRequest
from foredraft.bench.peers.prometheus import Acceptance, acceptance, from_timings, generated, parse_metrics
from foredraft.bench.peers.sse import Server
from foredraft.bench.records import Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNKNOWN = -1
"""Stands for a token whose id the server did not tell and the text does not give."""

_QUICK = 10.0  # seconds for what a server answers at once
_SETTLING = 20  # looks at the counters, until they have the whole answer
_BETWEEN = 0.05  # seconds
_NEUTRAL: Mapping[str, Mapping[str, Any]] = {
    "vllm": {"return_token_ids": True, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    "sglang": {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    "llamacpp": {"top_k": 0, "min_p": 0.0, "cache_prompt": False},
    "foredraft": {"return_token_ids": True},
}
"""By what `/v1/models` says the server is: settings without which it samples by the model's or its own defaults, keeps
prompts from before, or does not tell token ids. Other servers may refuse what OpenAI's API does not have."""


@dataclass(frozen=True)
class Known:
    """A server, the model to ask for, and what it must be told beyond OpenAI's API."""

    server: Server
    model: str
    kind: str


@dataclass
class _Received:
    """What came of one answer so far. Times by `perf_counter`; zero is: not yet."""

    started: float
    first: float = 0.0
    last: float = 0.0
    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    timings: Mapping[str, Any] | None = None

    def take(self, event: Mapping[str, Any]) -> None:
        """One event of the stream, which came just now."""
        now = time.perf_counter()
        self.usage = event.get("usage") or self.usage
        self.timings = event.get("timings") or self.timings
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            piece = thought + (delta.get("content") or choice.get("text") or "")
            ids = choice.get("token_ids") or ()
            self.text += piece
            self.ids += ids
            self.finish = choice.get("finish_reason") or self.finish
            if piece or ids or choice.get("finish_reason"):
                self.last = now
                self.first = self.first or now


class UrlPeer(Peer):
    """A server that somebody started. It drafts as it was told there: a request's `drafter` is the server's URL.

    Token ids are exact where the server tells them (vLLM, foredraft). Else the text is tokenised anew, by `tokenizer`,
    the target's; then the number of tokens is still the server's, if it tells it: what is missing is `UNKNOWN`. The
    acceptance is what its `/metrics` counted meanwhile, so nobody else may use it. A server that keeps prompts from
    before reads them faster when they come again: vLLM and llama.cpp's are told not to, others are to be started so.
    """

    name = "url"
    drafters = ("URL",)

    def __init__(self, options: PeerOptions, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        super().__init__(options)
        self._tokenizer: Any = tokenizer
        self._known: dict[str, Known] = {}
        self.acceptance = Acceptance()
        """Of the last answer, by position too."""

    def answer(self, request: PeerRequest) -> Turn:
        """See `Peer`. `prompt_tokens` are those that the server counted."""
        if request.draft_tokens is not None:
            raise PeerError("A server drafts as many tokens as it was started with: name none behind the URL.")
        known = self.known(request.drafter)
        path, body = self._body(known, request)
        before = self._metrics(known.server)
        received = _Received(time.perf_counter())
        for event in known.server.stream(path, body, self.options.timeout):
            try:
                received.take(event)
            except (AttributeError, TypeError) as error:
                raise PeerError(f"{known.server.url} sent an event that is not of OpenAI's form: {event}.") from error
        if received.finish is None:
            raise PeerError(f"{known.server.url} ended its answer without a reason for the end: it broke off.")
        ids = self._ids(received)
        self.acceptance = self._acceptance(known.server, before, received, len(ids))
        counts = self.acceptance
        return Turn(
            prompt_tokens=int(received.usage.get("prompt_tokens") or len(request.ids)),
            ids=ids,
            text=received.text,
            ttft=received.first - received.started,
            seconds=received.last - received.started,
            target_forwards=counts.target_forwards,
            draft_forwards=counts.draft_forwards,
            drafted=counts.drafted,
            accepted=counts.accepted,
        )

    def conditions(self) -> dict[str, str]:
        """See `Peer`: the servers asked so far."""
        return {url: f"{known.kind or 'unknown server'}, model {known.model}" for url, known in self._known.items()}

    def known(self, url: str) -> Known:
        """What a server is, and which model it has; it is asked once.

        Raises:
            PeerError: It cannot be reached, or lists no such model.
        """
        return self._known.get(url) or self._look(url)

    def _look(self, url: str) -> Known:
        server = Server(url, self.options.api_key)
        page = server.get(f"{server.base}/models", _QUICK)
        try:
            models = [(str(model["id"]), str(model.get("owned_by") or "")) for model in json.loads(page)["data"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PeerError(f"{url}/models lists no models: is it the URL of OpenAI's API, ending in /v1?") from error
        if not models or not any(server.model in ("", name) for name, _ in models):
            listed = ", ".join(name for name, _ in models) or "none"
            raise PeerError(f"{url} does not serve the model '{server.model}'. It serves: {listed}.")
        model, kind = next(found for found in models if server.model in ("", found[0]))
        self._known[url] = Known(server, model, kind if kind in _NEUTRAL else "")
        return self._known[url]

    def _body(self, known: Known, request: PeerRequest) -> tuple[str, dict[str, Any]]:
        """Path and body of a request: chat messages if there are any, else a text to go on with.

        That is the token ids themselves if the server is known to take them, or the text cannot be had from them.
        """
        body = {
            "model": known.model,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": 1.0,
            "seed": request.seed % 2**31,
            "stream": True,
            "stream_options": {"include_usage": True},
            **_NEUTRAL.get(known.kind, {}),
        }
        if known.kind == "vllm":
            body["cache_salt"] = secrets.token_hex(16)  # prompts from before are of no use to it then
        if request.messages:
            messages = [dict(message) for message in request.messages]
            return f"{known.server.base}/chat/completions", body | {"messages": messages}
        prompt: Any = list(request.ids)
        if self._tokenizer is not None and not known.kind:
            prompt = self._tokenizer.decode(prompt, skip_special_tokens=True)  # it adds those that begin a text
        return f"{known.server.base}/completions", body | {"prompt": prompt}

    def _ids(self, received: _Received) -> tuple[int, ...]:
        """Ids of an answer, as many as it had tokens; the one that ended it has no text."""
        if received.ids:
            return tuple(received.ids)
        count = received.usage.get("completion_tokens")
        if count is None and self._tokenizer is None:
            raise PeerError(
                "It does not tell how many tokens its answer has: give the target's tokenizer to count them."
            )
        ids: list[int] = []
        if self._tokenizer is not None:
            ids += self._tokenizer.encode(received.text, add_special_tokens=False)
            if received.finish == "stop" and self._tokenizer.eos_token_id is not None:
                ids.append(int(self._tokenizer.eos_token_id))
        if not (ids if count is None else count):
            raise PeerError("Its answer has no token.")
        return tuple(ids if count is None else [*ids[:count], *[UNKNOWN] * (count - len(ids))])

    def _metrics(self, server: Server) -> dict[str, float]:
        """What it counts; nothing, if it does not tell."""
        try:
            return parse_metrics(server.get(f"{server.base.removesuffix('/v1')}/metrics", _QUICK))
        except PeerError:
            return {}

    def _acceptance(self, server: Server, before: Mapping[str, float], received: _Received, tokens: int) -> Acceptance:
        """Counts of the answer; servers may count it a moment after they sent it."""
        if received.timings is not None:
            return from_timings(received.timings, tokens)
        after = self._metrics(server) if before else {}
        for _ in range(_SETTLING):
            seen = generated(before, after)
            if seen is None or seen >= tokens:
                break
            time.sleep(_BETWEEN)
            after = self._metrics(server)
        return acceptance(before, after, tokens)
