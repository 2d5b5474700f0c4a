/**
 * Which moment is on the screen: the live one, or one of the last five minutes. All workers are at the same moment.
 *
 * Moment: the page's time at which frames came. Frames of several workers that come within 0.1 s are of one moment.
 */

import { formatAge, formatTime, setText } from "./text.js";
import { AWAY } from "./workers.js";

const SAME_MOMENT_S = 0.1;

/** `workers()` are all workers, `recorded()` the workers whose frames are steps; `onChange` is called to draw another moment. */
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

  /** The moment of a frame that comes now. */
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

  goLive() {
    this.position_s = null;
    for (const worker of this.workers()) worker.shown = worker.live;
    this.onChange();
  }

  toggle() {
    if (this.isLive) this.seek(this.newest_s);
    else this.goLive();
  }

  /** Go one moment back (-1) or forth (1). */
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

  /** The moment before or after the one on the screen at which a worker's frame came, or null. */
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

/** The toolbar's buttons, slider and label, bound to a timeline. */
export class TimeControls {
  constructor({ toggle, back, forth, slider, live, label, timeline }) {
    Object.assign(this, { toggle, back, forth, slider, live, label, timeline });
    toggle.addEventListener("click", () => timeline.toggle());
    back.addEventListener("click", () => timeline.step(-1));
    forth.addEventListener("click", () => timeline.step(1));
    live.addEventListener("click", () => timeline.goLive());
    slider.addEventListener("input", () => timeline.seek(Number(slider.value)));
    slider.addEventListener("keydown", (event) => this.#stepBySlider(event));
  }

  update() {
    const { timeline } = this;
    for (const control of [this.toggle, this.back, this.forth, this.slider, this.live]) control.disabled = !timeline.hasPast;
    setText(this.toggle.querySelector("[data-word]"), timeline.isLive ? "Pause" : "Resume");
    this.label.classList.toggle("paused", !timeline.isLive);
    this.toggle.dataset.icon = timeline.isLive ? "pause" : "play";
    this.live.setAttribute("aria-pressed", String(timeline.isLive));
    if (!timeline.hasPast) return;
    this.#moveSlider();
    setText(this.label, this.describe());
  }

  /** The moment on the screen in words. */
  describe() {
    const { timeline } = this;
    if (!timeline.hasPast) return "No frames yet";
    if (timeline.isLive) return `Live, ${formatTime(timeline.shown_s)}`;
    return `Paused at ${formatTime(timeline.shown_s)}, ${formatAge(timeline.newest_s - timeline.shown_s)} ago`;
  }

  #moveSlider() {
    const { oldest_s, newest_s, shown_s } = this.timeline;
    this.slider.min = oldest_s;
    this.slider.max = newest_s;
    this.slider.value = shown_s;
    this.slider.setAttribute("aria-valuetext", this.describe());
  }

  #stepBySlider(event) {
    const direction = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 }[event.key];
    if (direction === undefined) return;
    event.preventDefault(); // the slider's own step is often too small to reach the next moment
    event.stopPropagation();
    this.timeline.step(direction);
  }
}
