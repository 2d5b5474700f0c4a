"""A small OpenAI-compatible server: streams `max_tokens` tokens, or misbehaves."""

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from tests.loopback_server import served

Answer = Callable[[dict[str, Any]], tuple[int, Iterable[str] | AsyncIterator[str]]]


class StubServer:
    """Answers with `answer(body) -> (status, events)`; keeps every body, and the headers of the last one."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await (await self._response(Request(scope, receive)))(scope, receive, send)

    async def _response(self, request: Request) -> Response:
        if request.url.path == "/v1/models":
            return JSONResponse({"data": [{"id": "stub"}]})
        self.headers = dict(request.headers)
        self.bodies.append(await request.json())
        status, events = self._answer(self.bodies[-1])
        return StreamingResponse(events, status)


@contextlib.contextmanager
def stub_server(answer: Answer) -> Iterator[StubServer]:
    """Serves on a thread until the block ends."""
    server = StubServer(answer)
    with served(server, lifespan="off", timeout_graceful_shutdown=0) as (port, _):
        server.url = f"http://127.0.0.1:{port}"
        yield server


def completion(body: dict[str, Any]) -> tuple[int, list[str]]:
    """A well-behaved completions stream."""
    count = body["max_tokens"]
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
    events: list[dict[str, Any]] = [{"choices": [{"text": f" {i}", "finish_reason": None}]} for i in range(count)]
    events += [{"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 16}}}]
    return 200, [*(f"data: {json.dumps(event)}\n\n" for event in events), "data: [DONE]\n\n"]
