/**
 * The page's state: takes frames and events of the stream, knows which workers are shown, and draws at most once for each time that
 * the screen is refreshed. Terms of workers, such as departed and silent: workers.js.
 */

import { decodeFrame, fromBase64 } from "./frames.js";
import { formatTime } from "./text.js";
import { Timeline } from "./timeline.js";
import { AWAY, JUST_GONE, PRESENT, WorkerList } from "./workers.js";

const STRIP_EVERY_MS = 1000;

/** `parts` are the functions and objects that draw the page; main.js sets them. */
export class App {
  constructor({ filters, hues }) {
    this.list = new WorkerList();
    this.workers = this.list.workers;
    this.filters = filters;
    this.hues = hues;
    this.timeline = new Timeline({
      workers: () => [...this.workers.values()], recorded: () => this.recordedWorkers(), onChange: () => this.requestRender(true),
    });
    this.numFrames = 0;
    this.parts = null;
    this.source = null; // a Connection
    this.isConnected = false;
    this.connected_s = null; // since when the stream is open: a worker's silence counts from then
    this.knownGone = new Set(); // ids of departed workers
    this.tickKey = "";
    this.isRenderDue = false;
    this.isStripDue = true;
    this.lastStrip_ms = -Infinity;
  }

  /** The workers, present or departed, that have sent a frame and that the filter shows. */
  recordedWorkers() {
    return [...this.workers.values()].filter((worker) => worker.live !== null && this.filters.shows(worker));
  }

  /** The recorded workers that are on the map at the moment on the screen. */
  visibleWorkers() {
    return this.recordedWorkers().filter((worker) => this.#presenceOf(worker) !== AWAY);
  }

  /** The recorded workers that were present at the moment on the screen, so that their blocks and requests count. */
  presentWorkers() {
    return this.recordedWorkers().filter((worker) => this.#presenceOf(worker) === PRESENT);
  }

  /** Whether a worker had just left at the moment on the screen. */
  isJustGone(worker) {
    return this.#presenceOf(worker) === JUST_GONE;
  }

  /** What is wrong with a worker, for its heading; "" if all is well. */
  noteOf({ presence, problem }) {
    if (presence.isGone) return `gone since ${formatTime(presence.goneSince_s)}`;
    const silence_s = presence.silence_s(Date.now() / 1000, this.connected_s);
    return [problem, silence_s && `nothing for ${Math.floor(silence_s)} s`].filter(Boolean).join("; ");
  }

  /** A function (record, group) that says whether a block of a tier's state is dimmed, or null if none is. */
  dimmer(worker, state) {
    return this.isJustGone(worker) ? () => true : this.filters.dimmer(worker, state);
  }

  /** Why the map is empty. */
  whyEmpty() {
    if (!this.timeline.isLive) return "No worker was present at this moment.";
    const gone = this.recordedWorkers().filter(({ presence }) => presence.isGone);
    if (!gone.length) return "No blocks yet: waiting for a worker.";
    return `${gone.map((worker) => `${worker.id} is ${this.noteOf(worker)}`).join("; ")}. Step back to see the time before.`;
  }

  /** What is wrong with workers that have no heading, because they have sent no frame. */
  problemsWithoutHeading() {
    const notes = [...this.workers.values()].filter(({ live }) => live === null).map((worker) => [worker.id, this.noteOf(worker)]);
    return notes.filter(([, note]) => note).map(([id, note]) => `${id}: ${note}`);
  }

  /** The names of the groups of workers in the order of their hues. */
  groupNames(workers = this.visibleWorkers()) {
    const names = new Set(workers.flatMap((worker) => worker.shown.geometry.groups.map(({ name }) => name)));
    return [...names].sort((a, b) => this.hues.indexOf(a) - this.hues.indexOf(b));
  }

  takeEvent(event, data) {
    if (event === "frame") this.takeFrame(fromBase64(data));
    else if (event === "workers") this.#takeWorkers(JSON.parse(data));
    else if (event === "problem") this.#takeProblem(JSON.parse(data));
  }

  takeFrame(bytes) {
    const at_s = this.timeline.momentOf(Date.now() / 1000);
    const frame = decodeFrame(bytes);
    const id = frame.header.worker;
    const worker = this.list.present(id, Date.now() / 1000);
    if (!worker.takeFrame(frame, bytes, at_s)) {
      this.source.restart();
      return;
    }
    this.hues.of(worker.live.geometry);
    this.parts.eventLog.take(worker, frame.header, at_s);
    this.numFrames += 1;
    this.requestRender(frame.header.whole);
  }

  setStatus(status) {
    this.isConnected = status.kind === "live";
    this.connected_s = this.isConnected ? Date.now() / 1000 : null;
    this.parts.status.show(status);
    this.requestRender(false);
  }

  /** Each second, update what changes without a frame. */
  tick() {
    this.list.prune(Date.now() / 1000, this.timeline.position_s);
    this.#clearFilterOfGone();
    this.#announceSilent();
    const lines = [...this.workers.values()].map((worker) => `${worker.id} ${this.#presenceOf(worker)} ${this.noteOf(worker)}`);
    const key = lines.join("\n");
    if (key !== this.tickKey) this.requestRender(true);
    this.tickKey = key;
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

  #presenceOf({ presence }) {
    return this.timeline.isLive ? presence.now(Date.now() / 1000) : presence.at(this.timeline.position_s);
  }

  #announceSilent() {
    const isNew = ({ presence }) => !presence.isSilenceAnnounced && presence.silence_s(Date.now() / 1000, this.connected_s) > 0;
    const silent = [...this.workers.values()].filter(isNew);
    for (const { presence } of silent) presence.isSilenceAnnounced = true;
    if (silent.length) this.parts.announcer.say(silent.map((worker) => `${worker.id}: ${this.noteOf(worker)}.`).join(" "));
  }

  #takeWorkers(list) {
    this.list.take(list, Date.now() / 1000, this.timeline.position_s);
    this.#clearFilterOfGone();
    this.requestRender(true);
  }

  /**
   * Clear the filter of a worker that leaves while time is live, since the map would be empty. A filter that the user sets later is
   * for stepping back.
   */
  #clearFilterOfGone() {
    const { worker: id } = this.filters;
    const gone = new Set([...this.workers.values()].filter(({ presence }) => presence.isGone).map((worker) => worker.id));
    const hasLeft = gone.has(id) && !this.knownGone.has(id) && this.timeline.isLive;
    this.knownGone = gone;
    if (id && (hasLeft || !this.workers.has(id))) this.filters.set({ worker: "" });
  }

  #takeProblem({ worker, message }) {
    const known = this.workers.get(worker);
    if (known) known.problem = message;
    this.requestRender(false);
  }
}
