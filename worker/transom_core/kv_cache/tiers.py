"""The tiers of the KV cache: the arena in the device's memory, where steps compute, an arena in the host's memory, and files.

Both arenas have the same groups, blocks and pages; the host's has another number of pages. Blocks move between the tiers by copies.
What is on the disk is imported into the host tier for a request that needs it (`imports`); of its files only the digests are
known (`kvcache.tiers.disk.index`).
"""

from __future__ import annotations

DEVICE = 0
HOST = 1
DISK = 2
