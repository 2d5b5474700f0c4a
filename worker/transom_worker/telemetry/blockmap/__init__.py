"""The live block map, the worker's part: snapshots of the cache, the frames that carry their changes, and the watchers."""
