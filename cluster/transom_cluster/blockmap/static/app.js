/** The page: takes frames and events in, and draws at most once for each picture the screen shows. */

import { decodeFrame, fromBase64 } from "./frames.js";
import { formatTime } from "./format.js";
import { AWAY, HERE, JUST_GONE } from "./presence.js";
import { Roster } from "./roster.js";
import { Stopwatch } from "./stopwatch.js";
import { Timeline } from "./timeline.js";

const STRIP_EVERY_MS = 1000;

/** Holds what is known; `parts` is what draws it, bound by main.js. */
export class App {
  constructor({ filters, hues }) {
    this.roster = new Roster();
    this.workers = this.roster.workers;
    this.filters = filters;
    this.hues = hues;
    this.timeline = new Timeline({
      workers: () => [...this.workers.values()], recorded: () => this.recordedWorkers(), onChange: () => this.requestRender(true),
    });
    this.stopwatch = new Stopwatch();
    this.parts = null;
    this.source = null; // a Connection; null in the demo
    this.isConnected = false;
    this.connected_s = null; // the time of the connection; a frame that is missing before it is no problem
    this.knownGone = new Set(); // ids
    this.tickKey = "";
    this.isRenderDue = false;
    this.isStripDue = true;
    this.lastStrip_ms = -Infinity;
  }

  /** The workers that have sent something and pass the filter, those that are gone among them. */
  recordedWorkers() {
    return [...this.workers.values()].filter((worker) => worker.live !== null && this.filters.shows(worker));
  }

  /** Those of them that are on the screen at the moment shown. */
  visibleWorkers() {
    return this.recordedWorkers().filter((worker) => this.#presenceOf(worker) !== AWAY);
  }

  /** Those of them that were there at the moment shown, so that their blocks and requests count. */
  workersThere() {
    return this.recordedWorkers().filter((worker) => this.#presenceOf(worker) === HERE);
  }

  /** Whether a worker had just left at the moment shown. */
  isLeaving(worker) {
    return this.#presenceOf(worker) === JUST_GONE;
  }

  /** What is wrong with a worker, as its heading says it. */
  noteOf({ presence, problem }) {
    if (presence.isGone) return `gone since ${formatTime(presence.goneSince_s)}`;
    const quiet_s = presence.quiet_s(Date.now() / 1000, this.connected_s);
    return [problem, quiet_s && `nothing for ${Math.floor(quiet_s)} s`].filter(Boolean).join("; ");
  }

  /** A function (record, group) that says whether a block is dimmed, or null if none is. */
  dimmer(worker) {
    return this.isLeaving(worker) ? () => true : this.filters.dimmer(worker);
  }

  /** What to say where there is no worker to show. */
  whyNothing() {
    if (!this.timeline.isLive) return "No worker was there at this moment.";
    const gone = this.recordedWorkers().filter(({ presence }) => presence.isGone);
    if (!gone.length) return "No blocks yet: waiting for a worker.";
    return `${gone.map((worker) => `${worker.id} is ${this.noteOf(worker)}`).join("; ")}. Step back to see what was before.`;
  }

  /** What is wrong with workers that have no section to say it in: a refused watcher gets no frame. */
  problemsOfUnseen() {
    const unseen = [...this.workers.values()].filter(({ live }) => live === null).map((worker) => [worker.id, this.noteOf(worker)]);
    return unseen.filter(([, note]) => note).map(([id, note]) => `${id}: ${note}`);
  }

  /** Names of the groups of workers, by default those shown, in the order of their hues. */
  groupNames(workers = this.visibleWorkers()) {
    const names = new Set(workers.flatMap((worker) => worker.shown.geometry.groups.map(({ name }) => name)));
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
    const worker = this.roster.present(id, Date.now() / 1000);
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
    this.connected_s = this.isConnected ? Date.now() / 1000 : null;
    this.parts.status.show(status);
    this.requestRender(false);
  }

  /** Once a second: what changes although nothing comes. */
  tick() {
    this.roster.prune(Date.now() / 1000, this.timeline.position_s);
    this.#dropFilterOfGone();
    this.#sayWhoIsQuiet();
    const key = [...this.workers.values()].map((worker) => `${worker.id} ${this.#presenceOf(worker)} ${this.noteOf(worker)}`).join("\n");
    if (key !== this.tickKey) this.requestRender(true);
    this.tickKey = key;
  }

  /** Draw before the screen's next picture. `isWanted`: the user asked for it, so the strip is drawn at once. */
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

  #presenceOf({ presence }) {
    return this.timeline.isLive ? presence.now(Date.now() / 1000) : presence.at(this.timeline.position_s);
  }

  #sayWhoIsQuiet() {
    const isNew = ({ presence }) => !presence.isQuietTold && presence.quiet_s(Date.now() / 1000, this.connected_s) > 0;
    const quiet = [...this.workers.values()].filter(isNew);
    for (const { presence } of quiet) presence.isQuietTold = true;
    if (quiet.length) this.parts.announcer.say(quiet.map((worker) => `${worker.id}: ${this.noteOf(worker)}.`).join(" "));
  }

  #takeWorkers(list) {
    this.roster.take(list, Date.now() / 1000, this.timeline.position_s);
    this.#dropFilterOfGone();
    this.requestRender(true);
  }

  /** Live, a filter for a worker that leaves would show nothing; a filter that the user sets later is for stepping back. */
  #dropFilterOfGone() {
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
