"""Reads the field `prompt` of a completion: a text, token ids, a list of texts, or a list of lists of ids."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Raw

from transom_cluster.openai.request.body import decode_field
from transom_cluster.openai.request.request_limits import ModelLimits, check_choices, check_length, check_total
from transom_cluster.openai.request.token_id_lists import count_ids, read_id_lists, read_ids
from transom_core.errors import RequestError

_STRING, _IDS = {"type": "string"}, {"type": "array", "items": {"type": "integer"}}
PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [_STRING, {"type": "array", "items": _STRING}, _IDS, {"type": "array", "items": _IDS}],
    "examples": ["Once upon a time", ["One", "Two"], [72, 105]],
}
TOKENS_SCHEMA: dict[str, Any] = {**_IDS, "examples": [[72, 105]]}

_TEXT: msgspec.json.Decoder[str] = msgspec.json.Decoder(str)
_TEXTS: msgspec.json.Decoder[list[str]] = msgspec.json.Decoder(list[str])
_FIRST_ELEMENT = re.compile(rb"\[\s*(.)", re.DOTALL)


def read_prompts(field: Raw, *, num_choices: int, limits: ModelLimits) -> list[str] | list[list[int]]:
    """Return the prompts of this batch: all texts, or all lists of token ids. `num_choices` is `n`, the choices of each prompt.

    Lists that are too long are refused before their ids become objects.

    Raises:
        RequestError: there is no prompt, the field has another form, or there are too many choices or ids.
        PromptTooLong: a prompt of ids exceeds the model's length.
    """
    text = bytes(field)
    first = _FIRST_ELEMENT.match(text)
    if text.startswith(b'"'):
        return [decode_field(_TEXT, text, "prompt")]
    if first is None:
        shown = text[:80].decode(errors="replace")
        raise RequestError(
            f"prompt is {shown}; send a text, token ids, a list of texts, or a list of lists of token ids.",
            param="prompt",
        )
    if first[1] == b"]":
        raise RequestError("prompt is an empty list; send at least one prompt.", param="prompt")
    if first[1] == b'"':
        texts = decode_field(_TEXTS, text, "prompt")
        check_choices(len(texts), num_choices, limits, param="prompt")
        return texts
    if first[1] == b"[":
        check_choices(text.count(b"[") - 1, num_choices, limits, param="prompt")
        check_total(count_ids(text), num_choices, limits, param="prompt")
        return read_id_lists(text, "prompt")
    check_length(count_ids(text), None, limits, param="prompt")
    return [read_ids(text, "prompt")]


def read_tokens(field: Raw, limits: ModelLimits) -> list[int]:
    """Return the ids of the field `tokens` of /detokenize.

    Raises:
        RequestError: the field is not a list of whole numbers, or has more of them than the model's length.
    """
    text = bytes(field)
    if (num_ids := count_ids(text)) > limits.max_model_len:
        raise RequestError(
            f"tokens has {num_ids:,} ids; at most {limits.max_model_len:,}, the model's length, are decoded at once.",
            param="tokens",
        )
    return read_ids(text, "tokens")
