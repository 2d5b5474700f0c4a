/** Where each worker's section lies in the map, and how big a cell is at a zoom. */

import { layoutPages } from "./layout.js";

export const HEADING_CSS_PX = 34;
const MARGIN_CSS_PX = 10;
const CELL_SIDES_CSS_PX = [2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 52];
const SMALLEST_FIT = 1; // index: cells of 3 pixels; below that one scrolls rather than squints
const LARGEST_FIT = 15;
const MOST_MAP_CSS_PX = 15_000_000; // browsers stop laying out soon after

/** The zoom: `level` is an index of cell sides, or null for the largest at which everything fits. */
export class Zoom {
  constructor() {
    this.level = null;
    this.fitted = SMALLEST_FIT;
  }

  change(by) {
    this.level = Math.min(Math.max((this.level ?? this.fitted) + by, 0), CELL_SIDES_CSS_PX.length - 1);
  }

  fit() {
    this.level = null;
  }

  get side_css_px() {
    return CELL_SIDES_CSS_PX[this.level ?? this.fitted];
  }
}

/** Place the workers below each other: {sections: [{worker, layout, top, pagesTop, bottom}], heightPx}, device pixels. */
export function placeSections(workers, zoom, { widthPx, heightPx, pixelRatio }) {
  const place = (level) => placeAt(workers, CELL_SIDES_CSS_PX[level], widthPx, pixelRatio);
  if (zoom.level !== null) {
    const placed = place(zoom.level);
    return placed.heightPx <= MOST_MAP_CSS_PX * pixelRatio ? placed : place(SMALLEST_FIT);
  }
  for (let level = LARGEST_FIT; ; level--) {
    const placed = place(level);
    if (placed.heightPx > heightPx && level > SMALLEST_FIT) continue;
    zoom.fitted = level;
    return placed;
  }
}

function placeAt(workers, sideCssPx, widthPx, pixelRatio) {
  const cellPx = Math.max(1, Math.round(sideCssPx * pixelRatio));
  const headingPx = Math.round(HEADING_CSS_PX * pixelRatio);
  const marginPx = Math.round(MARGIN_CSS_PX * pixelRatio);
  const sections = [];
  let top = 0;
  for (const worker of workers) {
    const layout = layoutPages(worker.shown.geometry, widthPx, cellPx);
    const pagesTop = top + headingPx;
    const bottom = pagesTop + layout.heightPx;
    sections.push({ worker, layout, top, pagesTop, bottom });
    top = bottom + marginPx;
  }
  return { sections, heightPx: top };
}
