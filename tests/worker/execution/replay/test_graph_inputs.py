"""The memory that graphs are given, and a capture on a stream of its own, also where it fails. Every step that a graph should serve
fits into a size, and there are few sizes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.how_many import num_examples
from tests.worker.execution.hand_scheduler import engine_config, make_runner
from transom_core.config import SchedulerConfig
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_kernels.latent_attention.reference import rows_of_sequences
from transom_kernels.paged_attention.rule import MaskRule
from transom_kernels.paged_attention.triton.launches import LaunchKey
from transom_kernels.paged_attention.triton.tuning import FEW_TOKENS, MAX_PARTIAL_BYTES
from transom_kernels.paged_attention.triton.work_items import ITEM_FIELDS, filling_splits
from transom_worker.execution.batch.step_arrays import GroupArrays, StepArrays, row_ranges
from transom_worker.execution.memory import activation_bytes
from transom_worker.execution.replay.backends import GRAPH_BYTES, graph_bytes
from transom_worker.execution.replay.decode_sizes import FEW_SEQS, MIXED_TOKENS, DecodeSize, DecodeSizes, StepSize
from transom_worker.execution.replay.fixed_inputs import FixedArrays, FixedInputs, step_fields
from transom_worker.execution.replay.graph_capture import CudaCapture
from transom_worker.execution.replay.graph_inputs import GroupLaunchKey, buffer_bytes, plan_work_by_key, size_of

CPU = torch.device("cpu")

WIDTHS = {"key_size": 16, "value_size": 16, "element_bytes": 4, "cache_bytes": 4}
SHAPE = {"group": 3, "kv_heads": 2, "multiprocessors": 132, **WIDTHS}
ASKS = tuple((group, LaunchKey(rule=MaskRule(window=window), **SHAPE)) for group, window in ((0, None), (1, 6)))
FULL = GroupSpec(name="full", kind=GroupKind.FULL, layers=(0,), block_size=16)
WINDOW = GroupSpec(name="window", kind=GroupKind.SINKS_WINDOW, layers=(1,), block_size=16, window=128, sinks=4)


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


def sizes(max_num_seqs: int = 64, max_model_len: int = 131_072, *, max_num_batched_tokens: int = 1024) -> DecodeSizes:
    return DecodeSizes(
        [FULL, WINDOW],
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def need(lengths: list[int]) -> StepSize:
    """What sequences of these lengths take, this step's token included."""
    longest = -(-max(lengths) // 16)
    return StepSize(num_seqs=len(lengths), num_columns=(longest, min(10, longest)))


def test_sequences_come_in_few_sizes() -> None:
    assert sizes(64).num_seqs == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert [len(sizes(64, length).decodes) for length in (1024, 8192, 131_072)] == [9, 18, 36]
    assert [len(sizes(256, length).decodes) for length in (1024, 8192, 131_072)] == [13, 26, 52]
    assert [len(sizes(256, length).mixed) for length in (1024, 8192, 131_072)] == [8, 16, 32]
    assert sizes(256, max_num_batched_tokens=300).most_mixed_tokens == 256
    assert sizes(256, max_num_batched_tokens=100).mixed == ()


@pytest.mark.parametrize(
    ("lengths", "size"),
    [
        ([1], (0, 1)), ([1024], (0, 1)), ([1025], (1, 1)), ([5, 1024, 9], (0, 4)), ([5, 1025, 9], (1, 4)),
        ([8193], (2, 1)), ([131_072], (3, 1)), ([131_072] + [10] * 63, (3, 64)), ([3000] * 64, (1, 64)),
        ([9000] * 64, (2, 64)), ([30_000] * 64, (2, 64)), ([131_073], None), ([10] * 65, None),
    ],
)  # fmt: skip
def test_the_smallest_size_is_taken(lengths: list[int], size: tuple[int, int] | None) -> None:
    found = sizes().smallest_for(need(lengths))
    assert found == (None if size is None else DecodeSize(level=size[0], num_seqs=size[1]))


@settings(max_examples=num_examples(daily=50, exhaustive=500))
@given(
    max_model_len=st.integers(1, 200_000),
    max_num_seqs=st.integers(1, 300),
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=40),
    group=st.sampled_from((1, 4, 8, 40)),
    multiprocessors=st.sampled_from((58, 132)),
)
def test_every_decode_step_fits_a_size(
    max_model_len: int, max_num_seqs: int, shares: list[float], group: int, multiprocessors: int
) -> None:
    """Its launches have room for the step's work items, and for one of each sequence that is added."""
    made = sizes(max_num_seqs, max_model_len)
    assert made.all
    ends = [1 + int(share * (max_model_len - 1)) for share in shares[:max_num_seqs]]
    arrays = mixed_step([end - 1 for end in ends], [1] * len(ends))
    keys = [(index, replace(key, multiprocessors=multiprocessors)) for index, key in launch_keys(group, 2)]
    works = plan_work_by_key(arrays, keys)
    size = made.smallest_for(size_of(arrays, works))
    assert size in made.all
    for (index, key), work in zip(keys, works, strict=True):
        added = replace(work, items=np.resize(work.items, (len(work.items) + size.num_seqs - len(ends), ITEM_FIELDS)))
        assert made.has_room(size, 0, (index, key, key.tilings[0]), added)


def launch_keys(group: int, element_bytes: int) -> list[GroupLaunchKey]:
    """A layer with a full cache and one with a window, `group` query heads of 128 for each KV head."""
    widths = {"key_size": 128, "value_size": 128, "element_bytes": element_bytes, "cache_bytes": element_bytes}
    shape = {"group": group, "kv_heads": 8, "multiprocessors": 132, **widths}
    rules = (MaskRule(), MaskRule(window=WINDOW.window, num_sink_tokens=WINDOW.sinks))
    return [(index, LaunchKey(rule=rule, **shape)) for index, rule in enumerate(rules)]


def mixed_step(starts: list[int], counts: list[int]) -> StepArrays:
    """A step of sequences that have all their blocks, as far as its plan of work needs it."""
    rows = row_ranges(starts, counts)
    groups = []
    for spec in (FULL, WINDOW):
        first = [max(0, start - spec.window + 1) // 16 if spec.window else 0 for start in starts]
        first = [max(block, spec.num_sink_blocks) for block in first]
        ends = zip(starts, counts, first, strict=True)
        most = max(1, *(-(-(start + count) // 16) - block for start, count, block in ends)) + spec.num_sink_blocks
        groups.append(
            GroupArrays(
                block_size=16,
                num_sink_blocks=spec.num_sink_blocks,
                block_table=np.empty((len(starts), most), dtype=np.int32),
                first_block=np.array(first),
                attend_from_host=[0] * len(starts),
                slots=rows.positions,
                rows=rows,
            )
        )
    return StepArrays(token_ids=rows.positions, rows=rows, logit_rows=rows.offset[1:] - 1, groups=tuple(groups))


def test_padding_names_no_rows(tiny_model: Path) -> None:
    """Regression: an indexer read a block id of padding in what an earlier step of another size had left there."""
    builder = make_runner(engine_config(tiny_model, window=6, window_pattern="FS"))._builder
    arrays = FixedArrays.on_cpu(step_fields(builder, 4, (3, 3)))
    for array in arrays.host.values():
        array.fill(129_000)
    inputs = FixedInputs(builder, arrays)
    inputs.write(mixed_step([7, 7], [1, 1]), 4)
    for group in inputs.forward_batch(4).groups:
        slots, sequence, num_visible = rows_of_sequences(group, 4)
        assert sequence.tolist() == [0, 1, 2, 3]
        assert num_visible.tolist() == [8, 8, 1, 1]
        assert slots[2:, 0].tolist() == [-1, -1]


def random_counts(rng: random.Random, most_tokens: int, most_seqs: int) -> list[int]:
    """New tokens of sequences, at least one of which has several."""
    counts = [rng.randint(2, min(most_tokens, rng.choice((4, 40, most_tokens))))]
    while (left := most_tokens - sum(counts)) and len(counts) < most_seqs and rng.random() < 0.98:
        counts.append(min(left, rng.choice((1, 1, 1, 1, 1, 1, 1, 1, rng.randint(2, 4), 5, rng.randint(5, 100)))))
    rng.shuffle(counts)
    return counts


@settings(max_examples=num_examples(daily=60, exhaustive=3000))
@given(seed=st.integers(0, 2**32), group=st.sampled_from((1, 4, 8, 40, 200)), element_bytes=st.sampled_from((2, 4)))
def test_the_work_of_mixed_steps_fits_the_launches_of_their_size(seed: int, group: int, element_bytes: int) -> None:
    """By brute force: each launch has room for the work items of all steps that are given its size, and of the tokens added."""
    rng = random.Random(seed)
    made = sizes(rng.choice((1, 5, 64, 256, 600)), rng.choice((900, 5000, 131_072)))
    most_tokens = rng.choice((2, 30, 129, *MIXED_TOKENS))
    counts = random_counts(rng, most_tokens, made.num_seqs[-1])
    reach = rng.choice((900, 900, 5000, made._max_model_len))
    starts = [rng.randint(0, max(0, min(reach, made._max_model_len) - count)) for count in counts]
    keys, arrays = launch_keys(group, element_bytes), mixed_step(starts, counts)
    works = plan_work_by_key(arrays, keys, is_mixed=True)
    step = size_of(arrays, works, keys)
    size = made.smallest_for(step)
    num_few, num_long = sum(1 < n <= FEW_TOKENS for n in counts), sum(n > 1 for n in counts)
    launches = [(group, key, tiling) for group, key in keys for tiling in key.tilings]
    # with more partial results an eager step has several launches, and no size
    one_each = all(work.num_partials <= key.most_partials for work, (_, key, _) in zip(works, launches, strict=True))
    is_short = max(start + count for start, count in zip(starts, counts, strict=True)) <= 1024
    if is_short and num_few <= FEW_SEQS and one_each:
        assert size is not None
        assert size.level == 0 or num_long > FEW_SEQS
    if size is None:
        return
    assert size in made.all
    assert size.num_seqs >= len(counts)
    assert size.mixed_tokens == next(tokens for tokens in MIXED_TOKENS if tokens >= sum(counts))
    for work, launch in zip(works, launches, strict=True):
        assert made.has_room(size, sum(counts), launch, work)
        assert arrays.groups[launch[0]].block_table.shape[1] <= made.num_columns(size, launch[0])


@pytest.mark.parametrize(
    ("counts", "shape"),
    [
        ([2], (128, 32)), ([1, 127], (128, 32)), ([1, 128], (256, 32)), ([1] * 33 + [50], (128, 127)),
        ([1] * 126 + [2], (128, 127)), ([1] * 200 + [312], (512, 256)), ([1, 512], None), ([1] * 255 + [2], (384, 256)),
        ([1] * 257 + [2], None), ([2] * FEW_SEQS, (128, 32)), ([2] * (FEW_SEQS + 1), None), ([2] * 200, None),
    ],
)  # fmt: skip
def test_mixed_steps_at_the_edges_of_sizes(counts: list[int], shape: tuple[int, ...] | None) -> None:
    """Tokens and sequences, and the level where it is not 0."""
    keys, arrays = launch_keys(4, 2), mixed_step([7] * len(counts), counts)
    size = sizes(256, 9000).smallest_for(size_of(arrays, plan_work_by_key(arrays, keys, is_mixed=True), keys))
    if shape is None:
        assert size is None
    else:
        num_tokens, num_seqs, level = (*shape, 0)[:3]
        assert size == DecodeSize(level=level, num_seqs=num_seqs, mixed_tokens=num_tokens)
