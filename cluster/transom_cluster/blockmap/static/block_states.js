/** The states of blocks in frames (docs/block_map.md), on the device and in the host tier. */

export const UNLEASED = 0; // no group leases its page
export const FREE = 1; // without content, in a leased page
export const ACTIVE = 2; // sequences reference it
export const EVICTABLE = 3; // cached, and no checkpoint needs it
export const PINNED = 4; // cached, and a checkpoint needs it; in the host tier: anything needs it
export const REPAIR = 5; // active, and its sequence recomputes its window
export const EVICTED = 6; // cached in the frame before this one; the other tier may have its contents now
export const SHARED = 7; // a column of the tally, not a state: several sequences reference the block
