"""Many clients at once: what each of them got, on one connection."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.end_to_end.server import KEY, PATIENCE_S

BEGUN_CHUNKS = 5


@dataclass(slots=True)
class Stream:
    """One streamed completion; when each chunk came is in seconds since the epoch."""

    request_id: str = ""
    text: str = ""
    chunks_s: list[float] = field(default_factory=list)
    error: dict[str, Any] | None = None
    is_whole: bool = False  # the end mark came
    usage: dict[str, Any] | None = None


def items(count: int) -> list[str]:
    """Prompts that differ."""
    return [f"Item {i} of the list is" for i in range(count)]


def bodies(prompts: Sequence[str | list[int]], *, max_tokens: int) -> list[dict[str, Any]]:
    """A streamed request for each prompt: every other one greedy, the others seeded."""
    return [
        {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": float(i % 2),
            "seed": i,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for i, prompt in enumerate(prompts)
    ]


async def ask(client: httpx.AsyncClient, body: dict[str, Any], stream: Stream) -> Stream:
    """Send one request and read its answer into `stream`, as far as it comes."""
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                stream.is_whole = True
            elif line.startswith("data: "):
                _read_chunk(json.loads(line[6:]), stream)
    return stream


def _read_chunk(chunk: dict[str, Any], stream: Stream) -> None:
    stream.request_id = chunk.get("id", stream.request_id)
    stream.error = chunk.get("error", stream.error)
    stream.usage = chunk.get("usage") or stream.usage
    if chunk.get("choices"):
        stream.text += chunk["choices"][0]["text"]
        stream.chunks_s.append(time.time())


def client_of(url: str) -> httpx.AsyncClient:
    """A client with any number of connections."""
    return httpx.AsyncClient(base_url=url, headers=KEY, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None))


async def ask_all(
    url: str, requests: Sequence[dict[str, Any]], disturb: Callable[[], None] = lambda: None
) -> list[Stream]:
    """Ask all at once, and `disturb` when every answer has begun."""
    streams = [Stream() for _ in requests]
    async with client_of(url) as client:
        asking = asyncio.gather(*(ask(client, *pair) for pair in zip(requests, streams, strict=True)))
        while not asking.done() and any(len(stream.chunks_s) < BEGUN_CHUNKS for stream in streams):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(disturb)
        await asking
    return streams


async def ask_until(
    url: str, requests: Sequence[Iterator[dict[str, Any]]], is_over: Callable[[], bool], *, pause_s: float = 0.0
) -> list[list[Stream]]:
    """Each client sends its requests, which have no end, with a pause after each answer; all answers of each.

    Clients that pause leave the machine time for what goes on meanwhile.
    """

    async def go_on(client: httpx.AsyncClient, own: Iterator[dict[str, Any]]) -> list[Stream]:
        answers: list[Stream] = []
        while not is_over():
            answers.append(await ask(client, next(own), Stream()))
            await asyncio.sleep(pause_s)
        return answers

    async with client_of(url) as client:
        return await asyncio.gather(*(go_on(client, own) for own in requests))
