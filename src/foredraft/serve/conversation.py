"""From the messages of a chat request to the text that the model reads, tools included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from foredraft.serve.problems import bad, nearest
from foredraft.serve.tools import Tool, ToolCalls
from foredraft.serve.wire import ChatRequest, Message, NamedTool

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
    if message.content is None and not message.tool_calls:
        raise bad(f"{path}.content", f"{path}.content is missing.", "missing_required_parameter")
    if message.tool_calls and role != "assistant":
        raise bad(
            f"{path}.tool_calls",
            f"{path}.tool_calls belongs to messages of the assistant, but the role is '{message.role}'.",
        )
    if role == "tool" and not message.tool_call_id:
        raise bad(f"{path}.tool_call_id", f"{path}.tool_call_id is missing.", "missing_required_parameter")
    plain: dict[str, Any] = {"role": role, "content": message.text}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [call.model_dump(exclude={"index"}) for call in message.tool_calls]
    return plain


def tool_calls(body: ChatRequest) -> ToolCalls | None:
    """The request's tools; also where only the history has calls, which not every chat template knows."""
    if not body.tools and body.tool_choice not in (None, "none", "auto"):
        raise bad("tool_choice", "tool_choice needs tools.")
    if not body.tools and not any(message.role == "tool" or message.tool_calls for message in body.messages):
        return None
    functions = [tool.function for tool in body.tools or ()]
    tools = [
        Tool(
            name=function.name,
            description=function.description or "",
            parameters=function.parameters or {"type": "object", "properties": {}},
            strict=bool(function.strict),
        )
        for function in functions
    ]
    choice = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else body.tool_choice
    names = [function.name for function in functions]
    if isinstance(body.tool_choice, NamedTool) and choice not in names:
        hint = nearest(str(choice), names)
        raise bad("tool_choice.function.name", f"tool_choice names '{choice}', which is not among the tools.{hint}")
    return ToolCalls(tools, choice or ("auto" if tools else "none"), parallel=body.parallel_tool_calls is not False)
