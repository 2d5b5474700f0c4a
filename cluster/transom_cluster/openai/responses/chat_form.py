"""Converts a request of OpenAI's Responses API (/v1/responses) to the chat request that asks for the same answer.

The server then handles the chat request like one of /v1/chat/completions, so both endpoints accept the same values. An error about
a field of the chat request is reported under the name of the field that the client sent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from transom_cluster.openai.request.body import NULL, decode_field
from transom_cluster.openai.request.chat_request import ChatCompletionRequest
from transom_cluster.openai.responses.input_items import read_messages
from transom_cluster.openai.responses.request_body import ResponsesRequest, TextFormat
from transom_cluster.openai.responses.responses_tools import ToolNames, read_tool_choice, read_tools
from transom_core.errors import RequestError

# Fields that both kinds of request have with different meanings, so they are not copied like those of `_SAME_NAME`.
_READ_HERE = {"tools", "tool_choice", "top_logprobs", "stream_options"}
_SAME_NAME = tuple(
    name
    for name in ResponsesRequest.__struct_fields__
    if name in ChatCompletionRequest.__struct_fields__ and name not in _READ_HERE
)
_RESPONSES_NAMES = {  # field of a chat -> field of a Responses request
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
MAX_WARNING_CHARS = 1000
_TOOL = re.compile(r"tools\[(\d+)\](?:\.function)?")
_HEAD = re.compile(r"\w+")
_CHAT: msgspec.json.Decoder[ChatCompletionRequest] = msgspec.json.Decoder(ChatCompletionRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatForm:
    """A Responses request as a chat request, the names of its tools, and a warning for each part that was skipped."""

    chat: ChatCompletionRequest
    names: ToolNames
    tool_paths: tuple[str, ...]  # the path of each of the chat's tools in the client's body
    warnings: tuple[str, ...]

    def error(self, error: RequestError) -> RequestError:
        """Convert an error about the chat request to one about the Responses request."""
        param = error.param
        if param is None or (changed := self._param(param)) == param:
            return error
        return type(error)(str(error).replace(param, changed), param=changed)

    def _param(self, param: str) -> str:
        """Return the path of the client's field that became the field `param` of the chat."""
        if tool := _TOOL.match(param):
            return self.tool_paths[int(tool[1])] + param[tool.end() :]
        head = _HEAD.match(param)
        name = None if head is None else _RESPONSES_NAMES.get(head[0])
        if head is None or name is None:
            return param
        # Several items may become one message, so the index of a message is not that of an item.
        return name if name == "input" else name + param[head.end() :]

    @property
    def warning_header(self) -> str:
        """Return the warnings as the value of a header: printable ASCII, at most MAX_WARNING_CHARS characters."""
        shown = "; ".join(self.warnings).encode("ascii", "replace").decode()
        return "".join(char if char.isprintable() else "?" for char in shown)[:MAX_WARNING_CHARS]


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
    given = {name: value for name, value in chat.items() if value is not None and value != NULL}
    return ChatForm(
        chat=decode_field(_CHAT, msgspec.json.encode(given), ""),
        names=names,
        tool_paths=tuple(tools),
        warnings=tuple(warnings),
    )


def _response_format(given: TextFormat) -> dict[str, Any]:
    """Convert `text.format` to a chat's `response_format`."""
    if given.type != "json_schema":
        return {"type": given.type}
    schema = {name: getattr(given, name) for name in ("name", "description", "strict")}
    named = {name: value for name, value in schema.items() if value is not None}
    return {"type": "json_schema", "json_schema": {**named, "schema": given.schema}}
