"""The routes of the live block map: its page and files, the stream of frames, and one block's description (docs/block_map.md)."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from starlette.responses import HTMLResponse, Response

from transom_cluster.blockmap.feed import describe_error
from transom_cluster.blockmap.static_files import DEMO, PAGE, file_response
from transom_cluster.http.block_map_stream import BlockStream
from transom_cluster.openai.answer.error_responses import HttpError, http_status_error, not_found
from transom_cluster.router.router import Router
from transom_core.errors import WorkerLost

MIN_PERIOD_S, MAX_PERIOD_S = 0.1, 10.0
DESCRIBE_TIMEOUT_S = 10.0

_Period = Annotated[float, Query(gt=0, allow_inf_nan=False)]


def add_routes(api: FastAPI, router: Router) -> None:
    """Add the block map's routes to the app."""
    _add_file_routes(api)
    _add_data_routes(api, router)


def _add_file_routes(api: FastAPI) -> None:
    @api.get("/blocks", summary="The live block map, a page for people", response_class=HTMLResponse)
    def page(request: Request) -> Response:
        return _file(PAGE, request)

    @api.get("/blocks/assets/{name}", include_in_schema=False)
    def asset(name: str, request: Request) -> Response:
        return _file(name, request)

    @api.get("/blocks/demo.bin", include_in_schema=False)
    def demo(request: Request) -> Response:
        return _file(DEMO, request)


def _file(name: str, request: Request) -> Response:
    response = file_response(name, request)
    if response is None:
        raise HttpError(http_status_error(404, request.method, request.url.path))
    return response


def _add_data_routes(api: FastAPI, router: Router) -> None:
    @api.get("/blocks/stream", include_in_schema=False)
    async def stream(worker: str | None = None, period_s: _Period = 0.5) -> Response:
        if worker is not None:
            _check_worker(router, worker)
        period_s = min(max(period_s, MIN_PERIOD_S), MAX_PERIOD_S)
        return BlockStream(router, worker=worker, period_s=period_s)

    @api.get("/blocks/describe", include_in_schema=False)
    async def describe(
        worker: str, group: int, block: int, tier: Literal["device", "host"] = "device"
    ) -> dict[str, Any]:
        _check_worker(router, worker)
        try:
            async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
                described = await router.connections[worker].client.describe_block(group, block, tier)
        except Exception as error:
            raise WorkerLost(describe_error(error)) from error
        if "error" in described:
            raise not_found(described["error"], param="block", code="block_not_found")
        return {"worker": worker, **described}


def _check_worker(router: Router, worker: str) -> None:
    if worker not in router.connections:
        known = ", ".join(sorted(router.connections)) or "none"
        raise not_found(
            f"There is no worker {worker!r}; the workers are: {known}.", param="worker", code="worker_not_found"
        )
