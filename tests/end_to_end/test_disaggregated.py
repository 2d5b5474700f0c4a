"""A prefill worker of two ranks and a decode worker of one, over HTTP: KV moves between them, cut and joined by heads, and every
answer is that of one engine, whichever worker is killed while prompts are on their way."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.server_process import Server, start_server
from benchmarks.serving.process_names import processes_named
from tests.cluster.router.engine_workers import WIRES
from tests.end_to_end.server import HTTP, PATIENCE_S, assert_ended_cleanly, look_until, metric
from tests.end_to_end.streams import Stream, ask_all, bodies
from transom_core.contract import SamplingParams
from transom_worker.llm import LLM

pytestmark = [pytest.mark.serve, pytest.mark.exhaustive, pytest.mark.timeout(1800)]

LENGTH = 1000
MAX_TOKENS = 24
MODEL: dict[str, Any] = {"dtype": "float32", "window": 64, "sinks": 4, "window_pattern": "SSF"}
FLAGS = {
    **MODEL,
    "kv_cache_memory_bytes": "32MiB",
    "swap_space": "64MiB",
    "role": "decode",
    "worker_group": "role=prefill,tensor_parallel_size=2",
    "worker_wait_s": PATIENCE_S,
    "kv_transfer_timeout_s": 5,
}


def prompts(first: int, count: int) -> list[list[int]]:
    return [[5 + (first + i) * 7 % 500, *range(6, 5 + LENGTH)] for i in range(count)]


@pytest.fixture(scope="module", params=WIRES)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("disaggregated")
    given = {**FLAGS, "disk_cache": folder / "disk", "kv_transfer_wire": request.param}
    with start_server(str(tiny_model), **given) as server:
        yield server
        assert list(folder.rglob("*.kv")) == []  # the host tiers have room for everything
        assert_ended_cleanly(server, signal.SIGTERM)
    ranks = [path for path in (folder / "disk" / "transom-kv").iterdir() if path.is_dir()]
    assert len(ranks) == 3  # two of the prefill worker, one of the decode worker
    assert all(any(rank.rglob("*.kv")) for rank in ranks)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[LLM]:
    engine = LLM(str(tiny_model), **MODEL, kv_cache_memory_bytes="32MiB")
    yield engine
    engine.shutdown()


def check(engine: LLM, some: list[list[int]], streams: list[Stream]) -> None:
    """Each stream is whole, and has the text of an engine by itself."""
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, temperature=float(i % 2), seed=i)
        for i in range(len(some))
    ]
    expected = engine.generate([{"prompt_token_ids": prompt} for prompt in some], params)
    assert [stream.error for stream in streams] == [None] * len(some)
    assert all(stream.is_whole for stream in streams)
    assert [stream.text for stream in streams] == [one.outputs[0].text for one in expected]


def transfers(server: Server, outcome: str) -> float:
    return metric(server, "transom_kv_transfers_total", direction="in", outcome=outcome)


def test_prompts_move_their_live_blocks_and_answers_are_exact(server: Server, engine: LLM) -> None:
    some = prompts(0, 4)
    check(engine, some, asyncio.run(ask_all(server.url, bodies(some, max_tokens=MAX_TOKENS))))
    assert transfers(server, "fetched") >= 4
    moved = metric(server, "transom_kv_transfer_bytes_total", direction="in")
    assert 0 < moved < 0.4 * metric(server, "transom_kv_transfer_full_length_bytes_total")
    assert moved == metric(server, "transom_kv_transfer_bytes_total", direction="out")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_is_killed_while_prompts_move_changes_no_answer(server: Server, engine: LLM, role: str) -> None:
    some = prompts(200 if role == "prefill" else 300, 12)
    [victim] = workers(server, role)
    before = transfers(server, "fetched")

    async def run() -> list[Stream]:
        streams = asyncio.create_task(ask_all(server.url, bodies(some, max_tokens=MAX_TOKENS)))
        async with asyncio.timeout(PATIENCE_S):
            while not streams.done() and await asyncio.to_thread(transfers, server, "fetched") <= before:
                await asyncio.sleep(0)
        os.kill(victim, signal.SIGKILL)
        return await streams

    check(engine, some, asyncio.run(run()))
    look_until(lambda: workers(server, role), lambda pids: len(pids) == 1 and victim not in pids)
    look_until(lambda: HTTP.get(server.url).json()["workers"], lambda workers: _roles(workers) == {"prefill", "decode"})
    again = prompts(400 if role == "prefill" else 500, 2)
    check(engine, again, asyncio.run(ask_all(server.url, bodies(again, max_tokens=MAX_TOKENS))))


def workers(server: Server, role: str) -> list[int]:
    """The processes of the workers of a role."""
    found = [(process.pid, ":Worker-1" in " ".join(process.cmdline())) for process in processes_named(server, "worker")]
    return [pid for pid, prefills in found if prefills == (role == "prefill")]


def _roles(workers: list[dict[str, Any]]) -> set[str]:
    return {worker["role"] for worker in workers if worker["state"] == "open"}
