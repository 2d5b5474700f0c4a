"""Provides chat templates for model families that publish none: DeepSeek V3.2 and V4 publish Python scripts instead, and Mistral's
models with a `tekken.json` need the library mistral-common.

DeepSeek's templates take the usual variables (`messages`, `tools`, `add_generation_prompt`), and:

- `thinking` or `enable_thinking`: whether the model thinks first. By default it does so if `reasoning_effort` is given and is not
  "none".
- `reasoning_effort`: "max" adds the instruction to think as long as it can (V4).

A template that comes with the model, or that the operator gives, replaces the built-in one.
"""

from collections.abc import Callable
from importlib.resources import files

# By config.json's model_type, or "tekken" and the version of that file: the template, and a token that it writes.
_FILES = {
    "deepseek_v32": ("deepseek_v32.jinja", "<｜Assistant｜>"),
    "deepseek_v4": ("deepseek_v4.jinja", "<｜Assistant｜>"),
    **{f"tekken{version}": ("mistral.jinja", "[SYSTEM_PROMPT]") for version in (7, 11, 13)},
}


def built_in_template(model_type: str, token_id: Callable[[str], int | None]) -> str | None:
    """Return the built-in chat template for a config.json's `model_type`, or for `tekken7` and so on; None if there is none.

    `token_id` returns a token's id, or None for an unknown token. The result is None if the vocabulary lacks the family's tokens,
    because the template would be useless.
    """
    name, token = _FILES.get(model_type, ("", ""))
    if not name or token_id(token) is None:
        return None
    return files(__name__).joinpath(name).read_text("utf-8")
