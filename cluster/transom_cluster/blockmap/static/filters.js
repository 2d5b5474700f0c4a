/** What is looked at: one worker or all, one group or all, requests whose id contains a text. */

import { recordsOfRequests } from "./sequence_lookup.js";

/** Holds the choice; `onChange` is called after each change. */
export class Filters {
  constructor(onChange) {
    this.worker = "";
    this.group = "";
    this.request = "";
    this.onChange = onChange;
    this.chosen = new Map(); // worker id -> {state, time_s, request, records}
  }

  set(choice) {
    Object.assign(this, choice);
    this.onChange();
  }

  shows(worker) {
    return this.worker === "" || this.worker === worker.id;
  }

  get areSet() {
    return this.worker !== "" || this.group !== "" || this.request !== "";
  }

  /** A function (record, group) that says whether a block is dimmed, or null if none is. */
  dimmer(worker) {
    const { state, group, request } = { state: worker.shown, group: this.group, request: this.request };
    const wanted = state.geometry.groups.findIndex((candidate) => candidate.name === group);
    const records = request === "" ? null : this.#recordsOf(worker);
    if (group === "" && records === null) return null;
    return (record, g) => (group !== "" && g !== wanted) || (records !== null && records[record] === 0);
  }

  #recordsOf(worker) {
    const known = this.chosen.get(worker.id);
    const state = worker.shown;
    if (known?.state === state && known.time_s === state.time_s && known.request === this.request) return known.records;
    const records = recordsOfRequests(state, this.request);
    this.chosen.set(worker.id, { state, time_s: state.time_s, request: this.request, records });
    return records;
  }
}
