"""From the messages of a chat request to the text that the model reads, tools included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from foredraft.errors import InvalidInputError
from foredraft.serve.problems import bad, nearest
from foredraft.serve.tools import Tool, ToolCalls
from foredraft.serve.wire import AssistantMessage, ChatRequest, FunctionDefinition, Message, NamedTool, ToolMessage

_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError)


def rendered(tokenizer: Any, messages: Sequence[Message], tools: ToolCalls | None) -> str:
    """The conversation as the model reads it, up to where its answer begins.

    Raises:
        ApiError: The model has no chat template, or it does not take these messages.
    """
    template = tokenizer.chat_template
    if not template:
        raise bad("messages", "This model has no chat template: use /v1/completions.", "unsupported_parameter")
    plain = [_plain(message, f"messages[{i}]") for i, message in enumerate(messages)]
    known: list[dict[str, Any]] | None = None
    if tools is not None:
        plain, known = tools.messages(plain, template if isinstance(template, str) else None)
    try:
        return str(tokenizer.apply_chat_template(plain, tools=known, add_generation_prompt=True, tokenize=False))
    except _TEMPLATE_ERRORS as error:
        raise bad("messages", f"The model's chat template does not take these messages: {str(error)[:200]}") from error


def _plain(message: Message, path: str) -> dict[str, Any]:
    """A message for the chat template. `developer` is what templates know as `system`."""
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": message.text}
    if message.name is not None:
        plain["name"] = message.name
    if isinstance(message, ToolMessage):
        plain["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        if message.tool_calls:
            plain["tool_calls"] = [call.model_dump(exclude={"index"}) for call in message.tool_calls]
        elif message.content is None:
            missing = f"{path} has no content and no tool_calls: give one of them."
            raise bad(f"{path}.content", missing, "missing_required_parameter")
    return plain


def tool_calls(body: ChatRequest) -> ToolCalls | None:
    """The request's tools; also where only the history has calls, which not every chat template knows."""
    if not body.tools and body.tool_choice not in (None, "none", "auto"):
        raise bad("tool_choice", "tool_choice needs tools.")
    if not body.tools and not any(_is_about_tools(message) for message in body.messages):
        return None
    functions = [tool.function for tool in body.tools or ()]
    choice = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else body.tool_choice
    names = [function.name for function in functions]
    if isinstance(body.tool_choice, NamedTool) and choice not in names:
        hint = nearest(str(choice), names)
        raise bad("tool_choice.function.name", f"tool_choice names '{choice}', which is not among the tools.{hint}")
    try:
        tools = [_tool(function) for function in functions]
        default = "auto" if tools else "none"
        return ToolCalls(tools, choice or default, parallel=body.parallel_tool_calls is not False)
    except InvalidInputError as error:
        raise bad("tools", str(error)) from error


def _tool(function: FunctionDefinition) -> Tool:
    parameters = function.parameters or {"type": "object", "properties": {}}
    return Tool(
        name=function.name,
        description=function.description or "",
        parameters=parameters,
        strict=bool(function.strict),
    )


def _is_about_tools(message: Message) -> bool:
    return isinstance(message, ToolMessage) or (isinstance(message, AssistantMessage) and bool(message.tool_calls))
