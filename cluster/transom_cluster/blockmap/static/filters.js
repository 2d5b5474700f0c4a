/** The filters: one worker or all, one group or all, and requests whose id contains a text. */

import { element } from "./text.js";

/** The user's choice; "" means all. `onChange` is called after each change. */
export class Filters {
  constructor(onChange) {
    this.worker = "";
    this.group = "";
    this.request = "";
    this.onChange = onChange;
    this.chosen = new Map(); // tier and worker id -> {state, time_s, request, records}
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

  /** A function (record, group) that says whether a block of a tier's state is dimmed, or null if none is. */
  dimmer(worker, state) {
    const { group } = this;
    const wanted = state.geometry.groups.findIndex(({ name }) => name === group);
    const records = this.request === "" ? null : this.#recordsOf(worker, state);
    if (group === "" && records === null) return null;
    return (record, g) => (group !== "" && g !== wanted) || (records !== null && records[record] === 0);
  }

  /** The records that the request filter chooses, computed once for each state. */
  #recordsOf(worker, state) {
    const { time_s } = worker.state;
    const key = `${state === worker.state ? "device" : "host"} ${worker.id}`;
    const known = this.chosen.get(key);
    if (known?.state === state && known.time_s === time_s && known.request === this.request) return known.records;
    const records = state.recordsOfRequests(this.request);
    this.chosen.set(key, { state, time_s, request: this.request, records });
    return records;
  }
}

/** The toolbar's two selects, text field and button, bound to the filters. */
export class FilterControls {
  constructor({ worker, group, request, clear, filters }) {
    Object.assign(this, { worker, group, request, clear, filters });
    worker.addEventListener("change", () => filters.set({ worker: worker.value }));
    group.addEventListener("change", () => filters.set({ group: group.value }));
    request.addEventListener("input", () => filters.set({ request: request.value.trim() }));
    clear.addEventListener("click", () => filters.set({ worker: "", group: "", request: "" }));
  }

  update(workerIds, groupNames) {
    fillOptions(this.worker, "All workers", workerIds, this.filters.worker);
    fillOptions(this.group, "All groups", groupNames, this.filters.group);
    if (this.request.value.trim() !== this.filters.request) this.request.value = this.filters.request;
    this.clear.disabled = !this.filters.areSet;
  }
}

function fillOptions(select, allText, names, chosen) {
  const key = names.join("\n");
  if (select.dataset.key !== key) {
    select.dataset.key = key;
    select.replaceChildren(element("option", { value: "" }, allText), ...names.map((name) => element("option", { value: name }, name)));
  }
  if (select.value !== chosen) select.value = chosen;
}
