"""Sends one request as a well-behaved client does, slowly if asked, or leaves in the middle; what came is an `Answer`."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass
from typing import Any

import httpx

from soaking.answers import Answer
from soaking.cases import Case

PATIENCE_S = 300.0  # longer than a request may wait for a worker: a request that takes longer hangs
SMALL_BUFFER = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)]


class Hung(Exception):
    """No end of an answer within `PATIENCE_S`."""


@dataclass(slots=True)
class Reading:
    """How a client reads a stream: a pause before every chunk, and after how many chunks it leaves (None: it stays).

    `longest_gap_s` is the longest wait for a chunk, the first one included.
    """

    pause_s: float = 0.0
    leave_after: int | None = None
    longest_gap_s: float = 0.0


def http_client(url: str, *, slow: bool = False) -> httpx.AsyncClient:
    """A client whose every request has a connection of its own, so that none meets a connection that the server is closing."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    transport = httpx.AsyncHTTPTransport(limits=limits, socket_options=SMALL_BUFFER if slow else None)
    return httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, transport=transport, trust_env=False)


async def ask(client: httpx.AsyncClient, case: Case, *, stream: bool, reading: Reading | None = None) -> Answer:
    """Send a request and read its answer.

    Raises:
        httpx.TransportError: the connection broke.
        Hung: the answer did not end.
    """
    reading = reading or Reading()
    answer = Answer()
    try:
        async with asyncio.timeout(PATIENCE_S):
            if stream:
                await _read_stream(client, case, answer, reading)
            else:
                await _read_whole(client, case, answer)
    except (TimeoutError, httpx.TimeoutException):
        raise Hung(f"{case.name}: {answer.num_chunks} chunks within {PATIENCE_S:.0f} s") from None
    return answer


async def _read_whole(client: httpx.AsyncClient, case: Case, answer: Answer) -> None:
    reply = await client.post(case.path, json=case.body)
    answer.status, answer.retry_after = reply.status_code, reply.headers.get("retry-after")
    answer.read_body(reply.content)


async def _read_stream(client: httpx.AsyncClient, case: Case, answer: Answer, reading: Reading) -> None:
    body: dict[str, Any] = {**case.body, "stream": True, "stream_options": {"include_usage": True}}
    last_s = time.monotonic()
    async with client.stream("POST", case.path, json=body) as reply:
        answer.status, answer.retry_after = reply.status_code, reply.headers.get("retry-after")
        if reply.status_code != 200:
            answer.read_body(await reply.aread())
            return
        async for line in reply.aiter_lines():
            answer.read_line(line)
            now_s = time.monotonic()
            reading.longest_gap_s, last_s = max(reading.longest_gap_s, now_s - last_s), now_s
            if reading.leave_after is not None and answer.num_chunks >= reading.leave_after:
                return
            if reading.pause_s and line:
                await asyncio.sleep(reading.pause_s)
                last_s = time.monotonic()
