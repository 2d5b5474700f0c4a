"""The routes `/debug/requests`: what happened to each request, from the router that served it and the workers that ran it.

Each client sees only its own requests, since a timeline shows how much of a prompt was cached.

Line: a request's summary as one JSON object.  Step: one event of its timeline, at the router or at a worker.
Attempt: one engine request at one worker; a migrated choice has several, with ids such as `chatcmpl-1-0-0` and `chatcmpl-1-0-0+1`.

Hosts' clocks may differ. Each part of a report has the time of its host's clock when the part was made. If, by this router's clock,
that time is not between the query and its answer, the part's times are shifted by the difference. So the order of steps is wrong by
at most the time that the query took.
"""

import asyncio
import functools
import itertools
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request

from transom_cluster.http.request_state import request_state
from transom_cluster.openai.answer.error_responses import HttpError
from transom_cluster.router import peers
from transom_cluster.router.router import Router
from transom_core.clock import steady_time_s
from transom_core.telemetry.request_timelines import MAX_TIMELINES, prompt_and_choice_of

_ERRORS: dict[int | str, dict[str, Any]] = {400: {"description": "A parameter is wrong."}}
_State = Annotated[Literal["running", "finished"] | None, Query(description="Only requests in this state.")]
_Limit = Annotated[int, Query(ge=1, le=MAX_TIMELINES, description="Up to this many, the newest.")]


def add_routes(api: FastAPI, router: Router) -> None:
    """Add the routes to the app."""

    @api.get("/debug/requests", summary="This client's last requests, a line each", responses=_ERRORS)
    async def requests(request: Request, state: _State = None, limit: _Limit = 100) -> dict[str, Any]:
        return {"requests": await recent_requests(router, request_state(request.scope).client, state, limit)}

    @api.get("/debug/requests/{request_id:path}", summary="What happened to a request, step by step")
    async def timeline(request: Request, request_id: str) -> dict[str, Any]:
        found = await request_report(router, request_id, request_state(request.scope).client)
        if found is None:
            message = (
                f"This client has no request {request_id!r}; each router remembers its last {MAX_TIMELINES:,} requests, "
                "without those that were refused before their prompt was read."
            )
            raise HttpError(404, message, param="request_id", code="request_not_found")
        return found


ASK_TIMEOUT_S = 2.0  # for the other routers to answer, and then for the workers

Steps = list[dict[str, Any]]


async def request_report(router: Router, request_id: str, client: str) -> dict[str, Any] | None:
    """Return a request's summary, its steps in order of time, and its times in queue, prefill and decode.

    None if no router knows the request, or if another client sent it.
    """
    own = await _ask_routers(router, request_id, client)  # its times are on this router's clock
    if own is None:
        return None
    line = own["line"]
    answers = await asyncio.gather(*(_ask_worker(router, worker, line["id"]) for worker in line["workers"]))
    parts = dict(zip(line["workers"], answers, strict=True))
    worker_steps = [step for part in parts.values() if isinstance(part, list) for step in part]
    steps = sorted((*own["steps"], *(_with_choice(step, line) for step in worker_steps)), key=lambda step: step["at_s"])
    return {
        **line,
        "times": phase_times(worker_steps),
        "worker_parts": {worker: part if isinstance(part, str) else "told" for worker, part in parts.items()},
        "steps": [_shown_step(step, line["arrival_s"]) for step in steps],
    }


async def recent_requests(router: Router, client: str, state: str | None, limit: int) -> list[dict[str, Any]]:
    """Return the lines of a client's last requests at all routers, newest first."""
    query = functools.partial(peers.recent_requests, client=client, state=state, limit=limit)
    others = await router.peers.ask_others(query, timeout_s=ASK_TIMEOUT_S)
    known = [query(router), *(lines for lines in others if isinstance(lines, list))]
    return sorted(itertools.chain(*known), key=lambda line: float(line["arrival_s"]), reverse=True)[:limit]


def phase_times(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds in queue, prefill and decode at workers.

    Each time is summed over a choice's attempts, and the result is the largest sum among the choices.
    """
    by_attempt: dict[str, Steps] = {}
    for step in steps:
        by_attempt.setdefault(step["request_id"], []).append(step)
    by_choice: dict[str, dict[str, float]] = {}
    for request_id, own in by_attempt.items():
        times = by_choice.setdefault(request_id.partition("+")[0], {"queue_s": 0.0, "prefill_s": 0.0, "decode_s": 0.0})
        at_s = {step["what"]: step["at_s"] for step in reversed(own)}  # the first of each kind
        latest_s = max(step["at_s"] + step.get("seconds", 0.0) for step in own)
        phases = ("queued", "admitted", "first_token")
        for name, begin, end in zip(times, phases, (*phases[1:], "finished"), strict=True):
            if begin in at_s:
                times[name] += max(0.0, at_s.get(end, latest_s) - at_s[begin])
    if not by_choice:
        return {}
    return {name: max(times[name] for times in by_choice.values()) for name in ("queue_s", "prefill_s", "decode_s")}


async def _ask_routers(router: Router, request_id: str, client: str) -> dict[str, Any] | None:
    """Return the router's part of the report, from the router that served the request: this one or another."""
    query = functools.partial(peers.request_timeline, request_id=request_id, client=client)
    own = query(router)
    if own is not None:
        return own
    asked_s = steady_time_s()
    others = await router.peers.ask_others(query, timeout_s=ASK_TIMEOUT_S)
    part = next((part for part in others if isinstance(part, dict)), None)
    if part is None:
        return None
    line = part["line"]
    ahead_s = clock_difference_s(line["arrival_s"] + line["age_s"], asked_s, steady_time_s())
    return {
        "line": {**line, "arrival_s": line["arrival_s"] - ahead_s},
        "steps": [{**step, "at_s": step["at_s"] - ahead_s} for step in part["steps"]],
    }


def clock_difference_s(there_s: float, asked_s: float, answered_s: float) -> float:
    """Return the least number of seconds by which another host's clock must be ahead of this one's (negative: behind).

    The other clock showed `there_s` at some time between `asked_s` and `answered_s` on this host's clock.
    """
    return there_s - min(max(there_s, asked_s), answered_s)


async def _ask_worker(router: Router, worker: str, response_id: str) -> Steps | str:
    """Return a worker's steps, or the reason why there are none."""
    connection = router.connections.get(worker)
    if connection is None:
        return "gone"
    asked_s = steady_time_s()
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            steps = await connection.client.request_timeline(response_id)
    except Exception:  # a call to a failing or lost worker may raise anything
        return "no answer"
    answered_s = steady_time_s()
    return [_on_this_clock(step, asked_s, answered_s) for step in steps] or "forgotten"


def _on_this_clock(step: dict[str, Any], asked_s: float, answered_s: float) -> dict[str, Any]:
    there_s = step["at_s"] + step["ago_s"]
    facts = {name: value for name, value in step.items() if name != "ago_s"}
    return {**facts, "at_s": step["at_s"] - clock_difference_s(there_s, asked_s, answered_s)}


def _with_choice(step: dict[str, Any], line: dict[str, Any]) -> dict[str, Any]:
    """Return a worker's step with the router's number of its choice, which a worker cannot know: it does not know how many choices
    each prompt has."""
    prompt_and_choice = prompt_and_choice_of(step["request_id"])
    if line["choices"] == 1 or prompt_and_choice is None:
        return step
    prompt, choice = prompt_and_choice
    return {**step, "choice": prompt * (line["choices"] // line["prompts"]) + choice}


def _shown_step(step: dict[str, Any], arrival_s: float) -> dict[str, Any]:
    at = datetime.fromtimestamp(step["at_s"], UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    facts = {name: round(value, 6) if isinstance(value, float) else value for name, value in step.items()}
    facts.pop("at_s")
    return {"after_s": round(step["at_s"] - arrival_s, 6), "at": at, **facts}
