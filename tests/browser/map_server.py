"""A server on loopback with the page's files and a stream that a test feeds frame by frame."""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

import transom_cluster.blockmap
from tests.loopback_server import served

STATIC = f"{transom_cluster.blockmap.__path__[0]}/static"
POLICY = "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'"  # stricter than the real server's
CLOSE = None  # in a stream's queue: the server closes it


def event(name: str, value: Any) -> str:
    """One server-sent event."""
    data = base64.b64encode(value).decode() if isinstance(value, bytes) else json.dumps(value)
    return f"event: {name}\ndata: {data}\n\n"


class MapServer:
    """What the test says is what every open stream gets. `on_open` gives the first events of a new stream."""

    def __init__(self) -> None:
        self.url = ""
        self.key: str | None = None
        self.on_open: Callable[[], list[str]] = list
        self.description: dict[str, Any] = {}
        self.described: list[dict[str, str]] = []
        self.stream_queries: list[dict[str, str]] = []
        self._streams: set[asyncio.Queue[str | None]] = set()
        self.loop: asyncio.AbstractEventLoop | None = None

    def send(self, *frames: bytes) -> None:
        """Send frames to every open stream."""
        for frame in frames:
            self.send_event("frame", frame)

    def send_event(self, name: str, value: Any) -> None:
        """Send any event to every open stream."""
        self._put(event(name, value))

    def drop(self) -> None:
        """Close every open stream."""
        self._put(CLOSE)

    def _put(self, text: str | None) -> None:
        assert self.loop is not None

        def put() -> None:
            for queue in self._streams:
                queue.put_nowait(text)

        self.loop.call_soon_threadsafe(put)

    def app(self) -> Starlette:
        """The routes of docs/block_map.md."""
        return Starlette(
            routes=[
                Route("/blocks", self._page),
                Mount("/blocks/assets", StaticFiles(directory=STATIC)),
                Route("/blocks/stream", self._stream),
                Route("/blocks/describe", self._describe),
            ]
        )

    async def _page(self, request: Request) -> Response:
        return FileResponse(f"{STATIC}/index.html", headers={"content-security-policy": POLICY})

    async def _describe(self, request: Request) -> Response:
        self.described.append(dict(request.query_params))
        return JSONResponse(self.description)

    async def _stream(self, request: Request) -> Response:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "wrong key"}}, status_code=401)
        self.stream_queries.append(dict(request.query_params))
        return StreamingResponse(self._fed(), media_type="text/event-stream")

    async def _fed(self) -> AsyncIterator[str]:
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        for text in self.on_open():
            queue.put_nowait(text)
        self._streams.add(queue)
        try:
            while (told := await queue.get()) is not CLOSE:
                yield told
        finally:
            self._streams.discard(queue)


@contextlib.contextmanager
def map_server() -> Iterator[MapServer]:
    """Serve on a thread until the block ends."""
    made = MapServer()
    with served(made.app(), timeout_graceful_shutdown=0) as (port, made.loop):
        made.url = f"http://127.0.0.1:{port}"
        yield made
