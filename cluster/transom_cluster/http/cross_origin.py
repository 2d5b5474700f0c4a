"""Lets web pages of the origins in `--allowed-origins` call this API from a browser (CORS).

A browser first asks, without an API key, whether it may send such a request: the **preflight**, an OPTIONS request with the header
Access-Control-Request-Method. So this middleware must run before the one that checks keys. It adds its headers to error responses
as well, because a page could not read the error otherwise.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from transom_cluster.openai.answer.error_responses import wire_error
from transom_core.errors import RequestError

METHODS = ("GET", "HEAD", "POST", "OPTIONS")
READABLE_HEADERS = ("x-request-id", "retry-after")  # response headers that a page may read besides the default ones


class CrossOriginMiddleware(CORSMiddleware):
    """Starlette's CORS middleware, with refusals in the form of this API's errors."""

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        super().__init__(
            app, allow_origins=origins, allow_methods=METHODS, allow_headers=("*",), expose_headers=READABLE_HEADERS
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """Answer a preflight with status 200, or with 400 for an origin or method that is not allowed."""
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        origin, method = request_headers["origin"], request_headers["access-control-request-method"]
        error = wire_error(
            RequestError(
                f"Pages of {origin!r} may not send {method!r} requests; the server's --allowed-origins names the origins that "
                f"may, and the methods are {', '.join(METHODS)}."
            )
        )
        headers = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        return Response(error.dumps(), error.status, headers=headers, media_type="application/json")
