/**
 * The state of every block of one worker's host tier: the blocks in host memory to which the device's blocks are spilled and swapped.
 *
 * It has the members of WorkerState that the map reads, so that both are drawn and pointed at in the same way. A block has a state and
 * nothing else: neighbours in equal states come as one run.
 */

import { EVICTABLE, EVICTED, FREE, PINNED, UNLEASED } from "./block_states.js";
import { Geometry } from "./geometry.js";

const RUN_WORDS = 2;
const COUNT_NAMES = { [FREE]: "empty", [EVICTABLE]: "loose", [PINNED]: "held" }; // in a frame's `host.counts`

/** All blocks of a host tier. */
export class HostState {
  constructor(geometry) {
    this.geometry = geometry;
    this.states = new Uint8Array(geometry.numRecords);
    this.references = new Uint16Array(0); // not told
    this.owners = new Uint8Array(geometry.numPages); // 0 free, else group + 1
    this.counts = geometry.groups.map(() => ({}));
    this.freePages = geometry.numPages;
  }

  /** The host tier of a whole frame, or null without one. */
  static fromWhole({ header }) {
    if (!header.host) return null;
    const { num_pages, num_blocks } = header.host;
    const groups = header.groups.map((group, g) => ({ ...group, num_blocks: num_blocks[g] }));
    return new HostState(new Geometry({ ...header, num_pages, groups }));
  }

  apply({ header, hostBlocks }) {
    this.counts = header.host.counts;
    this.freePages = header.host.free_pages;
    const { groups } = this.geometry;
    for (let i = 0; i < hostBlocks.length; i += RUN_WORDS) {
      const [group, state, count] = [hostBlocks[i + 1] & 0xff, (hostBlocks[i + 1] >>> 8) & 0xff, (hostBlocks[i + 1] >>> 16) + 1];
      if (group >= groups.length || hostBlocks[i] + count > groups[group].num_blocks) continue; // of a newer worker
      this.#put(group, hostBlocks[i], count, state);
    }
  }

  /** Frames tell neither ages nor requests. */
  age_s() {
    return 0;
  }

  isShared() {
    return false;
  }

  /** The number of blocks of a group in a state. */
  numBlocks(group, column) {
    return this.counts[group][COUNT_NAMES[column]] ?? 0;
  }

  sequencesOf() {
    return [];
  }

  recordsOfRequests() {
    return new Uint8Array(this.geometry.numRecords);
  }

  #put(group, first, count, state) {
    const { geometry, owners } = this;
    this.states.fill(state, geometry.recordOf(group, first), geometry.recordOf(group, first) + count);
    const lastPage = Math.min(geometry.pageOf(group, first + count - 1), geometry.numPages - 1);
    for (let page = geometry.pageOf(group, first); page <= lastPage; page++) {
      if (state === UNLEASED) owners[page] = owners[page] === group + 1 ? 0 : owners[page];
      else if (owners[page] === 0 || state !== EVICTED) owners[page] = group + 1; // a block that has left owns no page
    }
  }
}
