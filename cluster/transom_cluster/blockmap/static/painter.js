/** Paints the pages in sight, and of those only the blocks whose look changed since the last time. */

import { EVICTED_IN_USE, fadeOf, REPAIR_SHARED, styleNumber } from "./colours.js";
import { blockRect, gapOf, pageCorner } from "./layout.js";
import { EVICTED, HELD, LOOSE, REPAIR, SHARED } from "./worker_state.js";

const NOT_PAINTED = 0xffff;

/** Remembers the look of every cell on the canvas. */
export class Painter {
  constructor(pixels) {
    this.pixels = pixels;
    this.forget();
  }

  /** The next `paint` draws everything: after scrolling, resizing, or with other colours. */
  forget() {
    this.isStale = true;
  }

  /** Paint parts: [{state, layout, hues, isDimmed(record, group), firstPage, endPage, x, y}], x and y of page 0's corner. */
  paint(parts, styles) {
    if (this.isStale) this.#startAnew(parts, styles);
    let page = 0;
    let cell = 0;
    for (const part of parts) {
      for (let p = part.firstPage; p < part.endPage; p++) {
        this.#paintPage(part, p, page++, cell, styles);
        cell += part.layout.maxSlots;
      }
      this.#paintEvictedElsewhere(part, page - (part.endPage - part.firstPage), styles);
    }
    this.pixels.flush();
  }

  #startAnew(parts, styles) {
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
      this.#paintTile(x, y, layout, owner ? styles.outlines[1 + (part.hues[owner - 1] % (styles.outlines.length - 1))] : styles.outlines[0], styles);
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

  /** A page that was given back has no cells: evicted blocks show above it once. One that another group has shows its own, marked. */
  #paintEvictedElsewhere(part, firstPageSlot, styles) {
    const { state } = part;
    for (const [group, block] of state.evicted) {
      const page = state.geometry.pageOf(group, block);
      if (page < part.firstPage || page >= part.endPage || state.owners[page] === group + 1) continue;
      if (state.owners[page] === 0) this.#paintEvicted(part, group, block, styles);
      else for (const heir of state.geometry.blocksOver(group, block, state.owners[page] - 1)) this.#paintHeir(part, state.owners[page] - 1, heir, styles);
      this.paintedOwners[firstPageSlot + page - part.firstPage] = NOT_PAINTED;
    }
  }

  #paintEvicted(part, group, block, styles) {
    const { geometry } = part.state;
    const [x, y, w, h] = blockRect(part.layout, geometry, group, block);
    this.pixels.cell(x + part.x, y + part.y, w, h, styleOf(part, group, geometry.recordOf(group, block)), styles);
  }

  /** A cell whose bytes were another group's until this frame. */
  #paintHeir(part, group, block, styles) {
    const { geometry, references } = part.state;
    const [x, y, w, h] = blockRect(part.layout, geometry, group, block);
    const record = geometry.recordOf(group, block);
    const rect = [x + part.x, y + part.y, w, h];
    if (references[record] > 0) this.pixels.cell(...rect, styleOf(part, group, record, true), styles);
    else this.pixels.crossedCell(...rect, styleOf(part, group, record), styles);
  }

  #corner(part, page) {
    const [x, y] = pageCorner(part.layout, page);
    return [x + part.x, y + part.y];
  }
}

/** The look of one block now; `isHeir` of one that is in use, and whose bytes held an evicted block of another group. */
export function styleOf({ state, hues, isDimmed }, group, record, isHeir = false) {
  let kind = state.states[record];
  if (isHeir) kind = EVICTED_IN_USE;
  else if (kind === REPAIR) kind = state.isShared(record) ? REPAIR_SHARED : REPAIR;
  else if (kind === EVICTED && state.references[record] > 0) kind = EVICTED_IN_USE;
  else if (state.isShared(record)) kind = SHARED;
  const fade = kind === LOOSE || kind === HELD ? fadeOf(state.age_s(record)) : 0;
  return styleNumber(hues[group], kind, fade, kind !== EVICTED && isDimmed !== null && isDimmed(record, group));
}
