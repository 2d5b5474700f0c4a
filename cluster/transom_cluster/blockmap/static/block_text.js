/** What there is to say about one block, as rows of a name and a text. */

import { formatAge, formatBytes, formatCount, formatHash, formatNoun } from "./format.js";
import { sequencesOf } from "./sequence_lookup.js";
import { ACTIVE, EMPTY, EVICTED, GONE, HELD, LOOSE, REPAIR, UNKNOWN } from "./worker_state.js";

const STATE_NAMES = {
  [GONE]: "not leased", [EMPTY]: "empty", [ACTIVE]: "active", [LOOSE]: "cached, left behind",
  [HELD]: "cached, held by a checkpoint", [REPAIR]: "active, in a repair", [EVICTED]: "just evicted",
};

/** The state of a block in words. */
export function stateName(state, record) {
  const name = STATE_NAMES[state.states[record]] ?? `state ${state.states[record]}`;
  if (state.states[record] === EVICTED && state.references[record] > 0) return `${name}, in use again`;
  return state.isShared(record) ? `${name}, shared` : name;
}

/** One line, for the tooltip and for screen readers. */
export function blockLine(state, group, block) {
  const { geometry } = state;
  const record = geometry.recordOf(group, block);
  const requests = sequencesOf(state, group, block).map(({ sequence }) => sequence.request);
  const others = requests.length > 1 ? ` and ${formatNoun(requests.length - 1, "other")}` : "";
  const tail = requests.length ? `, ${requests[0]}${others}` : "";
  return `${geometry.groups[group].name} block ${formatCount(block)}: ${stateName(state, record)}${tail}`;
}

/** All that the frames tell: [[name, text]]. */
export function blockRows(worker, group, block) {
  const state = worker.shown;
  const { geometry } = state;
  const record = geometry.recordOf(group, block);
  const { name, kind, block_size, block_bytes } = geometry.groups[group];
  return [
    ["Worker", worker.id],
    ["Group", kind && kind !== name ? `${name} (${kind})` : name],
    ["Block", `${formatCount(block)}, ${formatBytes(block_bytes)}`],
    ["Page", formatCount(geometry.pageOf(group, block))],
    ["State", stateName(state, record)],
    ["For", formatAge(state.age_s(record))],
    ["References", formatCount(state.references[record])],
    ["Tokens", tokenRange(state.logical[record], block_size)],
    ["Hash", state.hashes[record] ? `${formatHash(state.hashes[record])}…` : "not published"],
  ];
}

/** A free page has no blocks to describe. */
export function pageLine(state, page) {
  const owner = state.owners[page];
  const lease = owner ? `leased to ${state.geometry.groups[owner - 1].name}` : "free";
  return `Page ${formatCount(page)}: ${lease}`;
}

/** The tokens at a place in a sequence: "16 to 31 (logical block 1)". */
export function tokenRange(logical, blockSize) {
  if (logical === UNKNOWN) return "unknown";
  const first = logical * blockSize;
  return `${formatCount(first)} to ${formatCount(first + blockSize - 1)} (logical block ${formatCount(logical)})`;
}
