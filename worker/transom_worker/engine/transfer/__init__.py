"""KV transfer: a worker fetches a cached prefix from another worker, if the router expects that to cost less than computing it.

- **source**: the worker that has the prefix (`exports`). It keeps the blocks referenced while they are read.
- **target**: the worker that has the request (`fetches`). It holds the request, imports the blocks into free pages of its KV pool
  or into its host tier, and lets the request be admitted: then the prefix is an ordinary hit.
- **live blocks**: the blocks that a sequence needs to continue after the prefix: all blocks of groups that keep every token, and
  the last blocks of sliding groups. Only these are moved.

The two sides exchange the messages of `contract.kv_transfer` over a `contract.prefix_peers.PrefixPeers`. Each side reaches its own
KV cache through `store.TransferStore`. If the source dies, hangs or refuses, the target computes the prompt itself.
docs/kv_tiers.md has the rules and bounds.
"""
