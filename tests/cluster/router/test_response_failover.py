"""/v1/responses and chats over HTTP where a worker dies in the middle: every event of the stream is that of a calm run.

Ids are random in each run; the n-th id of a response has to stand at the same places.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.cluster.conftest import make_router, until
from tests.cluster.speaking_worker import Fate, SpeakingWorker
from tests.cluster.stub_worker import ByteTokenizer, StubDirectory
from tests.how_many import ALL_TESTS
from transom_cluster.http.api import build_api
from transom_cluster.router.router import Router
from transom_core.config import FailoverConfig

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris 🦜"}}\n</tool_call>'
ANSWER = f"<think>Rain?</think>Let me look.\n{CALL}\n{CALL}"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {
        "input": "Is it raining?",
        "tools": [{"type": "function", "name": "weather", "parameters": PARAMETERS}],
        "store": False,
    },
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Is it raining?"}],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}],
        "logprobs": True,
    },
}


@dataclass
class Server:
    """One router, which gets new workers for each request."""

    directory: StubDirectory
    router: Router
    client: httpx.AsyncClient
    num_workers: int = 0

    async def body_of(self, path: str, *deaths: int, stream: bool) -> str:
        """The response's body, where workers die after these numbers of tokens."""
        fate = Fate(list(deaths))
        workers = [
            SpeakingWorker(tokenizer=ByteTokenizer(), texts=(ANSWER,), worker=f"w{self.num_workers + i}", fate=fate)  # type: ignore[arg-type]
            for i in range(len(deaths) + 1)
        ]
        self.num_workers += len(workers)
        for worker in workers:
            self.directory.add(worker)
        names = {worker.worker for worker in workers}
        connections = self.router.connections
        await until(lambda: {name for name, connection in connections.items() if connection.is_open} == names)
        response = await self.client.post(path, json={**BODIES[path], "stream": stream})
        for worker in workers:
            self.directory.remove(worker)
        await until(lambda: not connections)
        assert response.status_code == 200, response.text
        assert fate.num_deaths == len(deaths)
        return response.text


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    directory = StubDirectory()
    router = make_router(
        directory=directory,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        failover=FailoverConfig(wait_s=60.0),
    )
    router.start()
    transport = httpx.ASGITransport(app=build_api(router))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield Server(directory, router, client)
    await router.stop()


def without_chance(body: str) -> str:
    """The body with numbered ids, and without times."""
    numbers: dict[str, int] = {}

    def numbered(match: re.Match[str]) -> str:
        return f"{match[1]}{numbers.setdefault(match[0], len(numbers))}"

    body = re.sub(r"\b([a-z]+[-_])[0-9a-f]{16,}", numbered, body)
    return re.sub(r'"(created|created_at|completed_at)": ?[\d.]+', "", body)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", BODIES)
async def test_a_death_changes_no_byte(server: Server, path: str, stream: bool) -> None:
    calm = without_chance(await server.body_of(path, stream=stream))
    assert calm.count("weather") >= 2
    for cut in range(0, len(ANSWER.encode()), 1 if ALL_TESTS else 23):
        assert without_chance(await server.body_of(path, cut, stream=stream)) == calm
    assert without_chance(await server.body_of(path, 9, 40, 31, stream=stream)) == calm
