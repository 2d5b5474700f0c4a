/**
 * Which block the page tells about.
 *
 * Hovered: the block under the pointer. Chosen: the block that the user clicked. Target: the hovered block, or else the chosen one. All are
 * hits of the map (map_view.js).
 */

/** `map` finds blocks, `outline` frames the target. `onChange` is called when the target may have changed. */
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
    this.onChange();
  }

  choose() {
    this.chosen = this.hovered ?? this.chosen;
    this.onChange();
  }

  clear() {
    this.chosen = null;
    this.#place();
    this.onChange();
  }

  /** Find the target again after a repaint, since the block under the pointer and the place of the outline may have changed. */
  refresh() {
    this.hovered = this.point === null ? null : this.map.hit(...this.point);
    if (this.chosen !== null && this.map.rectOf(this.chosen) === null) this.chosen = null;
    this.#place();
  }

  #place() {
    const rect = this.target === null ? null : this.map.rectOf(this.target);
    this.outline.hidden = rect === null;
    if (rect === null) return;
    const [x, y, w, h] = rect.map((length) => length / this.map.pixelRatio);
    Object.assign(this.outline.style, { left: `${x}px`, top: `${y}px`, width: `${w}px`, height: `${h}px` });
  }
}
