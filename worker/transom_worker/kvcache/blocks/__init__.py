"""The device's blocks: the arena of pages, a pool of blocks per group, block tables, and the registry of published blocks."""
