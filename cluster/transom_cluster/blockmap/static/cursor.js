/** Which block is looked at: the one under the pointer, else the one that was clicked or reached with the keyboard. */

const MAX_JUMPS = 5000;

/** `map` finds blocks; `onChange(hit, how)` gets what is looked at now, or null. */
export class Cursor {
  constructor({ map, outline, onChange }) {
    Object.assign(this, { map, outline, onChange });
    this.hovered = null;
    this.pinned = null;
    this.point = null; // of the pointer on the canvas: blocks may move under it
  }

  get target() {
    return this.hovered ?? this.pinned;
  }

  hover(point) {
    this.point = point;
    this.refresh();
    this.onChange("pointer");
  }

  pin() {
    this.pinned = this.hovered ?? this.pinned;
    this.onChange("pin");
  }

  clear() {
    this.pinned = null;
    this.#place();
    this.onChange("pin");
  }

  /** After a repaint: what is under the pointer may be another block now, and the outline may have moved. */
  refresh() {
    this.hovered = this.point === null ? null : this.map.hit(...this.point);
    if (this.pinned !== null && this.map.rectOf(this.pinned) === null) this.pinned = null;
    this.#place();
  }

  /** One block to the left, right, up or down; over gaps and free pages. */
  move(dx, dy) {
    const next = this.pinned === null ? this.#firstInSight() : this.#neighbour(dx, dy);
    if (next !== null) this.#pinByKey(next);
  }

  /** To the first block of the next (1) or previous (-1) leased page. */
  movePage(direction) {
    if (this.pinned === null) return this.move(0, 0);
    const { worker } = this.pinned;
    const { owners, geometry } = worker.shown;
    for (let page = this.pinned.page + direction; page >= 0 && page < geometry.numPages; page += direction) {
      if (owners[page]) return this.#pinByKey(firstBlockOf(worker, page));
    }
  }

  /** To the first (or last) leased page of the worker. */
  moveToEnd(isLast) {
    const target = this.pinned ?? this.#firstInSight();
    if (target === null) return;
    const { owners } = target.worker.shown;
    const page = isLast ? owners.findLastIndex((owner) => owner > 0) : owners.findIndex((owner) => owner > 0);
    if (page >= 0) this.#pinByKey(firstBlockOf(target.worker, page));
  }

  #pinByKey(hit) {
    this.pinned = hit;
    this.hovered = this.point = null;
    this.map.reveal(this.map.rectOf(hit));
    this.#place();
    this.onChange("keyboard");
  }

  #neighbour(dx, dy) {
    const [left, top, w, h] = this.map.rectOf(this.pinned);
    const [strideX, strideY] = [Math.max(1, w >> 1), Math.max(1, h >> 1)];
    let [x, y] = [left + w / 2, top + h / 2];
    for (let jump = 0; jump < MAX_JUMPS; jump++) {
      [x, y] = [x + dx * strideX, y + dy * strideY];
      if (x < 0 || x > this.map.pixels.width || y < 0 || y > this.map.placed.heightPx) return null;
      const hit = this.map.hitWorld(x, y);
      if (hit !== null && hit.block !== null && !isSame(hit, this.pinned)) return hit;
    }
    return null;
  }

  #firstInSight() {
    for (const { worker, bottom } of this.map.placed.sections) {
      if (bottom < this.map.scrollPx) continue;
      const { owners } = worker.shown;
      for (let page = 0; page < owners.length; page++) {
        const rect = owners[page] ? this.map.rectOf({ worker, page, group: null, block: null }) : null;
        if (rect !== null && rect[1] + rect[3] > this.map.scrollPx) return firstBlockOf(worker, page);
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

function firstBlockOf(worker, page) {
  const { geometry, owners } = worker.shown;
  const group = owners[page] - 1;
  return { worker, page, group, block: geometry.firstBlocks[group][page] };
}

function isSame(a, b) {
  return a.worker === b.worker && a.group === b.group && a.block === b.block;
}
