/**
 * What the page keeps of the last five minutes of one worker: its frames, from which any moment can be restored, and the number
 * of blocks by state each second.
 *
 * Key state: a snapshot of all blocks, kept beside a frame, so that a moment is restored without applying all frames before it.
 */

import { decodeFrame } from "./frames.js";
import { snapshotBytes, WorkerState } from "./worker_state.js";

export const SPAN_S = 300;
export const MAX_BYTES = 64 * 1024 * 1024; // of the histories of all workers
export const BANDS = ["active", "pinned", "evictable", "free"]; // in the order of a frame's `history`
const COUNT_NAMES = ["active", "held", "loose", "empty"]; // the bands in a frame's `counts`
const MAX_DIFFS_TO_KEY = 240;
const RECORD_WORDS = 5;

/** One worker's frames, in the order in which they came, in bounded memory. */
export class History {
  constructor() {
    this.maxAge_s = SPAN_S;
    this.maxBytes = MAX_BYTES;
    this.entries = []; // the first is always a whole frame or has a key state
    this.numBytes = 0;
    this.recordsSinceKey = 0;
    this.diffsSinceKey = 0;
  }

  /** Keep a frame that came at `at_s`; `state` is the worker's after it. */
  push(bytes, frame, state, at_s) {
    const entry = { at_s, bytes, whole: frame.header.whole, key: null, numBytes: bytes.byteLength + 100 };
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

  /** The index of the last entry at or before a time, -1 if there is none. */
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

  /** Restore the worker's state after entry `index`. */
  stateAt(index) {
    let start = index;
    while (!this.#standsAlone(start)) start--;
    const entry = this.entries[start];
    const state = entry.key ? WorkerState.restore(entry.key) : WorkerState.fromWhole(this.#frame(start));
    for (let i = start + 1; i <= index; i++) state.apply(this.#frame(i));
    return state;
  }

  /** Delete the oldest entries that are too old, or too much for the memory. */
  trim(now_s) {
    for (;;) {
      const next = this.#nextStart();
      if (next < 0) return;
      const isOld = this.entries[next].at_s <= now_s - this.maxAge_s;
      if (!isOld && this.numBytes <= this.maxBytes) return;
      for (const entry of this.entries.splice(0, next)) this.numBytes -= entry.numBytes;
    }
  }

  #frame(index) {
    return decodeFrame(this.entries[index].bytes);
  }

  #standsAlone(index) {
    return this.entries[index].whole || this.entries[index].key !== null;
  }

  /** Key states cost memory, runs of diffs cost time: place a key when the diffs have half as many records as there are blocks. */
  #placeKey(entry, frame, state) {
    this.recordsSinceKey += frame.blocks.length / RECORD_WORDS + frame.hostBlocks.length / 2;
    this.diffsSinceKey += 1;
    const numBlocks = state.tally.reduce((sum, count) => sum + count, 0);
    const isLong = this.recordsSinceKey > Math.max(1000, numBlocks / 2) || this.diffsSinceKey > MAX_DIFFS_TO_KEY;
    if (!entry.whole && isLong) {
      entry.key = state.snapshot();
      entry.numBytes += snapshotBytes(entry.key);
    }
    if (entry.whole || isLong) this.recordsSinceKey = this.diffsSinceKey = 0;
  }

  #nextStart() {
    for (let i = 1; i < this.entries.length; i++) if (this.#standsAlone(i)) return i;
    return -1;
  }
}

/** One worker's numbers of blocks, a sample a second: [free pages, [a number for each of BANDS] of each group]. */
export class UtilisationSeries {
  #newest; // second

  constructor() {
    this.samples = new Map();
    this.hasEnded = false;
  }

  takeFrame(header) {
    for (const [time_s, ...sample] of header.history ?? []) this.#put(time_s, sample);
    this.#put(header.time_s, [header.free_pages, ...header.counts.map((counts) => COUNT_NAMES.map((name) => counts[name]))]);
  }

  /** The worker left: there are no samples after the newest until it sends another frame. */
  end() {
    this.hasEnded = true;
  }

  /** The sample of a second. The newest sample counts until there is another, since an idle worker sends few frames. */
  at(second) {
    if (this.hasEnded && second > this.#newest) return null;
    return this.samples.get(Math.min(second, this.#newest)) ?? null;
  }

  get newestSecond() {
    return this.#newest ?? null;
  }

  #put(time_s, sample) {
    const second = Math.floor(time_s);
    if (!this.hasEnded) this.#repeatUntil(second);
    this.hasEnded = false;
    this.samples.set(second, sample);
    if (this.#newest === undefined || second > this.#newest) {
      this.#newest = second;
      this.#trim();
    }
  }

  #repeatUntil(second) {
    const newest = this.samples.get(this.#newest);
    for (let between = Math.max(this.#newest + 1, second - SPAN_S); between < second; between++) this.samples.set(between, newest);
  }

  #trim() {
    for (const second of this.samples.keys()) {
      if (second >= this.#newest - SPAN_S) break; // the map is in the order of time
      this.samples.delete(second);
    }
  }
}

/** The sum of the workers' samples of a second, for the group of a name: a number for each of BANDS; null without samples. */
export function sumOfGroup(workers, groupName, second) {
  let sum = null;
  for (const worker of workers) {
    const sample = worker.series.at(second);
    const index = worker.live.geometry.groups.findIndex((group) => group.name === groupName);
    if (sample === null || index < 0) continue;
    sum = sample[1 + index].map((count, band) => count + (sum ? sum[band] : 0));
  }
  return sum;
}
