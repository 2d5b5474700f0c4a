/** What every block of one worker is at one moment. Frames change it; a snapshot brings it back. */

import { Geometry } from "./geometry.js";

export const GONE = 0;
export const EMPTY = 1;
export const ACTIVE = 2;
export const LOOSE = 3;
export const HELD = 4;
export const REPAIR = 5;
export const EVICTED = 6;
export const SHARED = 7; // a column of the tally, not a state: several references

export const UNKNOWN = 0xffffffff;
const BORN_UNKNOWN = 0x7fffffff;
const BANDS = { [EMPTY]: "empty", [ACTIVE]: "active", [LOOSE]: "loose", [HELD]: "held" };
const TALLY_COLUMNS = 8;
const RECORD_WORDS = 5;

/** All blocks, pages, sequences and numbers of a worker. */
export class WorkerState {
  /** Use `fromWhole` or `restore`. Births are kept in tenths of a second from `epoch_s`, so that they fit 32 bits. */
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

  static restore(snapshot) {
    const state = new WorkerState(snapshot.geometry, snapshot.epoch_s);
    state.owners.set(snapshot.owners);
    state.#setNumbers(snapshot.numbers);
    state.evicted = snapshot.evicted;
    for (const sequence of snapshot.sequences) state.sequences.set(sequence.id, sequence);
    state.#putRecords(snapshot);
    return state;
  }

  /** Take a frame in: a whole one replaces everything. */
  apply(frame) {
    const { header } = frame;
    if (header.whole) this.#reset(header);
    this.#takeNumbers(header);
    this.evicted = [];
    this.#applyPages(frame.pages);
    this.#applyBlocks(frame.blocks);
    for (const id of header.gone) this.sequences.delete(id);
    for (const sequence of header.sequences) this.sequences.set(sequence.id, sequence);
  }

  /** How long a block is in its state, or null where that is not known. */
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
   * The number of blocks of a group in a state (or `SHARED`). Active, held, loose and empty ones are the frame's own counts:
   * there a block that is in repair, or was just evicted and is in use again, is active.
   */
  numBlocks(group, column) {
    const band = BANDS[column];
    return band ? this.counts[group][band] : this.tally[group * TALLY_COLUMNS + column];
  }

  /** All that can change, compactly; `restore` takes it. */
  snapshot() {
    const used = this.#usedRecords();
    const pick = (array) => used.map((record) => array[record]);
    return {
      epoch_s: this.epoch_s, geometry: this.geometry, numbers: this.numbers, owners: this.owners.slice(),
      used, states: Uint8Array.from(pick(this.states)), references: Uint16Array.from(pick(this.references)),
      logical: pick(this.logical), hashes: pick(this.hashes), born: Int32Array.from(pick(this.born)),
      evicted: this.evicted, sequences: [...this.sequences.values()],
    };
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
    this.evicted = []; // [group, block] of this frame's evictions: a page given back has no cells to show them
  }

  #reset(header) {
    const geometry = new Geometry(header);
    if (geometry.key !== this.geometry.key) this.geometry = geometry;
    this.epoch_s = header.time_s;
    this.#allocate();
  }

  #takeNumbers({ time_s, counts, free_pages, running, waiting, totals }) {
    this.#setNumbers({ time_s, counts, freePages: free_pages, running, waiting, totals });
  }

  #setNumbers(numbers) {
    this.numbers = numbers;
    Object.assign(this, numbers);
  }

  #applyPages(pages) {
    for (let i = 0; i < pages.length; i += 2) {
      const [page, owner] = [pages[i], pages[i + 1]];
      const before = this.owners[page];
      if (before && before !== owner) this.#fillPage(before - 1, page, GONE);
      this.owners[page] = owner;
      if (owner && before !== owner) this.#fillPage(owner - 1, page, EMPTY);
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
      if (group >= groups.length || block >= groups[group].num_blocks) continue; // a newer worker's notion
      const age = blocks[i + 4];
      const born = age === UNKNOWN ? BORN_UNKNOWN : now - age;
      this.#put(offsets[group] + block, group, state, blocks[i] >>> 16, blocks[i + 2], blocks[i + 3], born);
      if (state === EVICTED) this.evicted.push([group, block]);
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
    if (state === GONE) return;
    this.tally[group * TALLY_COLUMNS + state] += change;
    if (this.isShared(record)) this.tally[group * TALLY_COLUMNS + SHARED] += change;
  }

  #usedRecords() {
    let numUsed = 0;
    for (const state of this.states) numUsed += state !== GONE;
    const used = new Uint32Array(numUsed);
    for (let record = 0, next = 0; record < this.states.length; record++) {
      if (this.states[record] !== GONE) used[next++] = record;
    }
    return used;
  }

  #putRecords({ used, states, references, logical, hashes, born }) {
    const { offsets } = this.geometry;
    let group = 0;
    for (let i = 0; i < used.length; i++) {
      while (group + 1 < offsets.length && used[i] >= offsets[group + 1]) group++; // `used` ascends
      this.#put(used[i], group, states[i], references[i], logical[i], hashes[i], born[i]);
    }
  }
}

/** Bytes that a snapshot keeps, roughly: records exactly, sequences by a fair guess. */
export function snapshotBytes(snapshot) {
  return snapshot.used.length * 19 + snapshot.owners.length + snapshot.sequences.length * 400 + 500;
}
