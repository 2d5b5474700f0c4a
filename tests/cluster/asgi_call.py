"""One request to an ASGI app whose client the test plays: it may leave at any moment."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

GIVE_UP_S = 120


class AsgiCall:
    """A request, by default a POST. `sent` are the app's messages so far; `leave` disconnects.

    `body_so_far` are the bytes that arrive where the rest of the body never does.
    """

    def __init__(
        self,
        app: Any,
        path: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
        *,
        body_so_far: bytes | None = None,
        method: str = "POST",
        query: str = "",
    ) -> None:
        self.sent: list[Mapping[str, Any]] = []
        self._changed = asyncio.Event()
        self._gone = asyncio.Event()
        content = json.dumps(body).encode() if body_so_far is None else body_so_far
        self._to_come = [{"type": "http.request", "body": content, "more_body": body_so_far is not None}]
        if body_so_far == b"":
            self._to_come.clear()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": quote(path).encode(),
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
            "server": ("test", 80),
            "client": ("test", 1),
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    @property
    def status(self) -> int | None:
        """Of the response, once it has begun."""
        return self.sent[0]["status"] if self.sent else None

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    async def begun(self) -> None:
        async with asyncio.timeout(GIVE_UP_S):
            while not self.sent:
                await self._changed.wait()

    async def ended(self) -> None:
        async with asyncio.timeout(GIVE_UP_S):
            await self.task

    async def leave(self) -> None:
        self._gone.set()
        await self.ended()

    async def _receive(self) -> Mapping[str, Any]:
        if self._to_come:
            return self._to_come.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Mapping[str, Any]) -> None:
        self.sent.append(message)
        self._changed.set()
