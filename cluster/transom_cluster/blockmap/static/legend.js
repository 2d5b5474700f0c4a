/** What each look means, with the number of blocks that have it now, by group. */

import { styleNumber } from "./colours.js";
import { element, setText } from "./dom.js";
import { formatCount } from "./format.js";
import { Pixels } from "./pixels.js";
import { ACTIVE, EMPTY, EVICTED, HELD, LOOSE, REPAIR, SHARED } from "./worker_state.js";

const SWATCH_CSS_PX = 18;
const ROWS = [
  { column: ACTIVE, name: "Active", meaning: "a request uses it" },
  { column: SHARED, name: "Shared", meaning: "active: several requests use it" },
  { column: REPAIR, name: "In repair", meaning: "active: its window is replayed" },
  { column: HELD, name: "Cached, held", meaning: "a checkpoint counts on it" },
  { column: LOOSE, name: "Cached, left behind", meaning: "first to go; fades" },
  { column: EMPTY, name: "Empty", meaning: "holds nothing" },
  { column: EVICTED, name: "Just evicted", meaning: "cached a moment ago" },
];

/** Fills `table`: a row a state, a column a group. */
export class Legend {
  constructor(table) {
    this.table = table;
    this.key = "";
    this.cells = [];
  }

  /** `groups` are names in the order of their hues. */
  update(groups, workers, styles, stylesVersion) {
    const key = `${groups.join("\n")} ${stylesVersion}`;
    if (key !== this.key) this.#build(groups, styles);
    this.key = key;
    ROWS.forEach(({ column }, row) => {
      groups.forEach((name, g) => setText(this.cells[row][g], formatCount(sumOf(workers, name, column))));
    });
  }

  #build(groups, styles) {
    const head = element("tr", {}, element("th", { scope: "col" }, "Block"), ...groups.map((name) => element("th", { scope: "col" }, ...breakable(name))));
    this.cells = ROWS.map(() => groups.map(() => element("span")));
    const rows = ROWS.map((row, r) => {
      const title = element("th", { scope: "row" }, row.name, element("small", {}, row.meaning));
      const cells = groups.map((_, hue) => element("td", {}, swatch(hue, row.column, styles), this.cells[r][hue]));
      return element("tr", {}, title, ...cells);
    });
    this.table.tHead.replaceChildren(head);
    this.table.tBodies[0].replaceChildren(...rows);
  }
}

/** A name that may be broken after its underscores. */
function breakable(name) {
  return name.split(/(?<=_)/).flatMap((part, i) => (i ? [element("wbr"), part] : [part]));
}

function swatch(hue, kind, styles) {
  const canvas = element("canvas", { class: "swatch", "aria-hidden": "true" });
  const side = Math.round(SWATCH_CSS_PX * (window.devicePixelRatio || 1));
  const pixels = new Pixels(canvas);
  pixels.resize(side, side);
  pixels.cell(0, 0, side, side, styleNumber(hue, kind, 0, false), styles);
  pixels.flush();
  return canvas;
}

function sumOf(workers, groupName, column) {
  let sum = 0;
  for (const { shown } of workers) {
    const group = shown.geometry.groups.findIndex(({ name }) => name === groupName);
    if (group >= 0) sum += shown.numBlocks(group, column);
  }
  return sum;
}
