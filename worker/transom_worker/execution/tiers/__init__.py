"""A rank's tiers of KV memory: the device's arena, the host's arena, files, and the block copies between them."""
