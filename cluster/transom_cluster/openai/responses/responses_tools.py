"""Converts `tools` and `tool_choice` of a Responses request to the form of a chat request.

Tools that OpenAI hosts (web search, code interpreter, ...) and types that the server does not know are skipped, each with a
warning, because clients such as Codex send them to every server. Function tools work as in a chat.

Custom tools and namespaces become functions in the chat:

- A **custom tool** takes free text. In the chat it is a function with one argument, the string `input`.
- A **namespace** groups tools. In the chat its tool `close` is the function `NAMESPACE__close`.

`ToolNames` remembers which tool each function stands for, so that a call in the answer becomes the item that the client expects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import Raw

from transom_cluster.openai.request.body import NULL, OpenModel, any_json, decode_field
from transom_core.errors import RequestError

MAX_TOOLS = 1024
CUSTOM_INPUT = "input"
_SEPARATOR = "__"
Chosen = str | dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolName:
    """A tool as the client knows it."""

    name: str
    kind: Literal["function", "custom"] = "function"
    namespace: str | None = None

    @property
    def chat_name(self) -> str:
        """Return the name of the tool's function in the chat."""
        return self.name if self.namespace is None else f"{self.namespace}{_SEPARATOR}{self.name}"


class ToolNames:
    """Maps the names of a chat's functions to the tools of the Responses request."""

    def __init__(self) -> None:
        self._tools: dict[str, ToolName] = {}

    def add(self, tool: ToolName) -> bool:
        """Add a tool; return False if another tool has the same name in the chat."""
        return self._tools.setdefault(tool.chat_name, tool) is tool

    def of_call(self, chat_name: str) -> ToolName:
        """Return the tool that the model has called. An unknown name is taken as a function's name."""
        return self._tools.get(chat_name) or ToolName(name=chat_name)


class _ToolType(OpenModel, frozen=True, kw_only=True):
    type: str


class _Function(OpenModel, frozen=True, kw_only=True):
    name: str
    description: str | None = None
    parameters: Raw = any_json()
    strict: bool | None = None


class _CustomFormat(OpenModel, frozen=True, kw_only=True):
    type: Literal["text", "grammar"]
    syntax: str | None = None
    definition: str | None = None


class _Custom(OpenModel, frozen=True, kw_only=True):
    name: str
    description: str | None = None
    format: _CustomFormat | None = None


class _Namespace(OpenModel, frozen=True, kw_only=True):
    name: str
    tools: list[Raw]


class _Choice(OpenModel, frozen=True, kw_only=True):
    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[_Choice] | None = None


_TOOLS: msgspec.json.Decoder[list[Raw]] = msgspec.json.Decoder(list[Raw])
_TYPE = msgspec.json.Decoder(_ToolType)
_FUNCTION = msgspec.json.Decoder(_Function)
_CUSTOM = msgspec.json.Decoder(_Custom)
_NAMESPACE = msgspec.json.Decoder(_Namespace)
_CHOICE: msgspec.json.Decoder[str | _Choice | None] = msgspec.json.Decoder(str | _Choice | None)


def read_tools(text: Raw, *, names: ToolNames, warnings: list[str]) -> dict[str, dict[str, Any]]:
    """Return the tools in the form of a chat, by their paths in the body. Adds the tools' names to `names`, and a line to
    `warnings` for each skipped tool.

    Raises:
        RequestError: a tool is malformed, or two have the same name; `param` names the tool.
    """
    given = [] if text == NULL else decode_field(_TOOLS, text, "tools")
    return _read_list(given, "tools", None, names, warnings)


def read_tool_choice(text: Raw) -> Chosen | None:
    """Return `tool_choice` in the form of a chat; None if it is not given.

    Raises:
        RequestError: the field is malformed, or chooses a tool of a type that OpenAI hosts.
    """
    choice = decode_field(_CHOICE, text, "tool_choice")
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type == "allowed_tools":
        allowed = [_named(tool, f"tool_choice.tools[{i}]") for i, tool in enumerate(choice.tools or ())]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode or "auto", "tools": allowed}}
    return _named(choice, "tool_choice")


def _read_list(
    texts: list[Raw], path: str, namespace: str | None, names: ToolNames, warnings: list[str]
) -> dict[str, dict[str, Any]]:
    """Return the tools of one list, by their paths: of the field `tools`, or of a namespace in it."""
    if len(texts) > MAX_TOOLS:
        raise RequestError(f"{path} has {len(texts):,} tools; at most {MAX_TOOLS:,} are allowed.", param=path)
    tools: dict[str, dict[str, Any]] = {}
    for index, text in enumerate(texts):
        where = f"{path}[{index}]"
        kind = decode_field(_TYPE, text, where).type
        if kind == "function":
            tools[where] = _function(text, where, namespace, names)
        elif kind == "custom":
            tools[where] = _custom(text, where, namespace, names, warnings)
        elif kind == "namespace" and namespace is None:
            group = decode_field(_NAMESPACE, text, where)
            tools |= _read_list(group.tools, f"{where}.tools", group.name, names, warnings)
        else:
            warnings.append(f"{where}: tools of type {kind[:64]} are skipped")
    return tools


def _function(text: Raw, path: str, namespace: str | None, names: ToolNames) -> dict[str, Any]:
    tool = decode_field(_FUNCTION, text, path)
    name = _added(ToolName(name=tool.name, namespace=namespace), path, names)
    function: dict[str, Any] = {"name": name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters != NULL:
        function["parameters"] = tool.parameters
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _custom(text: Raw, path: str, namespace: str | None, names: ToolNames, warnings: list[str]) -> dict[str, Any]:
    """Return the function that stands for a custom tool. Only a regular expression of its grammar is enforced."""
    tool = decode_field(_CUSTOM, text, path)
    name = _added(ToolName(name=tool.name, kind="custom", namespace=namespace), path, names)
    description, text_schema = tool.description or "", {"type": "string"}
    if tool.format is not None and tool.format.type == "grammar":
        description += f"\n\nThe input must match this {tool.format.syntax} grammar:\n{tool.format.definition}"
        if tool.format.syntax == "regex":
            text_schema["pattern"] = f"^({tool.format.definition})$"
        else:
            warnings.append(f"{path}: its grammar is shown to the model and not enforced")
    parameters = {
        "type": "object",
        "properties": {CUSTOM_INPUT: text_schema},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
    function = {"name": name, "description": description.strip(), "parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


def _added(tool: ToolName, path: str, names: ToolNames) -> str:
    if not names.add(tool):
        raise RequestError(f"{path}: there are two tools with the name {tool.chat_name!r}.", param=path)
    return tool.chat_name


def _named(choice: _Choice, path: str) -> dict[str, Any]:
    if choice.type not in ("function", "custom"):
        raise RequestError(
            f"{path}.type is {choice.type[:80]!r}; this server has no tools of its own, so only a function or custom tool can "
            "be chosen.",
            param=f"{path}.type",
        )
    if choice.name is None:
        raise RequestError(f"{path}.name is missing; it is required.", param=f"{path}.name")
    tool = ToolName(name=choice.name, namespace=choice.namespace)
    return {"type": "function", "function": {"name": tool.chat_name}}
