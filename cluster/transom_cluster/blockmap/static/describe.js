/** Asks the worker about the block that is looked at, once the pointer rests on it. */

const REST_MS = 250;

/** `onAnswer(rows)` gets [[name, text]]; an empty list when there is nothing to say. */
export class Describer {
  constructor({ url, keys, onAnswer }) {
    Object.assign(this, { url, keys, onAnswer });
    this.asked = "";
    this.timer = null;
  }

  /** Look at a block, or at nothing (null). */
  lookAt(target) {
    const query = target === null || target.block === null ? "" : queryOf(target);
    if (query === this.asked) return;
    this.asked = query;
    clearTimeout(this.timer);
    this.onAnswer([]);
    if (query) this.timer = setTimeout(() => this.#ask(query), REST_MS);
  }

  async #ask(query) {
    const rows = await this.#fetchRows(query);
    if (query === this.asked) this.onAnswer(rows);
  }

  async #fetchRows(query) {
    try {
      const response = await fetch(`${this.url}?${query}`, { headers: this.keys.headers() });
      return response.ok ? rowsOf(await response.json()) : [["Details", `the server answered ${response.status}`]];
    } catch (error) {
      return [["Details", `not to be had: ${error.message}`]];
    }
  }
}

function queryOf({ worker, group, block }) {
  return new URLSearchParams({ worker: worker.id, group, block }).toString();
}

/** Any JSON object as rows, nested names joined, what is empty left out. */
export function rowsOf(value, prefix = "") {
  if (Array.isArray(value)) return value.every(isPlain) ? [[prefix, value.join(", ")]] : value.flatMap((item, i) => rowsOf(item, `${prefix} ${i + 1}`));
  if (isPlain(value)) return [[prefix, String(value)]];
  return Object.entries(value).filter(([, item]) => !isNothing(item)).flatMap(([name, item]) => rowsOf(item, nameOf(prefix, name)));
}

function nameOf(prefix, name) {
  const words = name.replaceAll("_", " ");
  return prefix ? `${prefix}: ${words}` : words[0].toUpperCase() + words.slice(1);
}

function isPlain(value) {
  return value === null || typeof value !== "object";
}

function isNothing(value) {
  return value === null || value === "" || (typeof value === "object" && Object.keys(value).length === 0);
}
