"""Reads the request fields that become variables of the chat template: `chat_template_kwargs`, `reasoning_effort`, `verbosity`.

`chat_template_kwargs` are the client's own variables, such as `{"enable_thinking": false}`. One must not do what a field of the
request does, or would be refused for: `xml_tools` among them would render tools whose calls the server then does not parse, and
`messages` other messages than the ones that were checked. Names of this kind are refused here. Switches, such as Llama's
`tools_in_user_message`, are not: true and false describe no tool.

A template that does not know a variable ignores it, so that a model without reasoning answers as always. The thinking switches of
templates have two names: `enable_thinking` (Qwen, GLM) and `thinking` (DeepSeek, Granite, Kimi). Both follow from the effort.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from msgspec import Raw

from transom_cluster.openai.request.late_field import LateField
from transom_core.errors import RequestError

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]

_GPT_OSS_EFFORTS = ("low", "medium", "high")
_EFFORTS_OF_PARSER = {"openai": _GPT_OSS_EFFORTS, "openai_gptoss": _GPT_OSS_EFFORTS}
"""The efforts that a model knows, by its reasoning parser, where it knows only some and always reasons."""

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


def reasoning_variables(
    effort: ReasoningEffort | None, *, reasoning_parser: str | None, param: str = "reasoning_effort"
) -> dict[str, Any]:
    """The chat template's variables for an effort; none without one.

    Raises:
        RequestError: this model has no such effort; `param` is the field that has it.
    """
    if effort is None:
        return {}
    known = _EFFORTS_OF_PARSER.get(reasoning_parser or "", ())
    if known and effort not in known:
        raise RequestError(f"{param} is {effort!r}; this model has {', '.join(known)}.", param=param)
    thinks = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
