"""Sends requests at a given load and notes when bytes came. Nothing is parsed while the clock runs; `load_answers` does."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from load_connection import Connection, Packet, Server, decode, request_bytes

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(slots=True, kw_only=True)
class RawAnswer:
    """One streamed answer as it came. Times are seconds of the monotonic clock; `error` is set when it failed."""

    sent_s: float
    done_s: float = 0.0
    packets: list[Packet] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How hard to push: `concurrency` clients that each wait for their answer, or arrivals at `rate_per_s` (Poisson)."""

    concurrency: int | None = None
    rate_per_s: float | None = None

    @property
    def label(self) -> str:
        """Short name for tables."""
        return f"closed {self.concurrency}" if self.rate_per_s is None else f"open {self.rate_per_s:g}/s"


class LoadClient:
    """Keep-alive connections to one server's API, as many as are needed at once. An async context manager."""

    def __init__(self, *, base_url: str, api: str, api_key: str | None, timeout_s: float) -> None:
        self._server = Server.parse(base_url)
        self._path = PATHS[api]
        self._api_key = api_key
        self._timeout_s = timeout_s
        self._idle: list[Connection] = []

    async def __aenter__(self) -> LoadClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._idle:
            connection.close()

    async def first_model(self) -> str:
        """The first model that the server lists. Raises OSError."""
        status, body = decode(await self._exchange(request_bytes(self._server, "GET", "/v1/models", **self._auth)))
        text = b"".join(data for _, data in body)
        if status != 200:
            raise ConnectionError(f"GET /v1/models answered HTTP {status}: {text[:300].decode(errors='replace')}")
        return str(json.loads(text)["data"][0]["id"])

    async def stream(self, body: dict[str, Any]) -> RawAnswer:
        """Send one request and read its answer to the end; failures are noted in the answer, not raised."""
        request = request_bytes(self._server, "POST", self._path, body=json.dumps(body).encode(), **self._auth)
        raw = RawAnswer(sent_s=time.perf_counter())
        try:
            raw.packets = await self._exchange(request)
        except TimeoutError:
            raw.error = f"no complete answer in {self._timeout_s:g} s"
        except OSError as error:
            raw.error = f"{type(error).__name__}: {error}"
        raw.done_s = time.perf_counter()
        return raw

    async def run(self, load: Load, bodies: Iterator[dict[str, Any]], num_requests: int, seed: int) -> list[RawAnswer]:
        """Send `num_requests` requests at this load and wait for all answers."""
        prepared = [next(bodies) for _ in range(num_requests)]
        if load.rate_per_s is not None:
            return await self._open_loop(load.rate_per_s, prepared, random.Random(seed))
        return await self._closed_loop(load.concurrency or 1, prepared)

    async def _closed_loop(self, concurrency: int, prepared: list[dict[str, Any]]) -> list[RawAnswer]:
        left = iter(prepared)
        answers: list[RawAnswer] = []

        async def client() -> None:
            for body in left:
                answers.append(await self.stream(body))

        await asyncio.gather(*(client() for _ in range(min(concurrency, len(prepared)))))
        return answers

    async def _open_loop(
        self, rate_per_s: float, prepared: list[dict[str, Any]], arrivals: random.Random
    ) -> list[RawAnswer]:
        due_s = time.perf_counter()
        tasks = []
        async with asyncio.TaskGroup() as group:
            for body in prepared:
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))  # late: at once, which keeps the average
                tasks.append(group.create_task(self.stream(body)))
                due_s += arrivals.expovariate(rate_per_s)
        return [task.result() for task in tasks]

    @property
    def _auth(self) -> dict[str, Any]:
        return {"api_key": self._api_key}

    async def _exchange(self, request: bytes) -> list[Packet]:
        """On an idle connection if there is one. A server may close it at that moment: then once more on a new one."""
        async with asyncio.timeout(self._timeout_s):
            while self._idle:
                connection = self._idle.pop()
                if connection.closed:
                    continue
                try:
                    return await self._exchange_on(connection, request)
                except ConnectionError:
                    break
            return await self._exchange_on(await Connection.open(self._server), request)

    async def _exchange_on(self, connection: Connection, request: bytes) -> list[Packet]:
        try:
            packets = await connection.exchange(request)
        except BaseException:
            connection.close()
            raise
        if not connection.closed:
            self._idle.append(connection)
        return packets
