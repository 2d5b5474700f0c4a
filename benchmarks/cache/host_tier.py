"""What the host tier's copies cost: bytes per second of spills (device to host, inside a step) and of loads (host to device, beside
steps), for blocks of several sizes, beside a plain copy of the same number of bytes.

    python -m benchmarks.cache.host_tier

On CPUs "device" and "host" are both the machine's memory. Each figure is the best of `REPEATS`; on a machine that others use
compare within one run. docs/kv_tiers.md has the last figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.layout import ArenaLayout, GroupLayout
from transom_kernels.cpu.memory import lazy_bytes
from transom_worker.execution.tiers.rank_tiers import RankTiers, TierMemory
from transom_worker.scheduling.step import TIER_DEVICE, TIER_HOST, StepPlan

REPEATS = 5
COPIED_BYTES = 128 << 20
BLOCK_BYTES = (16 << 10, 128 << 10, 368_640)  # the last: 16 tokens of SmolLM2-135M in bfloat16


class Copies:
    """Blocks of one size in both tiers, with every page touched."""

    def __init__(self, block_bytes: int) -> None:
        spec = GroupSpec(name="full", kind=GroupKind.FULL, layers=(), block_size=16)
        group = GroupLayout(spec=spec, block_bytes=block_bytes, stride_bytes=block_bytes, layers=())
        self.num_blocks = COPIED_BYTES // block_bytes
        layout = ArenaLayout(page_bytes=block_bytes, num_pages=self.num_blocks, groups=(group,))
        slabs = [lazy_bytes(layout.slab_bytes).fill_(tier) for tier in range(2)]
        self.made = RankTiers({tier: TierMemory(layout, slab) for tier, slab in enumerate(slabs)})
        self.num_bytes = self.num_blocks * block_bytes
        self._num_plans = 0

    def spill(self) -> None:
        """Copy all blocks to the host."""
        self.made.run(self._plan(TIER_DEVICE, TIER_HOST, 0))

    def load(self) -> None:
        """Copy all blocks to the device, and wait for that."""
        self.made.run(self._plan(TIER_HOST, TIER_DEVICE, self._num_plans + 1))
        while not self.made.ended_loads(wait=True).loaded:
            pass

    def _plan(self, source: int, target: int, ticket: int) -> StepPlan:
        self._num_plans += 1
        count, ids = self.num_blocks, list(range(self.num_blocks))
        return StepPlan(
            step_id=self._num_plans,
            copy_group=[0] * count,
            copy_source=ids,
            copy_target=ids,
            copy_source_tier=[source] * count,
            copy_target_tier=[target] * count,
            copy_ticket=[ticket] * count,
        )


def seconds(action: Callable[[], object]) -> float:
    """The seconds of one call."""
    begin_s = time.perf_counter()
    action()
    return time.perf_counter() - begin_s


def main() -> None:
    """Print the table."""
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print(f"| block, KiB | spill, GB/s | load, GB/s | plain copy, GB/s |  ({COPIED_BYTES >> 20} MiB)")
    print("|---:|---:|---:|---:|")
    for block_bytes in BLOCK_BYTES:
        copies = Copies(block_bytes)
        source, target = (torch.zeros(copies.num_bytes, dtype=torch.uint8).fill_(1) for _ in range(2))
        best = [
            min(seconds(action) for _ in range(REPEATS))
            for action in (copies.spill, copies.load, lambda t=target, s=source: t.copy_(s))
        ]
        rates = [copies.num_bytes / one for one in best]
        print(f"| {block_bytes / 1024:.0f} | " + " | ".join(f"{one / 1e9:.2f}" for one in rates) + " |", flush=True)
        copies.made.close()


if __name__ == "__main__":
    main()
