/**
 * The workers that the page knows, present or departed: when each was present, its live state, and its past.
 *
 * Departed worker: a worker that the server no longer lists. The page keeps its past for as long as any history. Silent worker: a
 * present worker whose frames have stopped. Times are those of the page's clock.
 */

import { History, MAX_BYTES, SPAN_S, UtilisationSeries } from "./history.js";
import { WorkerState } from "./worker_state.js";

export const PRESENT = "present";
export const JUST_GONE = "just gone"; // still on the map, dimmed
export const AWAY = "away";

const JUST_GONE_S = 10;
const SILENT_AFTER_S = 12; // an idle worker sends a frame every 5 s
const MAX_DEPARTED = 8;

/** When one worker was present: from its first frame on, except in its absences. */
export class Presence {
  constructor() {
    this.firstFrame_s = null;
    this.heard_s = null; // its last frame, or when it was listed
    this.isSilenceAnnounced = false;
    this.absences = []; // [from_s, until_s], in order; until_s of the last is Infinity while the worker is gone
  }

  /** Since when the worker is gone, null while it is present. */
  get goneSince_s() {
    const last = this.absences[this.absences.length - 1];
    return last?.[1] === Infinity ? last[0] : null;
  }

  get isGone() {
    return this.goneSince_s !== null;
  }

  leave(now_s) {
    if (!this.isGone) this.absences.push([now_s, Infinity]);
  }

  comeBack(now_s) {
    if (this.isGone || this.heard_s === null) this.heard_s = now_s;
    if (this.isGone) this.absences[this.absences.length - 1][1] = now_s;
  }

  /** A frame came. */
  framed(at_s) {
    this.comeBack(at_s);
    this.firstFrame_s ??= at_s;
    this.heard_s = at_s;
    this.isSilenceAnnounced = false;
    const last = this.absences[this.absences.length - 1];
    if (last !== undefined && last[1] > at_s) last[1] = at_s; // the moment of a frame may begin just before the frame came
  }

  /** Forget absences that ended before a time. */
  forgetBefore(time_s) {
    this.absences = this.absences.filter(([, until_s]) => until_s >= time_s);
  }

  /** For how long the worker has been silent, 0 if it is not. `open_s` is when the stream was opened, null if it is closed. */
  silence_s(now_s, open_s) {
    if (this.isGone || this.heard_s === null || open_s === null) return 0;
    const silence_s = now_s - Math.max(this.heard_s, open_s);
    return silence_s > SILENT_AFTER_S ? silence_s : 0;
  }

  /** `PRESENT`, `JUST_GONE` or `AWAY` now. */
  now(now_s) {
    if (!this.isGone) return PRESENT;
    return now_s - this.goneSince_s < JUST_GONE_S ? JUST_GONE : AWAY;
  }

  /** `PRESENT`, `JUST_GONE` or `AWAY` at a time in the past. */
  at(time_s) {
    if (this.firstFrame_s === null || time_s < this.firstFrame_s) return AWAY;
    const absence = this.absences.findLast(([from_s]) => from_s < time_s);
    if (absence === undefined || time_s >= absence[1]) return PRESENT;
    return time_s - absence[0] < JUST_GONE_S ? JUST_GONE : AWAY;
  }
}

/** One worker. `live` is its newest state; `shown` is the state on the screen, another one only while time is paused. */
export class Worker {
  constructor(id) {
    this.id = id;
    this.info = { worker: id, model: "", state: "" };
    this.live = null;
    this.shown = null;
    this.problem = null;
    this.presence = new Presence();
    this.history = new History();
    this.series = new UtilisationSeries();
    this.firstTotals = null;
    this.nextSequence = null;
  }

  /** Apply a decoded frame and keep its bytes; false if a frame before it is missing. */
  takeFrame(frame, bytes, at_s) {
    const { header } = frame;
    if (!header.whole && (this.live === null || header.sequence !== this.nextSequence)) return false;
    this.presence.framed(at_s);
    this.nextSequence = header.sequence + 1;
    this.#apply(frame);
    this.history.push(bytes, frame, this.live, at_s);
    this.series.takeFrame(header);
    this.#rememberTotals(header.totals);
    this.problem = null;
    return true;
  }

  /** The worker departed. */
  leave(now_s) {
    this.presence.leave(now_s);
    this.series.end();
    this.info = { ...this.info, state: "" };
    this.problem = null;
  }

  /** What was counted from the opening of the page up to the state on the screen. */
  totalsSinceOpened() {
    const totals = this.shown.totals;
    return Object.fromEntries(Object.keys(totals).map((name) => [name, Math.max(0, totals[name] - this.firstTotals[name])]));
  }

  #apply(frame) {
    const showsLive = this.shown === this.live;
    if (this.live === null) this.live = WorkerState.fromWhole(frame);
    else this.live.apply(frame);
    if (showsLive) this.shown = this.live;
  }

  #rememberTotals(totals) {
    const hasRestarted = this.firstTotals !== null && Object.keys(totals).some((name) => totals[name] < this.firstTotals[name]);
    if (this.firstTotals === null) this.firstTotals = totals;
    else if (hasRestarted) this.firstTotals = Object.fromEntries(Object.keys(totals).map((name) => [name, 0]));
  }
}

/** The workers by id. Their histories share one bound of memory. */
export class WorkerList {
  constructor() {
    this.workers = new Map();
  }

  /** The worker of an id, which is present from now on. */
  present(id, now_s) {
    let worker = this.workers.get(id);
    if (worker === undefined) {
      worker = new Worker(id);
      this.workers.set(id, worker);
      this.#shareMemory(now_s);
    }
    worker.presence.comeBack(now_s);
    return worker;
  }

  /** The listed `{worker, model, state}` are present, all others gone. `paused_s` is the moment on the screen, null when live. */
  take(list, now_s, paused_s) {
    const ids = new Set(list.map(({ worker }) => worker));
    for (const worker of this.workers.values()) if (!ids.has(worker.id) && !worker.presence.isGone) this.#leave(worker, now_s);
    for (const info of list) this.present(info.worker, now_s).info = info;
    this.prune(now_s, paused_s);
  }

  /** Delete departed workers: the oldest of too many, and those whose past is too old, unless the screen shows that past. */
  prune(now_s, paused_s) {
    const all = [...this.workers.values()];
    const departed = all.filter(({ presence }) => presence.isGone).sort((a, b) => a.presence.goneSince_s - b.presence.goneSince_s);
    departed.forEach((worker, i) => {
      const isOnScreen = paused_s !== null && worker.presence.at(paused_s) !== AWAY;
      const isTooOld = worker.presence.goneSince_s <= now_s - SPAN_S && !isOnScreen;
      if (isTooOld || i < departed.length - MAX_DEPARTED) this.workers.delete(worker.id);
      else worker.history.trim(now_s); // no frame comes that would trim it
    });
    for (const { presence } of all) presence.forgetBefore(now_s - SPAN_S);
    if (this.workers.size < all.length) this.#shareMemory(now_s);
  }

  #leave(worker, now_s) {
    if (worker.live === null) this.workers.delete(worker.id); // it has no past
    else worker.leave(now_s);
  }

  #shareMemory(now_s) {
    for (const { history } of this.workers.values()) {
      history.maxBytes = MAX_BYTES / this.workers.size;
      history.trim(now_s);
    }
  }
}
