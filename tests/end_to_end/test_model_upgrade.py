"""One model is replaced by another of its geometry on a real cluster, by a redeploy and in its folder: an answer is of one of them.

Two checkpoints differ in nothing but their weights, and workers fetch prefixes from each other. `make test-all` runs this.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.end_to_end.server import HTTP, PATIENCE_S, Server, look_until, start_server, stop_server, wait_for_replicas
from tests.end_to_end.streams import Stream, ask_all, bodies, items
from tests.end_to_end.two_routers import redeploy_under_load
from tests.tiny_checkpoints import tiny_llama

pytestmark = [pytest.mark.serve, pytest.mark.exhaustive, pytest.mark.timeout(1200)]

START = "Once upon a time there was a very long prompt. " * 12  # so that all have a prefix in common
REQUESTS = bodies([START + item for item in items(8)], max_tokens=40)
SETTINGS = {
    "served_model_name": "tiny",
    "kv_cache_memory_bytes": "16MiB",
    "swap_space": "16MiB",
    "dtype": "float32",
    "replicas": 2,
    "worker_wait_s": PATIENCE_S,
}


def versions(server: Server) -> dict[str, int]:
    """Workers by system fingerprint, the newest model first."""
    (card,) = HTTP.get(f"{server.url}/v1/models").json()["data"]
    return {one["system_fingerprint"]: one["workers"] for one in card["versions"]}


def whole(server: Server, number: int = 2) -> tuple[str, list[str]]:
    """The fingerprint of the only model of `number` workers, and its answers."""
    (fingerprint,) = look_until(lambda: versions(server), lambda found: list(found.values()) == [number])
    streams = asyncio.run(ask_all(server.url, REQUESTS))
    assert {mark for stream in streams for mark in stream.fingerprints} == {fingerprint}
    return fingerprint, [stream.text for stream in streams]


def check(answers: list[list[Stream]], expected: dict[str, list[str]]) -> set[str]:
    """Every whole answer is that of the model which it names; which models have answered."""
    found: set[str] = set()
    for number, streams in enumerate(answers):
        for stream in streams:
            (fingerprint,) = stream.fingerprints
            found.add(fingerprint)
            if stream.error is None:
                assert stream.text == expected[fingerprint][number]
            else:
                assert expected[fingerprint][number].startswith(stream.text)
    return found


def test_every_answer_is_of_one_model(tmp_path: Path) -> None:
    folder, new = tiny_llama(tmp_path / "served", seed=0), tiny_llama(tmp_path / "v2", seed=1)
    flags = [text for name, value in SETTINGS.items() for text in ("--" + name.replace("_", "-"), str(value))]
    server = start_server(str(folder), tmp_path / "log", *flags)
    try:
        first, texts = whole(server)
        expected = {first: texts}
        answers = redeploy_under_load(server, {"model": str(new), **SETTINGS}, REQUESTS, pause_s=0.5)
        second, expected_of_second = whole(server)
        expected[second] = expected_of_second
        assert expected[first] != expected[second]
        assert check(answers, expected) == {first, second}

        # Back to the folder of the first model, which then gets the weights of the second while its workers run.
        redeploy_under_load(server, {"model": str(folder), **SETTINGS}, REQUESTS[:1], pause_s=0.5)
        assert whole(server) == (first, expected[first])
        shutil.copyfile(new / "model.safetensors", folder / "model.safetensors")
        victim, other = wait_for_replicas(server, ":Worker", 2)
        streams = asyncio.run(ask_all(server.url, REQUESTS, partial(os.kill, victim, signal.SIGKILL)))
        assert all(stream.error is None for stream in streams)  # they go on at the worker that has the first model
        assert check([[stream] for stream in streams], expected) == {first}
        look_until(lambda: versions(server), lambda found: found == {second: 1, first: 1})
        again = asyncio.run(ask_all(server.url, REQUESTS * 2))
        assert second in check([[one, two] for one, two in zip(again[:8], again[8:], strict=True)], expected)
        os.kill(other, signal.SIGKILL)
        look_until(lambda: versions(server), lambda found: found == {second: 2})
        assert whole(server) == (second, expected[second])
    finally:
        stop_server(server)
