"""Blocks: the arena of pages, pools of each group, block tables, and the registry of who uses which block."""
