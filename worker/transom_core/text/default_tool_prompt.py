"""Puts tools into chats whose template does not support tools, in the form on which Hermes models (and Qwen 2.5) are trained.

The tools' descriptions become a section at the end of the system prompt. A call of the assistant becomes text between `<tool_call>`
and `</tool_call>`. Results become a user message, each between `<tool_response>` and `</tool_response>`. All templates support
these roles.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_SECTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def messages_with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the messages with tools, calls and results as text; other messages are unchanged."""
    converted: list[dict[str, Any]] = []
    previous_role = None
    for message in messages:
        is_result = message["role"] == "tool"
        plain = _plain(message)
        if is_result and previous_role == "tool":  # many templates require that user and assistant alternate
            begin = len(converted[-1]["content"]) + 1
            converted[-1]["content"] += "\n" + plain["content"]
            converted[-1]["cache_marks"] += tuple(begin + mark for mark in plain["cache_marks"])
        else:
            converted.append(plain)
        previous_role = message["role"]
    if not tools:
        return converted
    section = _SECTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if converted[0]["role"] == "system":
        system = converted[0]["content"]
        converted[0]["content"] = f"{system}\n\n{section}" if system else section
        return converted
    return [{"role": "system", "content": section}, *converted]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with its calls as text; a tool's result as a user message."""
    content = message["content"] or ""
    if message["role"] == "tool":
        shown = f"<tool_response>\n{content}\n</tool_response>"
        marks = (len(shown),) if message.get("cache_marks") else ()
        return {"role": "user", "content": shown, "cache_marks": marks}
    calls = [_call_text(call["function"]) for call in message.get("tool_calls") or ()]
    if not calls:
        return dict(message)
    others = {name: value for name, value in message.items() if name not in ("content", "tool_calls")}
    return {**others, "content": "\n".join([content, *calls] if content else calls)}


def _call_text(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
