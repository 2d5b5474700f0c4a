/** Pause, resume, steps, the slider and what moment is shown. */

import { setText } from "./dom.js";
import { formatAge, formatTime } from "./format.js";

/** Binds the buttons to a timeline. */
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
    this.label.classList.toggle("held", !timeline.isLive);
    this.toggle.dataset.icon = timeline.isLive ? "pause" : "play";
    this.live.setAttribute("aria-pressed", String(timeline.isLive));
    if (!timeline.hasPast) return;
    this.#moveSlider();
    setText(this.label, this.describe());
  }

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
    event.preventDefault(); // its own step would often not reach the next moment
    event.stopPropagation();
    this.timeline.step(direction);
  }
}
