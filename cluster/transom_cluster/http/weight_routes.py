"""The routes with which an operator pauses all workers and replaces their weights, as reinforcement learning needs it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Literal

from fastapi import Body, FastAPI

from transom_cluster.router.router import Router
from transom_cluster.router.worker_client import WorkerClient
from transom_core.contract import ErrorInfo
from transom_core.errors import ModelError, RequestError, WorkerLost
from transom_core.model_files.resolve import with_commit


def add_routes(api: FastAPI, router: Router) -> None:
    """Add the routes to the app. Each answers when all workers have done what it asks for."""

    async def on_all(call: Callable[[WorkerClient], Coroutine[Any, Any, ErrorInfo | None]]) -> dict[str, Any]:
        workers = [one for one in router.connections.values() if one.takes_requests]
        try:
            refusals = await asyncio.gather(*(call(one.client) for one in workers))
        except Exception as error:
            raise WorkerLost(f"A worker did not answer: {type(error).__name__}.") from error
        for refusal in filter(None, refusals):
            raise refusal.error()
        return {"workers": [one.worker_id for one in workers]}

    @api.post("/pause", include_in_schema=False)
    async def pause(mode: Literal["keep", "wait"] = "wait") -> dict[str, Any]:
        return await on_all(lambda client: client.pause(mode))

    @api.post("/resume", include_in_schema=False)
    async def resume() -> dict[str, Any]:
        return await on_all(lambda client: client.pause(None))

    @api.post("/update_weights_from_disk", include_in_schema=False)
    async def update_weights_from_disk(model_path: Annotated[str, Body(embed=True)]) -> dict[str, Any]:
        try:
            model = await asyncio.to_thread(with_commit, model_path)  # so that all workers load the same one
        except ModelError as error:
            raise RequestError(f"model_path: {error}", param="model_path") from error
        return await on_all(lambda client: client.update_weights(model))
