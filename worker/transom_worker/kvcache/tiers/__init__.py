"""Decides which blocks move between the device, host memory, disk and other workers. Integers only; `execution.tiers` moves the
bytes.

The way of a block through the tiers (a *node* is a boundary of the prefix tree with the blocks that it pins, `prefix.tree`):

    device    A sequence computes the block, and `publishing` enters it into the index. After the sequence it stays cached.
      |       When the device needs memory, `node_eviction` chooses a node, `tier_moves` demotes it, and copies of its blocks to
      |       the host are queued (*spill*).
    host      Searches find the block's digest in `host_tier`. When a request hits it, `loads` allocates a block on the device,
      |       the ranks copy while steps run, and then searches find the block on the device again. The blocks of a preempted
      |       sequence are copied out and back in the same way, but no other sequence can hit them (`KvCache.swap_out`).
      |       When the host needs room, nodes are dropped, and `DiskStores` queues copies of their blocks to files.
    disk      `disk.watch` lists the files, and `disk.index` has their digests. If reading a request's prefix costs less than
      |       computing it, the request is held while `imports` takes host blocks and the ranks read files into them. Then the
      |       prefix is an ordinary hit in the host tier; `KeptImports` protects it until the request is admitted.
    peers     `engine.transfer` does the same over the network: the source lends the blocks of a hit (`exports`), `block_format`
              converts them, and the target imports them.

One search over all tiers finds a prefix (`transom_core.kv_cache.prefix_search`). Measured rates decide whether a load or a read
costs less than computing (`load_rates`, `scheduling.rate_meter`). `tiers.Tiers` always has all these parts, even if a tier is not
configured.
"""
