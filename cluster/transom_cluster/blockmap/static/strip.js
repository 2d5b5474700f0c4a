/**
 * The strip below the map: five minutes of utilisation, for each group a stacked area of its leased blocks by state.
 *
 * Column: the number of blocks of a group in each of BANDS at one second, or null where there is no sample.
 */

import { bandColours, toCss } from "./colours.js";
import { BANDS, SPAN_S, sumOfGroup } from "./history.js";
import { element, formatCount, setText } from "./text.js";

/** Fills `box` with a row a group. A click calls `onSeek(time_s)` with the time at that place. */
export class Strip {
  constructor({ box, onSeek }) {
    this.box = box;
    this.onSeek = onSeek;
    this.rows = new Map();
    this.newest_s = null;
  }

  /** `colours` is {theme, ground, text, accent}; `shown_s` is the time on the screen, null when live. */
  update({ groups, workers, hues, colours, shown_s, chosenGroup }) {
    const seconds = workers.map(({ series }) => series.newestSecond).filter((second) => second !== null);
    if (!seconds.length) return;
    this.newest_s = Math.max(...seconds);
    this.#removeOthers(groups);
    for (const name of groups) {
      const row = this.#rowOf(name);
      row.element.classList.toggle("dimmed", chosenGroup !== "" && chosenGroup !== name);
      const columns = this.#columnsOf(workers, name);
      drawStack(row.canvas, columns, bandColours(colours.theme, hues.indexOf(name), colours.ground), colours, this.#markAt(shown_s));
      setText(row.label, describe(columns, shown_s === null ? SPAN_S - 1 : this.#indexOf(shown_s)));
    }
  }

  #columnsOf(workers, name) {
    return Array.from({ length: SPAN_S }, (_, i) => sumOfGroup(workers, name, this.newest_s - SPAN_S + 1 + i));
  }

  #indexOf(time_s) {
    return Math.min(SPAN_S - 1, Math.max(0, Math.floor(time_s) - this.newest_s + SPAN_S - 1));
  }

  #markAt(shown_s) {
    return shown_s === null ? null : (this.#indexOf(shown_s) + 0.5) / SPAN_S;
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
      const canvas = element("canvas", { role: "img", "aria-label": title, click: (event) => this.#seek(event) });
      const label = element("span");
      row = { canvas, label, element: element("div", { class: "strip-row" }, element("p", {}, element("b", {}, name), " ", label), canvas) };
      this.rows.set(name, row);
      this.box.append(row.element);
    }
    return row;
  }

  #seek({ offsetX, target }) {
    this.onSeek(this.newest_s - SPAN_S + 1 + Math.ceil((offsetX / target.clientWidth) * SPAN_S));
  }
}

function drawStack(canvas, columns, bands, { ground, text, accent }, mark) {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [Math.round(canvas.clientWidth * ratio), Math.round(canvas.clientHeight * ratio)];
  if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext("2d");
  context.fillStyle = toCss(ground);
  context.fillRect(0, 0, width, height);
  const highest = Math.max(1, ...columns.map((column) => (column ? sum(column) : 0)));
  columns.forEach((column, i) => column && drawColumn(context, column, i, { width, height, highest, bands, text }));
  if (mark !== null) {
    context.fillStyle = accent;
    context.fillRect(Math.round(mark * width) - ratio, 0, 2 * ratio, height);
  }
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

/** The numbers at one place of the strip, or the newest ones where there is no sample. */
function describe(columns, index) {
  const column = columns[index] ?? columns.findLast((candidate) => candidate !== null);
  if (!column) return "";
  const leased = sum(column);
  const shares = BANDS.map((band, b) => `${leased ? Math.round((100 * column[b]) / leased) : 0} % ${band}`);
  return `${formatCount(leased)} leased: ${shares.join(", ")}`;
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}
