"""Misbehaving clients against a real server with a tiny engine: no status 500, no hang, no leaked request or block.

schemathesis sends what two OpenAPI documents allow, and what this server's own document forbids. Every response of a real engine is
as this server's document says. What OpenAI's published document allows and this server does not take, the server refuses in
OpenAI's shape; every other response is as that document says.

schemathesis' own `parametrize` makes the requests of every operation while pytest collects, in each of its processes, whether or
not the test is run there: seconds for each document. So `check_all_operations` makes them while the test runs.
"""

import asyncio
import contextlib
import json
import re
import socket
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, example, given, settings, strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.parameters import ParameterLocation
from schemathesis.core.result import Ok
from schemathesis.generation.meta import TestPhase
from schemathesis.pytest.lazy import get_all_tests
from schemathesis.schemas import BaseSchema

from tests.cluster.conftest import num_in_flight
from tests.cluster.engine_server import EngineServer, engine_server
from tests.how_many import ALL_TESTS, num_examples
from transom_cluster.http.api import build_api

SETTINGS: dict[str, Any] = {
    "max_model_len": 160,
    "kv_cache_memory_bytes": "256KiB",  # two of the longest sequences: others are preempted
    "max_num_seqs": 6,
    "max_num_batched_tokens": 64,
    "window": 32,
    "window_pattern": "SF",
}
CLIENT_S = 120
PROBE = {"prompt": list(range(5, 45)), "max_tokens": 20, "temperature": 0, "ignore_eos": True}
FUZZ = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
KEY = "sesame"
ENDED_BY_DONE = ("/v1/chat/completions", "/v1/completions")
EVENT_STREAM = "text/event-stream"
load_all_checks()
CHECKED: list[Any] = [
    check
    for check in CHECKS.get_all()
    if check.__name__ != "positive_data_acceptance"  # a schema cannot say what fits the model's length and vocabulary
]


@pytest.fixture(scope="module")
def server(tiny_model) -> Iterator[EngineServer]:
    """Its text for the same prompt is the same before and after all that is done to it, preemptions among it."""
    with engine_server(tiny_model, **SETTINGS) as running:
        before = probe(running)
        crowd(running)
        assert running.replica.engine.scheduler.work.num_preemptions > 0
        yield running
        asyncio.run(running.until_quiet())
        assert probe(running) == before


def probe(server: EngineServer) -> str:
    return httpx.post(f"{server.url}/v1/completions", json=PROBE, timeout=CLIENT_S).json()["choices"][0]["text"]


def crowd(server: EngineServer) -> None:
    """Six sequences in one request, which are admitted together, and of which the cache can hold two."""
    body = {"prompt": [list(range(5 + 90 * i, 95 + 90 * i)) for i in range(6)], "max_tokens": 60, "ignore_eos": True}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=CLIENT_S).raise_for_status()


MANNERS = [
    "reads", "sips", "dribbles", "pipelines", "half closes", "stops", "leaves", "resets", "gives up", "lies", "garbles",
]  # fmt: skip
plans = st.fixed_dictionaries(
    {
        "manner": st.sampled_from(MANNERS),
        "path": st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
        "stream": st.booleans(),
        "n": st.integers(1, 2),
        "max_tokens": st.integers(1, 40),
        "num_prompt": st.integers(1, 90),
        "logprobs": st.booleans(),
        "at": st.floats(0, 1),  # where a client stops, as a share of what there is
    }
)


def message(plan: dict[str, Any], *, last: bool) -> bytes:
    """The request's bytes."""
    body: dict[str, Any] = {name: plan[name] for name in ("stream", "n", "max_tokens")}
    body |= {"temperature": 0, "ignore_eos": True}
    if plan["path"] == "/v1/completions":
        body["prompt"] = list(range(5, 5 + plan["num_prompt"]))
        body["logprobs"] = 20 if plan["logprobs"] else None
    else:
        body["messages"] = [{"role": "user", "content": "a b " * (plan["num_prompt"] // 4)}]
        body |= {"logprobs": True, "top_logprobs": 20} if plan["logprobs"] else {}
    content = json.dumps(body).encode()
    length = len(content) + (50 if plan["manner"] == "lies" else 0)
    connection = "close" if last else "keep-alive"
    head = f"POST {plan['path']} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\nConnection: {connection}\r\n\r\n"
    return head.encode() + content


class Client:
    """One connection that behaves as its plan says. It stays open until `close`."""

    def __init__(self, port: int, plan: dict[str, Any]) -> None:
        self.plan = plan
        self._port = port
        self._received = b""
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        self._socket.setblocking(False)

    async def play(self) -> None:
        content, at = message(self.plan, last=True), self.plan["at"]
        async with asyncio.timeout(CLIENT_S):
            await asyncio.get_running_loop().sock_connect(self._socket, ("127.0.0.1", self._port))
            match self.plan["manner"]:
                case "reads" | "sips" as manner:
                    await self._send(content)
                    await self._read(at_once=100 if manner == "sips" else 2**16)
                    self._check(1)
                case "dribbles":
                    for begin in range(0, len(content), 20):
                        await self._send(content[begin : begin + 20])
                        await asyncio.sleep(0)
                    await self._read()
                    self._check(1)
                case "pipelines":
                    await self._send(message(self.plan, last=False) + content)
                    await self._read()
                    self._check(2)
                case "half closes":
                    await self._send(content)
                    self._socket.shutdown(socket.SHUT_WR)
                    await self._read()  # an answer or its beginning, and an end
                case "gives up":
                    await self._send(content[: int(at * (len(content) - 1))])
                    self._socket.close()
                case "garbles":  # a line of the head or the body is broken; the server answers or closes
                    begin = int(at * len(content))
                    with contextlib.suppress(ConnectionResetError):  # it closes while it has bytes left to read
                        await self._send(content[:begin] + b"\x00\xff{" + content[begin + 3 :])
                        self._socket.shutdown(socket.SHUT_WR)
                        await self._read()
                    assert b"HTTP/1.1 500" not in self._received
                case "lies":
                    await self._send(content)  # more is announced than comes
                case "stops" | "leaves" | "resets" as manner:
                    await self._send(content)
                    await self._read(until=int(at * 3000))
                    if manner == "resets":
                        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    if manner != "stops":
                        self._socket.close()

    def close(self) -> None:
        self._socket.close()

    async def _send(self, content: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, content)

    async def _read(self, *, at_once: int = 2**16, until: int | None = None) -> None:
        """To the end, or until `until` bytes are there."""
        while until is None or len(self._received) < until:
            piece = await asyncio.get_running_loop().sock_recv(self._socket, at_once)
            if not piece:
                return
            self._received += piece

    def _check(self, num_answers: int) -> None:
        """So many whole answers came, without an error."""
        text = self._received.decode()
        assert text.count("HTTP/1.1 200 OK") == text.count("HTTP/1.1 ") == num_answers, text
        assert '"error"' not in text
        assert text.count("data: [DONE]") == (num_answers if self.plan["stream"] else 0)
        assert len(re.findall('"finish_reason": ?"length"', text)) == num_answers * self.plan["n"]


USUAL: dict[str, Any] = {"path": "/v1/completions", "stream": True, "n": 2, "max_tokens": 40, "num_prompt": 60}


@settings(FUZZ, max_examples=num_examples(2, 20))
@given(st.lists(plans, min_size=2, max_size=7))
@example([{**USUAL, "logprobs": True, "at": 0.5, "manner": manner} for manner in MANNERS])
def test_any_clients_at_once(server: EngineServer, wanted: list[dict[str, Any]]) -> None:
    async def play() -> None:
        clients = [Client(server.port, plan) for plan in wanted]
        try:
            await asyncio.gather(*(client.play() for client in clients))
            await server.until_quiet()  # though some have not read their answers, and have not left
        finally:
            for client in clients:
                client.close()
        async with asyncio.timeout(CLIENT_S):
            labels = {"model": "tiny", "router": "r"}
            while server.router.metrics.registry.get_sample_value("transom_router_open_streams", labels) != 0:
                await asyncio.sleep(0.002)

    asyncio.run(play())


def check_all_operations(
    schema: BaseSchema, check: Callable[[Case], None], subtests: pytest.Subtests, *, max_examples: int
) -> None:
    """Calls `check` with requests of every operation of the document, `max_examples` of them drawn at random; each operation is a
    subtest."""
    examples = settings(
        max_examples=max_examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    for made in get_all_tests(schema=schema, test_func=check, settings=examples, given_kwargs={}):
        assert isinstance(made, Ok), made
        operation, send_all = made.ok()
        with subtests.test(operation.label):
            send_all()


@pytest.fixture(scope="module")
def guarded(tiny_model: Path) -> Iterator[EngineServer]:
    """A real engine whose cache holds two of the longest sequences; no request or block is left at the end."""
    settings: dict[str, Any] = dict(max_model_len=160, kv_cache_memory_bytes="256KiB", max_num_seqs=6, num_threads=1)
    with engine_server(tiny_model, server={"api_keys": (KEY,)}, **settings) as running:
        yield running
        asyncio.run(running.until_quiet())


def is_left_out(case: Case) -> bool:
    """19 of 20 of the thousands of bodies that schemathesis makes of each field in turn: `make test-all` sends them too."""
    assert case.meta is not None
    if ALL_TESTS or case.method != "POST" or case.meta.phase.name is not TestPhase.COVERAGE:
        return False
    return zlib.crc32(repr((case.path, case.headers, case.query, case.body)).encode()) % 20 != 0


def check_content(path: str, content_type: str, text: str) -> None:
    """No error of the server's own, even inside a stream that began well; JSON without NaN and infinities; a stream has its end."""
    assert not re.search(r'"type": ?"(server|api)_error"', text), text
    if content_type.startswith(EVENT_STREAM):
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        if path in ENDED_BY_DONE:
            assert text.endswith("data: [DONE]\n\n"), text
            lines.pop()
    else:
        lines = [text] if content_type.startswith("application/json") else []
    for line in lines:
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_every_response_is_as_the_document_says(guarded: EngineServer, subtests: pytest.Subtests) -> None:
    def check(case: Case) -> None:
        assert case.meta is not None
        if is_left_out(case):
            return
        body = case.body
        if case.meta.generation.mode is GenerationMode.POSITIVE and isinstance(body, dict):
            body["model"] = "tiny"  # any other one is 404
            if case.path in ENDED_BY_DONE and body.get("stream") is None:
                body["stream"] = num_good[case.path, True] <= num_good[case.path, False]
        # A route ignores query parameters that it does not know, and `headers` replace wrong ones.
        unknown = set(case.query or ()) - {parameter.name for parameter in case.operation.query}
        places = (ParameterLocation.BODY, ParameterLocation.PATH)
        has_other_fault = any(case.meta.is_negative_at(place) for place in places)
        ignored = unknown and not has_other_fault
        checks = [one for one in CHECKED if not (ignored and one.__name__ == "negative_data_rejection")]
        headers = {"Authorization": f"Bearer {KEY}"}
        response = case.call_and_validate(base_url=guarded.url, headers=headers, checks=checks, timeout=CLIENT_S)
        content_type = response.headers.get("content-type", [""])[0]
        check_content(case.path, content_type, response.text)
        num_good[case.path, content_type.startswith(EVENT_STREAM)] += response.status_code == 200
        assert num_in_flight(guarded.router) == 0

    num_good: Counter[tuple[str, bool]] = Counter()  # answers with status 200, by path and whether they were streams
    schema = schemathesis.openapi.from_dict(build_api(guarded.router).openapi())
    schema.config.max_stream_events = 10**6  # every stream is read to its end
    check_all_operations(schema, check, subtests, max_examples=num_examples(2, 15))
    assert all(num_good[path, is_stream] for path in ENDED_BY_DONE for is_stream in (False, True))
