/** What was counted, over the workers shown: since they started, and since the page was opened. */

import { element, setText } from "./dom.js";
import { formatCount } from "./format.js";

const ROWS = [
  ["hit_tokens", "Hit tokens"],
  ["repaired_tokens", "Repaired tokens"],
  ["missed_tokens", "Missed tokens"],
  ["evicted_blocks", "Evicted blocks"],
  ["preemptions", "Preemptions"],
  ["repairs", "Repairs"],
];

/** Fills `table`, and the line of running and waiting requests. */
export class Counters {
  constructor({ table, requests }) {
    this.requests = requests;
    this.cells = new Map();
    for (const [name, title] of ROWS) {
      const cells = [element("td"), element("td")];
      this.cells.set(name, cells);
      table.tBodies[0].append(element("tr", {}, element("th", { scope: "row" }, title), ...cells));
    }
  }

  update(workers) {
    const opened = sumByName(workers.map((worker) => worker.totalsSinceOpened()));
    const totals = sumByName(workers.map(({ shown }) => shown.totals));
    for (const [name, [sinceOpened, total]] of this.cells) {
      setText(sinceOpened, formatCount(opened[name] ?? 0));
      setText(total, formatCount(totals[name] ?? 0));
    }
    const running = workers.reduce((sum, { shown }) => sum + shown.running, 0);
    const waiting = workers.reduce((sum, { shown }) => sum + shown.waiting, 0);
    setText(this.requests, `${formatCount(running)} running, ${formatCount(waiting)} waiting`);
  }
}

function sumByName(records) {
  const sums = {};
  for (const record of records) for (const [name, value] of Object.entries(record)) sums[name] = (sums[name] ?? 0) + value;
  return sums;
}
