/**
 * Where blocks lie, in a worker's memory and on the canvas.
 *
 * Page: a piece of the worker's KV memory of a fixed size, leased to one group at a time. Page p has those blocks of a group that
 * lie wholly inside it. Tile: a page on the canvas. All tiles of a worker are equal and in the order of memory, and the cells of
 * a group fill the tile, so that area is bytes. Section: a heading and the tiles of one tier of a worker; sections lie below each other.
 *
 * Lengths on the canvas are device pixels, but for those whose names say CSS pixels.
 */

const HEADING_CSS_PX = 34;
const MARGIN_CSS_PX = 10;
const CELL_SIDES_CSS_PX = [2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 52];
const SMALLEST_FIT = 1; // index of cells of 3 pixels: where even those do not fit, the map scrolls
const LARGEST_FIT = 15;
const MAX_MAP_CSS_PX = 15_000_000; // browsers stop the layout a little above this height
const MIN_CELL_WITH_GAP_PX = 5; // between smaller cells the gaps would outweigh the cells
const BORDER_PX = 1;

/** One worker's pages and groups, and where the records of each group start in arrays of all blocks. */
export class Geometry {
  constructor(header) {
    this.model = header.model;
    this.identity = header.identity ?? ""; // of the model: hexadecimal digits
    this.pageBytes = header.page_bytes;
    this.numPages = header.num_pages;
    this.groups = header.groups;
    this.offsets = offsetsOf(header.groups);
    this.numRecords = header.groups.reduce((sum, group) => sum + group.num_blocks, 0);
    this.firstBlocks = header.groups.map((group) => this.#edges(group, 0));
    this.endBlocks = header.groups.map((group) => this.#edges(group, 1));
    this.maxBlocksPerPage = header.groups.map((_, g) => this.#mostBlocks(g));
    this.key = JSON.stringify([this.model, this.identity, this.pageBytes, this.numPages, this.groups]);
  }

  /** The index of a block's record in arrays of all blocks. */
  recordOf(group, block) {
    return this.offsets[group] + block;
  }

  /** The page that has a block's first byte. */
  pageOf(group, block) {
    return Math.floor((block * this.groups[group].stride_bytes) / this.pageBytes);
  }

  /** For each page the first block inside it (side 0), or the first block after that (side 1). */
  #edges(group, side) {
    const edges = new Uint32Array(this.numPages);
    const round = side === 0 ? Math.ceil : Math.floor;
    for (let page = 0; page < this.numPages; page++) {
      edges[page] = Math.min(round(((page + side) * this.pageBytes) / group.stride_bytes), group.num_blocks);
    }
    return edges;
  }

  #mostBlocks(group) {
    let most = 0;
    for (let page = 0; page < this.numPages; page++) {
      most = Math.max(most, this.endBlocks[group][page] - this.firstBlocks[group][page]);
    }
    return most;
  }
}

/** Lay out one worker's pages. `cellPx` is the side of a cell of the group with the most blocks in a page. */
export function layoutPages(geometry, widthPx, cellPx) {
  const mostBlocks = Math.max(1, ...geometry.maxBlocksPerPage);
  const gapPx = cellPx >= 10 ? 4 : 2;
  const maxCellColumns = Math.max(1, Math.floor((widthPx - gapPx - 2 * BORDER_PX) / cellPx));
  const cellColumns = Math.min(maxCellColumns, Math.ceil(Math.sqrt(mostBlocks)));
  const innerW = cellColumns * cellPx;
  const innerH = Math.ceil(mostBlocks / cellColumns) * cellPx;
  const pitchX = innerW + 2 * BORDER_PX + gapPx;
  const pitchY = innerH + 2 * BORDER_PX + gapPx;
  const columns = Math.max(1, Math.floor(widthPx / pitchX));
  const grids = geometry.maxBlocksPerPage.map((num) => gridOf(Math.max(1, num), innerW, innerH));
  const heightPx = Math.ceil(geometry.numPages / columns) * pitchY;
  return { innerW, innerH, pitchX, pitchY, columns, grids, heightPx, maxSlots: mostBlocks };
}

/** The upper left corner of a tile, inside its border. */
export function pageCorner(layout, page) {
  const x = (page % layout.columns) * layout.pitchX + BORDER_PX;
  const y = Math.floor(page / layout.columns) * layout.pitchY + BORDER_PX;
  return [x, y];
}

/** The rectangle [x, y, width, height] of a block, without the gap to its neighbours. */
export function blockRect(layout, geometry, group, block) {
  const page = geometry.pageOf(group, block);
  const slot = block - geometry.firstBlocks[group][page];
  const [x, y] = pageCorner(layout, page);
  const { xs, ys, columns } = layout.grids[group];
  const [column, row] = [slot % columns, Math.floor(slot / columns)];
  const [w, h] = [xs[column + 1] - xs[column], ys[row + 1] - ys[row]];
  return [x + xs[column], y + ys[row], w - gapOf(w, h), h - gapOf(w, h)];
}

/** The page at a point, or -1. */
export function pageAt(layout, numPages, x, y) {
  const column = Math.floor(x / layout.pitchX);
  const page = Math.floor(y / layout.pitchY) * layout.columns + column;
  return x < 0 || y < 0 || column >= layout.columns || page >= numPages ? -1 : page;
}

/** The block of a group at a point of a page, or -1. */
export function blockAt(layout, geometry, page, group, x, y) {
  const [pageX, pageY] = pageCorner(layout, page);
  const { xs, ys, columns } = layout.grids[group];
  const column = lastAtMost(xs, x - pageX);
  const row = lastAtMost(ys, y - pageY);
  const block = geometry.firstBlocks[group][page] + row * columns + column;
  const isInside = column >= 0 && row >= 0 && column < columns && row < ys.length - 1;
  return isInside && block < geometry.endBlocks[group][page] ? block : -1;
}

/** The gap between cells of a size. */
export function gapOf(w, h) {
  const side = Math.min(w, h);
  return side < MIN_CELL_WITH_GAP_PX ? 0 : Math.max(1, Math.round(side / 14));
}

/** The zoom: `level` is an index of cell sides, or null for the largest cells with which all sections fit the window. */
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
}

/**
 * Place the workers below each other, each with its host tier behind the device: {sections: [{worker, tier, layout, top, pagesTop,
 * bottom}], heightPx}. Host tiers may be many times larger than devices: unless the user has zoomed, they have smaller cells, with
 * which they take half of the window if they can.
 */
export function placeSections(workers, zoom, { widthPx, heightPx, pixelRatio }) {
  const hostLevel = zoom.level ?? fittingHostLevel(workers, { widthPx, heightPx, pixelRatio });
  const place = (level) => {
    const hostSideCssPx = CELL_SIDES_CSS_PX[Math.min(level, hostLevel)];
    return placeAt(workers, CELL_SIDES_CSS_PX[level], hostSideCssPx, widthPx, pixelRatio);
  };
  if (zoom.level !== null) {
    const placed = place(zoom.level);
    return placed.heightPx <= MAX_MAP_CSS_PX * pixelRatio ? placed : place(SMALLEST_FIT);
  }
  for (let level = LARGEST_FIT; ; level--) {
    const placed = place(level);
    if (Math.min(placed.heightPx, placed.heightPx - placed.hostPx + heightPx / 2) > heightPx && level > SMALLEST_FIT) continue;
    zoom.fitted = level;
    return placed;
  }
}

/** The largest cells with which all host tiers together take half of the window; the smallest if none do. */
function fittingHostLevel(workers, { widthPx, heightPx, pixelRatio }) {
  const hosts = workers.flatMap(({ state }) => (state.host ? [state.host.geometry] : []));
  for (let level = LARGEST_FIT; level > 0; level--) {
    const cellPx = Math.max(1, Math.round(CELL_SIDES_CSS_PX[level] * pixelRatio));
    const heights = hosts.map((geometry) => layoutPages(geometry, widthPx, cellPx).heightPx);
    if (heights.reduce((sum, height) => sum + height, 0) <= heightPx / 2) return level;
  }
  return 0;
}

function placeAt(workers, sideCssPx, hostSideCssPx, widthPx, pixelRatio) {
  const sidePx = (cssPx) => Math.max(1, Math.round(cssPx * pixelRatio));
  const headingPx = Math.round(HEADING_CSS_PX * pixelRatio);
  const marginPx = Math.round(MARGIN_CSS_PX * pixelRatio);
  const sections = [];
  let top = 0;
  let hostPx = 0; // of `top`, what host tiers take
  const add = (worker, tier, geometry, cellPx) => {
    const layout = layoutPages(geometry, widthPx, cellPx);
    const pagesTop = top + headingPx;
    const bottom = pagesTop + layout.heightPx;
    sections.push({ worker, tier, layout, top, pagesTop, bottom });
    if (tier === "host") hostPx += bottom + marginPx - top;
    top = bottom + marginPx;
  };
  for (const worker of workers) {
    add(worker, "device", worker.state.geometry, sidePx(sideCssPx));
    if (worker.state.host) add(worker, "host", worker.state.host.geometry, sidePx(hostSideCssPx));
  }
  return { sections, heightPx: top, hostPx };
}

function offsetsOf(groups) {
  const offsets = [];
  let next = 0;
  for (const group of groups) {
    offsets.push(next);
    next += group.num_blocks;
  }
  return offsets;
}

/** The grid of a tile whose cells are closest to squares; its lines `xs` and `ys` divide the tile without a remainder. */
function gridOf(numCells, width, height) {
  let columns = 1;
  let bestSide = 0;
  for (let tried = 1; tried <= numCells; tried++) {
    const side = Math.min(width / tried, height / Math.ceil(numCells / tried));
    if (side > bestSide) [columns, bestSide] = [tried, side];
  }
  const rows = Math.ceil(numCells / columns);
  return { columns, xs: cuts(columns, width), ys: cuts(rows, height) };
}

function cuts(parts, length) {
  return Int32Array.from({ length: parts + 1 }, (_, i) => Math.floor((i * length) / parts));
}

function lastAtMost(edges, value) {
  let index = edges.length - 1;
  while (index >= 0 && edges[index] > value) index--;
  return index;
}
