/**
 * The state of every block of one worker at one moment. Frames change it.
 *
 * Record: what is known about a block: state, references, logical index, hash, and since when it is in this state. The records of
 * all groups lie one after the other in flat arrays. Birth: the time at which a block came into its state.
 */

import { ACTIVE, EVICTABLE, EVICTED, FREE, PINNED, REPAIR, SHARED, UNLEASED } from "./block_states.js";
import { Geometry } from "./geometry.js";
import { HostState } from "./host_state.js";

export * from "./block_states.js";

export const UNKNOWN = 0xffffffff;
const BORN_UNKNOWN = 0x7fffffff;
const COUNT_NAMES = { [FREE]: "empty", [ACTIVE]: "active", [EVICTABLE]: "loose", [PINNED]: "held" }; // in a frame's `counts`
const TALLY_COLUMNS = 16;
const RECORD_WORDS = 5;

/** All blocks, pages, sequences and numbers of a worker. */
export class WorkerState {
  /** Callers use `fromWhole`. Births are tenths of a second after `epoch_s`, so that they fit 32 bits. */
  constructor(geometry, epoch_s) {
    this.geometry = geometry;
    this.epoch_s = epoch_s;
    this.#allocate();
  }

  static fromWhole(frame) {
    const state = new WorkerState(new Geometry(frame.header), frame.header.time_s);
    state.apply(frame);
    return state;
  }

  /** Apply a frame. A whole frame replaces everything. */
  apply(frame) {
    const { header } = frame;
    if (header.whole) this.#reset(header);
    const { time_s, counts, free_pages: freePages, running, waiting, totals } = header;
    Object.assign(this, { time_s, counts, freePages, running, waiting, totals });
    this.#applyPages(frame.pages);
    this.#applyBlocks(frame.blocks);
    if (header.whole) this.host = HostState.fromWhole(frame);
    if (header.host) this.host?.apply(frame);
    for (const id of header.gone) this.sequences.delete(id);
    for (const sequence of header.sequences) this.sequences.set(sequence.id, sequence);
  }

  /** How long a block has been in its state, or null if that is not known. */
  age_s(record) {
    const born = this.born[record];
    if (born === BORN_UNKNOWN) return null;
    return Math.max(0, this.time_s - this.epoch_s - born / 10);
  }

  isShared(record) {
    const state = this.states[record];
    return this.references[record] > 1 && (state === ACTIVE || state === REPAIR || state === EVICTED);
  }

  /**
   * The number of blocks of a group in a state (or `SHARED`). For active, pinned, evictable and free blocks this is the frame's
   * own count, where a block in repair, and a block that was just evicted and is in use again, are active.
   */
  numBlocks(group, column) {
    const name = COUNT_NAMES[column];
    return name ? this.counts[group][name] : this.tally[group * TALLY_COLUMNS + column];
  }

  /** The sequences that reference a block: [{sequence, logical}]. */
  sequencesOf(group, block) {
    const found = [];
    for (const sequence of this.sequences.values()) {
      const run = sequence.runs[group]?.find(([, firstBlock, count]) => block >= firstBlock && block < firstBlock + count);
      if (run !== undefined) found.push({ sequence, logical: run[0] + block - run[1] });
    }
    return found;
  }

  /** A byte for each record: 1 if a sequence whose request id contains `text` (in any case) references the block. */
  recordsOfRequests(text) {
    const chosen = new Uint8Array(this.geometry.numRecords);
    const wanted = text.toLowerCase();
    for (const { request, runs } of this.sequences.values()) {
      if (!request.toLowerCase().includes(wanted)) continue;
      runs.forEach((groupRuns, group) => {
        for (const [, firstBlock, count] of groupRuns) {
          const start = this.geometry.recordOf(group, firstBlock);
          chosen.fill(1, start, start + count);
        }
      });
    }
    return chosen;
  }

  #allocate() {
    const { numRecords, numPages, groups } = this.geometry;
    this.states = new Uint8Array(numRecords);
    this.references = new Uint16Array(numRecords);
    this.logical = new Uint32Array(numRecords);
    this.hashes = new Uint32Array(numRecords);
    this.born = new Int32Array(numRecords);
    this.owners = new Uint8Array(numPages); // 0 free, else group + 1
    this.tally = new Int32Array(groups.length * TALLY_COLUMNS);
    this.sequences = new Map();
    this.host = null; // a HostState, where the worker has a host tier
  }

  #reset(header) {
    const geometry = new Geometry(header);
    if (geometry.key !== this.geometry.key) this.geometry = geometry;
    this.epoch_s = header.time_s;
    this.#allocate();
  }

  #applyPages(pages) {
    for (let i = 0; i < pages.length; i += 2) {
      const [page, owner] = [pages[i], pages[i + 1]];
      const before = this.owners[page];
      if (before && before !== owner) this.#fillPage(before - 1, page, UNLEASED);
      this.owners[page] = owner;
      if (owner && before !== owner) this.#fillPage(owner - 1, page, FREE);
    }
  }

  #fillPage(group, page, state) {
    const { firstBlocks, endBlocks, offsets } = this.geometry;
    for (let block = firstBlocks[group][page]; block < endBlocks[group][page]; block++) {
      this.#put(offsets[group] + block, group, state, 0, UNKNOWN, 0, BORN_UNKNOWN);
    }
  }

  #applyBlocks(blocks) {
    const now = Math.round((this.time_s - this.epoch_s) * 10);
    const { offsets, groups } = this.geometry;
    for (let i = 0; i < blocks.length; i += RECORD_WORDS) {
      const group = blocks[i] & 0xff;
      const state = (blocks[i] >>> 8) & 0xff;
      const block = blocks[i + 1];
      if (group >= groups.length || block >= groups[group].num_blocks) continue; // of a newer worker
      const age = blocks[i + 4];
      const born = age === UNKNOWN ? BORN_UNKNOWN : now - age;
      this.#put(offsets[group] + block, group, state, blocks[i] >>> 16, blocks[i + 2], blocks[i + 3], born);
    }
  }

  #put(record, group, state, references, logical, hash, born) {
    this.#count(record, group, -1);
    this.states[record] = state;
    this.references[record] = references;
    this.logical[record] = logical;
    this.hashes[record] = hash;
    this.born[record] = born;
    this.#count(record, group, 1);
  }

  #count(record, group, change) {
    const state = this.states[record];
    if (state === UNLEASED) return;
    this.tally[group * TALLY_COLUMNS + state] += change;
    if (this.isShared(record)) this.tally[group * TALLY_COLUMNS + SHARED] += change;
  }
}
