"""Builds the HTTP API as a FastAPI app that does not depend on Ray: middleware, routes and error handlers."""

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from transom_cluster.http import (
    adapter_routes,
    block_map_routes,
    metrics_routes,
    request_timeline_routes,
    server_routes,
    transfer_routes,
    weight_routes,
)
from transom_cluster.http.admission_middleware import BLOCK_STREAM_PATH, OPEN_PATHS, AdmissionMiddleware
from transom_cluster.http.api_keys import ADMIN_FLAG, ApiKeys, needs_admin_key
from transom_cluster.http.client_limits import LimitSet
from transom_cluster.http.client_threads import RequestThreads
from transom_cluster.http.openai_routes import OpenAiRoutes
from transom_cluster.http.request_middleware import ErrorMiddleware, RequestMiddleware, error_response
from transom_cluster.http.tokenize_routes import TokenizeRoutes
from transom_cluster.openai.answer.error_responses import HttpError
from transom_cluster.openai.openapi_document import POST_ENDPOINTS, complete_openapi_document
from transom_cluster.router.router import Router
from transom_cluster.telemetry.request_outcome import CLIENT_DISCONNECTED_STATUS
from transom_core import __version__
from transom_core.errors import RequestError, TransomError

logger = logging.getLogger("transom.router")

STATUSES = (200, 400, 401, 403, 404, 408, 413, 429, 431, CLIENT_DISCONNECTED_STATUS, 500, 503, 529)
"""The statuses of POST requests whose series are on the metrics page, with 0, from the start."""

# FastAPI's own spans would duplicate Transom's, and its records of exceptions have their messages, which may quote prompts.
NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}


def build_api(router: Router) -> FastAPI:
    """Build the app that serves `router`. The app's lifespan starts and stops the router."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        router.start()
        yield
        await router.stop()

    api = FastAPI(
        title="Transom", version=__version__, lifespan=lifespan, redirect_slashes=False, telemetry=NO_TELEMETRY
    )
    config = router.config
    keys = ApiKeys(config.api_keys, config.api_key_file)
    admins = ApiKeys((), config.admin_api_key_file, flag=ADMIN_FLAG)
    limits = LimitSet(config.limits)
    api.state.limits = limits
    # The innermost layer comes first: outer layers count and log the requests that inner layers refuse.
    api.add_middleware(AdmissionMiddleware, config=config, keys=keys, admins=admins, limits=limits)
    api.add_middleware(ErrorMiddleware, show_messages=config.log_prompts)
    if config.allowed_origins:
        # Outside the check of keys, since a browser asks without a key whether a page may send a request (a *preflight*), and
        # outside the errors, which a page of an allowed origin may read.
        api.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=("GET", "HEAD", "POST", "OPTIONS"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
        )
    api.add_middleware(
        RequestMiddleware, metrics=router.metrics, tracing=router.tracing, logs_access=config.log_format == "json"
    )
    _add_error_handlers(api)
    threads = RequestThreads()
    OpenAiRoutes(router, threads, limits.work).add_routes(api)
    TokenizeRoutes(router, threads).add_routes(api)
    for routes in (
        server_routes,
        metrics_routes,
        request_timeline_routes,
        block_map_routes,
        transfer_routes,
        weight_routes,
        adapter_routes,
    ):
        routes.add_routes(api, router)
    document = api.openapi()
    has_keys, has_admins = keys.are_required, admins.are_required
    admin_paths = frozenset(
        path for path in document["paths"] if needs_admin_key(path, has_keys=has_keys, has_admins=has_admins)
    )
    complete_openapi_document(document, needs_key=keys.are_required, open_paths=OPEN_PATHS, admin_paths=admin_paths)
    _answer_head_requests(api)
    for endpoint in POST_ENDPOINTS:
        for status in STATUSES:  # so that Prometheus' `rate` sees the first error of a kind
            router.metrics.requests.of(endpoint, str(status))
    return api


def _answer_head_requests(api: FastAPI) -> None:
    """Accept HEAD on every route that accepts GET, as HTTP requires. The web server leaves out the body, and the OpenAPI document
    shows only GET."""
    for route in api.routes:
        if not isinstance(route, APIRoute) or route.path == BLOCK_STREAM_PATH:  # the stream would never end
            continue
        if route.methods and "GET" in route.methods:
            route.methods.add("HEAD")


def _add_error_handlers(api: FastAPI) -> None:
    async def on_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, (RequestError, HttpError)):
            logger.warning("%s %s: %r", request.method, request.url.path, error)
        return error_response(error, request.scope)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        if isinstance(error.__cause__, ClientDisconnect):
            raise error.__cause__
        # FastAPI's own error, of what was raised while it read the body.
        if isinstance(error.__cause__, (HttpError, TransomError)):
            return await on_error(request, error.__cause__)
        status = error.status_code if isinstance(error, HTTPException) else 500
        headers = getattr(error, "headers", None) or {}
        if status == 405 and request.method == "OPTIONS":  # the path exists: list the methods that it allows
            return Response(status_code=204, headers={"allow": f"{headers['Allow']}, OPTIONS"})
        if status == 404:
            message, code = f"There is no route {request.url.path}; GET / lists all paths.", "not_found"
        elif status == 405:
            message, code = f"{request.method} is not allowed at {request.url.path}.", "method_not_allowed"
        else:
            message, code = f"The request was refused with status {status}.", None
        return error_response(HttpError(status, message, code=code, headers=headers), request.scope)

    async def on_validation_error(request: Request, error: Exception) -> Response:
        problems = error.errors() if isinstance(error, RequestValidationError) else []
        name = ".".join(str(part) for part in problems[0]["loc"][1:]) if problems else None
        message = f"{name}: {problems[0]['msg']}." if problems else str(error)
        return error_response(RequestError(message, param=name), request.scope)

    api.add_exception_handler(TransomError, on_error)
    api.add_exception_handler(HttpError, on_error)
    api.add_exception_handler(HTTPException, on_http_exception)
    api.add_exception_handler(RequestValidationError, on_validation_error)
