/** Which sequences refer to a block, and which blocks a sequence refers to: from the runs in the frames. */

/** The sequences whose table holds a block: [{sequence, logical}]. */
export function sequencesOf(state, group, block) {
  const found = [];
  for (const sequence of state.sequences.values()) {
    const logical = logicalIndexIn(sequence.runs[group], block);
    if (logical !== null) found.push({ sequence, logical });
  }
  return found;
}

/** A byte for each record: 1 if a sequence whose request contains `text` refers to it. */
export function recordsOfRequests(state, text) {
  const chosen = new Uint8Array(state.geometry.numRecords);
  const wanted = text.toLowerCase();
  for (const sequence of state.sequences.values()) {
    if (sequence.request.toLowerCase().includes(wanted)) markRuns(chosen, state.geometry, sequence);
  }
  return chosen;
}

function logicalIndexIn(runs, block) {
  for (const [firstLogical, firstBlock, count] of runs ?? []) {
    if (block >= firstBlock && block < firstBlock + count) return firstLogical + block - firstBlock;
  }
  return null;
}

function markRuns(chosen, geometry, { runs }) {
  runs.forEach((groupRuns, group) => {
    for (const [, firstBlock, count] of groupRuns) {
      const start = geometry.recordOf(group, firstBlock);
      chosen.fill(1, start, start + count);
    }
  });
}
