"""nccl's way, without nccl: waiting returns before other ranks have taken part, and a rank that hangs is noticed all the same."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from transom_core.errors import RankLost
from transom_worker.models.parallel import process_group
from transom_worker.models.parallel.collective_watch import LOOKS
from transom_worker.models.parallel.process_group import ProcessGroup

WAIT_S = 60


class Work:
    """A collective on a device: it ends when the device has computed it, or when it is aborted."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def wait(self) -> None:
        """Return at once: only the device waits."""

    def is_completed(self) -> bool:
        return self.ended.is_set()


class Device:
    """What stands for nccl and the device: collectives of the first `num_answered` end, later ones wait for a rank that hangs."""

    def __init__(self, num_answered: int) -> None:
        self.num_answered = num_answered
        self.works: list[Work] = []
        self.num_aborts = 0

    def allreduce(self, tensors: list[torch.Tensor]) -> Work:
        self.works.append(Work())
        if len(self.works) <= self.num_answered:
            self.works[-1].ended.set()
        return self.works[-1]

    def abort(self) -> None:
        self.num_aborts += 1
        for work in self.works:
            work.ended.set()


def group_over(device: Device, monkeypatch: pytest.MonkeyPatch, *, timeout_s: float) -> ProcessGroup:
    monkeypatch.setattr(process_group, "_nccl", lambda *_: device)
    return ProcessGroup("127.0.0.1:1", rank=0, size=2, timeout_s=timeout_s, device="cuda")


def test_a_peer_that_hangs_is_a_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host that waits for the device goes on, and learns that the result is none."""
    device = Device(num_answered=3)
    group = group_over(device, monkeypatch, timeout_s=0.2)
    for _ in range(4):
        group.all_reduce_(torch.ones(2))
    assert device.works[-1].ended.wait(WAIT_S)  # as reading a result does
    for use in (group.check, lambda: group.all_reduce_(torch.ones(2))):
        with pytest.raises(RankLost, match=r"the other ranks are late by 0\.2 s"):
            use()
    assert device.num_aborts == 1
    group.close()


def test_nccls_own_watchdog_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would abort the process, and no rank could report which one hangs."""
    made: list[float] = []

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
            made.append(options._timeout.total_seconds())

    monkeypatch.setattr(process_group, "_store", lambda *_: None)
    monkeypatch.setattr(process_group.c10d, "ProcessGroupNCCL", Nccl, raising=False)
    process_group._nccl("127.0.0.1", 1, 0, 2, timedelta(seconds=270))
    assert made[0] > 270 * (1 + 1 / LOOKS)


class Peers:
    """What stands for peer memory: tensors of up to 8 bytes are summed there."""

    def __init__(self) -> None:
        self.num_sums = self.num_aborts = 0

    def takes(self, x: torch.Tensor) -> bool:
        return x.nbytes <= 8

    def all_reduce_(self, x: torch.Tensor) -> None:
        self.num_sums += 1

    def abort(self) -> None:
        self.num_aborts += 1


def test_small_sums_over_peer_memory_are_watched_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no collectives of nccl's; the mark after a step's last one does not come if a rank hangs."""
    device, peers, mark = Device(num_answered=1), Peers(), Work()
    monkeypatch.setattr(process_group, "DeviceMark", lambda: mark)
    group: Any = group_over(device, monkeypatch, timeout_s=0.2)
    group._peers = peers
    for num in (1, 2, 3, 2):
        group.all_reduce_(torch.ones(num))
    assert (peers.num_sums, len(device.works)) == (3, 1)
    group.check()
    group.end_step()
    assert not mark.ended.wait(0.01)
    while not peers.num_aborts:
        mark.ended.wait(0.01)
    with pytest.raises(RankLost, match=r"the other ranks are late by 0\.2 s"):
        group.all_reduce_(torch.ones(1))
    assert (peers.num_sums, device.num_aborts) == (3, 1)
    group.close()


def test_collectives_that_end_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each keeps its tensors: what is watched is what the device has not computed yet."""
    group: Any = group_over(Device(num_answered=1000), monkeypatch, timeout_s=60.0)
    for _ in range(1000):
        group.all_reduce_(torch.ones(2))
    group.check()
    assert len(group._watch._works) == 1
    group.close()
