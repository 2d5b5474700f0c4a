/** Where pages and blocks lie: pages are equal tiles in slab order, and a group's cells fill a tile, so area is bytes. */

const MIN_GAP_CELL_PX = 5; // smaller cells touch, otherwise the gaps would outweigh them
const BORDER_PX = 1;

/** Lay one worker's pages out. All lengths are device pixels; `cellPx` is the side of the densest group's cells. */
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
  const rows = Math.ceil(geometry.numPages / columns);
  const grids = geometry.maxBlocksPerPage.map((num) => gridOf(Math.max(1, num), innerW, innerH));
  return { widthPx, cellPx, innerW, innerH, pitchX, pitchY, columns, rows, grids, heightPx: rows * pitchY, maxSlots: mostBlocks };
}

/** The upper left corner of a page's inner area. */
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

/** The block of `owner`'s group at a point of a page, or -1. */
export function blockAt(layout, geometry, page, group, x, y) {
  const [pageX, pageY] = pageCorner(layout, page);
  const { xs, ys, columns } = layout.grids[group];
  const column = lastAtMost(xs, x - pageX);
  const row = lastAtMost(ys, y - pageY);
  const block = geometry.firstBlocks[group][page] + row * columns + column;
  const isInside = column >= 0 && row >= 0 && column < columns && row < ys.length - 1;
  return isInside && block < geometry.endBlocks[group][page] ? block : -1;
}

/** Space between cells of that size. */
export function gapOf(w, h) {
  const side = Math.min(w, h);
  return side < MIN_GAP_CELL_PX ? 0 : Math.max(1, Math.round(side / 14));
}

/** The grid whose cells are the squarest, cut so that it fills the tile. */
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
