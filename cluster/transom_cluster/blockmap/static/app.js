/** The page: takes frames and events in, and draws at most once for each picture the screen shows. */

import { decodeFrame, fromBase64 } from "./frames.js";
import { MAX_BYTES } from "./history.js";
import { Stopwatch } from "./stopwatch.js";
import { Timeline } from "./timeline.js";
import { Worker } from "./worker.js";

const STRIP_EVERY_MS = 1000;

/** Holds what is known; `parts` is what draws it, bound by main.js. */
export class App {
  constructor({ filters, hues }) {
    this.workers = new Map();
    this.filters = filters;
    this.hues = hues;
    this.timeline = new Timeline({
      workers: () => [...this.workers.values()], visible: () => this.visibleWorkers(), onChange: () => this.requestRender(true),
    });
    this.stopwatch = new Stopwatch();
    this.parts = null;
    this.source = null; // a Connection; null in the demo
    this.isConnected = false;
    this.isRenderDue = false;
    this.isStripDue = true;
    this.lastStrip_ms = -Infinity;
  }

  /** The workers that have sent something and pass the filter. */
  visibleWorkers() {
    return [...this.workers.values()].filter((worker) => worker.live !== null && this.filters.shows(worker));
  }

  /** What is wrong with workers that have no section to say it in: a refused watcher gets no frame. */
  problemsOfUnseen() {
    return [...this.workers.values()].filter(({ live, problem }) => live === null && problem).map(({ id, problem }) => `${id}: ${problem}`);
  }

  /** Names of the groups of the workers shown, in the order of their hues. */
  groupNames() {
    const names = new Set(this.visibleWorkers().flatMap((worker) => worker.shown.geometry.groups.map(({ name }) => name)));
    return [...names].sort((a, b) => this.hues.indexOf(a) - this.hues.indexOf(b));
  }

  takeEvent(event, data) {
    const started_ms = performance.now();
    if (event === "frame") this.takeFrame(fromBase64(data), 0, started_ms);
    else if (event === "workers") this.#takeWorkers(JSON.parse(data));
    else if (event === "problem") this.#takeProblem(JSON.parse(data));
  }

  takeFrame(bytes, shift_s = 0, started_ms = performance.now()) {
    const at_s = this.timeline.momentOf(Date.now() / 1000);
    const frame = decodeFrame(bytes, shift_s);
    const id = frame.header.worker;
    const worker = this.workers.get(id) ?? this.#addWorker(id);
    if (!worker.takeFrame(frame, bytes, at_s, shift_s)) {
      this.source?.restart();
      return;
    }
    this.hues.of(worker.live.geometry);
    this.parts.eventLog.take(worker, frame.header, at_s);
    this.stopwatch.frameTaken(performance.now() - started_ms, frame.header.whole);
    this.requestRender(frame.header.whole);
  }

  setStatus(status) {
    this.isConnected = status.kind === "live";
    this.parts.status.show(status);
    this.requestRender(false);
  }

  /** Draw before the screen's next picture. `isWanted`: somebody waits for it, so the strip follows at once. */
  requestRender(isWanted) {
    this.isStripDue ||= isWanted;
    if (this.isRenderDue || this.parts === null) return;
    this.isRenderDue = true;
    requestAnimationFrame(() => this.#render());
  }

  #render() {
    this.isRenderDue = false;
    const started_ms = performance.now();
    this.parts.draw(this);
    if (this.isStripDue || started_ms - this.lastStrip_ms > STRIP_EVERY_MS) {
      this.parts.drawStrip(this);
      this.lastStrip_ms = started_ms;
      this.isStripDue = false;
    }
    this.stopwatch.rendered(performance.now() - started_ms);
  }

  #addWorker(id) {
    const worker = new Worker(id);
    this.workers.set(id, worker);
    this.#shareMemory();
    return worker;
  }

  #takeWorkers(list) {
    const ids = new Set(list.map(({ worker }) => worker));
    for (const id of this.workers.keys()) if (!ids.has(id)) this.workers.delete(id);
    for (const info of list) (this.workers.get(info.worker) ?? this.#addWorker(info.worker)).info = info;
    if (this.filters.worker && !ids.has(this.filters.worker)) this.filters.set({ worker: "" });
    this.#shareMemory();
    this.requestRender(true);
  }

  #takeProblem({ worker, message }) {
    const known = this.workers.get(worker);
    if (known) known.problem = message;
    this.requestRender(false);
  }

  #shareMemory() {
    for (const worker of this.workers.values()) worker.history.maxBytes = MAX_BYTES / Math.max(1, this.workers.size);
  }
}
