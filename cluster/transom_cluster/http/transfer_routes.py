"""The route with which `transom bench transfer` measures how fast KV blocks move from one worker to another."""

import asyncio
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query

from transom_cluster.blockmap.feed import describe_error
from transom_cluster.http.block_map_routes import check_worker
from transom_cluster.openai.answer.error_responses import HttpError
from transom_cluster.router.router import Router
from transom_core.errors import WorkerLost

MAX_BYTES = 2**30
MEASURE_TIMEOUT_S = 120.0  # also for measurements of other clients, for which a worker lets this one wait


def add_routes(api: FastAPI, router: Router) -> None:
    """Add the route to the app."""

    @api.post("/transfers/measure", include_in_schema=False)
    async def measure(
        source: str,
        target: str,
        num_bytes: Annotated[int, Query(alias="bytes", gt=0, le=MAX_BYTES)],
        wire: Literal["nixl", "ray"] = "nixl",
    ) -> dict[str, Any]:
        for worker in (source, target):
            check_worker(router, worker)
        if source == target:
            message = f"source and target are both {source!r}; name two workers."
            raise HttpError(400, message, param="target", code="invalid_value")
        try:
            async with asyncio.timeout(MEASURE_TIMEOUT_S):
                return await router.connections[target].client.measure_fetch(source, num_bytes, wire)
        except Exception as error:
            raise WorkerLost(describe_error(error)) from error
