"""The disk tier of one rank: blocks that a thread writes, loads by ticket, broken files, and writes that fail."""

import logging
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.worker.execution.tiers.test_rank_tiers import LAYOUTS, add, rows, slabs
from transom_core.errors import StepFailed
from transom_worker.execution.executor import DiskUsage
from transom_worker.execution.tiers import disk_blocks as disk_tier
from transom_worker.execution.tiers import rank_tiers
from transom_worker.execution.tiers.rank_tiers import RankTiers
from transom_worker.execution.tiers.slabs import TierMemory
from transom_worker.kvcache.tiers.disk.folder import BlockFolder
from transom_worker.scheduling.step import TIER_DEVICE, TIER_DISK, TIER_HOST, StepPlan, StepResult


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def copies_over(memory: list[torch.Tensor], path: Path) -> RankTiers:
    tiers = {tier: TierMemory(layout, slab) for tier, (layout, slab) in enumerate(zip(LAYOUTS, memory, strict=True))}
    return RankTiers(tiers, BlockFolder(path, b"m" * 32, space_bytes=1 << 20))


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


def ended(made: RankTiers) -> StepResult:
    for _ in range(10_000):
        found = made.ended_loads(wait=True)
        if found.loaded or found.failed:
            return StepResult(step_id=0, loaded=found.loaded, failed=found.failed)
    raise AssertionError("the load did not end")


def contents(memory: list[torch.Tensor], tier: int, group: int, block: int) -> torch.Tensor:
    return rows(memory, tier, group)[block, : LAYOUTS[0].groups[group].block_bytes]


def usage(made: RankTiers) -> DiskUsage:
    found = made.disk_usage
    assert found is not None
    return found


def test_a_full_disk_is_no_disk_tier_for_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory, now_s = slabs(), [0.0]
    made = copies_over(memory, tmp_path)
    assert made._disk is not None
    made._disk._now_s = lambda: now_s[0]
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
    disk = made._disk
    assert disk is not None
    while disk._queued_bytes:
        os.sched_yield()


def test_blocks_of_the_device_come_to_the_host_by_the_piece(tmp_path: Path) -> None:
    """One copy for a run of blocks, since each waits for the device, but no more than a piece: a copy takes memory there."""
    memory, copied, cpu = slabs(), list[int](), torch.Tensor.cpu

    def counted(blocks: torch.Tensor) -> torch.Tensor:
        copied.append(len(blocks))
        return cpu(blocks)

    made, blocks = copies_over(memory, tmp_path), [4, 1, 3, 0, 2]
    sizes = [group.block_bytes for group in LAYOUTS[0].groups]
    wanted = [(0, block, block) for block in blocks] + [(1, block, 9 + block) for block in (1, 0)]
    with patch.object(torch.Tensor, "cpu", counted), patch.object(rank_tiers, "PIECE_BYTES", 3 * sizes[0]):
        made.run(stores(wanted, TIER_DEVICE))
    wait_until_written(made)
    assert copied == [3, 2, 2]
    held = [contents(memory, TIER_DEVICE, group, block).clone() for group, block, _ in wanted]
    made.run(fetches(wanted, 5))
    assert ended(made).loaded == [5]
    for (group, block, _), stored in zip(wanted, held, strict=True):
        assert torch.equal(contents(memory, TIER_HOST, group, block), stored)
    made.close()


def test_writing_that_does_not_keep_up_drops_blocks(tmp_path: Path) -> None:
    made = copies_over(slabs(), tmp_path)
    with patch.object(disk_tier, "QUEUED_BYTES", 100):
        made.run(stores([(0, 1, 10)]))
    assert usage(made).num_dropped == 1
    made.close()
    assert usage(made).num_written == 0


def test_a_rank_without_a_disk_tier_refuses(tmp_path: Path) -> None:
    memory = slabs()
    made = RankTiers({TIER_DEVICE: TierMemory(LAYOUTS[0], memory[0])})
    assert made.disk_usage is None
    with pytest.raises(StepFailed, match="this rank has no disk tier"):
        made.run(stores([(0, 1, 10)], TIER_DEVICE))
    made.close()
