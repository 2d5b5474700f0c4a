"""Ranks map each other's memory all together or not at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

from transom_kernels.all_reduce import PeerMemory, region_bytes
from transom_worker.models.parallel import peer_memory, process_group
from transom_worker.models.parallel.peer_memory import PeerAllReduce, map_peers
from transom_worker.models.parallel.process_group import listen

CPU, WAIT = torch.device("cpu"), timedelta(seconds=60)


def make_peers(size: int) -> PeerAllReduce:
    region = torch.zeros(region_bytes(size), dtype=torch.uint8)
    return PeerAllReduce(PeerMemory.of(0, [region.data_ptr()] * size, CPU), region)


def mapped(hosts: list[str], monkeypatch: pytest.MonkeyPatch, *, unable: int | None = None) -> list[Any]:
    """What each of the ranks on these hosts gets, if rank `unable` cannot map the others' memory."""
    size, listener = len(hosts), listen("127.0.0.1")

    def fake_map(store: Any, rank: int, size: int, device: torch.device) -> PeerAllReduce:
        if rank == unable:
            raise RuntimeError("peer access is not supported between these two devices\nExplanation")
        return make_peers(size)

    def one(rank: int) -> Any:
        store = process_group.c10d.TCPStore("127.0.0.1", listener.port, is_master=False, timeout=WAIT)
        return map_peers(store, rank=rank, size=size, host=hosts[rank], device=CPU)

    monkeypatch.setattr(peer_memory, "_map", fake_map)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def test_ranks_of_one_host_map_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(mapped(["a", "a", "a"], monkeypatch))


def test_no_rank_uses_it_unless_all_can(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert mapped(["a", "b"], monkeypatch) == [None] * 2
    assert mapped(["a"] * 9, monkeypatch) == [None] * 9
    caplog.clear()
    assert mapped(["a"] * 3, monkeypatch, unable=1) == [None] * 3
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 3
    assert all(text.endswith("(rank 1: peer access is not supported between these two devices).") for text in warnings)


def test_the_sizes_that_are_summed_there() -> None:
    """Sums of a step have tokens x hidden size elements; larger ones go to nccl, sooner with more ranks."""
    tokens_by_ranks = {
        size: max(
            num for num in (1, 32, 64, 128) if make_peers(size).takes(torch.zeros(num, 4096, dtype=torch.bfloat16))
        )
        for size in (2, 4, 8)
    }
    assert tokens_by_ranks == {2: 64, 4: 64, 8: 32}
    assert not make_peers(2).takes(torch.zeros(8, dtype=torch.int64))
