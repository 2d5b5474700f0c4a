"""The load generator against a stub server: every level is measured, and what cannot be measured is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
from rich.console import Console

from benchmarks.serving import load
from benchmarks.serving.load_client import Load, LoadClient
from benchmarks.serving.load_requests import Workload
from tests.benchmarks.stub_server import StubServer, completion

QUIET = Console(quiet=True)
SMALL: dict[str, Any] = {"prompt_tokens": (4, 8), "output_tokens": (2, 4)}


async def measure(server, loads):
    client = LoadClient(base_url=server.url, timeout_s=120)
    return await load.measure(client, Workload(model="", **SMALL), loads, 6, 2, QUIET)


async def test_every_level_is_measured_and_written(tmp_path):
    async with StubServer(completion) as server:
        used, summaries = await measure(server, [Load(concurrency=1), Load(rate_per_s=500.0)])
    assert used.model == "stub"
    assert [summary.load for summary in summaries] == ["closed 1", "open 500/s"]
    assert all(summary.num_answers == 6 for summary in summaries)
    assert len(server.bodies) == 1 + 2 + 6 + 6  # probe, warm-up, two levels
    path = tmp_path / "figures.json"
    load.write_json(path, used, summaries)
    assert json.loads(path.read_text())["levels"][0]["first_token_ms"]["p99"] > 0
    assert load.table(summaries, title="t").row_count == 2


async def test_a_server_that_always_refuses_stops_the_run():
    async with StubServer(lambda body: (401, ['{"error": "no key"}'])) as server:
        with pytest.raises(RuntimeError, match="HTTP 401"):
            await measure(server, [Load(concurrency=1)])


def test_ranges_and_levels_are_checked():
    assert load.read_range("32-512") == (32, 512)
    assert load.read_range("64") == (64, 64)
    assert load.read_loads("1,4", "") == [Load(concurrency=1), Load(concurrency=4)]
    assert load.read_loads("1", "0.5") == [Load(rate_per_s=0.5)]
    for wrong in ("9-3", "0-4", "x"):
        with pytest.raises(typer.BadParameter):
            load.read_range(wrong)
    for wrong in ("0", "x", "1,-2"):
        with pytest.raises(typer.BadParameter):
            load.read_loads(wrong, "")


def test_prompts_have_the_drawn_lengths_and_are_the_same_for_the_same_seed():
    def first(count: int, label: str, **changes: Any) -> list[dict[str, Any]]:
        bodies = Workload(model="m", **(SMALL | changes)).bodies(label)
        return [next(bodies) for _ in range(count)]

    bodies = first(200, "a", shared_prefix_tokens=3)
    assert {len(body["prompt"]) for body in bodies} == {4, 5, 6, 7, 8}
    assert {body["max_tokens"] for body in bodies} == {2, 3, 4}
    assert len({tuple(body["prompt"][:3]) for body in bodies}) == 1
    assert len({tuple(body["prompt"][3:]) for body in bodies}) == 200
    assert bodies == first(200, "a", shared_prefix_tokens=3) != first(200, "b", shared_prefix_tokens=3)
