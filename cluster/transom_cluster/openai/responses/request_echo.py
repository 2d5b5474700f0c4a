"""Makes the JSON of the request fields that a response of /v1/responses repeats.

A stream repeats these fields in three events, and a client's tools may be long, so each field becomes JSON text only once.
"""

from typing import Any

import msgspec

from transom_cluster.openai.answer.json_pieces import JsonText
from transom_cluster.openai.request.body import NULL
from transom_cluster.openai.responses.object_types import RequestEcho
from transom_cluster.openai.responses.request_body import METADATA, ReasoningField, ResponsesRequest, TextField
from transom_core.contract import SamplingParams


def request_echo(body: ResponsesRequest, params: SamplingParams) -> dict[str, JsonText]:
    """Return the JSON text of each field. The caller has already checked the body's tools."""
    reasoning = body.reasoning or ReasoningField()
    echo: RequestEcho = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
        "service_tier": "default",
        "store": False,
        "background": False,
        "previous_response_id": None,
        "temperature": params.temperature,
        "text": {"format": _text_format(body.text)},
        "tool_choice": "auto" if body.tool_choice == NULL else msgspec.json.decode(body.tool_choice),
        "tools": msgspec.json.decode(body.tools) or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "metadata": METADATA.read(body.metadata) or {},
    }
    if body.text is not None and body.text.verbosity is not None:
        echo["text"]["verbosity"] = body.text.verbosity
    if body.prompt_cache_key is not None:
        echo["prompt_cache_key"] = body.prompt_cache_key
    if body.safety_identifier is not None:
        echo["safety_identifier"] = body.safety_identifier
    if body.user is not None:
        echo["user"] = body.user
    return {name: JsonText.of(value) for name, value in echo.items()}


def _text_format(text: TextField | None) -> dict[str, Any]:
    if text is None or text.format is None:
        return {"type": "text"}
    given = text.format
    if given.type != "json_schema":
        return {"type": given.type}
    echo = {"type": given.type, "name": given.name, "schema": msgspec.json.decode(given.schema)}
    if given.description is not None:
        echo["description"] = given.description
    return {**echo, "strict": bool(given.strict)}
