/**
 * What the page says about one block: in a tooltip beside it, in the inspector panel, and with the details that the server sends
 * when asked (`/blocks/describe`). Row: [name, text].
 */

import { element, formatAge, formatBytes, formatCount, formatNoun, requestButton, setText } from "./text.js";
import { stateOf } from "./map_view.js";
import { ACTIVE, EVICTABLE, EVICTED, FREE, PINNED, REPAIR, UNKNOWN, UNLEASED } from "./worker_state.js";

const STATE_NAMES = {
  [UNLEASED]: "not leased", [FREE]: "free", [ACTIVE]: "active", [EVICTABLE]: "cached, evictable",
  [PINNED]: "cached, pinned by a checkpoint", [REPAIR]: "active, in a window repair", [EVICTED]: "just evicted",
};
const ASK_AFTER_MS = 250; // the pointer stays on a block for so long before the server is asked
const TOOLTIP_OFFSET_CSS_PX = 14;

/** One line about a hit. */
function lineOf({ worker, tier, page, group, block }) {
  const state = stateOf({ worker, tier });
  if (block === null) return pageLine(state, page);
  const [first, ...others] = state.sequencesOf(group, block).map(({ sequence }) => sequence.request);
  const requests = first === undefined ? "" : others.length ? `, ${first} and ${formatNoun(others.length, "other")}` : `, ${first}`;
  const { name } = state.geometry.groups[group];
  const where = tier === "host" ? "host tier, " : "";
  return `${where}${name} block ${formatCount(block)}: ${stateName(state, state.geometry.recordOf(group, block), tier)}${requests}`;
}

/** A line of text beside the block at the cursor, inside `box`. */
export class Tooltip {
  constructor({ tip, box }) {
    this.tip = tip;
    this.box = box;
  }

  /** `rect` is the block's, in CSS pixels of the box; null hides the tooltip. */
  show(target, rect) {
    this.tip.hidden = target === null || rect === null;
    if (this.tip.hidden) return;
    setText(this.tip, lineOf(target));
    const { clientWidth, clientHeight } = this.box;
    const left = Math.min(rect.left + rect.width + TOOLTIP_OFFSET_CSS_PX, clientWidth - this.tip.offsetWidth - 4);
    const below = rect.top + rect.height + TOOLTIP_OFFSET_CSS_PX;
    const above = Math.max(4, rect.top - this.tip.offsetHeight - TOOLTIP_OFFSET_CSS_PX);
    this.tip.style.left = `${Math.max(4, left)}px`;
    this.tip.style.top = `${below + this.tip.offsetHeight < clientHeight ? below : above}px`;
  }
}

/** The panel about one block. `onRequest(id)` is called when the user chooses a request. */
export class Inspector {
  constructor({ panel, onRequest }) {
    this.hint = panel.querySelector("[data-hint]");
    this.rows = panel.querySelector("[data-rows]");
    this.requests = panel.querySelector("[data-requests]");
    this.details = panel.querySelector("[data-details]");
    this.onRequest = onRequest;
    this.requestsKey = "";
  }

  show(target) {
    const hasBlock = target !== null && target.block !== null;
    const hint = target === null ? "Point at a block to read what it is. A click keeps it, a double click shows the blocks of its request only." : pageLine(stateOf(target), target.page);
    setText(this.hint, hasBlock ? "" : hint);
    this.hint.hidden = hasBlock;
    fillRows(this.rows, hasBlock ? blockRows(target) : []);
    this.#showRequests(hasBlock ? target : null);
  }

  /** Show the server's details as rows; an empty list while there are none. */
  showDetails(rows) {
    fillRows(this.details, rows);
  }

  #showRequests(target) {
    const found = target === null ? [] : stateOf(target).sequencesOf(target.group, target.block);
    const blockSize = target?.worker.state.geometry.groups[target.group].block_size;
    const lines = found.map(({ sequence, logical }) => [sequence, ` tokens ${tokenRange(logical, blockSize)}, ${sequence.phase}`]);
    const key = JSON.stringify(lines.map(([sequence, text]) => [sequence.id, sequence.request, text]));
    if (key === this.requestsKey) return; // a button that is replaced loses the focus
    this.requestsKey = key;
    this.requests.replaceChildren(...lines.map(([{ request }, text]) => element("li", {}, requestButton(request, this.onRequest), text)));
  }
}

/** Asks the server about the block at the cursor. `onRows(rows)` gets the details; an empty list while there are none. */
export class Describer {
  constructor({ url, keys, onRows }) {
    Object.assign(this, { url, keys, onRows });
    this.requested = "";
    this.timer = null;
  }

  /** Ask about a block, or about nothing (null). */
  lookAt(target) {
    const query = target === null || target.block === null ? "" : queryOf(target);
    if (query === this.requested) return;
    this.requested = query;
    clearTimeout(this.timer);
    this.onRows([]);
    if (query) this.timer = setTimeout(() => this.#ask(query), ASK_AFTER_MS);
  }

  async #ask(query) {
    const rows = await this.#fetchRows(query);
    if (query === this.requested) this.onRows(rows);
  }

  async #fetchRows(query) {
    try {
      const response = await fetch(`${this.url}?${query}`, { headers: this.keys.headers() });
      return response.ok ? detailRows(await response.json()) : [["Details", `the server answered ${response.status}`]];
    } catch (error) {
      return [["Details", `not available: ${error.message}`]];
    }
  }
}

function stateName(state, record, tier) {
  if (tier === "host" && state.states[record] === PINNED) return "needed";
  const name = STATE_NAMES[state.states[record]] ?? `state ${state.states[record]}`;
  if (state.states[record] === EVICTED && state.references[record] > 0) return `${name}, in use again`;
  return state.isShared(record) ? `${name}, shared` : name;
}

function pageLine(state, page) {
  const owner = state.owners[page];
  const lease = owner ? `leased to ${state.geometry.groups[owner - 1].name}` : "free";
  return `Page ${formatCount(page)}: ${lease}`;
}

/** What the frames say about a block. */
function blockRows({ worker, tier, group, block }) {
  const state = stateOf({ worker, tier });
  const { geometry } = state;
  const record = geometry.recordOf(group, block);
  const { name, kind, block_size, block_bytes } = geometry.groups[group];
  const known = [
    ["Worker", tier === "host" ? `${worker.id}, host tier` : worker.id],
    ["Group", kind && kind !== name ? `${name} (${kind})` : name],
    ["Block", `${formatCount(block)}, ${formatBytes(block_bytes)}`],
    ["Page", formatCount(geometry.pageOf(group, block))],
    ["State", stateName(state, record, tier)],
  ];
  if (tier === "host") return known;
  const hash = state.hashes[record].toString(16).padStart(8, "0");
  return [
    ...known,
    ["For", formatAge(state.age_s(record))],
    ["References", formatCount(state.references[record])],
    ["Tokens", tokenRange(state.logical[record], block_size)],
    ["Hash", state.hashes[record] ? `${hash}…` : "not published"],
  ];
}

/** The tokens of a logical block: "16 to 31 (logical block 1)". */
function tokenRange(logical, blockSize) {
  if (logical === UNKNOWN) return "unknown";
  const first = logical * blockSize;
  return `${formatCount(first)} to ${formatCount(first + blockSize - 1)} (logical block ${formatCount(logical)})`;
}

/**
 * What the server's details add to the frames: the first byte, a longer hash, and the checkpoints that pin the block. Of a host block
 * also its references, requests and tokens, since frames tell only its state.
 */
function detailRows({ tier, references, sequences, logical, tokens, first_byte, hash, cached_s, checkpoints = [] }) {
  const rows = checkpoints.map((checkpoint) => ["Checkpoint", checkpointText(checkpoint)]);
  if (tier === "host") {
    rows.push(...sequences.map(({ request }) => ["Request", request]), ["References", formatCount(references)]);
    rows.push(["Tokens", tokenRange(logical ?? UNKNOWN, tokens)]);
  }
  if (hash) rows.push([tier === "host" ? "Hash" : "Longer hash", `${hash}…`]);
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

function queryOf({ worker, tier, group, block }) {
  const query = new URLSearchParams({ worker: worker.id, group, block });
  if (tier === "host") query.set("tier", tier);
  return query.toString();
}

function fillRows(list, rows) {
  while (list.children.length > 2 * rows.length) list.lastElementChild.remove();
  while (list.children.length < 2 * rows.length) list.append(element(list.children.length % 2 ? "dd" : "dt"));
  rows.forEach(([name, text], i) => {
    setText(list.children[2 * i], name);
    setText(list.children[2 * i + 1], text);
  });
}
