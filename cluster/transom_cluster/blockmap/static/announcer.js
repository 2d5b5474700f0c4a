/** A line that screen readers read out: what was asked for at once, the state of things now and then. */

import { formatCount, formatNoun } from "./format.js";
import { ACTIVE, HELD, LOOSE, REPAIR } from "./worker_state.js";

const SUMMARY_EVERY_S = 30;

/** Writes into a live region. */
export class Announcer {
  constructor(region) {
    this.region = region;
    this.lastSummary_s = -Infinity;
  }

  say(text) {
    this.region.textContent = text;
  }

  /** The summary, if it was long since the last one. */
  update(workers, when, now_s) {
    if (now_s - this.lastSummary_s < SUMMARY_EVERY_S || !workers.length) return;
    this.saySummary(workers, when, now_s);
  }

  saySummary(workers, when, now_s) {
    this.lastSummary_s = now_s;
    this.say(`${when}. ${summaryOf(workers)}`);
  }
}

function summaryOf(workers) {
  const count = (...columns) => workers.reduce((sum, { shown }) => sum + sumOf(shown, columns), 0);
  const running = workers.reduce((sum, { shown }) => sum + shown.running, 0);
  const cached = `${formatCount(count(LOOSE, HELD))} cached, ${formatCount(count(REPAIR))} in repair`;
  return `${formatNoun(workers.length, "worker")}, ${formatNoun(running, "running request")}, ${formatCount(count(ACTIVE))} blocks active, ${cached}.`;
}

function sumOf(state, columns) {
  let sum = 0;
  for (let group = 0; group < state.geometry.groups.length; group++) for (const column of columns) sum += state.numBlocks(group, column);
  return sum;
}
