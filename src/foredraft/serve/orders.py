"""From a checked body to what the worker is asked, and how its answers are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from foredraft.errors import InvalidInputError
from foredraft.loading import stop_tokens
from foredraft.serve.asks import Ask, Grammar
from foredraft.serve.conversation import rendered, tool_calls
from foredraft.serve.interfaces import Worker
from foredraft.serve.problems import bad, no_such_model
from foredraft.serve.settings import ServerSettings
from foredraft.serve.wire import (
    ChatRequest,
    CompletionRequest,
    Sampling,
    Steering,
)
from foredraft.types import SamplingParams

if TYPE_CHECKING:
    from foredraft.serve.grammar import Grammars
    from foredraft.serve.tools import ToolCalls

SEEDS = 2**63 - 128
"""OpenAI allows negative ones; answer i has seed + i, which must fit too."""
_MOST_CHOICES = 128
_HEADERS = {
    "drafter": "x-foredraft-drafter",
    "budget": "x-foredraft-budget",
    "rule": "x-foredraft-rule",
}


@dataclass(frozen=True, kw_only=True)
class Order:
    """A request as it is carried out.

    Args:
        asks: One for each prompt.
        stream: Whether it is answered in chunks.
        include_usage: Whether the last chunk tells the figures.
        trace: Whether chunks tell origins and drafts.
        logprobs: How many likeliest tokens are told for each token; `None` for no log-probabilities at all.
        token_ids: Whether choices tell the ids of their tokens.
        tools: What may be called.
        echo: Texts that stand before the answers, one for each prompt.
        shown: Prompts as text, for the log.
    """

    asks: tuple[Ask, ...]
    stream: bool
    include_usage: bool
    trace: bool
    logprobs: int | None
    token_ids: bool = False
    tools: ToolCalls | None = None
    echo: tuple[str, ...] | None = None
    shown: tuple[str, ...] = ()

    @property
    def n(self) -> int:
        """Answers to each prompt."""
        return self.asks[0].n

    @property
    def choices(self) -> int:
        """Answers to all prompts."""
        return self.n * len(self.asks)


class OrderDesk:
    """Takes orders for one model. Its methods may be called from several threads; encoding and grammars take time."""

    def __init__(self, worker: Worker, settings: ServerSettings) -> None:
        self._worker, self._settings = worker, settings
        self._model = worker.model

    @cached_property
    def stop_tokens(self) -> frozenset[int]:
        """The ids that end an answer."""
        return stop_tokens(self._model.backend, self._model.tokenizer)

    @cached_property
    def grammars(self) -> Grammars:
        """Made when the first request needs one: importing the library takes a moment."""
        from foredraft.serve.grammar import Grammars

        return Grammars(self._model.tokenizer, self._model.backend.vocab_size, self.stop_tokens)

    def chat(self, body: ChatRequest, headers: Mapping[str, str], user: str) -> Order:
        """The order of a chat request.

        Raises:
            ApiError: It cannot be carried out here.
            InvalidInputError: A setting, schema or tool is not right.
        """
        self._check_common(body)
        if body.top_logprobs is not None and not body.logprobs:
            raise bad("top_logprobs", "top_logprobs needs logprobs to be true.")
        tools = tool_calls(body)
        text = rendered(self._model.tokenizer, body.messages, tools)
        prompt = [int(i) for i in self._model.tokenizer(text, add_special_tokens=False)["input_ids"]]
        steering = steered(body.foredraft, headers)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = self._params(
            body, logprobs, self._room(prompt, body.max_completion_tokens or body.max_tokens, "messages")
        )
        ask = self._ask(body, prompt, params, steering, self._grammar(body, tools), user)
        return self._order(body, [ask], steering, logprobs, tools=tools if _may_call(body) else None, shown=(text,))

    def completion(self, body: CompletionRequest, headers: Mapping[str, str], user: str) -> Order:
        """The order of a completion request; raises as `chat` does."""
        self._check_common(body)
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise bad(
                "best_of",
                f"best_of is {body.best_of}, but must be the same as n ({body.n or 1}): no answer is thrown away here.",
                "unsupported_parameter",
            )
        if body.echo and body.logprobs is not None:
            raise bad(
                "echo",
                "echo with logprobs is not supported: prompts have no log-probabilities here.",
                "unsupported_parameter",
            )
        steering = steered(body.foredraft, headers)
        prompts = [self._encode(prompt) for prompt in _prompts(body.prompt)]
        asks = []
        for prompt in prompts:
            params = self._params(body, body.logprobs, self._room(prompt, body.max_tokens, "prompt"))
            asks.append(self._ask(body, prompt, params, steering, None, user))
        shown = tuple(
            given if isinstance(given, str) else str(self._model.tokenizer.decode(given, skip_special_tokens=True))
            for given in (_prompts(body.prompt) if body.echo or self._settings.log_prompts else ())
        )
        return self._order(body, asks, steering, body.logprobs, echo=shown if body.echo else None, shown=shown)

    def _check_common(self, body: Sampling) -> None:
        check_model(body, self._settings)
        most = self._worker.limits.sequences
        if (body.n or 1) > most:
            raise bad("n", f"n is {body.n}, but must be at most {most}: the server's batch.")
        check_stream(body)
        limit, asked = self._worker.limits.timeout, body.foredraft.timeout if body.foredraft is not None else None
        if asked is not None and asked > limit:
            raise bad(
                "foredraft.timeout", f"foredraft.timeout is {asked:g} s, but the server allows at most {limit:g} s."
            )

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self._model.encode(prompt, chat=False)
        last = self._model.backend.vocab_size - 1
        if max(prompt) > last:
            message = f"prompt has token id {max(prompt)}, but the last id is {last}."
            raise bad("prompt", message)
        return prompt

    def _room(self, prompt: Sequence[int], asked: int | None, param: str) -> int:
        """Most tokens of the answer."""
        context = self._model.backend.context
        if context is not None and len(prompt) >= context:
            raise bad(
                param,
                f"The prompt has {len(prompt)} tokens, but the model's context is {context}, answer included: "
                "shorten the prompt.",
                "context_length_exceeded",
            )
        most = context - len(prompt) if context is not None else None
        wanted = asked if asked is not None else self._settings.max_tokens
        return wanted if most is None else min(wanted, most)

    def _params(self, body: Sampling, logprobs: int | None, max_tokens: int) -> SamplingParams:
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=max(body.top_k or 0, 0),
            top_p=1.0 if body.top_p is None else body.top_p,
            min_p=body.min_p or 0.0,
            repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
            frequency_penalty=body.frequency_penalty or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
            min_tokens=body.min_tokens or 0,
            logprobs=logprobs,
            seed=None if body.seed is None else body.seed % SEEDS,
            stop=stop,
            ignore_eos=bool(body.ignore_eos),
        )

    def _ask(
        self,
        body: Sampling,
        prompt: Sequence[int],
        params: SamplingParams,
        steering: Steering,
        grammar: Grammar | None,
        user: str,
    ) -> Ask:
        return Ask(
            prompt=tuple(prompt),
            params=params,
            n=body.n or 1,
            drafter=steering.drafter,
            draft_tokens=0 if steering.budget == "off" else steering.budget,
            rule=steering.rule,
            grammar=grammar,
            user=user,
            timeout=steering.timeout,
            detail=bool(steering.trace and body.stream),
        )

    def _grammar(self, body: ChatRequest, tools: ToolCalls | None) -> Grammar | None:
        form = body.response_format
        constrained = form is not None and form.type != "text"
        if constrained and _may_call(body):
            raise bad(
                "response_format",
                "response_format and tools together are not supported: leave one out, or set tool_choice 'none'.",
                "unsupported_parameter",
            )
        param = "response_format.json_schema.schema" if constrained else "tools"
        try:
            if form is not None and form.json_schema is not None:
                return self.grammars.json_schema(
                    form.json_schema.definition, strict=form.json_schema.strict is not False
                )
            if constrained:
                return self.grammars.json_object()
            return tools.grammar(self.grammars) if tools is not None and _may_call(body) else None
        except InvalidInputError as error:
            raise bad(param, str(error)) from error

    def _order(
        self,
        body: Sampling,
        asks: Sequence[Ask],
        steering: Steering,
        logprobs: int | None,
        *,
        tools: ToolCalls | None = None,
        echo: tuple[str, ...] | None = None,
        shown: tuple[str, ...] = (),
    ) -> Order:
        if len(asks) * asks[0].n > _MOST_CHOICES:
            raise bad(
                "prompt",
                f"{len(asks)} prompts with {asks[0].n} answers each are more than the {_MOST_CHOICES} answers that one "
                "request may have: send several requests.",
            )
        return Order(
            asks=tuple(asks),
            stream=bool(body.stream),
            include_usage=bool(body.stream_options is not None and body.stream_options.include_usage),
            trace=bool(steering.trace and body.stream),
            logprobs=logprobs,
            token_ids=bool(body.return_token_ids),
            tools=tools,
            echo=echo,
            shown=shown,
        )


def check_model(body: Sampling, settings: ServerSettings) -> None:
    """Refuse a request for another model.

    Raises:
        ApiError: It is one.
    """
    if body.model != settings.name:
        raise no_such_model(body.model, settings.name)


def check_stream(body: Sampling) -> None:
    """Refuse what is asked of a stream where there is none.

    Raises:
        ApiError: It has such options.
    """
    if body.stream_options is not None and not body.stream:
        raise bad("stream_options", "stream_options needs stream to be true.")


def steered(body: Steering | None, headers: Mapping[str, str]) -> Steering:
    """How the request is drafted: what the body says, else its headers.

    Raises:
        ApiError: The budget in the headers is no number.
    """
    given: dict[str, Any] = {name: headers[header] for name, header in _HEADERS.items() if headers.get(header)}
    budget = given.get("budget")
    if budget is not None and budget != "off":
        if not (budget.isascii() and budget.isdigit() and len(budget) <= 2 and int(budget) <= 64):
            raise bad("X-Foredraft-Budget", f"X-Foredraft-Budget is {budget[:40]!r}, but must be 0 to 64, or off.")
        given["budget"] = int(budget)
    if body is not None:
        given |= body.model_dump(exclude_none=True)
    return Steering(**given)


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """One or several prompts, each text or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    several: list[str | list[int]] = [each for each in prompt if isinstance(each, (str, list))]
    return several or [[token for token in prompt if isinstance(token, int)]]


def _may_call(body: ChatRequest) -> bool:
    """Whether an answer may have tool calls in it."""
    return bool(body.tools) and body.tool_choice != "none"
