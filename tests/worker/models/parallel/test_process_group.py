"""nccl's way, without nccl: waiting returns before other ranks have taken part, and a rank that hangs is noticed all the same.
Ranks map each other's memory all together or not at all.
"""

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from transom_core.errors import RankLost
from transom_kernels.all_reduce import region_bytes
from transom_worker.models.parallel import peer_memory, process_group
from transom_worker.models.parallel.peer_memory import CudaRuntime, Handle, map_peers
from transom_worker.models.parallel.process_group import LOOKS, ProcessGroup, listen

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


CPU, WAIT = torch.device("cpu"), timedelta(seconds=60)


class FakeCuda:
    """CUDA's runtime of several ranks in one process: a handle is the address itself. Unless `is_able`, `open` fails."""

    def __init__(self, *, is_able: bool = True) -> None:
        self.regions: list[ctypes.Array[ctypes.c_byte]] = []
        self.is_able, self.last_error = is_able, 0
        self.cudaGetErrorString = lambda error: {217: b"peer access is not supported"}[error]
        self.cudaGetErrorString.restype = None  # type: ignore[attr-defined]

    def cudaMalloc(self, address: Any, size: Any) -> int:
        self.regions.append((ctypes.c_byte * size.value)())
        address._obj.value = ctypes.addressof(self.regions[-1])
        return 0

    def cudaMemset(self, address: Any, value: int, size: Any) -> int:
        ctypes.memset(address, value, size.value)
        return 0

    def cudaDeviceSynchronize(self) -> int:
        return 0

    def cudaIpcGetMemHandle(self, handle: Any, address: Any) -> int:
        ctypes.memmove(handle, ctypes.byref(address), 8)
        return 0

    def cudaIpcOpenMemHandle(self, address: Any, handle: Handle, flags: Any) -> int:
        assert flags.value == 1
        address._obj.value = int.from_bytes(bytes(handle)[:8], "little")
        self.last_error = 0 if self.is_able else 217
        return self.last_error

    def cudaGetLastError(self) -> int:
        error, self.last_error = self.last_error, 0
        return error


def mapped(hosts: list[str], monkeypatch: pytest.MonkeyPatch, *, unable: int | None = None) -> list[Any]:
    """What each of the ranks on these hosts gets, if rank `unable` cannot open the others' memory."""
    size, listener = len(hosts), listen("127.0.0.1")
    cuda = [FakeCuda(is_able=rank != unable) for rank in range(size)]
    of_thread = threading.local()
    monkeypatch.setattr(peer_memory, "loaded_runtime", lambda: CudaRuntime(of_thread.cuda))

    def one(rank: int) -> Any:
        of_thread.cuda = cuda[rank]
        store = process_group.c10d.TCPStore("127.0.0.1", listener.port, is_master=False, timeout=WAIT)
        return map_peers(store, rank=rank, size=size, host=hosts[rank], device=CPU)

    with ThreadPoolExecutor(size) as pool:
        made = list(pool.map(one, range(size)))
    assert [each.last_error for each in cuda] == [0] * size, "torch's next launch raises it"
    for rank, peers in enumerate(made):
        if peers is not None:
            assert peers._memory.rank == rank
            assert peers._memory.regions.tolist() == [ctypes.addressof(each.regions[0]) for each in cuda]
            assert {len(each.regions[0]) for each in cuda} == {region_bytes(size)}
    return made


def test_ranks_of_one_host_map_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(mapped(["a", "a", "a"], monkeypatch))


def test_no_rank_uses_it_unless_all_can(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert mapped(["a", "b"], monkeypatch) == [None] * 2
    assert mapped(["a"] * 9, monkeypatch) == [None] * 9
    caplog.clear()
    assert mapped(["a"] * 3, monkeypatch, unable=1) == [None] * 3
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 3
    assert all(text.endswith("(rank 1: cudaIpcOpenMemHandle: peer access is not supported).") for text in warnings)


def test_a_process_without_cuda_says_so() -> None:
    with pytest.raises(RuntimeError, match="no libcudart"):
        peer_memory.loaded_runtime()
