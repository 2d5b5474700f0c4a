"""The routes that describe the server: index, health, version, and the served model."""

import time
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.responses import JSONResponse, Response

from transom_cluster.openai.answer.response_types import Health, ModelCard, ModelList
from transom_cluster.openai.answer.writers import system_fingerprint
from transom_cluster.router.router import Router
from transom_cluster.router.worker_pool import describe_connection
from transom_core import __version__


def add_routes(api: FastAPI, router: Router) -> None:
    """Add the routes to the app."""
    _add_status_routes(api, router)
    _add_model_routes(api, router)


def _add_status_routes(api: FastAPI, router: Router) -> None:
    @api.get("/", summary="What is here")
    async def index() -> dict[str, Any]:
        paths = sorted({route.path for route in api.routes if isinstance(route, APIRoute)} - {"/"})
        return {
            "name": "transom",
            "version": __version__,
            "model": router.config.served_model_name,
            "workers": [describe_connection(connection) for connection in router.connections.values()],
            "paths": paths,
            "docs": "/docs",
        }

    @api.get("/health", summary="200 when requests can be served")
    async def health() -> Response:
        if router.is_ready:
            return JSONResponse(Health(status="ok"))
        status = "this router is being stopped" if router.is_draining else "no worker is ready"
        return JSONResponse(Health(status=status), status_code=503, headers={"retry-after": "1"})

    @api.get("/version", summary="The server's version")
    async def version() -> dict[str, str]:
        return {"version": __version__}


def _add_model_routes(api: FastAPI, router: Router) -> None:
    started_s = int(time.time())

    def model_card(name: str) -> ModelCard:
        limits, adapter = router.limits.last_known, router.adapters.get(name)
        newest = next(iter(router.served.values()), list(router.connections.values()))
        info = next((one.info for one in newest if one.info is not None), None)
        groups = () if info is None else info.kv_groups
        return {
            "id": name,
            "object": "model",
            "created": started_s,
            "owned_by": "transom",
            "root": router.config.served_model_name if adapter is None else adapter.path,
            "parent": None if adapter is None else router.config.served_model_name,
            "max_model_len": None if limits is None else limits.max_model_len,
            "kv_cache": [
                {"group": group.name, "dtype": group.dtype, "bytes_per_token": group.bytes_per_token}
                for group in groups
            ],
            "versions": [
                {"system_fingerprint": system_fingerprint(identity), "identity": identity, "workers": len(workers)}
                for identity, workers in router.served.items()
            ],
        }

    @api.get("/v1/models", summary="The served models", response_model=None)
    async def models() -> ModelList:
        return {
            "object": "list",
            "data": [model_card(name) for name in (*router.config.model_names, *router.adapters.names)],
        }

    @api.get("/v1/models/{model_id:path}", summary="One model", response_model=None)
    async def model(model_id: str) -> ModelCard:
        router.check_model(model_id)
        return model_card(model_id)
