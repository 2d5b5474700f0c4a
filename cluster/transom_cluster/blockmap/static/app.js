/**
 * The page's state: takes frames and events of the stream, knows which workers are shown, and draws at most once for each time that
 * the screen is refreshed.
 */

import { decodeFrame, fromBase64 } from "./frames.js";
import { UtilisationSeries } from "./strip.js";
import { formatTime } from "./text.js";
import { WorkerState } from "./worker_state.js";

const STRIP_EVERY_MS = 1000;

/** One worker: what the stream says about it, the state of its blocks (null before its first frame), and its utilisation. */
export class Worker {
  constructor(id) {
    this.id = id;
    this.info = { worker: id, model: "", state: "" };
    this.state = null;
    this.problem = "";
    this.series = new UtilisationSeries();
    this.nextSequence = null;
  }

  /** Apply a decoded frame; false if a frame before it is missing. */
  takeFrame(frame) {
    const { header } = frame;
    if (!header.whole && (this.state === null || header.sequence !== this.nextSequence)) return false;
    this.nextSequence = header.sequence + 1;
    if (this.state === null) this.state = WorkerState.fromWhole(frame);
    else this.state.apply(frame);
    this.series.takeFrame(header);
    this.problem = "";
    return true;
  }
}

/** `parts` are the functions and objects that draw the page; main.js sets them. */
export class App {
  constructor({ filters, hues }) {
    this.workers = new Map(); // by id
    this.filters = filters;
    this.hues = hues;
    this.numFrames = 0;
    this.parts = null;
    this.source = null; // a Connection
    this.isRenderDue = false;
    this.isStripDue = true;
    this.lastStrip_ms = -Infinity;
  }

  /** The workers that have sent a frame and that the filter shows. */
  visibleWorkers() {
    return [...this.workers.values()].filter((worker) => worker.state !== null && this.filters.shows(worker));
  }

  /** What is wrong with workers that have no heading, because they have sent no frame. */
  problemsWithoutHeading() {
    const silent = [...this.workers.values()].filter(({ state, problem }) => state === null && problem);
    return silent.map(({ id, problem }) => `${id}: ${problem}`);
  }

  /** The names of the groups of workers in the order of their hues. */
  groupNames() {
    const names = new Set(this.visibleWorkers().flatMap(({ state }) => state.geometry.groups.map(({ name }) => name)));
    return [...names].sort((a, b) => this.hues.indexOf(a) - this.hues.indexOf(b));
  }

  /** The moment on the screen in words. */
  moment() {
    const times_s = this.visibleWorkers().map(({ state }) => state.time_s);
    if (!times_s.length) return "No frames yet";
    return `${this.source.isPaused ? "Paused at" : "Live,"} ${formatTime(Math.max(...times_s))}`;
  }

  takeEvent(event, data) {
    if (event === "frame") this.takeFrame(fromBase64(data));
    else if (event === "workers") this.#takeWorkers(JSON.parse(data));
    else if (event === "problem") this.#takeProblem(JSON.parse(data));
  }

  takeFrame(bytes) {
    const frame = decodeFrame(bytes);
    const worker = this.#workerOf(frame.header.worker);
    if (!worker.takeFrame(frame)) {
      this.source.restart();
      return;
    }
    this.hues.of(worker.state.geometry);
    this.parts.eventLog.take(worker, frame.header);
    this.numFrames += 1;
    this.requestRender(frame.header.whole);
  }

  /** Draw before the screen's next refresh; the strip too if `withStrip`, else it is drawn once a second. */
  requestRender(withStrip) {
    this.isStripDue ||= withStrip;
    if (this.isRenderDue || this.parts === null) return;
    this.isRenderDue = true;
    requestAnimationFrame(() => this.#render());
  }

  #render() {
    this.isRenderDue = false;
    const now_ms = performance.now();
    this.parts.draw();
    if (this.isStripDue || now_ms - this.lastStrip_ms > STRIP_EVERY_MS) {
      this.parts.drawStrip();
      this.lastStrip_ms = now_ms;
      this.isStripDue = false;
    }
  }

  #workerOf(id) {
    if (!this.workers.has(id)) this.workers.set(id, new Worker(id));
    return this.workers.get(id);
  }

  /** Keep the listed workers; those that are not listed have gone. */
  #takeWorkers(list) {
    const ids = new Set(list.map(({ worker }) => worker));
    for (const id of this.workers.keys()) if (!ids.has(id)) this.workers.delete(id);
    for (const info of list) this.#workerOf(info.worker).info = info;
    if (this.filters.worker && !ids.has(this.filters.worker)) this.filters.set({ worker: "" });
    this.requestRender(true);
  }

  #takeProblem({ worker, message }) {
    const known = this.workers.get(worker);
    if (known) known.problem = message;
    this.requestRender(false);
  }
}
