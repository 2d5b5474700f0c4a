"""OpenTelemetry's newest names for generative AI, for those who ask for them with `OTEL_SEMCONV_STABILITY_OPT_IN`.

With `gen_ai_latest_experimental` in that variable, spans have more attributes, and a router's metrics page has the metrics of a
model server, under the names that OpenTelemetry's rules for Prometheus give them: `gen_ai.server.request.duration`, in seconds,
becomes `gen_ai_server_request_duration_seconds`. Buckets are Transom's own. What Transom measures for all endpoints at once has the
operation `inference`.
"""

import os
from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from transom_core.telemetry.vllm_names import relabelled

PROVIDER = "transom"
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""Path -> OpenTelemetry's name of what it does."""

_SERVER_METRICS = {
    "transom_router_request_seconds": "gen_ai_server_request_duration_seconds",
    "transom_router_first_token_seconds": "gen_ai_server_time_to_first_token_seconds",
    "transom_router_inter_token_seconds": "gen_ai_server_time_per_output_token_seconds",
}


def wants_latest_names() -> bool:
    """Return whether this process's environment asks for the newest names."""
    return "gen_ai_latest_experimental" in os.environ.get("OTEL_SEMCONV_STABILITY_OPT_IN", "").split(",")


def genai_families(families: Mapping[str, Metric]) -> Iterator[Metric]:
    """Yield OpenTelemetry's families that come from `families`, which are given by name."""
    for source, name in _SERVER_METRICS.items():
        if source in families:
            yield relabelled(families[source], name, _labels)


def _labels(labels: Mapping[str, str]) -> dict[str, str] | None:
    """Return OpenTelemetry's labels of a sample; None if it belongs to no operation of a model."""
    operation = OPERATIONS.get(labels["endpoint"]) if "endpoint" in labels else "inference"
    if operation is None:
        return None
    names = {"gen_ai_operation_name": operation, "gen_ai_provider_name": PROVIDER}
    return names | {"gen_ai_request_model": labels["model"], "service_instance_id": f"router/{labels['router']}"}
