"""Metrics pages: all routers and workers merged, or one process alone; as text or OpenMetrics, plain or compressed."""

from __future__ import annotations

import asyncio
import gzip
import logging
from collections.abc import Sequence

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE_OPENMETRICS
from starlette.requests import Request
from starlette.responses import Response

from transom_cluster.openai.answer.error_responses import process_silent, unknown_process
from transom_cluster.router.peers import MetricsQuery, ProcessMetricsQuery, ProcessNameQuery
from transom_cluster.router.router import Router
from transom_cluster.router.worker_client import WorkerClient
from transom_cluster.telemetry.merge_metrics import merge_pages

logger = logging.getLogger("transom.router")


async def collect_page(router: Router, *, openmetrics: bool = False) -> str:
    """The merged metrics of all routers and workers that answer in time. The others are left out and counted."""
    query, timeout_s = MetricsQuery(openmetrics), router.timings.scrape_timeout_s
    workers, routers = await asyncio.gather(
        asyncio.gather(
            *(_page_of(one.client, openmetrics, timeout_s=timeout_s) for one in router.connections.values())
        ),
        router.peers.ask_others(query, timeout_s=timeout_s),
    )
    router.metrics.dropped_scrapes("worker", sum(page is None for page in workers))
    router.metrics.dropped_scrapes("router", sum(not isinstance(page, str) for page in routers))
    pages = [query.answer(router), *routers, *workers]
    texts = [page for page in pages if isinstance(page, str)]
    return await asyncio.to_thread(merge_pages, texts, openmetrics=openmetrics)  # on a thread, so that no stream waits


async def process_names(router: Router) -> Sequence[str]:
    """The names `router/ID` and `worker/ID`: this router, the other routers that answer, and all workers."""
    others = await router.peers.ask_others(ProcessNameQuery(), timeout_s=router.timings.scrape_timeout_s)
    routers = [ProcessNameQuery().answer(router), *sorted(name for name in others if isinstance(name, str))]
    return [*routers, *(f"worker/{worker_id}" for worker_id in router.connections)]


async def process_page(router: Router, name: str, *, openmetrics: bool = False) -> str:
    """The metrics of one process alone.

    Raises:
        HttpError: 404 if there is no such process, 504 if it does not answer.
    """
    kind, _, process_id = name.partition("/")
    query, timeout_s = ProcessMetricsQuery(name, openmetrics), router.timings.scrape_timeout_s
    if (page := query.answer(router)) is not None:
        return page
    if kind == "worker" and (connection := router.connections.get(process_id)) is not None:
        page = await _page_of(connection.client, openmetrics, timeout_s=timeout_s)
        if page is None:
            raise process_silent(name)
        return page
    answers = await router.peers.ask_others(query, timeout_s=timeout_s) if kind == "router" else []
    for answer in answers:
        if isinstance(answer, str):
            return answer
    raise (
        process_silent(name) if any(isinstance(answer, BaseException) for answer in answers) else unknown_process(name)
    )


async def _page_of(client: WorkerClient, openmetrics: bool, *, timeout_s: float) -> str | None:
    try:
        return await asyncio.wait_for(client.metrics_text(openmetrics=openmetrics), timeout_s)
    except Exception as error:
        logger.info("A worker's metrics were left out: %r", error)
        return None


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
