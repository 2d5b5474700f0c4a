/**
 * The strip below the map: five minutes of utilisation, for each group a stacked area of its leased blocks by state.
 *
 * Column: the number of blocks of a group in each of BANDS at one second, or null where there is no sample.
 */

import { bandColours, toCss } from "./colours.js";
import { element, formatCount, setText } from "./text.js";

const SPAN_S = 300;
const BANDS = ["active", "pinned", "evictable", "free"]; // in the order of a frame's `history`
const COUNT_NAMES = ["active", "held", "loose", "empty"]; // the bands in a frame's `counts`

/** Fills `box` with a row a group. */
export class Strip {
  constructor(box) {
    this.box = box;
    this.rows = new Map();
    this.newest_s = null;
  }

  /** `colours` is {theme, ground, text}. */
  update({ groups, workers, hues, colours, chosenGroup }) {
    const seconds = workers.map(({ series }) => series.newestSecond).filter((second) => second !== null);
    if (!seconds.length) return;
    this.newest_s = Math.max(...seconds);
    this.#removeOthers(groups);
    for (const name of groups) {
      const row = this.#rowOf(name);
      row.element.classList.toggle("dimmed", chosenGroup !== "" && chosenGroup !== name);
      const columns = this.#columnsOf(workers, name);
      drawStack(row.canvas, columns, bandColours(colours.theme, hues.indexOf(name), colours.ground), colours);
      setText(row.label, describe(columns));
    }
  }

  #columnsOf(workers, name) {
    return Array.from({ length: SPAN_S }, (_, i) => sumOfGroup(workers, name, this.newest_s - SPAN_S + 1 + i));
  }

  #removeOthers(groups) {
    for (const [name, row] of this.rows) {
      if (groups.includes(name)) continue;
      row.element.remove();
      this.rows.delete(name);
    }
  }

  #rowOf(name) {
    let row = this.rows.get(name);
    if (row === undefined) {
      const title = `Blocks of ${name} by state over the last five minutes`;
      const canvas = element("canvas", { role: "img", "aria-label": title });
      const label = element("span");
      row = { canvas, label, element: element("div", { class: "strip-row" }, element("p", {}, element("b", {}, name), " ", label), canvas) };
      this.rows.set(name, row);
      this.box.append(row.element);
    }
    return row;
  }
}

/** One worker's numbers of blocks, a sample a second: [free pages, [a number for each of BANDS] of each group]. */
export class UtilisationSeries {
  #newest; // second

  constructor() {
    this.samples = new Map();
  }

  takeFrame(header) {
    for (const [time_s, ...sample] of header.history ?? []) this.#put(time_s, sample);
    this.#put(header.time_s, [header.free_pages, ...header.counts.map((counts) => COUNT_NAMES.map((name) => counts[name]))]);
  }

  /** The sample of a second. The newest sample counts until there is another, since an idle worker sends few frames. */
  at(second) {
    return this.samples.get(Math.min(second, this.#newest)) ?? null;
  }

  get newestSecond() {
    return this.#newest ?? null;
  }

  #put(time_s, sample) {
    const second = Math.floor(time_s);
    this.#repeatUntil(second);
    this.samples.set(second, sample);
    if (this.#newest === undefined || second > this.#newest) {
      this.#newest = second;
      this.#trim();
    }
  }

  #repeatUntil(second) {
    const newest = this.samples.get(this.#newest);
    for (let between = Math.max(this.#newest + 1, second - SPAN_S); between < second; between++) this.samples.set(between, newest);
  }

  #trim() {
    for (const second of this.samples.keys()) {
      if (second >= this.#newest - SPAN_S) break; // the map is in the order of time
      this.samples.delete(second);
    }
  }
}

/** The sum of the workers' samples of a second, for the group of a name: a number for each of BANDS; null without samples. */
function sumOfGroup(workers, groupName, second) {
  let sum = null;
  for (const worker of workers) {
    const sample = worker.series.at(second);
    const index = worker.state.geometry.groups.findIndex((group) => group.name === groupName);
    if (sample === null || index < 0) continue;
    sum = sample[1 + index].map((count, band) => count + (sum ? sum[band] : 0));
  }
  return sum;
}

function drawStack(canvas, columns, bands, { ground, text }) {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [Math.round(canvas.clientWidth * ratio), Math.round(canvas.clientHeight * ratio)];
  if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext("2d");
  context.fillStyle = toCss(ground);
  context.fillRect(0, 0, width, height);
  const highest = Math.max(1, ...columns.map((column) => (column ? sum(column) : 0)));
  columns.forEach((column, i) => column && drawColumn(context, column, i, { width, height, highest, bands, text }));
}

function drawColumn(context, column, i, { width, height, highest, bands, text }) {
  const left = Math.floor((i * width) / SPAN_S);
  const right = Math.floor(((i + 1) * width) / SPAN_S);
  let bottom = height;
  BANDS.forEach((band, b) => {
    const top = b === BANDS.length - 1 ? height - (sum(column) / highest) * (height - 2) : bottom - (column[b] / highest) * (height - 2);
    context.fillStyle = toCss(bands[band]);
    context.fillRect(left, top, right - left, bottom - top);
    bottom = top;
  });
  context.fillStyle = toCss(text);
  context.globalAlpha = 0.35; // a thin line on top, so that pale bands have an edge
  context.fillRect(left, bottom, right - left, 1);
  context.globalAlpha = 1;
}

/** The newest numbers. */
function describe(columns) {
  const column = columns.findLast((candidate) => candidate !== null);
  if (!column) return "";
  const leased = sum(column);
  const shares = BANDS.map((band, b) => `${leased ? Math.round((100 * column[b]) / leased) : 0} % ${band}`);
  return `${formatCount(leased)} leased: ${shares.join(", ")}`;
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}
