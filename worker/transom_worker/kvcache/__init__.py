"""The KV cache of one worker: which sequence has which block, what is cached, and what is evicted. Integers only; no tensors.

    blocks/      the device's blocks: pages, a pool per group, block tables, and which sequences use which block
    prefix/      the tree of cached prefixes, the index of digests, and its changes as routers receive them
    eviction/    checkpoints, what evicting a prefix would cost, and which prefix is evicted first
    tiers/       moves blocks between the device, host memory, disk and other workers
    manager      `KvCache`: begins, extends and releases the blocks of sequences, and calls all other parts
    publishing   makes computed blocks findable, and places checkpoints

Terms of all modules in this package (rules that routers and the planner share are in `transom_core.kv_cache`):

    group          model layers that keep the same tokens for the same time. A *full group* keeps every token, a *sliding group* has
                   a window, chunk or compressor state
    sink blocks    a sequence's first blocks in a group with attention sinks; they never slide out
    page           a part of the arena (the KV memory); it is leased to one group at a time and holds blocks of that group only
    logical index  a block's index in its sequence: with blocks of 16 tokens, index 3 has tokens 48 to 63
    active         a block is active while a running sequence references it
    hash block     `--block-size` tokens with a *digest*, which names them and all tokens before them; a prompt's *chain* is the
                   list of its digests
    boundary       the position after the first n hash blocks of a chain
    publish        enter a computed block into the index under its digest, so that other requests can use it
    hit            the cached prefix of a sequence's tokens; the sequence starts after it
    window repair  computing the tokens before a hit's boundary again, so that sliding groups get their blocks there
    node           a boundary in the prefix tree at which requests may continue. It pins its *segment* (the chain since its parent)
                   in the full groups, and its *windows* (the blocks that sliding groups need at its boundary)
    checkpoint     a node with its windows: a request can continue there without computing any token again
    pin            exclude a cached block from eviction; a block that is published, but neither active nor pinned, is *evictable*
    lock           a running sequence locks the node that it started from or passed last; a locked node keeps its segment
"""
