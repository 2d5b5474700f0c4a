/** Asks the worker about the block that is looked at, once the pointer rests on it. */

import { formatAge, formatCount, formatNoun } from "./format.js";

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

/** What an answer adds to the frames: where the block lies, its longer hash, and the checkpoints that count on it. */
export function rowsOf({ first_byte, hash, cached_s, checkpoints = [] }) {
  const rows = checkpoints.map((checkpoint) => ["Checkpoint", checkpointText(checkpoint)]);
  if (hash) rows.push(["Longer hash", `${hash}…`]);
  if (typeof cached_s === "number") rows.push(["Not used for", formatAge(cached_s)]);
  if (typeof first_byte === "number") rows.push(["First byte", formatCount(first_byte)]);
  return rows;
}

function checkpointText({ kind, boundary_tokens, turns, running, part }) {
  const parts = [`${kind}, at ${formatNoun(boundary_tokens, "token")}, which needs it for its ${part}`];
  if (turns) parts.push(`came back ${formatNoun(turns, "time")}`);
  if (running) parts.push(`${formatNoun(running, "request")} on it`);
  return parts.join("; ");
}
