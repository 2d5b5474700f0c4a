/** The last minutes of one worker: its frames as they came, with key states between, in bounded memory. */

import { decodeFrame } from "./frames.js";
import { snapshotBytes, WorkerState } from "./worker_state.js";

export const MAX_AGE_S = 300;
export const MAX_BYTES = 64 * 1024 * 1024;
const MAX_DIFFS_TO_KEY = 240;
const RECORD_WORDS = 5;

/** A ring of frames; any of them can be shown again. */
export class History {
  constructor({ maxAge_s = MAX_AGE_S, maxBytes = MAX_BYTES } = {}) {
    this.maxAge_s = maxAge_s;
    this.maxBytes = maxBytes;
    this.entries = []; // the oldest always stands on its own: a whole frame or one with a key state
    this.numBytes = 0;
    this.recordsSinceKey = 0;
    this.diffsSinceKey = 0;
  }

  /** Keep a frame that came at `at_s`; `state` is the worker's after it. */
  push(bytes, frame, state, at_s, shift_s = 0) {
    const entry = { at_s, bytes, shift_s, whole: frame.header.whole, key: null, numBytes: bytes.byteLength + 100 };
    this.#placeKey(entry, frame, state);
    this.entries.push(entry);
    this.numBytes += entry.numBytes;
    this.trim(at_s);
  }

  get oldest_s() {
    return this.entries.length ? this.entries[0].at_s : null;
  }

  get newest_s() {
    return this.entries.length ? this.entries[this.entries.length - 1].at_s : null;
  }

  /** The last entry at or before a time, -1 if there is none. */
  indexAt(time_s) {
    let low = 0;
    let high = this.entries.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.entries[middle].at_s <= time_s) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  /** The worker's state after entry `index`, made anew. */
  stateAt(index) {
    let start = index;
    while (!this.#standsAlone(start)) start--;
    const entry = this.entries[start];
    const state = entry.key ? WorkerState.restore(entry.key) : WorkerState.fromWhole(this.#frame(start));
    for (let i = start + 1; i <= index; i++) state.apply(this.#frame(i));
    return state;
  }

  #frame(index) {
    const { bytes, shift_s } = this.entries[index];
    return decodeFrame(bytes, shift_s);
  }

  #standsAlone(index) {
    return this.entries[index].whole || this.entries[index].key !== null;
  }

  /** Keys cost memory, long runs of diffs cost time: a key as soon as the diffs would take as long as half of it. */
  #placeKey(entry, frame, state) {
    this.recordsSinceKey += frame.blocks.length / RECORD_WORDS;
    this.diffsSinceKey += 1;
    const numBlocks = state.tally.reduce((sum, count) => sum + count, 0);
    const isLong = this.recordsSinceKey > Math.max(1000, numBlocks / 2) || this.diffsSinceKey > MAX_DIFFS_TO_KEY;
    if (!entry.whole && isLong) {
      entry.key = state.snapshot();
      entry.numBytes += snapshotBytes(entry.key);
    }
    if (entry.whole || isLong) this.recordsSinceKey = this.diffsSinceKey = 0;
  }

  /** Let go of what is too old or too much. */
  trim(now_s) {
    for (;;) {
      const next = this.#nextStart();
      if (next < 0) return;
      const isOld = this.entries[next].at_s <= now_s - this.maxAge_s;
      if (!isOld && this.numBytes <= this.maxBytes) return;
      for (const entry of this.entries.splice(0, next)) this.numBytes -= entry.numBytes;
    }
  }

  #nextStart() {
    for (let i = 1; i < this.entries.length; i++) if (this.#standsAlone(i)) return i;
    return -1;
  }
}
