"""Holds the bytes of a rank's KV memory in its tiers: the device's slab, the host's slab, and files on disk.

`kvcache.tiers` decides in integers which block moves where; a plan brings these moves to every rank as copies. What moves when:

    copies of ticket 0        before the step's forward pass, in the plan's order: inside the device (compaction, shared prefixes),
                              device -> host (spills), host -> device (swapped sequences), and into the queue for the disk
    loads (tickets above 0)   beside this step and later ones: host -> device, and disk -> host. A later result reports their end
    writes to the disk        a thread writes what is queued; it drops blocks if it does not keep up
    read, write               between steps: the contents of blocks, to and from other workers
    remote reads              beside the steps: the memory of another worker's ranks -> host, by NIXL (`remote_reads`)

The runner and the executors use `rank_tiers`. `slabs` allocates the memory, `load_copies` and `disk_blocks`
make the loads and have the threads, and `load_reports` collects from all ranks which loads have ended.
"""
