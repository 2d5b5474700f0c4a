"""Sends requests at a given load and notes when bytes came. Nothing is parsed while the clock runs.

Client and server often share a machine, so a token here costs one append; `load_answers` reads the bytes afterwards.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(slots=True, kw_only=True)
class RawAnswer:
    """One streamed answer as it came. Times are seconds of the monotonic clock; `error` is set when it failed."""

    sent_s: float
    done_s: float = 0.0
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
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
    """A keep-alive connection pool to one server's API. Use as an async context manager."""

    def __init__(self, *, base_url: str, api: str, api_key: str | None, timeout_s: float) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        base_url = base_url.rstrip("/").removesuffix("/v1")
        self._http = httpx.AsyncClient(
            base_url=base_url, headers=headers, limits=limits, timeout=timeout_s, trust_env=False
        )
        self._path = PATHS[api]

    async def __aenter__(self) -> LoadClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def first_model(self) -> str:
        """The first model that the server lists. Raises httpx.HTTPError."""
        answer = await self._http.get("/v1/models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])

    async def stream(self, body: dict[str, Any]) -> RawAnswer:
        """Send one request and read its answer to the end; failures are noted in the answer, not raised."""
        raw = RawAnswer(sent_s=time.perf_counter())
        try:
            async with self._http.stream("POST", self._path, json=body) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode(errors="replace")
                    raw.error = f"HTTP {answer.status_code}: {text[:300]}"
                else:
                    async for chunk in answer.aiter_raw():
                        raw.chunks.append((time.perf_counter(), chunk))
        except httpx.HTTPError as error:
            raw.error = f"{type(error).__name__}: {error}"
        raw.done_s = time.perf_counter()
        return raw

    async def run(self, load: Load, bodies: Iterator[dict[str, Any]], num_requests: int, seed: int) -> list[RawAnswer]:
        """Send `num_requests` requests at this load and wait for all answers."""
        if load.rate_per_s is not None:
            return await self._open_loop(load.rate_per_s, bodies, num_requests, random.Random(seed))
        assert load.concurrency is not None
        return await self._closed_loop(load.concurrency, bodies, num_requests)

    async def _closed_loop(self, concurrency: int, bodies: Iterator[dict[str, Any]], count: int) -> list[RawAnswer]:
        prepared = iter([next(bodies) for _ in range(count)])
        answers: list[RawAnswer] = []

        async def client() -> None:
            for body in prepared:
                answers.append(await self.stream(body))

        await asyncio.gather(*(client() for _ in range(min(concurrency, count))))
        return answers

    async def _open_loop(
        self, rate_per_s: float, bodies: Iterator[dict[str, Any]], count: int, arrivals: random.Random
    ) -> list[RawAnswer]:
        prepared = [next(bodies) for _ in range(count)]
        due_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for body in prepared:
                await asyncio.sleep(
                    max(0.0, due_s - time.perf_counter())
                )  # late: at once, which keeps the average rate
                tasks.append(group.create_task(self.stream(body)))
                due_s += arrivals.expovariate(rate_per_s)
        return [task.result() for task in tasks]
