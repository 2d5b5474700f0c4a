"""Two checkpoints of equal geometry with real engines: no KV and no stream of one is ever continued by the other."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from tests.cluster.conftest import until
from tests.cluster.router.engine_workers import (
    HIT,
    HYBRID,
    LocalPeers,
    Mortal,
    at_worker,
    evict_all,
    fetch_of,
    request,
    routed,
    start_replica,
)
from tests.cluster.stub_worker import StubDirectory
from tests.tiny_checkpoints import tiny_llama
from transom_core.errors import WorkerLost
from transom_worker.replica import WorkerReplica


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [tiny_llama(tmp_path_factory.mktemp(f"seed{seed}"), seed=seed) for seed in (0, 1)]


def replica(folder: Path, name: str, disk: str) -> WorkerReplica:
    return start_replica(folder, name, **HYBRID, disk_cache=disk)


@pytest.fixture(scope="module")
def pair(models: list[Path]) -> Iterator[LocalPeers]:
    """A worker of each model: w0 and w1, which began to load last."""
    peers = LocalPeers()
    for model in models:
        peers.start(model, **HYBRID)
    yield peers
    for one in peers.workers.values():
        one.shutdown()


async def expected(pair: LocalPeers) -> list[list[int]]:
    """What each model answers from an empty cache."""
    found = []
    for number, worker in enumerate(pair.workers.values()):
        evict_all(worker)
        tokens, usage = await at_worker(worker, request(f"alone-{number}"))
        assert usage.num_cached_tokens == 0
        evict_all(worker)
        found.append(tokens)
    assert found[0] != found[1]
    return found


async def test_kv_of_another_model_is_not_fetched(pair: LocalPeers) -> None:
    alone = await expected(pair)
    source, target = pair.workers.values()
    assert (await source.info()).identity != (await target.info()).identity
    await at_worker(source, request("warm"))
    tokens, usage = await at_worker(target, request("fetch", "w0"))
    assert (tokens, usage.num_fetched_tokens, usage.num_cached_tokens) == (alone[1], 0, 0)
    tokens, usage = await at_worker(target, request("again"))
    assert (tokens, usage.num_cached_tokens) == (alone[1], HIT)  # its own
    assert fetch_of(target, "fetch")["outcome"] == "refused"


async def test_a_stream_killed_in_the_middle_is_not_continued_by_the_other_model(
    pair: LocalPeers, models: list[Path]
) -> None:
    alone = await expected(pair)
    newer, older = Mortal(pair.workers["w1"]), Mortal(pair.workers["w0"])
    newer.num_events = 4  # and then it is lost
    async with routed(models[0], newer, older) as router, router.generate([request("cut")]) as output:
        tokens: list[int] = []
        error: Exception | None = None
        while output.num_unfinished:
            for _, event in await output.next():
                tokens += event.token_ids
                error = None if event.error is None else event.error.error()
            if len(tokens) == 4 and error is None:
                await until(lambda: newer.is_dead)
                cast(StubDirectory, router._pool._directory).remove(newer)  # type: ignore[arg-type]
    assert isinstance(error, WorkerLost)
    assert "The model was replaced by another" in str(error)
    assert tokens == alone[1][:4]


@pytest.mark.parametrize("how", ["written over", "replaced"])
async def test_a_folder_that_changes_in_place(
    models: list[Path], pair: LocalPeers, tmp_path: Path, fast_reads: None, how: str
) -> None:
    """A worker computes with the files that it loaded. The next one has another identity, and uses no file of its disk tier."""
    alone, folder, disk = await expected(pair), tmp_path / "model", str(tmp_path / "disk")
    shutil.copytree(models[0], folder)
    first = replica(folder, "first", disk)
    await at_worker(first, request("warm"))
    weights, newer = folder / "model.safetensors", (models[1] / "model.safetensors").read_bytes()
    if how == "replaced":
        weights.unlink()
    with weights.open("r+b" if how == "written over" else "wb") as file:
        file.write(newer)
    evict_all(first)
    tokens, _ = await at_worker(first, request("after"))
    assert tokens == alone[0]
    second = replica(folder, "second", disk)
    assert (await second.info()).identity not in ("", (await first.info()).identity)
    first.shutdown()
    num_files = len(list(Path(disk).rglob("*.kv")))
    assert num_files
    tokens, usage = await at_worker(second, request("second"))
    assert (tokens, usage.num_cached_tokens, usage.num_disk_tokens) == (alone[1], 0, 0)
    second.shutdown()
    third = replica(folder, "third", disk)
    tokens, usage = await at_worker(third, request("third"))
    assert tokens == alone[1]
    assert usage.num_disk_tokens > 0  # the second one's files
    third.shutdown()
    again = replica(models[0], "again", disk)
    tokens, usage = await at_worker(again, request("again"))
    assert tokens == alone[0]
    assert usage.num_disk_tokens > 0  # the first one's: a copy of the same files is the same model
    again.shutdown()
