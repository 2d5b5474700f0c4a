/** What the page says about itself: the status of its connection, and the texts for screen readers. */

import { formatCount, formatNoun, setText } from "./text.js";
import { ACTIVE, EVICTABLE, PINNED, REPAIR } from "./worker_state.js";

const SUMMARY_EVERY_S = 30;
const STATUS_TEXTS = {
  connecting: "Connecting", live: "Connected", paused: "Paused", lost: "Connection lost", key: "API key wanted",
};

/** Writes into `region`, a live region that screen readers read out. */
export class Announcer {
  constructor(region) {
    this.region = region;
    this.lastSummary_s = -Infinity;
  }

  say(text) {
    this.region.textContent = text;
  }

  /** Say a summary if the last one is 30 s old. `when` is the moment on the screen in words. */
  update(workers, when, now_s) {
    if (now_s - this.lastSummary_s >= SUMMARY_EVERY_S && workers.length) this.saySummary(workers, when, now_s);
  }

  saySummary(workers, when, now_s) {
    this.lastSummary_s = now_s;
    this.say(`${when}. ${summaryOf(workers)}`);
  }
}

/** Shows a status {kind, message, retry_s} of the stream (frame_sources.js). */
export class StatusLine {
  constructor({ pill, message, announcer }) {
    Object.assign(this, { pill, message, announcer });
    this.kind = "";
  }

  show({ kind, message = "", retry_s = null }) {
    this.pill.dataset.kind = kind;
    setText(this.pill, STATUS_TEXTS[kind]);
    const retry = retry_s === null ? "" : ` Trying again in ${retry_s} s.`;
    setText(this.message, `${message}${retry}`);
    if (kind !== this.kind && kind !== "connecting") this.announcer.say(`${STATUS_TEXTS[kind]}. ${message}`);
    if (kind !== "connecting") this.kind = kind;
  }
}

function summaryOf(workers) {
  const count = (...columns) => formatCount(sum(workers.map(({ state }) => numBlocksOf(state, columns))));
  const running = sum(workers.map(({ state }) => state.running));
  const blocks = `${count(ACTIVE)} blocks active, ${count(EVICTABLE, PINNED)} cached, ${count(REPAIR)} in repair`;
  return `${formatNoun(workers.length, "worker")}, ${formatNoun(running, "running request")}, ${blocks}.`;
}

function numBlocksOf(state, columns) {
  return sum(state.geometry.groups.flatMap((_, group) => columns.map((column) => state.numBlocks(group, column))));
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}
