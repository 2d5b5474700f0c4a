"""A step writes its own numbers into the buffers of its size, and padding that reads nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from tests.worker.execution.hand_scheduler import HandScheduler, engine_config, make_runner
from tests.worker.execution.toy_decoder import layer, load_toy
from transom_kernels.paged_attention.rule import MaskRule
from transom_kernels.paged_attention.triton.launches import LaunchKey, launches_of
from transom_kernels.paged_attention.triton.tuning import MAX_PARTIAL_BYTES
from transom_kernels.paged_attention.triton.work_items import ITEM_FIELDS, filling_splits
from transom_worker.execution.batch.step_arrays import StepArrays
from transom_worker.execution.memory import activation_bytes
from transom_worker.execution.replay.backends import GRAPH_BYTES, graph_bytes
from transom_worker.execution.replay.decode_sizes import DecodeSize, DecodeSizes
from transom_worker.execution.replay.graph_capture import CudaCapture
from transom_worker.execution.replay.graph_inputs import GraphInputs, buffer_bytes, plan_work_by_key, size_of
from transom_worker.execution.runner import ModelRunner

CPU = torch.device("cpu")

CONFIG = engine_config(pool_bytes=2**20)
WIDTHS = {"key_size": 8, "value_size": 8, "element_bytes": 4, "cache_bytes": 4}
SHAPE = {"group": 1, "kv_heads": 2, "multiprocessors": 132, **WIDTHS}
ASKS = tuple((group, LaunchKey(rule=MaskRule(window=window), **SHAPE)) for group, window in ((0, None), (1, 6)))


def make() -> tuple[ModelRunner, DecodeSizes]:
    runner = make_runner(CONFIG, load_toy([layer(), layer(window=6)], max_position=4000))
    specs = [group.spec for group in runner.info.layout.groups]
    return runner, DecodeSizes(specs, max_num_seqs=8, max_model_len=4000, max_num_batched_tokens=64)


def decoding(runner: ModelRunner, lengths: list[int]) -> StepArrays:
    """Return a decode step of sequences with these numbers of computed tokens."""
    hand = HandScheduler(runner.info.layout)
    for seq_id, length in enumerate(lengths):
        hand.add(seq_id, [7] * length)
        runner._apply(hand.plan({seq_id: length}))
        hand.sequences[seq_id].next_id = 40 + seq_id
    plan = hand.plan(dict.fromkeys(range(len(lengths)), 1))
    runner._apply(plan)
    return runner._builder.arrays(plan, runner._store)


def test_a_step_in_a_larger_size() -> None:
    runner, sizes = make()
    builder, size = runner._builder, DecodeSize(level=1, num_seqs=4)
    host, device = (torch.full((buffer_bytes(size, sizes, ASKS, builder),), 77, dtype=torch.uint8) for _ in range(2))
    batch = GraphInputs(size, sizes, ASKS, builder, host=host, device=device)
    for lengths in ([1500, 3, 40, 9], [5, 1100, 11]):  # what the first leaves does not matter
        arrays = decoding(runner, lengths)
        works = plan_work_by_key(arrays, ASKS)
        assert sizes.smallest_for(size_of(arrays, works)) == size
        batch.write(arrays, works)
        device.copy_(host)
    got, wanted = batch.forward_batch(), builder.batch(arrays)
    assert got.token_ids.tolist() == [40, 41, 42, 0]
    assert got.positions.tolist() == [5, 1100, 11, 0]
    assert got.logit_rows.tolist() == [0, 1, 2, 3]
    for index, asked in ASKS:
        mine, plain = got.groups[index], wanted.groups[index]
        dump = runner.info.layout.dump_block(index) * mine.block_size
        assert mine.slots.tolist() == [*plain.slots.tolist(), dump]
        assert torch.equal(mine.block_table[:3, : plain.block_table.shape[1]], plain.block_table)
        assert mine.first_block.tolist() == [*plain.first_block.tolist(), 0]
        assert mine.query_offset.tolist() == [0, 1, 2, 3, 4]
        assert (mine.count_host, mine.start_host, mine.block_table_host) == ([], [], [])
        room = sizes.room(size, (index, asked, asked.tilings[0]))
        work, own = launches_of(mine, asked, device.device)[0].work, launches_of(plain, asked, device.device)[0].work
        num, combine_items = len(own.items), len(own.combine_items)
        assert torch.equal(work.items[:num], own.items)
        assert torch.equal(work.combine_items[:combine_items], own.combine_items)
        # Row 3 of sequence 3 is a token that sees no key.
        assert work.items[num].tolist() == [3, 1, -1, 3, *[0] * 4, -1]
        assert work.items[num + 1 :].tolist() == [[0] * (ITEM_FIELDS - 1) + [-1]] * (room.num_items - num - 1)
        assert not work.combine_items[combine_items:].any()
        assert work.num_partials == room.num_partials >= own.num_partials
    assert got.groups[0].scratch is not batch.forward_batch().groups[0].scratch


def test_steps_with_prompts_are_none() -> None:
    runner, _ = make()
    hand = HandScheduler(runner.info.layout)
    hand.add(0, [3, 4, 5])
    hand.add(1, [6])
    for counts, only in (({0: 2, 1: 1}, False), ({0: 1, 1: 1}, False), ({0: 1}, True)):
        hand.sequences[1].next_id = 9
        plan = hand.plan(counts)
        if counts == {0: 1, 1: 1}:
            plan.logits_from[0] += 1  # as if more of its prompt were to come
        runner._apply(plan)
        assert runner._builder.arrays(plan, runner._store).only_decodes is only
        hand.sequences[0].next_id = 9


def test_memory_is_set_aside_for_what_graphs_hold() -> None:
    runner, sizes = make()
    architecture, scheduler = runner._architecture, CONFIG.scheduler
    assert graph_bytes(None, architecture, scheduler, "float32", CPU) == 0
    held = graph_bytes(sizes, architecture, scheduler, "float32", CPU)
    top = DecodeSize(level=sizes.num_levels - 1, num_seqs=8)
    layer = architecture.layers[0]
    splits = filling_splits(layer.num_kv_heads, 132)
    partials = 8 * splits * layer.num_heads * (layer.head_size + 2) * 4  # of values, a maximum and a sum
    specs = [group.spec for group in runner.info.layout.groups]
    mixed = DecodeSizes(specs, max_num_seqs=8, max_model_len=4000, max_num_batched_tokens=512)
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
