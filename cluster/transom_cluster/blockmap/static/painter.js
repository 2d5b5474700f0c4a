/**
 * Paints the visible pages, and in those only the blocks whose style changed since the last time.
 *
 * Style: the whole look of a cell as one number (colours.js). Part: the visible pages of one worker,
 * {state, layout, hues, isDimmed(record, group), firstPage, endPage, x, y}, where x and y are the corner of page 0 on the canvas.
 */

import { EVICTED_IN_USE, fadeOf, REPAIR_SHARED, styleNumber } from "./colours.js";
import { gapOf, pageCorner } from "./geometry.js";
import { EVICTABLE, EVICTED, PINNED, REPAIR, SHARED } from "./worker_state.js";

const NOT_PAINTED = 0xffff;

/** Remembers the style of every cell on the canvas. */
export class Painter {
  constructor(pixels) {
    this.pixels = pixels;
    this.forget();
  }

  /** Make the next `paint` draw everything, because the canvas was scrolled or resized or the colours changed. */
  forget() {
    this.isStale = true;
  }

  paint(parts, styles) {
    if (this.isStale) this.#clear(parts, styles);
    let page = 0;
    let cell = 0;
    for (const part of parts) {
      for (let p = part.firstPage; p < part.endPage; p++) {
        this.#paintPage(part, p, page++, cell, styles);
        cell += part.layout.maxSlots;
      }
    }
    this.pixels.flush();
  }

  #clear(parts, styles) {
    let numPages = 0;
    let numCells = 0;
    for (const { firstPage, endPage, layout } of parts) {
      numPages += endPage - firstPage;
      numCells += (endPage - firstPage) * layout.maxSlots;
    }
    this.paintedOwners = new Uint16Array(numPages).fill(NOT_PAINTED);
    this.paintedStyles = new Uint16Array(numCells).fill(NOT_PAINTED);
    this.pixels.clear(styles.ground);
    this.isStale = false;
  }

  #paintPage(part, page, pageSlot, cellSlot, styles) {
    const { state, layout } = part;
    const owner = state.owners[page];
    const [x, y] = this.#corner(part, page);
    if (this.paintedOwners[pageSlot] !== owner) {
      const outline = owner ? 1 + (part.hues[owner - 1] % (styles.outlines.length - 1)) : 0;
      this.#paintTile(x, y, layout, styles.outlines[outline], styles);
      this.paintedStyles.fill(NOT_PAINTED, cellSlot, cellSlot + layout.maxSlots);
      this.paintedOwners[pageSlot] = owner;
    }
    if (owner) this.#paintCells(part, page, owner - 1, x, y, cellSlot, styles);
  }

  #paintTile(x, y, { innerW, innerH }, outline, styles) {
    this.pixels.rect(x, y, innerW, innerH, styles.ground);
    this.pixels.outline(x - 1, y - 1, innerW + 2, innerH + 2, 1, outline);
  }

  #paintCells(part, page, group, x, y, cellSlot, styles) {
    const { geometry } = part.state;
    const { columns, xs, ys } = part.layout.grids[group];
    const first = geometry.firstBlocks[group][page];
    const numCells = geometry.endBlocks[group][page] - first;
    const firstRecord = geometry.offsets[group] + first;
    for (let slot = 0, column = 0, row = 0; slot < numCells; slot++) {
      const style = styleOf(part, group, firstRecord + slot);
      if (this.paintedStyles[cellSlot + slot] !== style) {
        this.paintedStyles[cellSlot + slot] = style;
        const w = xs[column + 1] - xs[column];
        const h = ys[row + 1] - ys[row];
        const gap = gapOf(w, h);
        this.pixels.cell(x + xs[column], y + ys[row], w - gap, h - gap, style, styles);
      }
      if (++column === columns) [column, row] = [0, row + 1];
    }
  }

  #corner(part, page) {
    const [x, y] = pageCorner(part.layout, page);
    return [x + part.x, y + part.y];
  }
}

/** The style of one block. */
function styleOf({ state, hues, isDimmed }, group, record) {
  const kind = kindOfBlock(state, record);
  const fade = kind === EVICTABLE || kind === PINNED ? fadeOf(state.age_s(record)) : 0;
  return styleNumber(hues[group], kind, fade, kind !== EVICTED && isDimmed !== null && isDimmed(record, group));
}

function kindOfBlock(state, record) {
  const blockState = state.states[record];
  if (blockState === REPAIR) return state.isShared(record) ? REPAIR_SHARED : REPAIR;
  if (blockState === EVICTED && state.references[record] > 0) return EVICTED_IN_USE;
  return state.isShared(record) ? SHARED : blockState;
}
