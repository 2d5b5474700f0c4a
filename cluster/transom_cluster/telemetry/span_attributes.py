"""Makes the attributes of an HTTP request's span, with the names of OpenTelemetry's conventions for generative AI."""

from __future__ import annotations

from typing import Any

from transom_cluster.telemetry.request_timeline import RequestTimeline
from transom_core.contract import SamplingParams


def request_attributes(params: SamplingParams, *, num_choices: int, stream: bool) -> dict[str, Any]:
    """Return the attributes of a client's request. They hold no text, not even stop strings."""
    attributes: dict[str, Any] = {
        "gen_ai.request.choice.count": num_choices,
        "gen_ai.request.stream": stream,
        "gen_ai.request.temperature": float(params.temperature),
        "gen_ai.request.top_p": float(params.top_p),
    }
    if params.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
    return attributes


def response_attributes(timeline: RequestTimeline | None) -> dict[str, Any]:
    """Return the attributes of the response; they are empty if the request was refused before it had a timeline."""
    if timeline is None:
        return {}
    attributes: dict[str, Any] = {
        "gen_ai.response.id": timeline.request_id,
        "gen_ai.usage.input_tokens": timeline.num_prompt_tokens,
        "gen_ai.usage.output_tokens": timeline.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": timeline.num_hit_tokens,
        "gen_ai.response.finish_reasons": [timeline.finish_reasons[index] for index in sorted(timeline.finish_reasons)],
        "transom.grammar": timeline.has_grammar,
        "transom.tool_calls": timeline.num_tool_calls,
        "transom.reasoning_tokens": timeline.num_reasoning_tokens,
        "transom.workers": list(timeline.workers),
        "transom.resumes": timeline.num_resumes,
        "transom.client_left": timeline.has_left,
    }
    if timeline.first_token_s:
        attributes["gen_ai.response.time_to_first_chunk"] = timeline.first_token_s - timeline.arrival_s
    return attributes
