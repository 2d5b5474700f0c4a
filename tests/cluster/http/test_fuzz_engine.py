"""Misbehaving clients against a real server with a tiny engine: no status 500, no hang, no leaked request or block."""

import asyncio
import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cluster.engine_server import EngineServer, engine_server
from tests.how_many import num_examples

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


MANNERS = ["reads", "sips", "dribbles", "pipelines", "half closes", "stops", "leaves", "resets", "gives up", "lies"]
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
                case "reads":
                    await self._send(content)
                    await self._read()
                    self._check(1)
                case "sips":
                    await self._send(content)
                    await self._read(at_once=100)
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
        assert (
            text.count('"finish_reason":"length"') + text.count('"finish_reason": "length"')
            == num_answers * self.plan["n"]
        )


@settings(FUZZ, max_examples=num_examples(2, 20))
@given(st.lists(plans, min_size=2, max_size=7))
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


def test_misbehaving_clients_at_once(server: EngineServer) -> None:
    plan = {
        "path": "/v1/completions",
        "stream": True,
        "n": 2,
        "max_tokens": 40,
        "num_prompt": 60,
        "logprobs": True,
        "at": 0.5,
    }
    test_any_clients_at_once.hypothesis.inner_test(server, [{**plan, "manner": manner} for manner in MANNERS])  # type: ignore[attr-defined]
