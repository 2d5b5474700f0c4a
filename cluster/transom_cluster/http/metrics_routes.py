"""The routes of metrics: all processes on one page, one process, and the list of processes for Prometheus."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from transom_cluster.http.metrics_discovery import PROCESS_PATH, discovery
from transom_cluster.http.metrics_format import page_response, wants_openmetrics
from transom_cluster.http.metrics_page import collect_page, process_names, process_page
from transom_cluster.http.public_address import public_address
from transom_cluster.router.router import Router

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
