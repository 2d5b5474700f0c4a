/** The states of blocks in frames (docs/block_map.md), on the device and in the host tier. */

export const UNLEASED = 0; // no group leases its page
export const FREE = 1; // without content, in a leased page
export const ACTIVE = 2; // sequences reference it
export const EVICTABLE = 3; // cached, and no checkpoint needs it
export const PINNED = 4; // cached, and a checkpoint needs it
export const REPAIR = 5; // active, and its sequence recomputes its window
export const EVICTED = 6; // cached in the frame before this one
export const SHARED = 7; // a column of the tally, not a state: several sequences reference the block
export const LOADING = 10; // a host block whose contents are copied to the device
export const SWAPPED = 11; // a host block of a preempted sequence
export const IMPORTED = 12; // a host block that bytes from another worker or the disk are written into
export const EXPORTED = 13; // a host block that another worker reads
export const MOVED = 14; // cached in the frame before this one; the other tier has its contents now
