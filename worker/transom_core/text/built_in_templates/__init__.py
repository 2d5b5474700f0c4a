"""Chat templates of model families whose repositories have none: DeepSeek V3.2 and V4 publish a Python script instead.

The templates take what chat templates take (`messages`, `tools`, `add_generation_prompt`), and:

- `thinking` or `enable_thinking`: whether the model thinks first. By default it does where `reasoning_effort` is given and not
  "none";
- `reasoning_effort`: "max" adds DeepSeek V4's instruction to think as long as it can.

A template that comes with the model or is given by the operator replaces the built-in one.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files

_FILES = {"deepseek_v32": "deepseek_v32.jinja", "deepseek_v4": "deepseek_v4.jinja"}  # by config.json's model_type


_TOKEN = "<｜Assistant｜>"  # which the templates write


def built_in_template(model_type: str, token_id: Callable[[str], int | None]) -> str | None:
    """The chat template for a family, by `model_type` of its config.json; None where there is none.

    `token_id` is the vocabulary's id of a token: a vocabulary without the family's tokens has no use for its template.
    """
    name = _FILES.get(model_type)
    if name is None or token_id(_TOKEN) is None:
        return None
    return files(__name__).joinpath(name).read_text("utf-8")
