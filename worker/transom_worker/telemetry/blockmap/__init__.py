"""The worker's part of the live block map: snapshots of the cache, frames with what changed between them, and the watchers."""
