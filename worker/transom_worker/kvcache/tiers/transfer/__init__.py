"""KV transfer: a worker fetches a cached prefix from another worker, if the router found that cheaper than computing it.

- **source**: the worker that has the prefix (`exports`). It keeps the blocks referenced while they are read.
- **target**: the worker that has the request (`fetches`). It holds the request, imports the blocks into its host tier, and lets the
  request be admitted: then the prefix is an ordinary hit.
- **live blocks**: the blocks that a sequence needs to continue after the prefix: all blocks of full groups, the last ones of
  windows. No others are moved.

The two sides talk through `contract.kv_transfer`'s messages, over a `contract.prefix_peers.PrefixPeers`; each reaches its own KV
cache through `kv_store.KvStore`. A source or target that dies, hangs or refuses costs the target a prompt to compute, and nothing
else: docs/kv_tiers.md has the protocol.
"""
