/**
 * The state of every block of one worker's host tier: the blocks in host memory to which the device's blocks are spilled and swapped.
 *
 * It has the members of WorkerState that the map reads, so that both are drawn and pointed at in the same way. A block has a state and
 * nothing else: neighbours in equal states come as one run.
 */

import { EVICTABLE, EVICTED, EXPORTED, FREE, IMPORTED, LOADING, MOVED, PINNED, SWAPPED, UNLEASED } from "./block_states.js";
import { Geometry } from "./geometry.js";

const RUN_WORDS = 2;
const COUNT_NAMES = {
  [FREE]: "empty", [EVICTABLE]: "loose", [PINNED]: "held", [LOADING]: "loading", [SWAPPED]: "swapped", [IMPORTED]: "imported",
  [EXPORTED]: "exported",
}; // in a frame's `host.counts`

/** All blocks of a host tier. `sequences` are the worker's, by id. */
export class HostState {
  constructor(geometry, sequences) {
    this.geometry = geometry;
    this.sequences = sequences;
    this.states = new Uint8Array(geometry.numRecords);
    this.references = new Uint16Array(0); // not told
    this.owners = new Uint8Array(geometry.numPages); // 0 free, else group + 1
    this.counts = geometry.groups.map(() => ({}));
    this.freePages = geometry.numPages;
    this.numMoved = geometry.groups.map(() => 0); // in the last frame
  }

  /** The host tier of a whole frame, or null without one. */
  static fromWhole(frame, sequences) {
    const { header } = frame;
    if (!header.host) return null;
    const { num_pages, num_blocks } = header.host;
    const groups = header.groups.map((group, g) => ({ ...group, num_blocks: num_blocks[g] }));
    return new HostState(new Geometry({ ...header, num_pages, groups }), sequences);
  }

  apply({ header, hostBlocks }) {
    this.counts = header.host.counts;
    this.freePages = header.host.free_pages;
    const { groups } = this.geometry;
    this.numMoved.fill(0);
    for (let i = 0; i < hostBlocks.length; i += RUN_WORDS) {
      const [group, state, count] = [hostBlocks[i + 1] & 0xff, (hostBlocks[i + 1] >>> 8) & 0xff, (hostBlocks[i + 1] >>> 16) + 1];
      if (group >= groups.length || hostBlocks[i] + count > groups[group].num_blocks) continue; // of a newer worker
      this.#put(group, hostBlocks[i], count, state);
      if (state === MOVED) this.numMoved[group] += count;
    }
  }

  /** Frames do not tell it. */
  age_s() {
    return 0;
  }

  isShared() {
    return false;
  }

  /** The number of blocks of a group in a state, or that the last frame tells as just moved. */
  numBlocks(group, column) {
    const name = COUNT_NAMES[column];
    return name ? this.counts[group][name] ?? 0 : this.numMoved[group];
  }

  /** The loading and swapped sequences that need a block: [{sequence, logical}], where logical is null: it is not told. */
  sequencesOf(group, block) {
    const found = [];
    for (const sequence of this.sequences.values()) {
      const runs = sequence.host_runs?.[group] ?? [];
      if (runs.some(([first, count]) => block >= first && block < first + count)) found.push({ sequence, logical: null });
    }
    return found;
  }

  /** A byte for each record: 1 if a sequence whose request id contains `text` (in any case) needs the block. */
  recordsOfRequests(text) {
    const chosen = new Uint8Array(this.geometry.numRecords);
    const wanted = text.toLowerCase();
    for (const { request, host_runs: groups = [] } of this.sequences.values()) {
      if (!request.toLowerCase().includes(wanted)) continue;
      groups.forEach((runs, group) => {
        for (const [first, count] of runs) chosen.fill(1, this.geometry.recordOf(group, first), this.geometry.recordOf(group, first + count));
      });
    }
    return chosen;
  }

  #put(group, first, count, state) {
    const { geometry, owners } = this;
    this.states.fill(state, geometry.recordOf(group, first), geometry.recordOf(group, first) + count);
    const lastPage = Math.min(geometry.pageOf(group, first + count - 1), geometry.numPages - 1);
    for (let page = geometry.pageOf(group, first); page <= lastPage; page++) {
      if (state === UNLEASED) owners[page] = owners[page] === group + 1 ? 0 : owners[page];
      else if (owners[page] === 0 || (state !== EVICTED && state !== MOVED)) owners[page] = group + 1; // a block that has left owns no page
    }
  }
}
