"""Prefixes: the tree of cached prefixes, the index of block digests, and the log of its changes for routers."""
