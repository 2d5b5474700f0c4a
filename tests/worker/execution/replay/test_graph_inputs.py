"""The memory that graphs are given, and a capture on a stream of its own, also where it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.worker.execution.hand_scheduler import engine_config, make_runner
from transom_core.config import SchedulerConfig
from transom_kernels.paged_attention.rule import MaskRule
from transom_kernels.paged_attention.triton.launches import LaunchKey
from transom_kernels.paged_attention.triton.tuning import MAX_PARTIAL_BYTES
from transom_kernels.paged_attention.triton.work_items import filling_splits
from transom_worker.execution.memory import activation_bytes
from transom_worker.execution.replay.backends import GRAPH_BYTES, graph_bytes
from transom_worker.execution.replay.decode_sizes import DecodeSize, DecodeSizes
from transom_worker.execution.replay.graph_capture import CudaCapture
from transom_worker.execution.replay.graph_inputs import buffer_bytes

CPU = torch.device("cpu")

WIDTHS = {"key_size": 16, "value_size": 16, "element_bytes": 4, "cache_bytes": 4}
SHAPE = {"group": 3, "kv_heads": 2, "multiprocessors": 132, **WIDTHS}
ASKS = tuple((group, LaunchKey(rule=MaskRule(window=window), **SHAPE)) for group, window in ((0, None), (1, 6)))


def test_memory_is_set_aside_for_what_graphs_hold(tiny_model: Path) -> None:
    runner = make_runner(engine_config(tiny_model, window=6, window_pattern="FS"))
    specs = [group.spec for group in runner.info.layout.groups]
    sizes = DecodeSizes(specs, max_num_seqs=8, max_model_len=2000, max_num_batched_tokens=64)
    architecture, scheduler = runner._architecture, SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64)
    assert graph_bytes(None, architecture, scheduler, "float32", CPU) == 0
    held = graph_bytes(sizes, architecture, scheduler, "float32", CPU)
    top = DecodeSize(level=sizes.num_levels - 1, num_seqs=8)
    layer = architecture.layers[0]
    splits = filling_splits(layer.num_kv_heads, 132)
    partials = 8 * splits * layer.num_heads * (layer.head_size + 2) * 4  # of values, a maximum and a sum
    mixed = DecodeSizes(specs, max_num_seqs=8, max_model_len=2000, max_num_batched_tokens=512)
    added = graph_bytes(mixed, architecture, scheduler, "float32", CPU) - held
    largest = replace(scheduler, max_num_batched_tokens=512, max_num_seqs=8)
    assert added >= len(mixed.mixed) * GRAPH_BYTES + activation_bytes(architecture, largest, torch.float32) + partials
    assert added >= MAX_PARTIAL_BYTES
    assert held > len(sizes.all) * GRAPH_BYTES + partials + buffer_bytes(top, sizes, ASKS, runner._builder) // 2


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
