"""The tiers of the KV cache: the arena in the device's memory, where steps compute, and an arena in the host's memory beside it.

Both have the same groups, blocks and pages; the host's has another number of pages. Blocks move between the tiers by copies.
"""

from __future__ import annotations

DEVICE = 0
HOST = 1
TIER_NAMES = ("device", "host")
