"""What the cache tells about itself; turned into metrics by the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from transom_worker.kvcache.histogram import HistogramStats


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """One group's blocks by state, and what became of the cached ones.

    `cached_blocks` are all that can be hit and nobody references; a checkpoint keeps `pinned_blocks` of them, the others are left
    behind. `free_blocks` are free ones in pages that the group has leased.
    """

    name: str
    block_bytes: int
    active_blocks: int
    cached_blocks: int
    free_blocks: int
    pinned_blocks: int = 0
    evicted_blocks: dict[str, int] = field(default_factory=dict)  # by reason, since start
    residency: HistogramStats = field(default_factory=HistogramStats)  # from cached to evicted
    reuse_interval: HistogramStats = field(default_factory=HistogramStats)  # from cached to hit


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStats:
    """Checkpoints by kind: those that stand now, and since start how many were placed, given up with their chain, left without
    their windows, and hit by admitted requests. What was placed and neither of the next two stands."""

    current: dict[str, int] = field(default_factory=dict)
    placed: dict[str, int] = field(default_factory=dict)
    evicted: dict[str, int] = field(default_factory=dict)
    windows_evicted: dict[str, int] = field(default_factory=dict)
    hit: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """The arena: pages by state, and the groups inside it. `outcome_tokens` are prompt tokens by outcome since start:
    "hit", "repaired", or "missed_<reason>"; they sum to the prompt tokens of all admitted requests. `outcome_requests` are those
    requests: "repaired" where a window had to be, else "hit" where anything was found, else "missed". Repairs count at every
    admission, after a preemption as well."""

    num_pages: int
    free_pages: int
    page_bytes: int
    groups: tuple[GroupStats, ...]
    outcome_tokens: dict[str, int] = field(default_factory=dict)
    outcome_requests: dict[str, int] = field(default_factory=dict)
    num_repairs: int = 0
    repair_tokens: int = 0
    waste: float = 0.0  # largest share of a page that no block covers, by geometry alone
    checkpoints: CheckpointStats = field(default_factory=CheckpointStats)
    num_compacted_blocks: int = 0  # moved to let an allocation succeed, since start

    @property
    def pool_bytes(self) -> int:
        """All pages."""
        return self.num_pages * self.page_bytes

    @property
    def fragmentation(self) -> float:
        """Share of the leased pages' bytes that lies in empty blocks."""
        leased_bytes = (self.num_pages - self.free_pages) * self.page_bytes
        return sum(group.free_blocks * group.block_bytes for group in self.groups) / max(1, leased_bytes)
