"""Rules of the KV cache that workers, routers and the planner share: groups, what they keep, block hashes, and the search for a
hit."""
