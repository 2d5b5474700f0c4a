"""`transom bench transfer` against a made-up server, and the route that it asks against a made-up worker."""

import functools
import json
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from tests.cluster.conftest import running_api
from tests.cluster.stub_worker import StubWorker
from transom_cluster.cli import app

WORKERS = [{"id": "a", "can_fetch": True}, {"id": "b", "can_fetch": True}, {"id": "no host tier", "can_fetch": False}]


def transfer(monkeypatch: pytest.MonkeyPatch, *arguments: str, workers: list[dict[str, Any]] = WORKERS) -> Any:
    """The caches hold 2 MB, NIXL takes 10 ms of which it reads for 4, calls take 80 ms, and b does not read a's memory. The first
    fetch of each wire, which connects, is slow."""
    seen: set[str] = set()

    def answer(asked: httpx.Request) -> httpx.Response:
        if asked.url.path == "/":
            return httpx.Response(200, json={"workers": workers})
        if asked.headers.get("authorization") != "Bearer boss":
            return httpx.Response(403, json={"error": {"message": "send a key from --admin-api-key-file."}})
        given = dict(asked.url.params)
        wire = "ray" if given["target"] == "b" else given["wire"]
        seconds = {"nixl": 0.01, "ray": 0.08}[wire] if wire in seen else 9.0
        seen.add(wire)
        report = {"outcome": "fetched" if int(given["bytes"]) <= 2e6 else "not_found", "wire": wire, "seconds": seconds}
        return httpx.Response(200, json={**report, "num_bytes": 2_000_000, "read_s": 0.004 * (wire == "nixl")})

    client = functools.partial(httpx.Client, transport=httpx.MockTransport(answer))
    monkeypatch.setattr("transom_cluster.commands.transfer.httpx.Client", client)
    return CliRunner().invoke(app, ["bench", "transfer", "http://server:8000", *arguments])


def test_pairs_are_a_table_or_lines_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("--megabytes", "1.5,16", "--rounds", "2", "--api-key", "boss")
    [_, *rows] = transfer(monkeypatch, *given).stdout.splitlines()
    assert [" ".join(row.split()) for row in rows] == [
        "a b 2.0 not used - 80.0 ms 0.03 GB/s",
        "a b 16.0 nothing is cached - nothing is cached",
        "b a 2.0 10.0 ms 0.20 GB/s 4.0 ms 0.50 GB/s 80.0 ms 0.03 GB/s",
        "b a 16.0 nothing is cached - nothing is cached",
    ]
    lines = [json.loads(line) for line in transfer(monkeypatch, *given, "--json").stdout.splitlines()]
    assert lines[2] == {"source": "b", "target": "a", "bytes": 2_000_000, "nixl": 0.01, "read": 0.004, "ray": 0.08}


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "admin-api-key-file" in transfer(monkeypatch).output
    assert "1 workers that can fetch" in transfer(monkeypatch, workers=WORKERS[1:]).output


async def test_the_route_asks_the_target() -> None:
    async with running_api(StubWorker(), StubWorker(worker="w1")) as api:
        asked: dict[str, Any] = {"source": "w0", "target": "w1", "bytes": 1000, "wire": "ray"}
        assert (await api.client.post("/transfers/measure", params=asked)).json() == {"w1": ["w0", 1000, "ray"]}
        for name, wrong, status in (("source", "x", 404), ("source", "w1", 400), ("bytes", 2**40, 400)):
            assert (await api.client.post("/transfers/measure", params={**asked, name: wrong})).status_code == status
