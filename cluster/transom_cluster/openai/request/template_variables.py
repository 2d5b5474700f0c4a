"""Reads the request fields that become variables of the chat template: `chat_template_kwargs`, `reasoning_effort`, `verbosity`.

`chat_template_kwargs` are the client's own variables, such as `{"enable_thinking": false}`. This module refuses variables that
would bypass a field of the request or its checks: `xml_tools` would render tools whose calls the server does not parse, and
`messages` would replace the messages that were checked. It accepts boolean switches, such as Llama's `tools_in_user_message`,
because true and false describe no tool.

A template ignores variables that it does not know, so reasoning variables do not change the prompt of a model without reasoning.
Templates have two names for the thinking switch: `enable_thinking` (Qwen, GLM) and `thinking` (DeepSeek, Granite, Kimi). This
module sets both from the effort.
"""

import re
from typing import Any, Literal

from msgspec import Raw

from transom_cluster.openai.request.body import LateField
from transom_core.errors import RequestError

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]

_GPT_OSS_EFFORTS = ("low", "medium", "high")
_EFFORTS_OF_PARSER = {"openai": _GPT_OSS_EFFORTS, "openai_gptoss": _GPT_OSS_EFFORTS}
"""Reasoning parser -> the efforts that its models know, for models that know only some efforts and always reason."""

TEMPLATE_VARIABLES: LateField[dict[str, Any]] = LateField("chat_template_kwargs", dict[str, Any])

_OWN_FIELDS = frozenset({"messages", "add_generation_prompt", "tools"})
_NOT_SUPPORTED = re.compile(
    r".*(tool|function|document).*|chat_template|continue_final_message", re.IGNORECASE | re.DOTALL
)
"""Templates know tools and documents by many names: `tools`, `xml_tools`, `builtin_tools`, `functions`, `documents`."""


def read_template_variables(text: Raw) -> dict[str, Any]:
    """Return the client's variables by name.

    Raises:
        RequestError: the value is not an object, is too long, or has a name that is refused; `param` names the variable.
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
    """Return the chat template's variables for an effort, or none if the request has no effort.

    Raises:
        RequestError: this model does not have the effort; `param` names the field that asks for it.
    """
    if effort is None:
        return {}
    known = _EFFORTS_OF_PARSER.get(reasoning_parser or "", ())
    if known and effort not in known:
        raise RequestError(f"{param} is {effort!r}; this model has {', '.join(known)}.", param=param)
    thinks = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
