"""Decides which blocks move between the device, host memory, disk and other workers. Integers only; `execution.tiers` moves the
bytes.

The stations of a block:

    device    A sequence computes it; `publishing` enters it into the index. Without references it stays cached.
      |       Memory is needed: `node_eviction` chooses a node, `tier_moves` demotes it, and copies are queued (*spill*).
    host      Its digest is found there (`host_tier`). A request that hits it is loaded (`loads`): blocks on the device are
      |       allocated, the ranks copy beside the steps, and the blocks are found on the device again. A preempted sequence's
      |       blocks come and go likewise, but belong to it alone (`KvCache.swap_out`).
      |       The host needs room: nodes are dropped, and `disk.stores` queues copies of their blocks to files.
    disk      `disk.watch` lists the files, `disk.index` knows their digests. A request whose prefix is worth reading is held while
      |       `imports` takes host blocks and the ranks read files into them; then it is an ordinary hit in the host tier, which
      |       `KeptImports` keeps until the request is admitted.
    peers     `transfer` does the same over the network: the source lends the blocks of a hit (`exports`), `block_format` converts
              them, and the target imports them.

One search over all tiers finds a prefix (`transom_core.kv_cache.prefix_search`). Measured rates decide whether a load or a read
costs less than computing (`load_rates`, `scheduling.rate_meter`). `tiers.Tiers` has all these parts, whichever tiers are
configured.
"""
