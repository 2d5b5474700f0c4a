"""What happened to requests, over HTTP. Each client sees its own: a life tells what of its prompt was cached."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request

from transom_cluster.http.request_state import request_state
from transom_cluster.http.request_timeline_report import recent_requests, request_report
from transom_cluster.openai.errors import HttpError, not_found
from transom_cluster.router.router import Router
from transom_worker.telemetry.request_timelines import MAX_TIMELINES

_ERRORS: dict[int | str, dict[str, Any]] = {400: {"description": "A parameter is wrong."}}
_State = Annotated[Literal["running", "finished"] | None, Query(description="Only these; finished: however it ended.")]
_Limit = Annotated[int, Query(ge=1, le=MAX_TIMELINES, description="The newest ones.")]


def add_routes(api: FastAPI, router: Router) -> None:
    """Add the routes."""

    @api.get("/debug/requests", summary="This client's last requests, a line each", responses=_ERRORS)
    async def requests(request: Request, state: _State = None, limit: _Limit = 100) -> dict[str, Any]:
        return {"requests": await recent_requests(router, request_state(request.scope).client, state, limit)}

    @api.get("/debug/requests/{request_id:path}", summary="What happened to a request, step by step")
    async def timeline(request: Request, request_id: str) -> dict[str, Any]:
        found = await request_report(router, request_id, request_state(request.scope).client)
        if found is None:
            raise _unknown(request_id)
        return found


def _unknown(request_id: str) -> HttpError:
    message = (
        f"No request {request_id!r} of yours is known; routers remember the last {MAX_TIMELINES:,} each, and none "
        "that was refused before its prompt was read: its answer says why."
    )
    return not_found(message, param="request_id", code="request_not_found")
