/** The map: a canvas that stays in sight, over a world as tall as all workers' sections. Paints what is in sight. */

import { blockAt, blockRect, pageAt, pageCorner } from "./layout.js";
import { Painter } from "./painter.js";
import { Pixels } from "./pixels.js";
import { placeSections, Zoom } from "./sections.js";
import { SectionHeadings } from "./section_headings.js";

/** `scroller` holds `world`, which holds the canvas. `view` is what the map looks at: {workers(), dimmer(worker), hues, noteOf(worker), isLeaving(worker)}. */
export class MapView {
  constructor({ scroller, world, canvas, view }) {
    Object.assign(this, { scroller, world, canvas, view });
    this.zoom = new Zoom();
    this.pixels = new Pixels(canvas);
    this.painter = new Painter(this.pixels);
    this.headings = new SectionHeadings(world, view);
    this.placed = { sections: [], heightPx: 0 };
    this.placedKey = "";
    this.styles = null;
    this.pixelRatio = 1;
  }

  setStyles(styles) {
    this.styles = styles;
    this.painter.forget();
  }

  /** Fit the canvas to its scroller; true if that changed anything. */
  resize() {
    const pixelRatio = window.devicePixelRatio || 1;
    const width = Math.round(this.scroller.clientWidth * pixelRatio);
    const height = Math.round(this.scroller.clientHeight * pixelRatio);
    if (width === this.pixels.width && height === this.pixels.height && pixelRatio === this.pixelRatio) return false;
    this.pixelRatio = pixelRatio;
    this.pixels.resize(width, height);
    this.canvas.style.width = `${width / pixelRatio}px`;
    this.canvas.style.height = `${height / pixelRatio}px`;
    this.painter.forget();
    return true;
  }

  /** Draw the workers as they are shown now. */
  paint() {
    this.resize();
    this.#place();
    const scrollPx = this.scrollPx;
    if (scrollPx !== this.paintedScrollPx) this.painter.forget();
    this.paintedScrollPx = scrollPx;
    this.painter.paint(this.#partsInSight(scrollPx), this.styles);
    this.headings.update(this.placed.sections, this.pixelRatio);
  }

  get scrollPx() {
    return Math.round(this.scroller.scrollTop * this.pixelRatio);
  }

  /** What lies at a point of the canvas (CSS pixels): {worker, page, group, block}; group and block are null in a free page. */
  hit(xCss, yCss) {
    return this.hitWorld(xCss * this.pixelRatio, yCss * this.pixelRatio + this.scrollPx);
  }

  /** The same for a point of the world, in device pixels; null where there is no page. */
  hitWorld(x, y) {
    const section = this.placed.sections.find((candidate) => y >= candidate.pagesTop && y < candidate.bottom);
    if (section === undefined) return null;
    const { worker, layout, pagesTop } = section;
    const { geometry, owners } = worker.shown;
    const page = pageAt(layout, geometry.numPages, x, y - pagesTop);
    if (page < 0) return null;
    const group = owners[page] ? owners[page] - 1 : null;
    const block = group === null ? -1 : blockAt(layout, geometry, page, group, x, y - pagesTop);
    return block < 0 ? { worker, page, group: null, block: null } : { worker, page, group, block };
  }

  /** The rectangle of a hit in the world, device pixels; null if its worker is not shown. */
  rectOf({ worker, page, group, block }) {
    const section = this.placed.sections.find((candidate) => candidate.worker === worker);
    if (section === undefined) return null;
    const { layout, pagesTop } = section;
    const [x, y] = pageCorner(layout, page);
    const [left, top, w, h] =
      block === null ? [x, y, layout.innerW, layout.innerH] : blockRect(layout, worker.shown.geometry, group, block);
    return [left, top + pagesTop, w, h];
  }

  /** Scroll just so far that a rectangle is in sight. */
  reveal([, top, , height]) {
    const topCss = top / this.pixelRatio;
    const bottomCss = (top + height) / this.pixelRatio;
    const { scrollTop, clientHeight } = this.scroller;
    if (topCss < scrollTop) this.scroller.scrollTop = topCss - 40;
    else if (bottomCss > scrollTop + clientHeight) this.scroller.scrollTop = bottomCss - clientHeight + 20;
  }

  changeZoom(by) {
    if (by === 0) this.zoom.fit();
    else this.zoom.change(by);
  }

  #place() {
    const workers = this.view.workers();
    const { width: widthPx, height: heightPx } = this.pixels;
    const parts = workers.map((worker) => `${worker.id}/${worker.revision}/${worker.shown.geometry.key.length}`);
    const key = `${widthPx},${heightPx},${this.pixelRatio},${this.zoom.level},${parts.join()}`;
    if (key === this.placedKey) return;
    this.placedKey = key;
    this.placed = placeSections(workers, this.zoom, { widthPx, heightPx, pixelRatio: this.pixelRatio });
    this.world.style.height = `${Math.ceil(this.placed.heightPx / this.pixelRatio)}px`;
    this.painter.forget();
  }

  #partsInSight(scrollPx) {
    const { hues } = this.view;
    const inSight = this.placed.sections.filter(({ top, bottom }) => bottom > scrollPx && top < scrollPx + this.pixels.height);
    return inSight.map(({ worker, layout, pagesTop }) => {
      const { geometry } = worker.shown;
      const firstRow = Math.max(0, Math.floor((scrollPx - pagesTop) / layout.pitchY));
      const endRow = Math.max(firstRow, Math.ceil((scrollPx + this.pixels.height - pagesTop) / layout.pitchY));
      return {
        state: worker.shown, layout, hues: hues.of(geometry), isDimmed: this.view.dimmer(worker), x: 0, y: pagesTop - scrollPx,
        firstPage: Math.min(firstRow * layout.columns, geometry.numPages),
        endPage: Math.min(endRow * layout.columns, geometry.numPages),
      };
    });
  }
}
