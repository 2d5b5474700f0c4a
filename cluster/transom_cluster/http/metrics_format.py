"""Chooses the format of a metrics page from the request's headers: text or OpenMetrics, plain or compressed."""

from __future__ import annotations

import asyncio
import gzip

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE_OPENMETRICS
from starlette.requests import Request
from starlette.responses import Response

GZIP_LEVEL = 1  # lines resemble each other, so higher levels cost more than they save
MIN_GZIP_BYTES = 1024


def wants_openmetrics(request: Request) -> bool:
    """Whether the client prefers OpenMetrics to plain text; a client that states no preference gets text."""
    weights = _weights(request.headers.get("accept", ""))
    weight = weights.get("application/openmetrics-text", 0.0)
    return weight > 0 and weight >= weights.get("text/plain", 0.0)


async def page_response(request: Request, page: str, *, openmetrics: bool) -> Response:
    """The page, compressed if the client accepts gzip. A thread compresses it, so that no stream waits."""
    headers = {
        "content-type": CONTENT_TYPE_OPENMETRICS if openmetrics else CONTENT_TYPE_PLAIN_0_0_4,
        "vary": "Accept, Accept-Encoding",
    }
    body = page.encode()
    if len(body) >= MIN_GZIP_BYTES and _weights(request.headers.get("accept-encoding", "")).get("gzip", 0.0) > 0:
        body = await asyncio.to_thread(gzip.compress, body, GZIP_LEVEL)
        headers["content-encoding"] = "gzip"
    return Response(body, headers=headers)


def _weights(header: str) -> dict[str, float]:
    """The weight of each name in an Accept header: the greatest `q` that it has, or 1 without one."""
    weights: dict[str, float] = {}
    for part in header.split(","):
        name, *parameters = (text.strip().lower() for text in part.split(";"))
        given = next((text[2:] for text in parameters if text.startswith("q=")), "1")
        try:
            weight = float(given)
        except ValueError:
            weight = 0.0
        weights[name] = max(weight, weights.get(name, 0.0))
    return weights
