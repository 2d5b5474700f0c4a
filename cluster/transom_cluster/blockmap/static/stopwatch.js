/** How long frames keep the main thread busy. `transomBlockMap.stopwatch.report()` in the console shows it. */

const MAX_KEPT = 2000;

export class Stopwatch {
  constructor() {
    this.numFrames = 0;
    this.diffs_ms = [];
    this.wholes_ms = [];
    this.renders_ms = [];
  }

  frameTaken(duration_ms, isWhole) {
    this.numFrames += 1;
    keep(isWhole ? this.wholes_ms : this.diffs_ms, duration_ms);
  }

  rendered(duration_ms) {
    keep(this.renders_ms, duration_ms);
  }

  /** Medians and 95th percentiles in milliseconds. */
  report() {
    const { numFrames, diffs_ms, wholes_ms, renders_ms } = this;
    return { numFrames, diffs_ms: spread(diffs_ms), wholes_ms: spread(wholes_ms), renders_ms: spread(renders_ms) };
  }
}

function keep(list, value) {
  list.push(value);
  if (list.length > MAX_KEPT) list.shift();
}

function spread(list) {
  const sorted = [...list].sort((a, b) => a - b);
  const at = (share) => Number((sorted[Math.floor(share * (sorted.length - 1))] ?? 0).toFixed(2));
  return { median: at(0.5), p95: at(0.95), most: at(1), count: sorted.length };
}
