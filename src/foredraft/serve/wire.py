"""The bodies of requests, as OpenAI's clients send them and with what foredraft adds."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from foredraft.serve.problems import nearest
from foredraft.types import COLDEST, STRONGEST

_MOST_CHOICES = 128
_LONGEST_NAME = 80  # of what is shown


class Body(BaseModel):
    """An object whose fields are all known. `null` is the same as leaving a field out."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=False)

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, value: Any) -> Any:
        if isinstance(value, dict):
            known = [field.alias or name for name, field in cls.model_fields.items()]
            unknown = next((name for name in value if name not in known), None)
            if unknown is not None:
                message = "is not known here.{hint}"
                raise PydanticCustomError(
                    "unknown_field", message, {"name": unknown[:_LONGEST_NAME], "hint": nearest(unknown, known)}
                )
        return value


T = TypeVar("T", bound=Body)


def refused(reason: str) -> Any:
    """A field that OpenAI has and this server does not: `null` passes."""

    def check(value: object) -> None:
        if value is not None:
            raise PydanticCustomError("refused", "{reason}", {"reason": reason})

    return Annotated[None, BeforeValidator(check), Field(description=f"Refused unless null: {reason}")]


def one_of_several(allowed: str) -> WrapValidator:
    """Says once what a field of several types may be, instead of what each of them found."""

    def check(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(allowed) from None

    return WrapValidator(check)


def _text_only(value: object) -> object:
    for part in value if isinstance(value, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            reason = f"has a part of type '{kind[:40]}', but the model reads text only."
            raise PydanticCustomError("refused", "{reason}", {"reason": reason})
    return value


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """What an earlier answer called, with its arguments as JSON in a string."""

    name: str
    arguments: str


class CalledTool(Body):
    """A call in an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


Content = Annotated[
    str | list[TextPart],
    one_of_several('be a string, or a list of {"type": "text", "text": "…"}'),
    BeforeValidator(_text_only),
]


class _Said(Body):
    """What all messages have."""

    content: Content
    name: str | None = None

    @property
    def text(self) -> str | None:
        """The content as one string; parts are paragraphs."""
        content: str | list[TextPart] | None = self.content
        return "\n".join(part.text for part in content) if isinstance(content, list) else content


class SystemMessage(_Said):
    """What the model is told to be."""

    role: Literal["system", "developer"]


class UserMessage(_Said):
    """What is asked."""

    role: Literal["user"]


class AssistantMessage(_Said):
    """An earlier answer. It has content, or calls tools, or both."""

    role: Literal["assistant"]
    content: Content | None = None  # type: ignore[assignment]
    tool_calls: list[CalledTool] | None = None
    refusal: str | None = None
    annotations: Any = None
    audio: refused("is not supported: the model reads text only.") = None  # type: ignore[valid-type]
    function_call: refused("is not supported: use tool_calls.") = None  # type: ignore[valid-type]


class ToolMessage(_Said):
    """What a called tool returned."""

    role: Literal["tool"]
    tool_call_id: str


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class StreamOptions(Body):
    """How a stream ends."""

    include_usage: bool | None = None
    include_obfuscation: Any = None


class Steering(Body):
    """How this request is drafted, and what is told of it."""

    drafter: str | None = Field(None, description="One of the server's drafters; `none` is plain decoding.")
    budget: Annotated[
        Annotated[int, Field(ge=0, le=64)] | Literal["off"] | None, one_of_several("be 0 to 64, or 'off'")
    ] = Field(None, description="Most tokens of a draft; 0 or `off` is plain decoding.")
    rule: str | None = Field(None, description="Acceptance rule.")
    trace: bool | None = Field(None, description="Whether stream chunks tell origins and drafts.")
    timeout: Annotated[float, Field(ge=0.01, le=86400)] | None = Field(None, description="Seconds, waiting included.")


class FunctionDefinition(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Body):
    """A tool."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    """Which function."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class Schema(Body):
    """A JSON schema with its name."""

    name: str
    description: str | None = None
    definition: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What the answer must be: any text, any JSON object, or JSON that fits a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            wanted = "have json_schema" if self.json_schema is None else "have the type 'json_schema'"
            raise ValueError(wanted)
        return self


Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Count = Annotated[int, Field(ge=1, le=2**31)]


def _no_trace_of_heat(temperature: float) -> float:
    if 0 < temperature < COLDEST:  # logits divided by it would be infinite
        raise ValueError(f"be 0, or in [{COLDEST}, 2]")
    return temperature


class Sampling(Body):
    """What both kinds of request have."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2), AfterValidator(_no_trace_of_heat)] | None = Field(
        None, description="1 if not given; 0 is greedy."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = Field(None, description="0 or -1 keeps all.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=1 / STRONGEST, le=STRONGEST)] | None = None
    logit_bias: Annotated[
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Bias] | None,
        one_of_several("have token ids in strings as keys, and numbers in [-100, 100] as values"),
    ] = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=4)]
        | None,
        one_of_several("be a string or up to 4 strings, none of them empty"),
    ] = None
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    foredraft: Steering | None = None
    # OpenAI's own affairs: accepted, and of no effect here.
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=128)] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool | None,
        one_of_several('\'none\', \'auto\', \'required\' or {"type": "function", "function": {"name": "…"}}'),
    ] = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[
        Annotated[list[Literal["text"]], Field(min_length=1)] | None,
        one_of_several("be ['text']: the model writes text only"),
    ] = None
    audio: refused("is not supported: the model writes text only.") = None  # type: ignore[valid-type]
    functions: refused("is not supported: use tools.") = None  # type: ignore[valid-type]
    function_call: refused("is not supported: use tool_choice.") = None  # type: ignore[valid-type]
    web_search_options: refused("is not supported: the server looks nothing up.") = None  # type: ignore[valid-type]
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None


Text = Annotated[str, Field(min_length=1)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(min_length=1)]
Prompt = Annotated[
    Text | Tokens | Annotated[list[Text], Field(min_length=1)] | Annotated[list[Tokens], Field(min_length=1)],
    one_of_several("be a string, token ids, or a list of either, and nothing of it empty"),
]


class CompletionRequest(Sampling):
    """`POST /v1/completions`."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None = Field(None, description="The same as n, or null.")
    suffix: refused("is not supported: the model only continues a text.") = None  # type: ignore[valid-type]
