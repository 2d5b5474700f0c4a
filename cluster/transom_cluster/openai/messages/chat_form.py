"""Converts a request of Anthropic's Messages API (/v1/messages) to the chat request that asks for the same answer."""

from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
from msgspec import Raw

from transom_cluster.openai.messages.content_blocks import read_messages
from transom_cluster.openai.messages.request_body import CountTokensRequest, Tool, ToolChoice
from transom_cluster.openai.request.body import NULL, decode_field
from transom_cluster.openai.request.chat_request import ChatCompletionRequest
from transom_cluster.openai.request.converted_chat import ConvertedChat, chat_of
from transom_cluster.openai.request.template_variables import TEMPLATE_VARIABLES, ReasoningEffort
from transom_core.errors import RequestError

_READ_HERE = {"messages", "tools", "tool_choice", "max_tokens", "stop", "chat_template_kwargs"}
_SAME_NAME = tuple(
    name
    for name in CountTokensRequest.__struct_fields__
    if name in ChatCompletionRequest.__struct_fields__ and name not in _READ_HERE
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_TOOLS: msgspec.json.Decoder[list[Tool] | None] = msgspec.json.Decoder(list[Tool] | None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesChat(ConvertedChat):
    """A Messages request as a chat request."""

    names: ClassVar = {
        "messages": "messages",
        "parameters": "input_schema",
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
    }


def messages_chat(body: CountTokensRequest, *, strips_billing_header: bool) -> MessagesChat:
    """Convert a Messages request to its chat form.

    Raises:
        RequestError: a block, a tool or another field is malformed or not supported; `param` names it.
    """
    warnings: list[str] = []
    tools = _read_tools(body.tools, warnings)
    chat: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAME}
    chat["messages"] = read_messages(
        body.messages, system=body.system, strips_billing_header=strips_billing_header, warnings=warnings
    )
    chat["max_tokens"] = body.max_tokens or (None if body.max_tokens is None else 1)  # of 0, the writer drops one token
    chat["tools"] = list(tools.values())
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    chat["stop"] = [*(body.stop_sequences or ()), *stops]
    if body.tool_choice is not None:
        chat["tool_choice"] = _tool_choice(body.tool_choice)
        chat["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    chat |= _reasoning_fields(body)
    if body.output_config is not None and (form := body.output_config.format) is not None:
        chat["response_format"] = {"type": form.type, "json_schema": {"name": "output", "schema": form.schema}}
    if body.context_management != NULL:
        warnings.append("context_management: its edits are skipped")
    return MessagesChat(chat=chat_of(chat), tool_paths=tuple(tools), warnings=tuple(warnings))


def _read_tools(text: Raw, warnings: list[str]) -> dict[str, dict[str, Any]]:
    """Return the tools in the form of a chat, by their paths in the body. Tools that only Anthropic's models know are skipped, each
    with a warning."""
    tools: dict[str, dict[str, Any]] = {}
    given = decode_field(_TOOLS, text, "tools")
    for index, tool in enumerate(given or ()):
        path = f"tools[{index}]"
        if tool.type not in (None, "custom"):
            warnings.append(f"{path}: tools of type {tool.type[:64]} are skipped")
            continue
        if tool.input_schema == NULL:
            raise RequestError(f"{path}.input_schema is missing; it is required.", param=f"{path}.input_schema")
        function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
        tools[path] = {"type": "function", "function": {**function, "strict": tool.strict}}
    return tools


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise RequestError("tool_choice.name is missing; it is required.", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


def _reasoning_fields(body: CountTokensRequest) -> dict[str, Any]:
    """Return the chat's fields for `thinking` and `output_config.effort`. Without either, the chat template decides.

    A model that always reasons does so even if thinking is disabled; the answer then does not show it.
    """
    effort, thinking = None if body.output_config is None else body.output_config.effort, body.thinking
    if thinking is None:
        return {"reasoning_effort": effort, "chat_template_kwargs": body.chat_template_kwargs}
    thinks = thinking.type != "disabled"
    switches = {"enable_thinking": thinks, "thinking": thinks}
    return {
        "reasoning_effort": effort or _effort(thinking.budget_tokens),
        "include_reasoning": thinks,
        "chat_template_kwargs": switches | (TEMPLATE_VARIABLES.read(body.chat_template_kwargs) or {}),
    }


def _effort(budget_tokens: int | None) -> ReasoningEffort | None:
    """Return the effort that stands for a budget of thinking tokens, because models know efforts and no budgets."""
    if budget_tokens is None:
        return None
    return "low" if budget_tokens <= 2048 else "medium" if budget_tokens <= 8192 else "high"
