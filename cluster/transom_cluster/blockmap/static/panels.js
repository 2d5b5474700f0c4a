/** The panels beside the map: the legend, the counters, the running requests, and the last events. */

import { styleNumber } from "./colours.js";
import { Pixels } from "./pixels.js";
import { element, formatCount, formatNoun, formatTime, requestButton, setText } from "./text.js";
import { ACTIVE, EVICTABLE, EVICTED, FREE, PINNED, REPAIR, SHARED } from "./worker_state.js";

const SWATCH_CSS_PX = 18;
const MAX_REQUESTS = 40;
const MAX_EVENTS_KEPT = 1000;
const MAX_EVENTS_SHOWN = 60;
export const DEVICE_LOOKS = [
  { column: ACTIVE, name: "Active", meaning: "a request uses it" },
  { column: SHARED, name: "Shared", meaning: "active: several requests use it" },
  { column: REPAIR, name: "In repair", meaning: "active: window recomputed" },
  { column: PINNED, name: "Cached, pinned", meaning: "a checkpoint needs it" },
  { column: EVICTABLE, name: "Cached, evictable", meaning: "evicted first; fades" },
  { column: FREE, name: "Free", meaning: "without content" },
  { column: EVICTED, name: "Just evicted", meaning: "cached until this frame" },
];
export const HOST_LOOKS = [
  { column: PINNED, name: "Needed", meaning: "by a checkpoint, request or transfer" },
  { column: EVICTABLE, name: "Cached, evictable", meaning: "dropped first" },
  { column: FREE, name: "Free", meaning: "without content" },
];
const COUNTERS = [
  ["hit_tokens", "Hit tokens"],
  ["repaired_tokens", "Repaired tokens"],
  ["missed_tokens", "Missed tokens"],
  ["evicted_blocks", "Evicted blocks"],
  ["preemptions", "Preemptions"],
  ["repairs", "Repairs"],
  ["spilled_blocks", "Spilled blocks"],
  ["loaded_blocks", "Loaded blocks"],
  ["swapped_blocks", "Swapped blocks"],
  ["imported_blocks", "Imported blocks"],
  ["dropped_blocks", "Blocks dropped by the host tier"],
];
const EVENTS_OF_BLOCKS = new Set(["spilled", "loaded", "swapped", "imported", "dropped"]); // "dropped" of no group: events

/** What each look means, and how many blocks have it: a row a look, a column a group. */
export class Legend {
  constructor(table, looks) {
    this.table = table;
    this.looks = looks;
    this.key = "";
    this.cells = [];
  }

  /** `groups` are names in the order of their hues, `states` those of one tier of the workers. */
  update(groups, states, styles, stylesVersion) {
    const key = `${groups.join("\n")} ${stylesVersion}`;
    if (key !== this.key) this.#build(groups, styles);
    this.key = key;
    this.looks.forEach(({ column }, row) => {
      groups.forEach((name, g) => setText(this.cells[row][g], formatCount(numBlocksOf(states, name, column))));
    });
  }

  #build(groups, styles) {
    const names = groups.map((name) => element("th", { scope: "col" }, ...breakable(name)));
    const head = element("tr", {}, element("th", { scope: "col" }, "Block"), ...names);
    this.cells = this.looks.map(() => groups.map(() => element("span")));
    const rows = this.looks.map(({ column, name, meaning }, row) => {
      const title = element("th", { scope: "row" }, name, element("small", {}, meaning));
      const cells = groups.map((_, hue) => element("td", {}, swatch(hue, column, styles), this.cells[row][hue]));
      return element("tr", {}, title, ...cells);
    });
    this.table.tHead.replaceChildren(head);
    this.table.tBodies[0].replaceChildren(...rows);
  }
}

/** What was counted over the workers shown since they started. */
export class Counters {
  constructor({ table, requests }) {
    this.requests = requests;
    this.cells = new Map();
    for (const [name, title] of COUNTERS) {
      const cell = element("td");
      this.cells.set(name, cell);
      table.tBodies[0].append(element("tr", {}, element("th", { scope: "row" }, title), cell));
    }
  }

  update(workers) {
    const totals = sumByName(workers.map(({ state }) => state.totals));
    for (const [name, total] of this.cells) {
      setText(total, formatCount(totals[name] ?? 0));
      total.parentElement.hidden = !(name in totals) && name.endsWith("_blocks"); // without a host tier
    }
    const { running = 0, waiting = 0 } = sumByName(workers.map(({ state: { running, waiting } }) => ({ running, waiting })));
    setText(this.requests, `${formatCount(running)} running, ${formatCount(waiting)} waiting`);
  }
}

/** The running requests: their progress and their cached tokens; also the suggestions of the request filter. */
export class RequestsPanel {
  constructor({ list, suggestions, onRequest }) {
    Object.assign(this, { list, suggestions, onRequest });
    this.rows = new Map();
  }

  /** `filter` is the request filter's text. */
  update(workers, filter) {
    const sequences = workers.flatMap(({ id, state }) => [...state.sequences.values()].map((sequence) => [`${id}/${sequence.id}`, sequence]));
    const kept = new Map(sequences.slice(0, MAX_REQUESTS));
    this.#removeOthers(kept);
    for (const [key, sequence] of kept) this.#show(key, sequence, filter);
    this.#suggest(sequences.map(([, { request }]) => request));
  }

  #removeOthers(kept) {
    for (const [key, row] of this.rows) {
      if (kept.has(key)) continue;
      row.remove();
      this.rows.delete(key);
    }
  }

  #show(key, sequence, filter) {
    let row = this.rows.get(key);
    if (row === undefined) {
      row = element("li", {}, requestButton(sequence.request, this.onRequest), element("span"));
      this.rows.set(key, row);
      this.list.append(row);
    }
    const isChosen = filter !== "" && sequence.request.toLowerCase().includes(filter.toLowerCase());
    row.firstChild.setAttribute("aria-pressed", String(isChosen));
    setText(row.lastChild, progressOf(sequence));
  }

  #suggest(requests) {
    const key = requests.join("\n");
    if (key === this.suggestedKey) return;
    this.suggestedKey = key;
    this.suggestions.replaceChildren(...[...new Set(requests)].map((value) => element("option", { value })));
  }
}

/** The last events, newest first. */
export class EventLog {
  constructor({ list, onRequest }) {
    this.list = list;
    this.onRequest = onRequest;
    this.entries = [];
    this.numTaken = 0;
    this.shownKey = "";
  }

  take(worker, { events, dropped_events, time_s }) {
    const { groups } = worker.state.geometry;
    for (const event of events) this.#add({ ...event, worker, groupName: groups[event.group]?.name ?? null });
    if (!dropped_events) return;
    this.#add({ kind: "dropped", count: dropped_events, time_s, worker, request: null, groupName: null, detail: "" });
  }

  /** Show the events of the workers and the group that the filters show. */
  update(filters) {
    const key = `${this.numTaken} ${filters.worker} ${filters.group}`;
    if (key === this.shownKey || this.list.contains(document.activeElement)) return; // a button that is replaced loses the focus
    this.shownKey = key;
    const isShown = ({ worker, groupName }) =>
      filters.shows(worker) && (!filters.group || !groupName || groupName === filters.group);
    const shown = [];
    for (let i = this.entries.length - 1; i >= 0 && shown.length < MAX_EVENTS_SHOWN; i--) {
      if (isShown(this.entries[i])) shown.push(this.entries[i]);
    }
    this.list.replaceChildren(...shown.map((entry) => this.#line(entry)));
  }

  #add(entry) {
    this.numTaken += 1;
    this.entries.push(entry);
    if (this.entries.length > MAX_EVENTS_KEPT) this.entries.shift();
  }

  #line(entry) {
    const line = element("li", { "data-kind": entry.kind }, element("time", {}, formatTime(entry.time_s)), element("b", {}, entry.kind));
    if (entry.request !== null) line.append(requestButton(entry.request, this.onRequest));
    line.append(element("span", {}, eventText(entry)));
    return line;
  }
}

function numBlocksOf(states, groupName, column) {
  let sum = 0;
  for (const state of states) {
    const group = state.geometry.groups.findIndex(({ name }) => name === groupName);
    if (group >= 0) sum += state.numBlocks(group, column);
  }
  return sum;
}

/** A name that may be broken after its underscores. */
function breakable(name) {
  return name.split(/(?<=_)/).flatMap((part, i) => (i ? [element("wbr"), part] : [part]));
}

function swatch(hue, kind, styles) {
  const canvas = element("canvas", { class: "swatch", "aria-hidden": "true" });
  const side = Math.round(SWATCH_CSS_PX * (window.devicePixelRatio || 1));
  const pixels = new Pixels(canvas);
  pixels.resize(side, side);
  pixels.cell(0, 0, side, side, styleNumber(hue, kind, 0, false), styles);
  pixels.flush();
  return canvas;
}

function sumByName(records) {
  const sums = {};
  for (const record of records) for (const [name, value] of Object.entries(record)) sums[name] = (sums[name] ?? 0) + value;
  return sums;
}

function progressOf({ phase, processed, num_tokens, num_cached_tokens, repair }) {
  const parts = [phase, `${formatCount(processed)} of ${formatCount(num_tokens)} tokens`];
  if (num_cached_tokens) parts.push(`${formatCount(num_cached_tokens)} cached`);
  if (repair) parts.push(`repairs ${formatCount(repair[0])} to ${formatCount(repair[1])}`);
  return parts.join(", ");
}

function eventText({ kind, count, groupName, detail }) {
  const where = groupName === null ? "" : ` of ${groupName}`;
  if (EVENTS_OF_BLOCKS.has(kind) && groupName !== null) return `${formatNoun(count, "block")}${where}`;
  const what = {
    evicted: `${formatNoun(count, "block")}${where}`,
    hit: detail ? "" : formatNoun(count, "token"),
    repair: detail ? "" : formatNoun(count, "token"),
    dropped: `${formatCount(count)} more events than a frame holds`,
  }[kind];
  return [what, detail].filter(Boolean).join(", ");
}
