/** The line above each worker's pages: who it is, how full, how busy, and what is wrong. */

import { element, setText } from "./dom.js";
import { formatBytes, formatCount, formatNoun } from "./format.js";

/** Keeps one heading for each section in the world, at its place. */
export class SectionHeadings {
  constructor(world) {
    this.world = world;
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
    for (const { worker, top } of sections) {
      const heading = this.#headingOf(worker);
      heading.style.top = `${top / pixelRatio}px`;
      setText(heading.children[1], describe(worker));
      setText(heading.children[2], worker.problem ?? "");
    }
  }

  #headingOf(worker) {
    let heading = this.headings.get(worker.id);
    if (heading === undefined) {
      heading = element("h2", { class: "worker-heading" }, element("b", {}, worker.id), element("span"), element("em"));
      this.headings.set(worker.id, heading);
      this.world.append(heading);
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
