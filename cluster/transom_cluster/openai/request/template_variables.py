"""Reads `chat_template_kwargs`, the client's own variables for the chat template, such as `{"enable_thinking": false}`.

A variable must not do what a field of the request does, or would be refused for: `xml_tools` among them would render tools whose
calls the server then does not parse, and `messages` other messages than the ones that were checked. Names of this kind are refused
here. Switches, such as Llama's `tools_in_user_message`, are not: true and false describe no tool.
"""

from __future__ import annotations

import re
from typing import Any

from msgspec import Raw

from transom_cluster.openai.request.late_field import LateField
from transom_core.errors import RequestError

TEMPLATE_VARIABLES: LateField[dict[str, Any]] = LateField("chat_template_kwargs", dict[str, Any])

_OWN_FIELDS = frozenset({"messages", "add_generation_prompt", "tools"})
_NOT_SUPPORTED = re.compile(
    r".*(tool|function|document).*|chat_template|continue_final_message", re.IGNORECASE | re.DOTALL
)
"""Templates know tools and documents by many names: `tools`, `xml_tools`, `builtin_tools`, `functions`, `documents`."""


def read_template_variables(text: Raw) -> dict[str, Any]:
    """The variables by name.

    Raises:
        RequestError: they are no object, too long, or have a name that is refused; `param` names it.
    """
    variables = TEMPLATE_VARIABLES.read(text) or {}
    for name, value in variables.items():
        path = f"chat_template_kwargs.{name}"
        if name in _OWN_FIELDS and not (name == "tools" and not value):
            raise RequestError(f"{path} would replace the request's field {name}; send that field instead.", param=path)
        if _NOT_SUPPORTED.fullmatch(name) and value is not None and value != [] and not isinstance(value, bool):
            raise RequestError(f"{path} is not supported yet; leave it out.", param=path)
    return variables
