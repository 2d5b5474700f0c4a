/** One worker as the page knows it: its live state, its past, and the numbers to draw over time. */

import { History } from "./history.js";
import { Presence } from "./presence.js";
import { UtilisationSeries } from "./utilisation.js";
import { WorkerState } from "./worker_state.js";

/** Takes frames in; `shown` is the state on the screen, which is the live one unless time is held. */
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
    this.revision = 0; // grows with each change of geometry, so that layouts know when to be made anew
  }

  /** Take a decoded frame and its bytes in; false if one before it is missing. */
  takeFrame(frame, bytes, at_s, shift_s = 0) {
    const { header } = frame;
    if (!header.whole && (this.live === null || header.sequence !== this.nextSequence)) return false;
    this.presence.framed(at_s);
    this.nextSequence = header.sequence + 1;
    this.#apply(frame);
    this.history.push(bytes, frame, this.live, at_s, shift_s);
    this.series.takeFrame(header);
    this.#rememberTotals(header.totals);
    this.problem = null;
    return true;
  }

  /** It is not there any more: what it said stays as its past. */
  leave(now_s) {
    this.presence.leave(now_s);
    this.series.end();
    this.info = { ...this.info, state: "" };
    this.problem = null;
  }

  /** What was counted since the page was opened, up to the state shown. */
  totalsSinceOpened() {
    const totals = this.shown.totals;
    return Object.fromEntries(Object.keys(totals).map((name) => [name, Math.max(0, totals[name] - this.firstTotals[name])]));
  }

  #apply(frame) {
    const isFollowing = this.shown === this.live;
    const keyBefore = this.live?.geometry.key;
    if (this.live === null) this.live = WorkerState.fromWhole(frame);
    else this.live.apply(frame);
    if (isFollowing) this.shown = this.live;
    if (this.live.geometry.key !== keyBefore) this.revision++;
  }

  #rememberTotals(totals) {
    const hasRestarted = this.firstTotals !== null && Object.keys(totals).some((name) => totals[name] < this.firstTotals[name]);
    if (this.firstTotals === null) this.firstTotals = totals;
    else if (hasRestarted) this.firstTotals = Object.fromEntries(Object.keys(totals).map((name) => [name, 0]));
  }
}
