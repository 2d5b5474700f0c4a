"""A small OpenAI-compatible server: streams `max_tokens` tokens, chunked or to the connection's end, or misbehaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

Answer = Callable[[dict[str, Any]], tuple[int, list[str]]]


class StubServer:
    """Serves `answer(body) -> (status, events)` on a free port; keeps every body. An async context manager."""

    def __init__(self, answer: Answer, *, keep_alive: bool = False) -> None:
        self._answer = answer
        self._keep_alive = keep_alive
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.url = ""

    async def __aenter__(self) -> StubServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                status, events = await self._read(reader)
                await (self._write_chunked if self._keep_alive else self._write_to_end)(writer, status, events)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> tuple[int, list[str]]:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.headers.append(head)
        if head.startswith("GET /v1/models "):
            return 200, [json.dumps({"data": [{"id": "stub"}]})]
        length = next(int(line[15:]) for line in head.split("\r\n") if line.lower().startswith("content-length:"))
        self.bodies.append(json.loads(await reader.readexactly(length)))
        return self._answer(self.bodies[-1])

    async def _write_to_end(self, writer: asyncio.StreamWriter, status: int, events: list[str]) -> None:
        writer.write(b"HTTP/1.1 %d Stub\r\nConnection: close\r\n\r\n" % status)
        for event in events:
            writer.write(event.encode())
            await writer.drain()
        writer.close()

    async def _write_chunked(self, writer: asyncio.StreamWriter, status: int, events: list[str]) -> None:
        writer.write(b"HTTP/1.1 %d Stub\r\nTransfer-Encoding: chunked\r\n\r\n" % status)
        for event in events:
            writer.write(b"%x\r\n%s\r\n" % (len(event.encode()), event.encode()))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def completion(body: dict[str, Any]) -> tuple[int, list[str]]:
    """A well-behaved completions stream."""
    count = body["max_tokens"]
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
    events: list[dict[str, Any]] = [{"choices": [{"text": f" {i}", "finish_reason": None}]} for i in range(count)]
    events += [{"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 16}}}]
    return 200, [*(f"data: {json.dumps(event)}\n\n" for event in events), "data: [DONE]\n\n"]
