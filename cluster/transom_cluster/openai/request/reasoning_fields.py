"""Reads the request fields about reasoning, `reasoning_effort` and `verbosity`, as variables of the chat template.

A template that does not know a variable ignores it, so that a model without reasoning answers as always. The thinking switches of
templates have two names: `enable_thinking` (Qwen, GLM) and `thinking` (DeepSeek, Granite, Kimi). Both follow from the effort.
"""

from __future__ import annotations

from typing import Any, Literal

from transom_core.errors import RequestError

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]

_GPT_OSS_EFFORTS = ("low", "medium", "high")
_EFFORTS_OF_PARSER = {"openai": _GPT_OSS_EFFORTS, "openai_gptoss": _GPT_OSS_EFFORTS}
"""The efforts that a model knows, by its reasoning parser, where it knows only some and always reasons."""


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
