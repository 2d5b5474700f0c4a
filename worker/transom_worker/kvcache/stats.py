"""The statistics of the KV cache, which the engine turns into metrics. A node of the prefix tree is a *checkpoint* while it pins
its windows, the blocks that sliding groups need there."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from transom_core.telemetry.histogram import Buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """One group's blocks by state, and what happened to the cached ones.

    `cached_blocks` can be hit, and no sequence references them; checkpoints pin `pinned_blocks` of them, and the others are
    evictable. `free_blocks` have no content, and are in pages that the group has leased.
    """

    name: str
    block_bytes: int
    active_blocks: int
    cached_blocks: int
    free_blocks: int
    pinned_blocks: int = 0
    evicted_blocks: dict[str, int] = field(default_factory=dict)  # by reason, since start
    residency: Buckets  # seconds from cached to evicted
    reuse_interval: Buckets  # seconds from cached to hit


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroupStats:
    """One group's blocks in the host tier, and how many have moved since start; all 0 without a host tier.

    `cached_blocks` can be hit, `other_blocks` belong to swapped sequences or to imports, `free_blocks` are empty in leased pages.
    """

    name: str
    cached_blocks: int = 0
    other_blocks: int = 0
    free_blocks: int = 0
    spilled_blocks: int = 0  # evicted from the device to the host tier
    loaded_blocks: int = 0  # copied back to the device, including those of swapped sequences
    swapped_blocks: int = 0  # moved to the host tier for preempted sequences
    held_blocks: int = 0  # held by imports now: being written, or kept until their requests are admitted
    imported_blocks: int = 0  # received from other workers or read from the disk
    evicted_blocks: dict[str, int] = field(default_factory=dict)  # by reason


@dataclass(slots=True, kw_only=True)
class CheckpointStats:
    """Checkpoints since start by kind (`tree.CheckpointKind`): `placed`, `evicted` with their segment, `windows_evicted` while
    their segment stayed, and `hit` by admitted requests."""

    placed: Counter[str] = field(default_factory=Counter)
    evicted: Counter[str] = field(default_factory=Counter)
    windows_evicted: Counter[str] = field(default_factory=Counter)
    hit: Counter[str] = field(default_factory=Counter)

    def copy(self) -> CheckpointStats:
        """Return a copy that later changes leave alone."""
        return CheckpointStats(**{name: getattr(self, name).copy() for name in self.__slots__})

    @property
    def current(self) -> dict[str, int]:
        """Return how many checkpoints of each kind exist now."""
        return {kind: count - self.evicted[kind] - self.windows_evicted[kind] for kind, count in self.placed.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """The arena's pages by state, and the groups inside it.

    `outcome_tokens` are prompt tokens by outcome since start: "hit", "repaired", or "missed_<reason>" (`prefix_outcome`); they add
    up to the prompt tokens of all admitted requests. `outcome_requests` counts these requests: "repaired" if any of their tokens
    was, else "hit" if any was, else "missed". `num_repairs` and `repair_tokens` count at every admission, also at those after a
    preemption.
    """

    num_pages: int
    free_pages: int
    page_bytes: int
    groups: tuple[GroupStats, ...]
    outcome_tokens: dict[str, int] = field(default_factory=dict)
    outcome_requests: dict[str, int] = field(default_factory=dict)
    num_repairs: int = 0
    repair_tokens: int = 0
    waste: float = 0.0  # the largest fraction, among the groups, of a page's bytes that no block can cover
    checkpoints: CheckpointStats = field(default_factory=CheckpointStats)
    host_pages: int = 0
    host_free_pages: int = 0
    host_groups: tuple[HostGroupStats, ...] = ()
    host_tokens: int = 0  # prompt tokens that were hits only because of the host tier
    num_compacted_blocks: int = 0  # moved to let an allocation succeed, since start

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pages."""
        return self.num_pages * self.page_bytes

    @property
    def fragmentation(self) -> float:
        """Fraction of the leased pages' bytes that is in free blocks."""
        leased_bytes = (self.num_pages - self.free_pages) * self.page_bytes
        return sum(group.free_blocks * group.block_bytes for group in self.groups) / max(1, leased_bytes)
