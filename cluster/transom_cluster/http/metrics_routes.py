"""The metrics routes: `/metrics` (all processes on one page), `/metrics/process` (one process) and `/metrics/sd` (the list of
processes, for Prometheus' HTTP service discovery).

A page has Prometheus' text format or OpenMetrics' format, plain or compressed.

Every process is a scrape target with the API's own address. So no process needs a port of its own that Prometheus can reach,
and the API keys protect all targets.
"""

import asyncio
import functools
import gzip
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE_OPENMETRICS
from starlette.responses import Response

from transom_cluster.http.shared_pages import SharedPages
from transom_cluster.openai.answer.error_responses import HttpError
from transom_cluster.router.peers import metrics_page, process_metrics_page, process_name
from transom_cluster.router.router import Router
from transom_cluster.router.worker_client import WorkerClient
from transom_cluster.telemetry.merge_metrics import merge_pages

logger = logging.getLogger("transom.router")

PROCESS_PATH = "/metrics/process"
GZIP_LEVEL = 1  # lines resemble each other, so higher levels save little for their time
MIN_GZIP_BYTES = 1024  # smaller pages are sent uncompressed
MAX_NAME_CHARS = 256  # of a process's name


def discovery(names: Iterable[str], request: Request, *, model: str) -> list[dict[str, Any]]:
    """Build the discovery document for processes by their names (`router/ID`, `worker/ID`), at the address of the request: its Host
    header, and the prefix at which the app is mounted.

    The metrics pages have the labels `model`, `router` and `worker` themselves, so targets carry none of these. Labels that begin
    with `__meta_` are for relabelling. The scrape job says whether targets have TLS.
    """
    prefix = request.scope.get("root_path", "").rstrip("/")
    shared = {"__metrics_path__": prefix + PROCESS_PATH, "__meta_transom_model": model}
    return [
        {
            "targets": [request.url.netloc],
            "labels": {
                **shared,
                "__param_name": name,
                "instance": name,
                "__meta_transom_kind": name.partition("/")[0],
                "__meta_transom_id": name.partition("/")[2],
            },
        }
        for name in names
    ]


_PROCESS_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "No name was given."},
    404: {"description": "There is no such process."},
    504: {"description": "The process does not answer."},
}


def add_routes(api: FastAPI, router: Router) -> None:
    """Add the routes of metrics to the app."""
    pages = SharedPages()

    @api.get("/metrics", summary="Prometheus metrics of all routers and workers")
    async def metrics(request: Request) -> Response:
        openmetrics = wants_openmetrics(request)
        page = await pages.get(openmetrics, functools.partial(collect_page, router, openmetrics=openmetrics))
        return await page_response(request, page, openmetrics=openmetrics)

    @api.get("/metrics/sd", summary="Every process as a target, for Prometheus' HTTP service discovery")
    async def service_discovery(request: Request) -> list[dict[str, Any]]:
        return discovery(await process_names(router), request, model=router.config.served_model_name)

    @api.get(
        PROCESS_PATH, summary="Prometheus metrics of one process that /metrics/sd names", responses=_PROCESS_ERRORS
    )
    async def process(request: Request, name: str) -> Response:
        openmetrics = wants_openmetrics(request)
        if len(name) > MAX_NAME_CHARS:
            raise _unknown_process(name)
        collect = functools.partial(process_page, router, name, openmetrics=openmetrics)
        return await page_response(request, await pages.get((name, openmetrics), collect), openmetrics=openmetrics)


async def collect_page(router: Router, *, openmetrics: bool = False) -> str:
    """Return the merged metrics of all routers and workers that answer in time. The others are left out and counted."""
    query, timeout_s = functools.partial(metrics_page, openmetrics=openmetrics), router.timings.scrape_timeout_s
    workers, routers = await asyncio.gather(
        asyncio.gather(
            *(_page_of(one.client, openmetrics, timeout_s=timeout_s) for one in router.connections.values())
        ),
        router.peers.ask_others(query, timeout_s=timeout_s),
    )
    dropped = router.metrics.dropped_scrapes
    dropped.of("worker").inc(sum(page is None for page in workers))
    dropped.of("router").inc(sum(not isinstance(page, str) for page in routers))
    texts = [page for page in [query(router), *routers, *workers] if isinstance(page, str)]
    return await asyncio.to_thread(merge_pages, texts, openmetrics=openmetrics)  # on a thread, so that no stream waits


async def process_names(router: Router) -> Sequence[str]:
    """Return the names (`router/ID` or `worker/ID`) of this router, the other routers that answer, and all workers."""
    others = await router.peers.ask_others(process_name, timeout_s=router.timings.scrape_timeout_s)
    routers = [process_name(router), *sorted(name for name in others if isinstance(name, str))]
    return [*routers, *(f"worker/{worker_id}" for worker_id in router.connections)]


async def process_page(router: Router, name: str, *, openmetrics: bool = False) -> str:
    """Return the metrics of one process.

    Raises:
        HttpError: there is no such process (status 404), or it does not answer (504).
    """
    kind, _, process_id = name.partition("/")
    query = functools.partial(process_metrics_page, process=name, openmetrics=openmetrics)
    timeout_s = router.timings.scrape_timeout_s
    if (page := query(router)) is not None:
        return page
    if kind == "worker" and (connection := router.connections.get(process_id)) is not None:
        page = await _page_of(connection.client, openmetrics, timeout_s=timeout_s)
        if page is None:
            raise _silent_process(name)
        return page
    answers = await router.peers.ask_others(query, timeout_s=timeout_s) if kind == "router" else []
    for answer in answers:
        if isinstance(answer, str):
            return answer
    is_silent = any(isinstance(answer, BaseException) for answer in answers)
    raise _silent_process(name) if is_silent else _unknown_process(name)


def _unknown_process(name: str) -> HttpError:
    message = f"There is no process {name!r}; /metrics/sd lists all processes."
    return HttpError(404, message, param="name", code="process_not_found")


def _silent_process(name: str) -> HttpError:
    message = f"The process {name!r} does not answer; try again, or look at its log."
    return HttpError(504, message, kind="server_error", param="name", code="process_silent")


async def _page_of(client: WorkerClient, openmetrics: bool, *, timeout_s: float) -> str | None:
    try:
        return await asyncio.wait_for(client.metrics_text(openmetrics=openmetrics), timeout_s)
    except Exception as error:
        logger.info("A worker's metrics were left out: %r", error)
        return None


def wants_openmetrics(request: Request) -> bool:
    """Return whether the client names OpenMetrics' format and gives it at least the weight of Prometheus' text format."""
    weights = _weights(request.headers.get("accept", ""))
    weight = weights.get("application/openmetrics-text", 0.0)
    return weight > 0 and weight >= weights.get("text/plain", 0.0)


async def page_response(request: Request, page: str, *, openmetrics: bool) -> Response:
    """Return a response with the page, compressed if the client accepts gzip. A thread compresses it, so that no stream waits."""
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
    """Return the weight of each name in an Accept or Accept-Encoding header: its largest `q`, or 1 if it has none."""
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
