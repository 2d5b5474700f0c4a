/**
 * Which block the page tells about.
 *
 * Hovered: the block under the pointer. Chosen: the block that the user clicked, or reached with the keyboard. Target: the hovered
 * block, or else the chosen one. All are hits of the map (map_view.js).
 */

import { stateOf } from "./map_view.js";

const MAX_STEPS = 5000;

/** `map` finds blocks, `outline` frames the target. `onChange(how)` is called with "pointer", "click" or "keyboard". */
export class Cursor {
  constructor({ map, outline, onChange }) {
    Object.assign(this, { map, outline, onChange });
    this.hovered = null;
    this.chosen = null;
    this.point = null; // of the pointer on the canvas, since blocks may move under it
  }

  get target() {
    return this.hovered ?? this.chosen;
  }

  hover(point) {
    this.point = point;
    this.refresh();
    this.onChange("pointer");
  }

  choose() {
    this.chosen = this.hovered ?? this.chosen;
    this.onChange("click");
  }

  clear() {
    this.chosen = null;
    this.#place();
    this.onChange("click");
  }

  /** Find the target again after a repaint, since the block under the pointer and the place of the outline may have changed. */
  refresh() {
    this.hovered = this.point === null ? null : this.map.hit(...this.point);
    if (this.chosen !== null && this.map.rectOf(this.chosen) === null) this.chosen = null;
    this.#place();
  }

  /** Move one block to the left, right, up or down, across gaps and free pages. */
  move(dx, dy) {
    const next = this.chosen === null ? this.#firstVisible() : this.#neighbour(dx, dy);
    if (next !== null) this.#chooseByKey(next);
  }

  /** Move to the first block of the next (1) or previous (-1) leased page. */
  movePage(direction) {
    if (this.chosen === null) return this.move(0, 0);
    const { worker, tier } = this.chosen;
    const { owners, geometry } = stateOf(this.chosen);
    for (let page = this.chosen.page + direction; page >= 0 && page < geometry.numPages; page += direction) {
      if (owners[page]) return this.#chooseByKey(firstBlockOf(worker, tier, page));
    }
  }

  /** Move to the first or last leased page of the worker. */
  moveToEnd(isLast) {
    const target = this.chosen ?? this.#firstVisible();
    if (target === null) return;
    const { owners } = stateOf(target);
    const page = isLast ? owners.findLastIndex((owner) => owner > 0) : owners.findIndex((owner) => owner > 0);
    if (page >= 0) this.#chooseByKey(firstBlockOf(target.worker, target.tier, page));
  }

  #chooseByKey(hit) {
    this.chosen = hit;
    this.hovered = this.point = null;
    this.map.reveal(this.map.rectOf(hit));
    this.#place();
    this.onChange("keyboard");
  }

  #neighbour(dx, dy) {
    const [left, top, w, h] = this.map.rectOf(this.chosen);
    const [strideX, strideY] = [Math.max(1, w >> 1), Math.max(1, h >> 1)];
    let [x, y] = [left + w / 2, top + h / 2];
    for (let step = 0; step < MAX_STEPS; step++) {
      [x, y] = [x + dx * strideX, y + dy * strideY];
      if (x < 0 || x > this.map.pixels.width || y < 0 || y > this.map.placed.heightPx) return null;
      const hit = this.map.hitWorld(x, y);
      if (hit !== null && hit.block !== null && !isSame(hit, this.chosen)) return hit;
    }
    return null;
  }

  #firstVisible() {
    for (const { worker, tier, bottom } of this.map.placed.sections) {
      if (bottom < this.map.scrollPx) continue;
      const { owners } = stateOf({ worker, tier });
      for (let page = 0; page < owners.length; page++) {
        const rect = owners[page] ? this.map.rectOf({ worker, tier, page, group: null, block: null }) : null;
        if (rect !== null && rect[1] + rect[3] > this.map.scrollPx) return firstBlockOf(worker, tier, page);
      }
    }
    return null;
  }

  #place() {
    const rect = this.target === null ? null : this.map.rectOf(this.target);
    this.outline.hidden = rect === null;
    if (rect === null) return;
    const [x, y, w, h] = rect.map((length) => length / this.map.pixelRatio);
    Object.assign(this.outline.style, { left: `${x}px`, top: `${y}px`, width: `${w}px`, height: `${h}px` });
  }
}

function firstBlockOf(worker, tier, page) {
  const { geometry, owners } = stateOf({ worker, tier });
  const group = owners[page] - 1;
  return { worker, tier, page, group, block: geometry.firstBlocks[group][page] };
}

function isSame(a, b) {
  return a.worker === b.worker && a.tier === b.tier && a.group === b.group && a.block === b.block;
}
