/** The three filters in the toolbar. */

import { element } from "./dom.js";

/** Binds two selects and a text field to the filters. */
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
