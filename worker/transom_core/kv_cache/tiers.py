"""The tiers of the KV cache: the arena in the device's memory, where steps compute, an arena in the host's memory, and files.

Both arenas have the same groups, blocks and pages, but the host's has another number of pages. Blocks are copied between the tiers.
A block on the disk is imported into the host tier for a request that needs it; of the files on the disk, the prefix index has only
the digests.
"""

DEVICE = 0
HOST = 1
DISK = 2
