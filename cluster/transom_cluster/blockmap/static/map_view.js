/**
 * The map: all workers' sections in an element that scrolls, and a canvas as large as the window, which stays in the window and
 * shows the visible part.
 *
 * World: the element as tall as all sections. Hit: what lies at a point, {worker, tier, page, group, block}, where group and block are
 * null in a page that no group leases, and tier is "device" or "host".
 */

import { blockAt, blockRect, pageAt, pageCorner, placeSections, Zoom } from "./geometry.js";
import { Painter } from "./painter.js";
import { Pixels } from "./pixels.js";
import { element, formatBytes, formatCount, formatNoun, setText } from "./text.js";

const IDENTITY_DIGITS = 16; // as in `system_fingerprint`

/** The state of the blocks of a hit's tier at the moment on the screen; null where the worker has no such tier then. */
export function stateOf({ worker, tier }) {
  return tier === "host" ? worker.state.host : worker.state;
}

/**
 * The element `scroller` has `world`, which has the canvas. `view` is what to show:
 * {workers(), dimmer(worker, state), hues}.
 */
export class MapView {
  constructor({ scroller, world, canvas, view }) {
    Object.assign(this, { scroller, world, canvas, view });
    this.zoom = new Zoom();
    this.pixels = new Pixels(canvas);
    this.painter = new Painter(this.pixels);
    this.headings = new SectionHeadings(world);
    this.placed = { sections: [], heightPx: 0 };
    this.placedKey = "";
    this.styles = null;
    this.pixelRatio = 1;
  }

  setStyles(styles) {
    this.styles = styles;
    this.painter.forget();
  }

  /** Draw the workers' states that are on the screen. */
  paint() {
    this.#resize();
    this.#place();
    const scrollPx = this.scrollPx;
    if (scrollPx !== this.paintedScrollPx) this.painter.forget();
    this.paintedScrollPx = scrollPx;
    this.painter.paint(this.#visibleParts(scrollPx), this.styles);
    this.headings.update(this.placed.sections, this.pixelRatio);
  }

  get scrollPx() {
    return Math.round(this.scroller.scrollTop * this.pixelRatio);
  }

  /** The hit at a point of the canvas (CSS pixels), null where there is no page. */
  hit(xCss, yCss) {
    const [x, y] = [xCss * this.pixelRatio, yCss * this.pixelRatio + this.scrollPx];
    const section = this.placed.sections.find((candidate) => y >= candidate.pagesTop && y < candidate.bottom);
    if (section === undefined) return null;
    const { worker, tier, layout, pagesTop } = section;
    const { geometry, owners } = stateOf(section);
    const page = pageAt(layout, geometry.numPages, x, y - pagesTop);
    if (page < 0) return null;
    const group = owners[page] ? owners[page] - 1 : null;
    const block = group === null ? -1 : blockAt(layout, geometry, page, group, x, y - pagesTop);
    return block < 0 ? { worker, tier, page, group: null, block: null } : { worker, tier, page, group, block };
  }

  /** The rectangle of a hit in the world (device pixels), null if its worker is not shown. */
  rectOf({ worker, tier = "device", page, group, block }) {
    const section = this.placed.sections.find((candidate) => candidate.worker === worker && candidate.tier === tier);
    if (section === undefined) return null;
    const { layout, pagesTop } = section;
    const [x, y] = pageCorner(layout, page);
    const [left, top, w, h] =
      block === null ? [x, y, layout.innerW, layout.innerH] : blockRect(layout, stateOf(section).geometry, group, block);
    return [left, top + pagesTop, w, h];
  }

  /** Fit the canvas to its scroller. */
  #resize() {
    const pixelRatio = window.devicePixelRatio || 1;
    const width = Math.round(this.scroller.clientWidth * pixelRatio);
    const height = Math.round(this.scroller.clientHeight * pixelRatio);
    if (width === this.pixels.width && height === this.pixels.height && pixelRatio === this.pixelRatio) return;
    this.pixelRatio = pixelRatio;
    this.pixels.resize(width, height);
    this.canvas.style.width = `${width / pixelRatio}px`;
    this.canvas.style.height = `${height / pixelRatio}px`;
    this.painter.forget();
  }

  #place() {
    const workers = this.view.workers();
    const { width: widthPx, height: heightPx } = this.pixels;
    const parts = workers.map(({ id, state }) => `${id}/${state.geometry.key}/${state.host?.geometry.key}`);
    const key = `${widthPx},${heightPx},${this.pixelRatio},${this.zoom.level},${parts.join()}`;
    if (key === this.placedKey) return;
    this.placedKey = key;
    this.placed = placeSections(workers, this.zoom, { widthPx, heightPx, pixelRatio: this.pixelRatio });
    this.world.style.height = `${Math.ceil(this.placed.heightPx / this.pixelRatio)}px`;
    this.painter.forget();
  }

  #visibleParts(scrollPx) {
    const { hues } = this.view;
    const visible = this.placed.sections.filter(({ top, bottom }) => bottom > scrollPx && top < scrollPx + this.pixels.height);
    return visible.map(({ worker, tier, layout, pagesTop }) => {
      const state = stateOf({ worker, tier });
      const { geometry } = state;
      const firstRow = Math.max(0, Math.floor((scrollPx - pagesTop) / layout.pitchY));
      const endRow = Math.max(firstRow, Math.ceil((scrollPx + this.pixels.height - pagesTop) / layout.pitchY));
      return {
        state, layout, hues: hues.of(geometry), isDimmed: this.view.dimmer(worker, state), x: 0, y: pagesTop - scrollPx,
        firstPage: Math.min(firstRow * layout.columns, geometry.numPages),
        endPage: Math.min(endRow * layout.columns, geometry.numPages),
      };
    });
  }
}

/** The line above each worker's pages: its id, its problem, its model and that one's identity, its free pages and its requests. */
class SectionHeadings {
  constructor(world) {
    this.world = world;
    this.headings = new Map();
  }

  update(sections, pixelRatio) {
    const kept = new Set(sections.map(nameOf));
    for (const [id, heading] of this.headings) {
      if (!kept.has(id)) {
        heading.remove();
        this.headings.delete(id);
      }
    }
    const hasNew = sections.some((section) => !this.headings.has(nameOf(section)));
    for (const section of sections) {
      const { worker, tier, top } = section;
      const heading = this.#headingOf(nameOf(section));
      if (hasNew) this.world.append(heading); // screen readers read the headings in the sections' order
      heading.style.top = `${top / pixelRatio}px`;
      setText(heading.children[1], tier === "host" ? "" : worker.problem);
      setText(heading.children[2], tier === "host" ? hostSummaryOf(worker.state) : summaryOf(worker));
    }
  }

  #headingOf(name) {
    let heading = this.headings.get(name);
    if (heading === undefined) {
      heading = element("h2", { class: "worker-heading" }, element("b", {}, name), element("em"), element("span"));
      this.headings.set(name, heading);
    }
    return heading;
  }
}

function nameOf({ worker, tier }) {
  return tier === "host" ? `${worker.id}, host tier` : worker.id;
}

function hostSummaryOf({ host, sequences }) {
  const { geometry, freePages, counts } = host;
  const pages = `${formatCount(freePages)} of ${formatNoun(geometry.numPages, "page")} free (${formatBytes(geometry.pageBytes)} each)`;
  const of = (phase) => [...sequences.values()].filter((sequence) => sequence.phase === phase).length;
  const used = (group) => Object.entries(counts[group]).reduce((sum, [name, count]) => sum + (name === "empty" ? 0 : count), 0);
  const blocks = geometry.groups.map(({ name }, g) => `${name} ${formatCount(used(g))} of ${formatCount(geometry.numPages * geometry.maxBlocksPerPage[g])} blocks`);
  return [pages, ...blocks, `${of("loading")} loading, ${of("swapped")} swapped`].join(" · ");
}

function summaryOf({ info, state }) {
  const { geometry, freePages, running, waiting } = state;
  const pages = `${formatCount(freePages)} of ${formatNoun(geometry.numPages, "page")} free (${formatBytes(geometry.pageBytes)} each)`;
  const identity = geometry.identity && `identity ${geometry.identity.slice(0, IDENTITY_DIGITS)}`;
  const parts = [geometry.model || info.model, identity, info.state, pages, `${running} running, ${waiting} waiting`];
  return parts.filter(Boolean).join(" · ");
}
