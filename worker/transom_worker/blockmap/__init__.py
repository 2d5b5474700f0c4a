"""The live block map, the worker's part: pictures of the cache, what changed between them, and who watches."""
