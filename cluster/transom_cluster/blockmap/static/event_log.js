/** The last things that happened, newest first, up to the moment shown. */

import { element } from "./dom.js";
import { formatCount, formatNoun, formatTime } from "./format.js";

const MAX_KEPT = 1000;
const MAX_SHOWN = 60;

/** Fills `list`; `onRequest(id)` is called when a request is chosen. */
export class EventLog {
  constructor({ list, onRequest }) {
    this.list = list;
    this.onRequest = onRequest;
    this.entries = [];
    this.numTaken = 0;
    this.shownKey = "";
  }

  take(worker, header, at_s) {
    const groups = worker.live.geometry.groups;
    for (const event of header.events) this.#add({ ...event, worker, at_s, groupName: groups[event.group]?.name ?? null });
    if (header.dropped_events) {
      this.#add({ kind: "dropped", count: header.dropped_events, time_s: header.time_s, worker, at_s, request: null, groupName: null, detail: "" });
    }
  }

  /** Show what is at or before a moment, of the workers shown. */
  update(shown_s, filters) {
    const newest = this.entries.length ? this.entries[this.entries.length - 1].number : 0;
    const key = `${newest} ${Number.isFinite(shown_s) ? shown_s : "live"} ${filters.worker} ${filters.group}`;
    if (key === this.shownKey || this.list.contains(document.activeElement)) return; // keep the focus where it is
    this.shownKey = key;
    const fits = (entry) =>
      entry.at_s <= shown_s && filters.shows(entry.worker) && (!filters.group || !entry.groupName || entry.groupName === filters.group);
    const shown = [];
    for (let i = this.entries.length - 1; i >= 0 && shown.length < MAX_SHOWN; i--) if (fits(this.entries[i])) shown.push(this.entries[i]);
    this.list.replaceChildren(...shown.map((entry) => this.#line(entry)));
  }

  #add(entry) {
    this.entries.push({ ...entry, number: ++this.numTaken });
    if (this.entries.length > MAX_KEPT) this.entries.shift();
  }

  #line(entry) {
    const line = element("li", { "data-kind": entry.kind }, element("time", {}, formatTime(entry.time_s)), element("b", {}, entry.kind));
    if (entry.request !== null) {
      const choose = () => this.onRequest(entry.request);
      line.append(element("button", { type: "button", class: "request", click: choose }, entry.request));
    }
    line.append(element("span", {}, sayWhat(entry)));
    return line;
  }
}

function sayWhat({ kind, count, groupName, detail }) {
  const where = groupName === null ? "" : ` of ${groupName}`;
  const what = {
    evicted: `${formatNoun(count, "block")}${where}`,
    hit: detail ? "" : formatNoun(count, "token"),
    repair: detail ? "" : formatNoun(count, "token"),
    dropped: `${formatCount(count)} more events than a frame holds`,
  }[kind];
  return [what, detail].filter(Boolean).join(", ");
}
