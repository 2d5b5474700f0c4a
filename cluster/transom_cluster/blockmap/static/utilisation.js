/** Blocks by state over the last five minutes, a sample a second, of one worker. */

export const SPAN_S = 300;
export const BANDS = ["active", "held", "loose", "empty"]; // the order in which a frame's `history` has them

/** Second -> [free pages, [active, held, loose, empty] of each group]. */
export class UtilisationSeries {
  constructor() {
    this.samples = new Map();
    this.hasEnded = false;
  }

  takeFrame(header) {
    for (const [time_s, freePages, ...groups] of header.history ?? []) this.#put(time_s, [freePages, ...groups]);
    this.#put(header.time_s, [header.free_pages, ...header.counts.map((counts) => BANDS.map((band) => counts[band]))]);
  }

  /** The worker left: its newest sample is its last. */
  end() {
    this.hasEnded = true;
  }

  /** The sample of a second; the newest one stands until there is another, since a worker that rests says little. */
  at(second) {
    if (this.hasEnded && second > this.#newest) return null;
    return this.samples.get(Math.min(second, this.#newest)) ?? null;
  }

  get newestSecond() {
    return this.#newest ?? null;
  }

  #newest;

  #put(time_s, sample) {
    const second = Math.floor(time_s);
    if (!this.hasEnded) this.#standUntil(second);
    this.hasEnded = false;
    this.samples.set(second, sample);
    if (this.#newest === undefined || second > this.#newest) {
      this.#newest = second;
      this.#trim();
    }
  }

  #standUntil(second) {
    const newest = this.samples.get(this.#newest);
    for (let between = Math.max(this.#newest + 1, second - SPAN_S); between < second; between++) this.samples.set(between, newest);
  }

  #trim() {
    for (const second of this.samples.keys()) {
      if (second >= this.#newest - SPAN_S) break; // inserted in order of time
      this.samples.delete(second);
    }
  }
}

/** Sum several workers' samples of a second into [active, held, loose, empty] of the group of that name; null without samples. */
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
