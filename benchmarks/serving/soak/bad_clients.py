"""Requests that are wrong, connections as broken clients have them (half-open, half-sent, reset, half-closed, never read), and what
a hostile client asks for."""

import asyncio
import json
import random
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from benchmarks.serving.soak.cases import CHAT, COMPLETIONS, words

MAX_BODY_BYTES = 1 << 20  # what the soak's server accepts
HOSTILE_ADDRESS = "127.0.0.2"  # a client is an address where there are no keys
HOLD_S = (1.0, 15.0)  # how long a half-open connection stays


@dataclass(frozen=True, slots=True)
class BadRequest:
    """A request that must be refused, and with which status."""

    name: str
    method: str
    path: str
    content: bytes
    status: int


def bad_requests(source: random.Random) -> Iterator[BadRequest]:
    """One of each kind."""
    good: dict[str, Any] = {"prompt": words(source, 5), "max_tokens": 4}

    def post(name: str, status: int = 400, *, path: str = COMPLETIONS, **changes: Any) -> BadRequest:
        return BadRequest(name, "POST", path, json.dumps(good | changes).encode(), status)

    yield BadRequest("no JSON", "POST", COMPLETIONS, b'{"prompt": "a', 400)
    yield BadRequest("broken text", "POST", COMPLETIONS, b'{"prompt": "\xff\xfe"}', 400)
    yield BadRequest("deep nesting", "POST", CHAT, b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400)
    yield BadRequest("empty body", "POST", CHAT, b"", 400)
    yield post("unknown field", surprise=1)
    yield post("temperature", temperature=200)
    yield post("choices", n=100_000)
    yield post("too long", prompt=[300] * 5000)
    yield post("token that is none", prompt=[1] * 2000 + ["x"])
    yield post("token out of range", prompt=[10**9])
    yield post("stop strings", stop=["a"] * 17)
    yield post(
        "tools", path=CHAT, prompt=None, messages=[{"role": "user", "content": "a"}], tools=[{"type": "function"}]
    )
    yield post("unknown model", 404, model="another")
    yield post("large body", 413, prompt="a" * (MAX_BODY_BYTES + 1))
    yield BadRequest("unknown path", "POST", "/v1/nothing", b"{}", 404)
    yield BadRequest("wrong method", "GET", COMPLETIONS, b"", 405)


@dataclass(frozen=True, slots=True)
class Attack:
    """A right request that takes much of the server, how many of it are sent at once, and when their client leaves."""

    name: str
    path: str
    body: dict[str, Any] | None  # None: GET
    at_once: int
    leave_after_s: float


def attacks(source: random.Random) -> list[Attack]:
    """One of each kind; benchmarks/serving/tenants.py measures their like."""
    many = {"prompt": words(source, 20), "max_tokens": 1000, "ignore_eos": True}
    schema = {"type": "object", "properties": {f"p{source.random()}": {"type": "string"} for _ in range(1000)}}
    return [
        Attack("choices", COMPLETIONS, many | {"n": 100}, 2, source.uniform(0.1, 10.0)),
        Attack("prompts", COMPLETIONS, many | {"prompt": [words(source, 9) for _ in range(100)]}, 2, 10.0),
        Attack("grammars", COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": schema}}, 4, 0.5),
        Attack("salts", COMPLETIONS, {"prompt": [5] * 1900, "max_tokens": 1, "cache_salt": words(source, 9)}, 4, 2.0),
        Attack("tokenize", "/tokenize", {"prompt": "\u1700" * 150_000}, 2, 10.0),
        Attack("pages", "/metrics", None, 8, 5.0),
    ]


class Rude:
    """Opens connections to a server and treats them badly; each method is one way, and ends with the connection closed."""

    WAYS = ("silent", "half_head", "half_body", "reset", "half_closed", "never_read")

    def __init__(self, url: str, source: random.Random) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._source = source

    async def behave(self, way: str) -> str | None:
        """Do it; the path of the request that the server may have seen whole, or None."""
        _, writer = await asyncio.open_connection(self._host, self._port)
        try:
            act: Callable[[asyncio.StreamWriter], Awaitable[str | None]] = getattr(self, way)
            return await act(writer)
        finally:
            writer.close()

    async def silent(self, writer: asyncio.StreamWriter) -> None:
        """Connect and say nothing."""
        await asyncio.sleep(self._hold_s)

    async def half_head(self, writer: asyncio.StreamWriter) -> None:
        """Send the beginning of the headers."""
        writer.write(self._request()[: self._source.randint(1, 60)])
        await asyncio.sleep(self._hold_s)

    async def half_body(self, writer: asyncio.StreamWriter) -> str:
        """Announce more than is sent."""
        writer.write(self._request()[: -self._source.randint(1, 40)])
        await asyncio.sleep(self._hold_s)
        return COMPLETIONS

    async def reset(self, writer: asyncio.StreamWriter) -> str:
        """Send a whole request, and reset the connection at some point of the answer."""
        writer.write(self._request())
        await writer.drain()
        await asyncio.sleep(self._source.uniform(0.0, 1.0))
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return COMPLETIONS

    async def half_closed(self, writer: asyncio.StreamWriter) -> str:
        """Send a whole request and close this side of the connection."""
        writer.write(self._request())
        writer.write_eof()
        await asyncio.sleep(self._source.uniform(0.0, 3.0))
        return COMPLETIONS

    async def never_read(self, writer: asyncio.StreamWriter) -> str:
        """Send a whole request and read nothing of its long answer."""
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(self._request(max_tokens=200, logprobs=10))
        await asyncio.sleep(self._hold_s)
        return COMPLETIONS

    @property
    def _hold_s(self) -> float:
        return self._source.uniform(*HOLD_S)

    def _request(self, **changes: Any) -> bytes:
        fields = {"prompt": words(self._source, 20), "max_tokens": 60, "ignore_eos": True, "stream": True, **changes}
        body = json.dumps(fields).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body
