/** Which moment is on the screen: the live one, or one of the last minutes. All workers are at the same moment. */

import { AWAY } from "./presence.js";

const SAME_MOMENT_S = 0.1; // frames of several workers that come together are one step

/** `workers()` gives all, `recorded()` those whose frames are steps; `onChange` is called when another moment is to be drawn. */
export class Timeline {
  constructor({ workers, recorded, onChange }) {
    this.workers = workers;
    this.recorded = recorded;
    this.onChange = onChange;
    this.position_s = null; // null: live
    this.lastArrival_s = -Infinity;
  }

  get isLive() {
    return this.position_s === null;
  }

  /** The moment that a frame which comes now belongs to. */
  momentOf(now_s) {
    if (now_s - this.lastArrival_s > SAME_MOMENT_S || now_s < this.lastArrival_s) this.lastArrival_s = now_s;
    return this.lastArrival_s;
  }

  get oldest_s() {
    return Math.min(...this.#histories().map((history) => history.oldest_s));
  }

  get newest_s() {
    return Math.max(...this.#histories().map((history) => history.newest_s));
  }

  /** The moment on the screen. */
  get shown_s() {
    return this.position_s ?? this.newest_s;
  }

  get hasPast() {
    return this.#histories().length > 0;
  }

  pause() {
    if (this.isLive && this.hasPast) this.seek(this.newest_s);
  }

  goLive() {
    this.position_s = null;
    for (const worker of this.workers()) worker.shown = worker.live;
    this.onChange();
  }

  toggle() {
    if (this.isLive) this.pause();
    else this.goLive();
  }

  /** One moment back (-1) or forth (1). */
  step(direction) {
    if (!this.hasPast) return;
    const neighbours = this.#histories().map((history) => this.#neighbour(history, direction)).filter((at_s) => at_s !== null);
    if (neighbours.length) this.seek(direction < 0 ? Math.max(...neighbours) : Math.min(...neighbours));
    else this.seek(this.shown_s);
  }

  /** Show the last moment at or before a time. */
  seek(time_s) {
    if (!this.hasPast) return;
    this.position_s = Math.min(Math.max(time_s, this.oldest_s), this.newest_s);
    for (const worker of this.workers()) {
      if (worker.live === null || worker.presence.at(this.position_s) === AWAY) continue;
      const index = Math.max(0, worker.history.indexAt(this.position_s));
      worker.shown = worker.history.stateAt(index);
    }
    this.onChange();
  }

  #neighbour(history, direction) {
    const shown_s = this.shown_s;
    const index = history.indexAt(shown_s);
    const isAtShown = index >= 0 && history.entries[index].at_s === shown_s;
    const wanted = direction > 0 ? index + 1 : isAtShown ? this.#firstOf(history, index) - 1 : index;
    return history.entries[wanted]?.at_s ?? null;
  }

  #firstOf(history, index) {
    let first = index;
    while (first > 0 && history.entries[first - 1].at_s === history.entries[index].at_s) first--;
    return first;
  }

  #histories() {
    return this.recorded().map((worker) => worker.history).filter((history) => history.entries.length > 0);
  }
}
