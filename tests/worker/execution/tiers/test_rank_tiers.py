"""A plan's copies run one after the other over all groups and both tiers, once, and loads end beside the steps.

The disk tier of one rank: blocks that a thread writes, loads by ticket, broken files, and writes that fail.
"""

import logging
import os
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.how_many import num_examples
from tests.present import present
from transom_core.contract.kv_transfer import PIECE_BYTES
from transom_core.errors import StepFailed
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.layout import ArenaLayout, GroupLayout
from transom_worker.execution.executor import DiskUsage
from transom_worker.execution.tiers import disk_blocks as disk_tier, rank_tiers
from transom_worker.execution.tiers.load_copies import LoadBoard, RowCopies, ThreadLoads
from transom_worker.execution.tiers.rank_tiers import RankTiers
from transom_worker.execution.tiers.slabs import TierMemory, block_rows
from transom_worker.kvcache.tiers.disk.folder import BlockFolder
from transom_worker.scheduling.step import TIER_DEVICE, TIER_DISK, TIER_HOST, StepPlan

STRIDES = (512, 256, 768)
DEVICE = ArenaLayout(
    page_bytes=1536,
    num_pages=3,
    groups=tuple(
        GroupLayout(
            spec=GroupSpec(name=str(stride), kind=GroupKind.FULL, layers=(), block_size=4),
            block_bytes=stride - 12,
            stride_bytes=stride,
            layers=(),
        )
        for stride in STRIDES
    ),
)
LAYOUTS = (DEVICE, replace(DEVICE, num_pages=5))
Copy = tuple[int, int, int, int, int]  # group, source tier, source, target tier, target


def slabs() -> list[torch.Tensor]:
    return [torch.randint(0, 255, (layout.slab_bytes,), dtype=torch.uint8) for layout in LAYOUTS]


def block_copies(slabs: list[torch.Tensor], disk: Path | None = None) -> RankTiers:
    tiers = {tier: TierMemory(layout, slab) for tier, (layout, slab) in enumerate(zip(LAYOUTS, slabs, strict=True))}
    return RankTiers(tiers, None if disk is None else BlockFolder(disk, b"m" * 32, space_bytes=1 << 20))


def rows(slabs: list[torch.Tensor], tier: int, group: int) -> torch.Tensor:
    return block_rows(LAYOUTS[tier], slabs[tier], group)


def plan_of(copies: list[Copy], *, ticket: int = 0, step_id: int = 0) -> StepPlan:
    plan = StepPlan(step_id=step_id)
    for copy in copies:
        add(plan, copy, ticket)
    return plan


def add(plan: StepPlan, copy: Copy, ticket: int) -> None:
    group, source_tier, source, target_tier, target = copy
    plan.copy_group.append(group)
    plan.copy_source_tier.append(source_tier)
    plan.copy_source.append(source)
    plan.copy_target_tier.append(target_tier)
    plan.copy_target.append(target)
    plan.copy_ticket.append(ticket)


def copies() -> st.SearchStrategy[list[Copy]]:
    def ends(group: int) -> st.SearchStrategy[tuple[int, int]]:
        ids = [st.integers(0, layout.dump_block(group) - 1) for layout in LAYOUTS]
        return st.one_of(*(st.tuples(st.just(tier), ids[tier]) for tier in (0, 1)))

    one = [st.tuples(st.just(group), ends(group), ends(group)) for group in range(3)]
    return st.lists(st.one_of(*one).map(lambda copy: (copy[0], *copy[1], *copy[2])), max_size=12)


@settings(max_examples=num_examples(daily=40, exhaustive=300))
@given(copies())
def test_copies_are_as_one_after_the_other_over_all_groups_and_tiers(copies: list[Copy]) -> None:
    got = slabs()
    wanted = [slab.clone() for slab in got]
    for group, source_tier, source, target_tier, target in copies:
        rows(wanted, target_tier, group)[target] = rows(wanted, source_tier, group)[source].clone()
    made = block_copies(got)
    plan = plan_of(copies)
    assert made.run(plan) == len(copies)
    assert all(map(torch.equal, got, wanted))
    assert made.run(plan) == 0  # as where a plan fails after its copies and is then abandoned
    assert all(map(torch.equal, got, wanted))
    made.close()


def take(made: RankTiers, ticket: int) -> None:
    for _ in range(10_000):
        ended = made.ended_loads(wait=True)
        if ended.loaded:
            assert ended.loaded == [ticket]
            assert (len(ended.load_s), ended.failed) == (1, [])
            return
    raise AssertionError("the load did not end")


def test_what_the_cpu_does_in_the_host_tier_waits_for_spills_that_a_gpu_still_makes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made, calls = block_copies(slabs(), tmp_path), []
    stream = SimpleNamespace(synchronize=lambda: calls.append("waited"))
    monkeypatch.setattr(made, "_device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(rank_tiers, "block_copy_between", lambda *_: calls.append("spilled"))
    monkeypatch.setattr(rank_tiers, "block_copy", lambda *_: calls.append("copied"))
    made.run(plan_of([(1, 0, 2, 0, 3), (1, 0, 2, 1, 7), (1, 1, 7, 1, 8)]))
    assert calls == ["copied", "spilled", "waited", "copied"]
    calls.clear()
    made.write(TIER_HOST, 2, [3], bytes(STRIDES[2] - 12))
    monkeypatch.setattr(disk_tier.DiskTier, "fetch", lambda *_: calls.append("fetched"))
    made.run(fetches([(1, 7, 0)], ticket=5))
    assert calls == ["waited", "waited", "fetched"]
    made.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_spills_and_loads_of_a_gpu_arrive() -> None:
    """Loads run on a stream of their own, after the spills that the plan before launched."""
    device, host = slabs()
    memory = [device.cuda(), host.pin_memory()]
    made, wanted = block_copies(memory), [rows(memory, 0, group)[1].cpu() for group in range(3)]
    made.run(plan_of([(group, 0, 1, 1, 2) for group in range(3)]))
    made.run(plan_of([(group, 1, 2, 0, 0) for group in range(3)], ticket=5, step_id=1))
    take(made, 5)
    for group in range(3):
        assert torch.equal(rows(memory, 1, group)[2], wanted[group])
        assert torch.equal(rows(memory, 0, group)[0].cpu(), wanted[group])
    made.close()


def test_a_spill_and_a_load_into_the_same_blocks_in_one_plan() -> None:
    memory = slabs()
    made = block_copies(memory)
    old, new = rows(memory, 0, 1)[2].clone(), rows(memory, 1, 1)[7].clone()
    plan = plan_of([(1, 0, 2, 1, 4)])
    add(plan, (1, 1, 7, 0, 2), 9)
    assert made.run(plan) == 2
    assert rows(memory, 1, 1)[4].equal(old)
    take(made, 9)
    assert rows(memory, 0, 1)[2].equal(new)
    assert made.ended_loads(wait=True).loaded == []  # at once: none is in flight
    made.close()


def test_steps_go_on_beside_a_load() -> None:
    memory = slabs()
    made = block_copies(memory)
    may_copy, original = threading.Event(), ThreadLoads._copy

    def held(self: ThreadLoads, ticket: int, copies: list[RowCopies]) -> None:
        assert may_copy.wait(30)
        original(self, ticket, copies)

    with patch.object(ThreadLoads, "_copy", held):
        made.run(plan_of([(0, 1, 5, 0, 3)], ticket=1))
        assert made.run(plan_of([(0, 0, 1, 0, 2)], step_id=1)) == 1  # as the load is held
        assert rows(memory, 0, 0)[2].equal(rows(memory, 0, 0)[1])
        assert made.ended_loads().loaded == []
        may_copy.set()
        take(made, 1)
    assert rows(memory, 0, 0)[3].equal(rows(memory, 1, 0)[5])
    made.close()


def test_an_error_in_the_thread_ends_the_steps() -> None:
    board = LoadBoard()
    loads = ThreadLoads(board)
    loads.start(3, [RowCopies(torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(2, 9, dtype=torch.uint8), [(0, 1)])])
    board.wait(30)
    for _ in range(2):  # it stays broken
        with pytest.raises(StepFailed, match="A load of KV blocks failed: ValueError"):
            board.take()
    loads.close()


@pytest.mark.parametrize(
    ("copy", "ticket", "message"),
    [
        ((0, 0, 0, 1, 99), 0, "copy 0 -> 99 leaves"),
        ((0, 1, 99, 0, 0), 4, "copy 99 -> 0 leaves"),
        ((0, 0, 0, 3, 0), 0, "tier 3 does not exist on this rank"),
        ((3, 0, 0, 1, 0), 0, "group 3 does not exist"),
    ],
)
def test_wrong_copies_are_refused(copy: Copy, ticket: int, message: str) -> None:
    made = block_copies(slabs())
    with pytest.raises(StepFailed, match=message):
        made.run(plan_of([copy], ticket=ticket))
    made.close()


@pytest.mark.parametrize("tier", [0, 1])
def test_blocks_as_bytes(tier: int) -> None:
    memory = slabs()
    made = block_copies(memory)
    before = [slab.clone() for slab in memory]
    assert made.read(tier, 2, [1, 4, 0]) == rows(memory, tier, 2)[[1, 4, 0], : STRIDES[2] - 12].numpy().tobytes()
    new = np.random.default_rng(0).bytes(2 * (STRIDES[2] - 12))
    made.write(tier, 2, [3, 1], new)
    assert made.read(tier, 2, [3, 1]) == new
    rows(before, tier, 2)[[3, 1], : STRIDES[2] - 12] = rows(memory, tier, 2)[[3, 1], : STRIDES[2] - 12]
    assert all(map(torch.equal, memory, before))  # nothing beside them
    with patch.object(
        rank_tiers, "PIECE_BYTES", 700
    ):  # a larger block is a piece of its own, as a state of Qwen3-Next is
        assert made.read(tier, 2, [3]) == new[: STRIDES[2] - 12]
        made.write(tier, 2, [3], new[: STRIDES[2] - 12])
    assert made.read(tier, 2, []) == b""
    made.write(tier, 2, [], b"")
    with pytest.raises(ValueError, match="2 blocks of group 2 take 1512 bytes on this rank, not 3"):
        made.write(tier, 2, [3, 1], b"abc")
    with pytest.raises(ValueError, match="leaves"):
        made.read(tier, 2, [-1])
    with pytest.raises(ValueError, match="move them in pieces"):
        made.read(tier, 2, [0] * (PIECE_BYTES // 756 + 1))
    made.close()


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def stores(blocks: list[tuple[int, int, int]], tier: int = TIER_HOST) -> StepPlan:
    """A plan that stores (group, block, digest's number)."""
    plan = StepPlan(step_id=0)
    for index, (group, block, number) in enumerate(blocks):
        add(plan, (group, tier, block, TIER_DISK, index), 0)
        plan.disk_digests.append(digest(number))
    return plan


def fetches(blocks: list[tuple[int, int, int]], ticket: int) -> StepPlan:
    """A plan that loads (group, block of the host tier, digest's number) from the disk."""
    plan = StepPlan(step_id=1)
    for index, (group, block, number) in enumerate(blocks):
        add(plan, (group, TIER_DISK, index, TIER_HOST, block), ticket)
        plan.disk_digests.append(digest(number))
    return plan


def contents(memory: list[torch.Tensor], tier: int, group: int, block: int) -> torch.Tensor:
    return rows(memory, tier, group)[block, : LAYOUTS[0].groups[group].block_bytes]


def usage(made: RankTiers) -> DiskUsage:
    return present(made.disk_usage)


def test_a_full_disk_is_no_disk_tier_for_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory, now_s = slabs(), [0.0]
    made = block_copies(memory, tmp_path)
    present(made._disk)._now_s = lambda: now_s[0]
    full = patch.object(BlockFolder, "write", side_effect=OSError(28, "No space left on device"))
    with full, caplog.at_level(logging.INFO, logger="transom.worker"):
        made.run(stores([(0, number, number) for number in range(4)]))
        wait_until_written(made)
    assert (usage(made).is_usable, usage(made).num_failed) == (False, 4)
    (line,) = (record.message for record in caplog.records if "disk cache" in record.message)
    assert line.startswith("The disk cache cannot be written: [Errno 28] No space left on device.")
    made.run(stores([(0, 0, 0)]))
    wait_until_written(made)
    assert usage(made).num_written == 0
    now_s[0] = disk_tier.PAUSE_S
    made.run(stores([(0, 1, 1)]))
    wait_until_written(made)
    assert (usage(made).is_usable, usage(made).num_written) == (True, 1)
    made.close()


def wait_until_written(made: RankTiers) -> None:
    """Wait for the thread to have taken everything: what is queued after a load's answer would be written later."""
    disk = present(made._disk)
    while disk._queued_bytes:
        os.sched_yield()


def test_blocks_of_the_device_come_to_the_host_by_the_piece(tmp_path: Path) -> None:
    """One copy for a run of blocks, since each waits for the device, but no more than a piece: a copy takes memory there."""
    memory, copied, cpu = slabs(), list[int](), torch.Tensor.cpu

    def counted(blocks: torch.Tensor) -> torch.Tensor:
        copied.append(len(blocks))
        return cpu(blocks)

    made, blocks = block_copies(memory, tmp_path), [4, 1, 3, 0, 2]
    sizes = [group.block_bytes for group in LAYOUTS[0].groups]
    wanted = [(0, block, block) for block in blocks] + [(1, block, 9 + block) for block in (1, 0)]
    with patch.object(torch.Tensor, "cpu", counted), patch.object(rank_tiers, "PIECE_BYTES", 3 * sizes[0]):
        made.run(stores(wanted, TIER_DEVICE))
    wait_until_written(made)
    assert copied == [3, 2, 2]
    held = [contents(memory, TIER_DEVICE, group, block).clone() for group, block, _ in wanted]
    made.run(fetches(wanted, 5))
    take(made, 5)
    for (group, block, _), stored in zip(wanted, held, strict=True):
        assert torch.equal(contents(memory, TIER_HOST, group, block), stored)
    made.close()


def test_writing_that_does_not_keep_up_drops_blocks(tmp_path: Path) -> None:
    made = block_copies(slabs(), tmp_path)
    with patch.object(disk_tier, "QUEUED_BYTES", 100):
        made.run(stores([(0, 1, 10)]))
    assert usage(made).num_dropped == 1
    made.close()
    assert usage(made).num_written == 0


def test_a_rank_without_a_disk_tier_refuses(tmp_path: Path) -> None:
    made = RankTiers({TIER_DEVICE: TierMemory(LAYOUTS[0], slabs()[0])})
    assert made.disk_usage is None
    with pytest.raises(StepFailed, match="this rank has no disk tier"):
        made.run(stores([(0, 1, 10)], TIER_DEVICE))
    made.close()
