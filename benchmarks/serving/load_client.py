"""Draws requests, sends them at a given load, and notes when bytes came. Only `load_answers` parses, when the clock has stopped.

Each request has a connection of its own, opened before the request's clock starts and closed by the server at the answer's end. So
nothing but the last bytes has to be looked at to know that an answer is whole.
"""

import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

PATH = "/v1/completions"
READ_BYTES = 1 << 16
LAST_CHUNK = b"\r\n0\r\n\r\n"  # no event ends so: its lines end in \n, and none is a bare 0
Packet = tuple[float, bytes]  # seconds of the monotonic clock, bytes
FIRST_TOKEN_ID = 1000  # below lie special tokens and single bytes, in every vocabulary that we know
LAST_TOKEN_ID = 30000


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """How requests are drawn: lengths in tokens, both ends included.

    Prompts are token ids, so that lengths are exact. `shared_prefix_tokens` of every prompt are the same; the rest is its own.
    """

    model: str
    prompt_tokens: tuple[int, int] = (32, 512)
    output_tokens: tuple[int, int] = (16, 128)
    shared_prefix_tokens: int = 0
    seed: int = 0

    def __str__(self) -> str:
        """The workload in a few words."""
        prompt, output = ("-".join(map(str, ends)) for ends in (self.prompt_tokens, self.output_tokens))
        shared = f", first {self.shared_prefix_tokens} shared" if self.shared_prefix_tokens else ""
        return f"prompts {prompt}{shared}, answers {output} tokens"

    def bodies(self, label: str) -> Iterator[dict[str, Any]]:
        """Request bodies without end; another label draws other prompts, so that runs do not hit each other's cache."""
        shared = self._draw(random.Random(f"{self.seed}/shared"), self.shared_prefix_tokens)
        stream = random.Random(f"{self.seed}/{label}")
        while True:
            num_prompt_tokens = stream.randint(*self.prompt_tokens)
            own = self._draw(stream, max(1, num_prompt_tokens - len(shared)))
            yield self._body([*shared, *own], stream.randint(*self.output_tokens))

    def _draw(self, source: random.Random, count: int) -> list[int]:
        return [source.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(count)]

    def _body(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(slots=True, kw_only=True)
class RawAnswer:
    """One streamed answer as it came. Times are seconds of the monotonic clock; `error` is set when it failed."""

    sent_s: float = 0.0
    packets: list[Packet] = field(default_factory=list)
    error: str | None = None

    @property
    def done_s(self) -> float:
        """When its last byte came."""
        return self.packets[-1][0] if self.packets else self.sent_s


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
    """A client of one server's completions."""

    def __init__(self, *, base_url: str, api_key: str | None = None, timeout_s: float) -> None:
        """`base_url` may end in /v1. Raises ValueError for what is not an http or https URL."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{base_url!r} is not a URL; give one such as http://127.0.0.1:8000")
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._is_tls, self._host = parts.scheme == "https", parts.hostname
        self._port = parts.port or (443 if self._is_tls else 80)
        self._models_url = f"{parts.scheme}://{parts.netloc}{prefix}/v1/models"
        self._headers = {"Host": parts.netloc, "Connection": "close", "Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._request_line = f"POST {prefix}{PATH} HTTP/1.1"
        self._timeout_s = timeout_s

    async def first_model(self) -> str:
        """The first model that the server lists. Raises httpx.HTTPError."""
        async with httpx.AsyncClient(headers=self._headers, timeout=self._timeout_s, trust_env=False) as client:
            reply = await client.get(self._models_url)
        return str(reply.raise_for_status().json()["data"][0]["id"])

    async def stream(self, body: dict[str, Any]) -> RawAnswer:
        """Send one request and read its answer to the end; failures are noted in the answer, not raised."""
        content = json.dumps(body).encode()
        lines = [f"{name}: {value}" for name, value in self._headers.items()]
        head = "\r\n".join([self._request_line, *lines, f"Content-Length: {len(content)}", "", ""])
        answer = RawAnswer(sent_s=time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._exchange(head.encode() + content, answer)
        except TimeoutError:
            answer.error = f"no complete answer in {self._timeout_s:g} s"
        except OSError as error:
            answer.error = f"{type(error).__name__}: {error}"
        return answer

    async def run(
        self, load: Load, bodies: Iterator[dict[str, Any]], num_requests: int, seed: int = 0
    ) -> list[RawAnswer]:
        """Send `num_requests` requests at this load and wait for all answers; `seed` is of open loops' arrivals."""
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

    async def _exchange(self, request: bytes, answer: RawAnswer) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._is_tls or None)
        try:
            answer.sent_s = time.perf_counter()
            writer.write(request)
            tail = b""
            while tail != LAST_CHUNK and (data := await reader.read(READ_BYTES)):
                answer.packets.append((time.perf_counter(), data))
                tail = (tail + data)[-len(LAST_CHUNK) :]
        finally:
            writer.close()
