"""Converts a request of OpenAI's Responses API (/v1/responses) to the chat request that asks for the same answer."""

from dataclasses import dataclass
from typing import Any, ClassVar

from transom_cluster.openai.request.chat_request import ChatCompletionRequest
from transom_cluster.openai.request.converted_chat import ConvertedChat, chat_of
from transom_cluster.openai.responses.input_items import read_messages
from transom_cluster.openai.responses.request_body import ResponsesRequest, TextFormat
from transom_cluster.openai.responses.responses_tools import ToolNames, read_tool_choice, read_tools

# Fields that both kinds of request have with different meanings, so they are not copied like those of `_SAME_NAME`.
_READ_HERE = {"tools", "tool_choice", "top_logprobs", "stream_options"}
_SAME_NAME = tuple(
    name
    for name in ResponsesRequest.__struct_fields__
    if name in ChatCompletionRequest.__struct_fields__ and name not in _READ_HERE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatForm(ConvertedChat):
    """A Responses request as a chat request, and the names of its tools."""

    names: ClassVar = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }

    tool_names: ToolNames


def chat_form(body: ResponsesRequest) -> ChatForm:
    """Convert a Responses request to its chat form.

    Raises:
        RequestError: an item, a tool or another field is malformed or not supported; `param` names it.
    """
    names, warnings = ToolNames(), list[str]()
    tools = read_tools(body.tools, names=names, warnings=warnings)
    chat: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAME}
    chat["messages"] = read_messages(body.input, instructions=body.instructions, warnings=warnings)
    chat["max_completion_tokens"] = body.max_output_tokens
    chat["tools"] = list(tools.values())
    chat["tool_choice"] = read_tool_choice(body.tool_choice)
    if body.reasoning is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        chat["response_format"] = _response_format(body.text.format)
    if body.text is not None:
        chat["verbosity"] = body.text.verbosity
    if body.includes_logprobs:
        chat["logprobs"], chat["top_logprobs"] = True, body.top_logprobs or 0
    return ChatForm(chat=chat_of(chat), tool_names=names, tool_paths=tuple(tools), warnings=tuple(warnings))


def _response_format(given: TextFormat) -> dict[str, Any]:
    """Convert `text.format` to a chat's `response_format`."""
    if given.type != "json_schema":
        return {"type": given.type}
    schema = {name: getattr(given, name) for name in ("name", "description", "strict")}
    named = {name: value for name, value in schema.items() if value is not None}
    return {"type": "json_schema", "json_schema": {**named, "schema": given.schema}}
