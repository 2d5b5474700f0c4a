"""Takes the windows out of a cache, as pressure would: what is left can be hit by repair alone."""

from transom_worker.kvcache.manager import KvCache


def lose_windows(cache: KvCache) -> None:
    """Evict every sliding block that no running sequence uses, but those that pin sink tokens."""
    tree = cache.checkpoints.tree
    for node in list(tree.nodes()):
        if node.windows is not None:
            cache.checkpoints.counts.windows_evicted[node.kind.value] += 1
        tree.unpin_windows(node)
        cache.eviction.add(node)
    for pool, retention in zip(cache.pools, cache.retentions, strict=True):
        if not retention.keeps_everything:
            sliding = [block for block in pool.evictable if pool.published[block][1] >= retention.num_sink_blocks]
            cache.registry.evict(pool.group, sliding, "test")


def lose_left_behind(cache: KvCache) -> None:
    """Evict every block that no running sequence uses and no checkpoint counts on."""
    for pool in cache.pools:
        cache.registry.evict(pool.group, list(pool.evictable), "test")
