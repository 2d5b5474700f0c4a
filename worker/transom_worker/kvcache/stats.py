"""What the cache tells about itself; turned into metrics by the engine."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """One group's blocks by state. `empty` counts free blocks in pages that the group has leased."""

    name: str
    block_bytes: int
    active_blocks: int
    cached_blocks: int
    empty_blocks: int
    evicted_blocks: dict[str, int] = field(default_factory=dict)  # by reason, since start


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """The arena: pages by state, and the groups inside it. `outcome_tokens` are prompt tokens by outcome since start:
    "hit", "repaired", or "missed_<reason>"; they sum to the prompt tokens of all admitted requests."""

    num_pages: int
    free_pages: int
    page_bytes: int
    groups: tuple[GroupStats, ...]
    outcome_tokens: dict[str, int] = field(default_factory=dict)
