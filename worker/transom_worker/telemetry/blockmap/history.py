"""Keeps the last five minutes of one worker's KV pool, one small entry per second, even while no watcher is connected."""

from __future__ import annotations

import time
from collections import deque

from transom_worker.kvcache.stats import CacheStats

MAX_ENTRIES = 300
PERIOD_S = 1.0

# Time, free pages, and (active, pinned, evictable, free) blocks by group.
Entry = tuple[float, int, tuple[tuple[int, int, int, int], ...]]


class History:
    """One thread adds entries, and any thread may read them. An idle engine adds none: its last entry holds until the next one."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=MAX_ENTRIES)

    def add(self, stats: CacheStats, now_s: float | None = None) -> None:
        """Add an entry; it replaces the newest entry if that is less than a second after the one before it."""
        now_s = time.time() if now_s is None else now_s
        groups = tuple(
            (group.active_blocks, group.pinned_blocks, group.cached_blocks - group.pinned_blocks, group.free_blocks)
            for group in stats.groups
        )
        entries = self._entries
        if len(entries) > 1 and entries[-1][0] - entries[-2][0] < PERIOD_S:
            entries.pop()
        entries.append((now_s, stats.free_pages, groups))

    def entries(self, now_s: float) -> list[list[object]]:
        """Return the entries of a frame: one per second of the last five minutes up to `now_s`, the oldest first."""
        known = list(self._entries)
        if not known:
            return []
        found: list[list[object]] = []
        at_s = max(known[0][0], now_s - (MAX_ENTRIES - 1) * PERIOD_S)
        index = 0
        while at_s <= now_s and len(found) < MAX_ENTRIES:
            while index + 1 < len(known) and known[index + 1][0] <= at_s:
                index += 1
            _, free_pages, groups = known[index]
            found.append([round(at_s, 3), free_pages, *map(list, groups)])
            at_s += PERIOD_S
        return found
