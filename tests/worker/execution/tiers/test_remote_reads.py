"""A rank reads another worker's memory: the right bytes, and no end while a byte may still come.

The first tests have an agent without a wire. The last one reads another process by NIXL, which is stopped and killed.
"""

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.worker.kvcache.tiers.test_block_format import FULL, shares, whole_numbers, write
from transom_core.config import TransferConfig
from transom_core.contract.kv_transfer import MemoryRegion, RankMemory
from transom_core.errors import ConfigError
from transom_core.kv_cache.layout import ArenaLayout
from transom_core.kv_cache.tiers import DEVICE, HOST
from transom_worker.execution.executor import ReadEnd, RemoteBlock, RemoteRead
from transom_worker.execution.tiers.nixl_agent import NixlAgent, Spans, open_agent
from transom_worker.execution.tiers.remote_reads import HANDLE_BYTES, OTHER_BYTES, RemoteReads
from transom_worker.execution.tiers.slabs import TierMemory
from transom_worker.kvcache.tiers.block_format import block_digest

needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")
WAIT_S = 120.0


def until(condition: Callable[[], Any]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.001)


class Ends(dict[str, str]):
    """The errors of ended reads, by id."""

    def note(self, end: ReadEnd) -> None:
        self[end.read_id] = end.error

    def of(self, read_id: str) -> str:
        until(lambda: read_id in self)
        return self.pop(read_id)


class FakeAgent:
    """Copies within this process when a handle's state is looked up while it is "DONE"; `states` are those of later handles."""

    def __init__(self, memory: RankMemory) -> None:
        self.memory = memory
        self.state_of_all = "DONE"
        self.in_flight: list[list[Any]] = []
        self.told: list[str] = []
        self.refusal: Exception | None = None

    def start(self, source: RankMemory, kind: tuple[str, int], spans: Spans, tier: int) -> Any:
        if self.refusal is not None:
            raise self.refusal
        handle = [source.agent, spans]
        self.in_flight.append(handle)
        return handle

    def state(self, handle: Any) -> str:
        if self.state_of_all == "DONE":
            for there, here, size in handle[1].tolist():
                view(here, size)[:] = view(there, size)
        if self.state_of_all != "PROC":
            self.in_flight.remove(handle)
        return self.state_of_all

    def disconnect(self, metadata: bytes) -> None:
        assert not any(agent == metadata for agent, _ in self.in_flight)
        self.told.append(f"disconnect {metadata.decode()}")

    def close(self) -> None:
        self.told.append("close")


def view(address: int, size: int) -> Any:
    """The bytes at an address."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def region(rows: np.ndarray) -> MemoryRegion:
    return MemoryRegion(address=rows.ctypes.data, kind="DRAM", device=0, strides=(rows.shape[1],) * 3)


class Case:
    """Blocks of the group FULL at two ranks, which one rank reads; `rows` is that rank's memory, [blocks, stride]."""

    def __init__(self) -> None:
        theirs, own = shares(2), shares(1)
        whole = whole_numbers(theirs, FULL)
        self.there = [np.frombuffer(part, np.uint8).reshape(3, -1).copy() for part in write(whole, theirs, FULL)]
        (wanted,) = write(whole, own, FULL)
        self.wanted = np.frombuffer(wanted, np.uint8).reshape(3, -1)
        self.rows = np.zeros((5, self.wanted.shape[1] + 16), np.uint8)
        memory = RankMemory(agent=b"own", regions={HOST: region(self.rows)})
        self.agent = cast(Any, FakeAgent(memory))
        tier: Any = SimpleNamespace(rows=lambda group: torch.from_numpy(self.rows))
        self.reads = RemoteReads(self.agent, own, 0, {HOST: tier})
        self.ends = Ends()
        self.reads.on_end = self.ends.note
        digests = {i: (block_digest(theirs, own, FULL, 0, row),) for i, row in enumerate(self.wanted)}
        self.digests: Any = (digests, {}, {})  # the reads' logical indices are the source's blocks
        self.memories = tuple(
            RankMemory(agent=f"{rank}".encode(), regions={DEVICE: region(rows)}) for rank, rows in enumerate(self.there)
        )
        self.shares = theirs

    def read(self, read_id: str = "r") -> None:
        blocks = tuple(
            RemoteBlock(FULL, source, DEVICE, source, HOST, target) for source, target in ((0, 4), (1, 0), (2, 2))
        )
        memories, shares, digests = self.memories, self.shares, self.digests
        self.reads.begin(RemoteRead(read_id=read_id, memories=memories, shares=shares, blocks=blocks, digests=digests))

    def has_come(self) -> bool:
        size = self.wanted.shape[1]
        return np.array_equal(self.rows[[4, 0, 2], :size], self.wanted) and not self.rows[[1, 3]].any()


@pytest.fixture
def case() -> Iterator[Case]:
    made = Case()
    yield made
    made.reads.close()
    assert made.agent.told[-1] == "close"


def test_a_rank_reads_its_heads_from_the_ranks_that_have_them_until_no_byte_can_come(case: Case) -> None:
    case.agent.state_of_all = "PROC"
    case.read()
    until(lambda: case.agent.in_flight)
    time.sleep(0.05)
    assert not case.ends
    case.agent.state_of_all = "DONE"
    assert case.ends.of("r") == ""
    assert case.has_come()
    assert not case.agent.in_flight


def test_other_bytes_than_the_source_has_are_noticed(case: Case) -> None:
    case.there[1][2] ^= 1
    case.read()
    assert case.ends.of("r") == OTHER_BYTES
    case.digests = ()
    case.read("without digests")
    assert "IndexError" in case.ends.of("without digests")


def test_a_connection_that_fails_is_made_anew_once_nothing_is_read_by_it(case: Case) -> None:
    case.agent.state_of_all = "PROC"
    case.read()
    until(lambda: len(case.agent.in_flight) >= 2)
    case.agent.state_of_all = "ERR"
    assert "ended as ERR" in case.ends.of("r")
    until(lambda: len(case.agent.told) == 2)
    assert sorted(case.agent.told) == ["disconnect 0", "disconnect 1"]
    case.agent.state_of_all = "DONE"
    case.read("again")
    assert case.ends.of("again") == ""
    assert case.has_come()


def test_a_connection_that_is_not_used_for_long_is_closed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transom_worker.execution.tiers.remote_reads.IDLE_S", 0.01)
    case.read()
    assert case.ends.of("r") == ""
    time.sleep(0.02)
    # the source was started again
    case.memories = tuple(replace(one, agent=one.agent + b" again") for one in case.memories)
    case.read()
    assert case.ends.of("r") == ""
    assert sorted(case.agent.told) == ["disconnect 0", "disconnect 1"]


def test_what_cannot_be_read_is_said(case: Case) -> None:
    case.agent.refusal = ConnectionError("the source is gone")
    case.read()
    assert case.ends.of("r") == "ConnectionError: the source is gone"
    case.agent.refusal = None
    case.read("again")
    assert case.ends.of("again") == ""


def test_without_nixl_calls_move_the_blocks_unless_the_settings_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)  # an import of it then fails
    assert open_agent(TransferConfig(is_on=True), {}) is None
    with pytest.raises(ConfigError, match=r"transom\[transfer\]"):
        open_agent(TransferConfig(is_on=True, wire="nixl"), {})


NUM_BLOCKS, BLOCK_BYTES = 10, HANDLE_BYTES // 2


def slab_memory(slab: torch.Tensor) -> TierMemory:
    """`NUM_BLOCKS` blocks of the group FULL, whose strides are far larger than they are."""
    layouts = shares(1).groups[0]
    groups = tuple(replace(one, block_bytes=BLOCK_BYTES, stride_bytes=BLOCK_BYTES) for one in layouts)
    return TierMemory(ArenaLayout(page_bytes=BLOCK_BYTES, num_pages=NUM_BLOCKS - 1, groups=groups), slab)


def source_process() -> None:
    """Lends sevens, until its standard input closes."""
    slab = torch.full((NUM_BLOCKS * BLOCK_BYTES,), 7, dtype=torch.uint8)
    agent = NixlAgent({DEVICE: slab_memory(slab)})
    sys.stdout.write(f"memory {pickle.dumps(agent.memory).hex()}\n")
    sys.stdout.flush()
    sys.stdin.read()


@pytest.mark.parametrize("is_real", [False, pytest.param(True, marks=needs_nixl)])
def test_log_handlers_stay_open_when_nixl_configures_logging(tmp_path: Path, is_real: bool) -> None:
    """As NIXL does when it is imported. Ray Serve's handler, once closed, would keep every later line in memory."""
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").touch()
    (tmp_path / "nixl" / "_api.py").write_text(
        "import logging.config\nlogging.config.dictConfig({'version': 1, 'disable_existing_loggers': False})\n"
        "logging.raiseExceptions = False\n"
    )
    program = (
        "import logging, logging.handlers, sys\n"
        "logger, file = logging.getLogger('serve'), logging.StreamHandler(sys.stdout)\n"
        "memory = logging.handlers.MemoryHandler(1, target=file)\n"
        "logger.addHandler(memory)\n"
        "from transom_worker.execution.tiers.nixl_agent import load_nixl\n"
        "load_nixl()\n"
        "logger.warning('written')\n"
        "assert logging.raiseExceptions and not memory.buffer"
    )
    paths = [*([] if is_real else [str(tmp_path)]), *sys.path]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    ran = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True)
    assert (ran.returncode, "written" in ran.stdout) == (0, True), ran.stderr


@needs_nixl
def test_a_source_that_hangs_keeps_the_blocks_until_it_goes_on_or_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TCP, where the source takes part in a read: its bytes come long after the read was given up."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    slab = torch.zeros(NUM_BLOCKS * BLOCK_BYTES, dtype=torch.uint8)
    memory, started = slab_memory(slab), threading.Event()
    command = f"from {__name__} import source_process; source_process()"
    source = subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert source.stdout is not None
    line = next(line for line in source.stdout if line.startswith("memory "))
    there: RankMemory = pickle.loads(bytes.fromhex(line.split()[1]))
    agent, kept = NixlAgent({HOST: memory}), replace(shares(1), groups=(memory.layout.groups,))
    reads, start = RemoteReads(agent, kept, 0, {HOST: memory}), agent.start
    ends = Ends()
    reads.on_end = ends.note

    def noted(*args: Any) -> Any:
        handle = start(*args)
        started.set()
        return handle

    def read(read_id: str) -> None:
        blocks = tuple(RemoteBlock(FULL, 0, DEVICE, block, HOST, NUM_BLOCKS - 1 - block) for block in range(NUM_BLOCKS))
        started.clear()
        reads.begin(RemoteRead(read_id=read_id, memories=(there,), shares=kept, blocks=blocks, digests=({}, {}, {})))

    def hang(read_id: str) -> None:
        """Stop the source, and read it."""
        source.send_signal(signal.SIGSTOP)
        slab.zero_()
        read(read_id)
        assert started.wait(WAIT_S)
        for _ in range(10):
            assert not ends
            time.sleep(0.05)

    monkeypatch.setattr(agent, "start", noted)
    try:
        read("first")
        assert ends.of("first") == ""
        assert bool((slab == 7).all())
        hang("goes on")
        source.send_signal(signal.SIGCONT)
        assert ends.of("goes on") == ""
        assert bool((slab == 7).all())
        hang("dies")
        source.send_signal(signal.SIGKILL)
        assert ends.of("dies")
        before = slab.clone()
        read("dead")
        assert ends.of("dead")
        assert torch.equal(slab, before)  # nothing comes after the end
    finally:
        reads.close()
        source.kill()
        source.communicate()
