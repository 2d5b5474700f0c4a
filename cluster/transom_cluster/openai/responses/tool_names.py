"""How tools of the Responses API are called in the chat: custom tools and namespaces become functions.

- A **custom tool** takes free text. In the chat it is a function with one argument, the string `input`.
- A **namespace** groups tools. In the chat its tool `close` is the function `NAMESPACE__close`.

`ToolNames` remembers which function is which tool, so that a call of the answer becomes the item that the client expects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CUSTOM_INPUT = "input"
_SEPARATOR = "__"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolName:
    """A tool as the client knows it."""

    name: str
    kind: Literal["function", "custom"] = "function"
    namespace: str | None = None

    @property
    def chat_name(self) -> str:
        """The name of its function in the chat."""
        return self.name if self.namespace is None else f"{self.namespace}{_SEPARATOR}{self.name}"


class ToolNames:
    """The tools of one request by the names of their functions."""

    def __init__(self) -> None:
        self._tools: dict[str, ToolName] = {}

    def add(self, tool: ToolName) -> bool:
        """Add a tool; False if there is one with this name in the chat."""
        return self._tools.setdefault(tool.chat_name, tool) is tool

    def of_call(self, chat_name: str) -> ToolName:
        """The tool that the model has called; a name that the request does not have is taken for a function's."""
        return self._tools.get(chat_name) or ToolName(name=chat_name)
