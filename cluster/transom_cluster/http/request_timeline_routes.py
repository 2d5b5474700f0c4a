"""The routes that show what happened to requests.

Each client sees its own requests only, since a timeline shows how much of a prompt was cached.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request

from transom_cluster.http.request_state import request_state
from transom_cluster.http.request_timeline_report import recent_requests, request_report
from transom_cluster.openai.answer.error_responses import HttpError, not_found
from transom_cluster.router.router import Router
from transom_core.telemetry.request_timelines import MAX_TIMELINES

_ERRORS: dict[int | str, dict[str, Any]] = {400: {"description": "A parameter is wrong."}}
_State = Annotated[Literal["running", "finished"] | None, Query(description="Only requests in this state.")]
_Limit = Annotated[int, Query(ge=1, le=MAX_TIMELINES, description="At most so many, the newest.")]


def add_routes(api: FastAPI, router: Router) -> None:
    """Add the routes to the app."""

    @api.get("/debug/requests", summary="This client's last requests, a line each", responses=_ERRORS)
    async def requests(request: Request, state: _State = None, limit: _Limit = 100) -> dict[str, Any]:
        return {"requests": await recent_requests(router, request_state(request.scope).client, state, limit)}

    @api.get("/debug/requests/{request_id:path}", summary="What happened to a request, step by step")
    async def timeline(request: Request, request_id: str) -> dict[str, Any]:
        found = await request_report(router, request_id, request_state(request.scope).client)
        if found is None:
            raise _unknown_request(request_id)
        return found


def _unknown_request(request_id: str) -> HttpError:
    message = (
        f"This client has no request {request_id!r}; each router remembers its last {MAX_TIMELINES:,} requests, without "
        "those that were refused before their prompt was read."
    )
    return not_found(message, param="request_id", code="request_not_found")
