"""Metrics over HTTP."""

from __future__ import annotations

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from transom_cluster.metrics_page import collect_page
from transom_cluster.router import Router


def add_to(api: FastAPI, router: Router) -> None:
    """Add the routes."""

    @api.get("/metrics", summary="Prometheus metrics of this router and all workers")
    async def metrics() -> Response:
        page = await collect_page(router.metrics, router.clients)
        return Response(page, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})
