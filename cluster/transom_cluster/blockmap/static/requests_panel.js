/** The requests that run now: how far each is, what came from the cache; a click shows its blocks only. */

import { element, setText } from "./dom.js";
import { formatCount } from "./format.js";

const MAX_ROWS = 40;

/** Fills `list` and the suggestions of the request filter. */
export class RequestsPanel {
  constructor({ list, suggestions, onRequest }) {
    Object.assign(this, { list, suggestions, onRequest });
    this.rows = new Map();
  }

  update(workers, chosen) {
    const sequences = workers.flatMap(({ id, shown }) => [...shown.sequences.values()].map((sequence) => [`${id}/${sequence.id}`, sequence]));
    const kept = new Map(sequences.slice(0, MAX_ROWS));
    this.#dropOthers(kept);
    for (const [key, sequence] of kept) this.#show(key, sequence, chosen);
    this.#suggest(sequences.map(([, { request }]) => request));
  }

  #dropOthers(kept) {
    for (const [key, row] of this.rows) {
      if (kept.has(key)) continue;
      row.remove();
      this.rows.delete(key);
    }
  }

  #show(key, sequence, chosen) {
    let row = this.rows.get(key);
    if (row === undefined) {
      const choose = () => this.onRequest(sequence.request);
      row = element("li", {}, element("button", { type: "button", class: "request", click: choose }, sequence.request), element("span"));
      this.rows.set(key, row);
      this.list.append(row);
    }
    row.firstChild.setAttribute("aria-pressed", String(chosen !== "" && sequence.request.toLowerCase().includes(chosen.toLowerCase())));
    setText(row.lastChild, progressOf(sequence));
  }

  #suggest(requests) {
    const key = requests.join("\n");
    if (key === this.suggestedKey) return;
    this.suggestedKey = key;
    this.suggestions.replaceChildren(...[...new Set(requests)].map((value) => element("option", { value })));
  }
}

function progressOf({ phase, processed, num_tokens, num_cached_tokens, repair }) {
  const parts = [phase, `${formatCount(processed)} of ${formatCount(num_tokens)} tokens`];
  if (num_cached_tokens) parts.push(`${formatCount(num_cached_tokens)} cached`);
  if (repair) parts.push(`repairs ${formatCount(repair[0])} to ${formatCount(repair[1])}`);
  return parts.join(", ");
}
