"""Tiers: which blocks move between the device, host memory, disk and other workers. Integers; `execution.tiers` moves the bytes."""
