"""The routes of metrics: all processes on one page, one process, and the list of processes for Prometheus' HTTP service discovery.

Each process is a scrape target with the API's own address. No process therefore needs a port that Prometheus can reach, and API
keys hold for all targets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from starlette.responses import Response

from transom_cluster.http.metrics_page import (
    collect_page,
    page_response,
    process_names,
    process_page,
    wants_openmetrics,
)
from transom_cluster.router.router import Router

PROCESS_PATH = "/metrics/process"
_HOST = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?")
_PREFIX = re.compile(r"(?:/[A-Za-z0-9._~-]+)+")


class PublicAddress(NamedTuple):
    """The API's address from outside.

    `host` includes the port unless it is the scheme's default; `prefix` is the path in front of all of the app's paths.
    """

    host: str
    prefix: str
    is_https: bool


def public_address(request: Request) -> PublicAddress:
    """The address in the request itself, unless a reverse proxy's headers give another.

    The headers are `X-Forwarded-Host`, `X-Forwarded-Prefix` (the prefix that the proxy removed from the path) and
    `X-Forwarded-Proto`. Of several values the first counts, which is the outermost proxy's. Values without the form of a host or a
    path are ignored. A client that forges these headers misleads only itself.
    """
    host = _forwarded(request, "host", _HOST) or request.url.netloc
    removed = _forwarded(request, "prefix", _PREFIX)
    mounted_at = request.scope.get("root_path", "").rstrip("/")
    # Serve's `root_path` setting may repeat what the header says; the prefix must appear once.
    prefix = mounted_at if f"{mounted_at}/".startswith(f"{removed}/") else removed + mounted_at
    is_https = request.url.scheme == "https" or request.headers.get("x-forwarded-proto", "").lower().startswith("https")
    return PublicAddress(host, prefix, is_https)


def _forwarded(request: Request, name: str, shape: re.Pattern[str]) -> str:
    value = request.headers.get(f"x-forwarded-{name}", "").partition(",")[0].strip().rstrip("/")
    return value if shape.fullmatch(value) else ""


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
