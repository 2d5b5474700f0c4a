"""The calls that capturing makes to CUDA, in order, and the state after a failed capture; a fake CUDA records the calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from transom_worker.execution.replay.graph_capture import CudaCapture

POOL = (0, 7)


class World:
    """Streams, graphs and the allocator; `fails` names what raises."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.current = FakeStream(self, "main")
        self.allocator_captures = False
        self.fails: dict[str, Exception] = {}

    def say(self, what: str) -> None:
        self.said.append(what)
        if what in self.fails:
            raise self.fails[what]


class FakeStream:
    device = torch.device("cuda", 3)

    def __init__(self, world: World, name: str) -> None:
        self._world, self.name = world, name

    def wait_stream(self, other: FakeStream) -> None:
        self._world.say(f"{self.name} waits for {other.name}")


class FakeGraph:
    def __init__(self, world: World) -> None:
        self._world = world

    def capture_begin(self, *, pool: tuple[int, int], capture_error_mode: str) -> None:
        assert (pool, capture_error_mode) == (POOL, "thread_local")
        self._world.allocator_captures = True
        self._world.say(f"begin on {self._world.current.name}")

    def capture_end(self) -> None:
        self._world.say(f"end on {self._world.current.name}")
        self._world.allocator_captures = False


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()

    @contextmanager
    def on_stream(stream: FakeStream) -> Iterator[None]:
        before, world.current = world.current, stream
        try:
            yield
        finally:
            world.current = before

    def end_allocating(device: int, pool: tuple[int, int]) -> None:
        assert (device, pool) == (3, POOL)
        if not world.allocator_captures:
            raise RuntimeError("not recording")
        world.allocator_captures = False

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(world, "side"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: world.current)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: world.say("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: world.say("empty cache"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(world))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end_allocating, raising=False)
    return world


RUN = ["side waits for main", "run on side", "main waits for side", "synchronize"]
CAPTURE = ["synchronize", "empty cache", "begin on side", "run on side", "end on side"]


def capture(world: World) -> None:
    device = CudaCapture(torch.device("cuda"))
    for call in (device.warm_up, device.capture):
        call(lambda: world.say(f"run on {world.current.name}"))


def test_a_pass_is_run_and_then_captured_on_a_stream_of_its_own(world: World) -> None:
    capture(world)
    assert world.said == RUN + CAPTURE
    assert (world.current.name, world.allocator_captures) == ("main", False)


def test_the_stream_is_waited_for_where_the_pass_fails(world: World) -> None:
    world.fails["run on side"] = MemoryError("no room")
    with pytest.raises(MemoryError, match="no room"):
        capture(world)
    assert world.said == RUN[:-1]
    assert world.current.name == "main"


@pytest.mark.parametrize("ends", [True, False], ids=["it can be ended", "ending fails too"])
@pytest.mark.parametrize("what", ["begin on side", "run on side", "end on side"])
def test_a_capture_that_fails_says_why_and_leaves_nothing_behind(world: World, what: str, ends: bool) -> None:
    reason = RuntimeError("operation not permitted when stream is capturing")

    def fail() -> None:
        if not ends:
            world.fails["end on side"] = RuntimeError("a consequence")
        world.fails[what] = reason

    def run() -> None:
        if world.allocator_captures:
            fail()
            world.say("run on side")

    if what == "begin on side":
        fail()
    with pytest.raises(RuntimeError, match="not permitted") as raised:
        CudaCapture(torch.device("cuda")).capture(run)
    assert raised.value is reason
    assert (world.current.name, world.allocator_captures) == ("main", False)
