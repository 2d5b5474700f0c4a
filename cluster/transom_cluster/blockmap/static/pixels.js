/**
 * Draws rectangles, cells and their marks as pixels in memory, and copies the changed rows to a canvas in one piece, which is
 * faster than a canvas call for each cell. A style is the whole look of a cell as one number (colours.js).
 */

import { EVICTED, PINNED, REPAIR, SHARED } from "./worker_state.js";
import { EVICTED_IN_USE, kindOf, REPAIR_SHARED } from "./colours.js";

/** The pixels of one canvas. Shapes are clipped to it. */
export class Pixels {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.resize(1, 1);
  }

  resize(width, height) {
    this.width = this.canvas.width = Math.max(1, width);
    this.height = this.canvas.height = Math.max(1, height);
    this.image = this.context.createImageData(this.width, this.height);
    this.data = new Uint32Array(this.image.data.buffer);
    this.#markClean();
  }

  clear(pixel) {
    this.data.fill(pixel);
    [this.top, this.bottom] = [0, this.height];
  }

  rect(x, y, w, h, pixel) {
    const left = Math.max(0, x);
    const right = Math.min(this.width, x + w);
    const top = Math.max(0, y);
    const bottom = Math.min(this.height, y + h);
    if (left >= right || top >= bottom) return;
    for (let row = top; row < bottom; row++) {
      const start = row * this.width;
      if (right - left > 16) this.data.fill(pixel, start + left, start + right);
      else for (let i = start + left; i < start + right; i++) this.data[i] = pixel;
    }
    if (top < this.top) this.top = top;
    if (bottom > this.bottom) this.bottom = bottom;
  }

  outline(x, y, w, h, thickness, pixel) {
    this.rect(x, y, w, thickness, pixel);
    this.rect(x, y + h - thickness, w, thickness, pixel);
    this.rect(x, y, thickness, h, pixel);
    this.rect(x + w - thickness, y, thickness, h, pixel);
  }

  /** Draw a block. Marks are whole pixels, so that they stay sharp down to cells of 3 pixels. */
  cell(x, y, w, h, style, styles) {
    const ink = styles.ink[style];
    this.rect(x, y, w, h, styles.fill[style]);
    switch (kindOf(style)) {
      case SHARED: return this.#inset(x, y, w, h, ink);
      case PINNED: return this.outline(x, y, w, h, strokeOf(w, h), ink);
      case REPAIR: return this.#hatch(x, y, w, h, ink);
      case REPAIR_SHARED: this.#hatch(x, y, w, h, ink); return this.#ringedInset(x, y, w, h, style, styles);
      case EVICTED_IN_USE: case EVICTED: return this.#cross(x, y, w, h, ink);
    }
  }

  /** Copy what was drawn since the last call to the canvas. */
  flush() {
    if (this.top < this.bottom) this.context.putImageData(this.image, 0, 0, 0, this.top, this.width, this.bottom - this.top);
    this.#markClean();
  }

  #markClean() {
    [this.top, this.bottom] = [this.height, 0];
  }

  #inset(x, y, w, h, pixel) {
    const side = insetSide(w, h);
    this.rect(x + ((w - side) >> 1), y + ((h - side) >> 1), side, side, pixel);
  }

  #ringedInset(x, y, w, h, style, styles) {
    const side = insetSide(w, h) + 2 * strokeOf(w, h);
    this.rect(x + ((w - side) >> 1), y + ((h - side) >> 1), side, side, styles.fill[style]);
    this.#inset(x, y, w, h, styles.ink[style]);
  }

  #hatch(x, y, w, h, pixel) {
    const side = Math.min(w, h);
    const stroke = Math.max(1, Math.round(side / 7));
    const period = side < 6 ? 2 : 2 * stroke + 1;
    this.#eachPixel(x, y, w, h, (dx, dy) => (dx + dy) % period < stroke, pixel);
  }

  #cross(x, y, w, h, pixel) {
    if (!hasRoomForCross(w, h)) return;
    const half = Math.max(0.7, Math.min(w, h) / 12);
    const margin = Math.max(1, Math.min(w, h) / 6);
    const isOn = (dx, dy) => {
      const along = ((dx + 0.5) / w) * h;
      const isInner = dx >= margin - 0.5 && dx < w - margin && dy >= margin - 0.5 && dy < h - margin;
      return isInner && (Math.abs(along - dy - 0.5) <= half || Math.abs(h - along - dy - 0.5) <= half);
    };
    this.#eachPixel(x, y, w, h, isOn, pixel);
  }

  #eachPixel(x, y, w, h, isOn, pixel) {
    const bottom = Math.min(this.height, y + h);
    const right = Math.min(this.width, x + w);
    for (let py = Math.max(0, y); py < bottom; py++) {
      for (let px = Math.max(0, x); px < right; px++) {
        if (isOn(px - x, py - y)) this.data[py * this.width + px] = pixel;
      }
    }
  }
}

function hasRoomForCross(w, h) {
  return Math.min(w, h) >= 6;
}

function strokeOf(w, h) {
  return Math.max(1, Math.round(Math.min(w, h) / 9));
}

function insetSide(w, h) {
  const side = Math.min(w, h);
  return side < 5 ? Math.max(1, side - 2) : Math.max(2, Math.round(side * 0.4));
}
