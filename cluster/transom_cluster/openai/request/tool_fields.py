"""Reads the request fields `tools`, `tool_choice` and `parallel_tool_calls`: which functions a model may call, and whether it must.

Example: with `tools` that describe `add` and `search`, the `tool_choice` `{"type": "function", "function": {"name": "add"}}` asks
for one call of `add` and nothing else.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from transom_cluster.openai.request.body import LateField, WireModel, any_json, decode_field, inlined_schema
from transom_core.errors import RequestError
from transom_core.text.markup.context import ToolsDemand, ToolSpec

MAX_TOOLS = 128  # OpenAI's
MAX_TOOLS_BYTES = 512 * 2**10
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")  # Anthropic's limit; OpenAI's is 64


class FunctionDefinition(WireModel, frozen=True, kw_only=True):
    """A function that the model may call. `parameters` is the JSON Schema of its arguments, which are an object; without a schema
    the function has no arguments."""

    name: Annotated[str, Meta(extra_json_schema={"pattern": f"^{_NAME.pattern}$"})]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(WireModel, frozen=True, kw_only=True):
    """One entry of `tools`."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["function"]})]
    function: FunctionDefinition
    cache_control: Raw = any_json()  # a hint of other vendors' APIs, ignored


class _ToolType(msgspec.Struct):
    type: str = "function"


TOOLS: LateField[list[Raw]] = LateField(
    "tools", Annotated[list[Raw], Meta(max_length=MAX_TOOLS)], max_bytes=MAX_TOOLS_BYTES
)
_TOOL_CHOICE: LateField[str | dict[str, Any]] = LateField("tool_choice", str | dict[str, Any])
_TYPE = msgspec.json.Decoder(_ToolType)
_TOOL = msgspec.json.Decoder(FunctionTool)

TOOLS_SCHEMA = inlined_schema(Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None)
_NAMED_SCHEMA = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["function", "allowed_tools"]},
        "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
        "allowed_tools": {
            "type": "object",
            "required": ["mode", "tools"],
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": {"type": "object"}},
            },
        },
    },
}
TOOL_CHOICE_SCHEMA: dict[str, Any] = {
    "anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED_SCHEMA, {"type": "null"}]
}


def read_tools(text: Raw) -> tuple[ToolSpec, ...]:
    """Return the functions of the field `tools` of a chat.

    Raises:
        RequestError: there are too many tools, a tool has another type or is malformed, or two have the same name; `param` names
            the tool.
    """
    tools = []
    for index, one in enumerate(TOOLS.read(text) or ()):
        path = f"tools[{index}]"
        kind = decode_field(_TYPE, one, path).type
        if kind != "function":
            raise RequestError(
                f"{path}.type is {kind!r}; this server has no tools of its own and takes 'function' only: describe it as a "
                "function, which your program then calls.",
                param=f"{path}.type",
            )
        tools.append(tool_spec(decode_field(_TOOL, one, path).function, path=f"{path}.function"))
    check_names(tools, path="tools[{}].function.name")
    return tuple(tools)


def tool_spec(function: FunctionDefinition, *, path: str) -> ToolSpec:
    """Convert a function to the form that the answer's markup uses; `path` is the field that describes the function.

    Raises:
        RequestError: the function's name has a character that is not allowed, or is too long.
    """
    if not _NAME.fullmatch(function.name):
        raise RequestError(
            f"{path}.name is {function.name[:80]!r}; it must have 1 to 128 characters: letters, digits, _ and -.",
            param=f"{path}.name",
        )
    return ToolSpec(
        name=function.name,
        description=function.description or "",
        parameters=NO_PARAMETERS if function.parameters is None else function.parameters,
        strict=bool(function.strict),
    )


def check_names(tools: Sequence[ToolSpec], *, path: str) -> None:
    """Raise RequestError if two tools have the same name. `path` is the field of a name, with `{}` for the tool's index."""
    first: dict[str, int] = {}
    for index, tool in enumerate(tools):
        if first.setdefault(tool.name, index) != index:
            where = path.format(index)
            raise RequestError(
                f"{where} is {tool.name!r}, which {path.format(first[tool.name])} is already; names must differ.",
                param=where,
            )


def read_tools_demand(text: Raw, tools: Sequence[ToolSpec], *, parallel: bool) -> ToolsDemand | None:
    """Return which of `tools` an answer may or must call, by the field `tool_choice`; None if there are no tools or the client
    wants no calls. A choice of one function asks for one call, even if `parallel` calls are allowed.

    Raises:
        RequestError: the field has none of the allowed forms, or needs tools that the request does not have.
    """
    mode, names, is_single = _chosen(text)
    known = tuple(tool.name for tool in tools)
    for name in names or ():
        if name not in known:
            listed = ", ".join(known) or "none"
            raise RequestError(
                f"tool_choice names the function {name[:80]!r}, which is not among tools; they have: {listed}.",
                param="tool_choice",
            )
    if mode == "required" and not tools:
        raise RequestError("tool_choice is 'required', and there are no tools; send tools.", param="tool_choice")
    if names == ():
        raise RequestError("tool_choice allows no tool; name one, or send 'none'.", param="tool_choice")
    if mode == "none" or not tools:
        return None
    called = known if names is None else tuple(dict.fromkeys(names))
    return ToolsDemand(mode=mode, names=called, parallel=parallel and not is_single)


def _chosen(text: Raw) -> tuple[Literal["none", "auto", "required"], tuple[str, ...] | None, bool]:
    """Return whether the model may or must call functions, which ones (None: all), and whether only one call is wanted."""
    match given := _TOOL_CHOICE.read(text):
        case None:
            return "auto", None, False
        case "none" | "auto" | "required":
            return given, None, False
        case {"type": "function", "function": {"name": str(name), **more}, **others} if not (more or others):
            return "required", (name,), True
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*allowed]}}:
            return mode, tuple(_allowed_name(index, one) for index, one in enumerate(allowed)), False
    raise RequestError(
        f"tool_choice is {bytes(text)[:80].decode(errors='replace')}; send 'none', 'auto', 'required', "
        '{"type": "function", "function": {"name": ...}}, or {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or '
        '"required", "tools": [{"type": "function", "function": {"name": ...}}, ...]}}.',
        param="tool_choice",
    )


def _allowed_name(index: int, entry: object) -> str:
    match entry:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    path = f"tool_choice.allowed_tools.tools[{index}]"
    raise RequestError(f'{path} must be {{"type": "function", "function": {{"name": ...}}}}.', param=path)


def template_tools(tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """Return the tools in the form that chat templates read: that of the field `tools`, without `strict`."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
        }
        for tool in tools
    ]
