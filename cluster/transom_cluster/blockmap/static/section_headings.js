/** The line above each worker's pages: its id, its problem, how full and how busy. */

import { element, setText } from "./dom.js";
import { formatBytes, formatCount, formatNoun } from "./format.js";

/** Keeps one heading for each section in the world, at its place. `view` is what to say: {noteOf(worker), isLeaving(worker)}. */
export class SectionHeadings {
  constructor(world, view) {
    this.world = world;
    this.view = view;
    this.headings = new Map();
  }

  update(sections, pixelRatio) {
    const kept = new Set(sections.map(({ worker }) => worker.id));
    for (const [id, heading] of this.headings) {
      if (!kept.has(id)) {
        heading.remove();
        this.headings.delete(id);
      }
    }
    const hasNew = sections.some(({ worker }) => !this.headings.has(worker.id));
    for (const { worker, top } of sections) {
      const heading = this.#headingOf(worker);
      if (hasNew) this.world.append(heading); // screen readers read the headings in the sections' order
      heading.style.top = `${top / pixelRatio}px`;
      heading.classList.toggle("leaving", this.view.isLeaving(worker));
      setText(heading.children[1], this.view.noteOf(worker));
      setText(heading.children[2], describe(worker));
    }
  }

  #headingOf(worker) {
    let heading = this.headings.get(worker.id);
    if (heading === undefined) {
      heading = element("h2", { class: "worker-heading" }, element("b", {}, worker.id), element("em"), element("span"));
      this.headings.set(worker.id, heading);
    }
    return heading;
  }
}

function describe({ info, shown }) {
  const { geometry, freePages, running, waiting } = shown;
  const pages = `${formatCount(freePages)} of ${formatNoun(geometry.numPages, "page")} free (${formatBytes(geometry.pageBytes)} each)`;
  const parts = [geometry.model || info.model, info.state, pages, `${running} running, ${waiting} waiting`];
  return parts.filter(Boolean).join(" · ");
}
