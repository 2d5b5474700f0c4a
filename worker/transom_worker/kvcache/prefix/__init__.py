"""Prefixes: the tree of cached prefixes, the index of block digests, and its changes as routers receive them."""
