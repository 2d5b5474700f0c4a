"""The routes of metrics: all processes on one page, one process, and the list of processes for Prometheus' HTTP service discovery.

Each process is a scrape target with the API's own address. No process therefore needs a port that Prometheus can reach, and API
keys hold for all targets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from transom_cluster.http.metrics_page import (
    collect_page,
    page_response,
    process_names,
    process_page,
    wants_openmetrics,
)
from transom_cluster.http.public_address import PublicAddress, public_address
from transom_cluster.router.router import Router

PROCESS_PATH = "/metrics/process"


def discovery(names: Iterable[str], *, at: PublicAddress, model: str) -> list[dict[str, Any]]:
    """Build the discovery document for processes by their names (`router/ID`, `worker/ID`).

    The metrics pages have the labels `model`, `router` and `worker` themselves, so targets carry none of these. Labels that begin
    with `__meta_` are for relabelling. A target has `__scheme__` only if TLS is certain; else the scrape job's own `scheme` holds.
    """
    shared = {"__metrics_path__": at.prefix + PROCESS_PATH, "__meta_transom_model": model}
    if at.is_https:
        shared["__scheme__"] = "https"
    return [
        {
            "targets": [at.host],
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

    @api.get("/metrics", summary="Prometheus metrics of all routers and workers")
    async def metrics(request: Request) -> Response:
        openmetrics = wants_openmetrics(request)
        return await page_response(
            request, await collect_page(router, openmetrics=openmetrics), openmetrics=openmetrics
        )

    @api.get("/metrics/sd", summary="Every process as a target, for Prometheus' HTTP service discovery")
    async def service_discovery(request: Request) -> list[dict[str, Any]]:
        names = await process_names(router)
        return discovery(names, at=public_address(request), model=router.config.served_model_name)

    @api.get(
        PROCESS_PATH, summary="Prometheus metrics of one process that /metrics/sd names", responses=_PROCESS_ERRORS
    )
    async def process(request: Request, name: str) -> Response:
        openmetrics = wants_openmetrics(request)
        page = await process_page(router, name, openmetrics=openmetrics)
        return await page_response(request, page, openmetrics=openmetrics)
