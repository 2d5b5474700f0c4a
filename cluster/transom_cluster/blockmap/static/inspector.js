/** The panel about one block: what the frames tell, its requests, and what the worker says when asked. */

import { blockRows, pageLine, tokenRange } from "./block_text.js";
import { element, setText } from "./dom.js";
import { sequencesOf } from "./sequence_lookup.js";

/** Fills `panel`; `onRequest(id)` is called when a request is chosen. */
export class Inspector {
  constructor({ panel, onRequest }) {
    this.hint = panel.querySelector("[data-hint]");
    this.rows = panel.querySelector("[data-rows]");
    this.requests = panel.querySelector("[data-requests]");
    this.details = panel.querySelector("[data-details]");
    this.onRequest = onRequest;
    this.requestsKey = "";
  }

  show(target) {
    const hasBlock = target !== null && target.block !== null;
    setText(this.hint, target === null ? "Point at a block, or press an arrow key on the map." : hasBlock ? "" : pageLine(target.worker.shown, target.page));
    this.hint.hidden = hasBlock;
    fillRows(this.rows, hasBlock ? blockRows(target.worker, target.group, target.block) : []);
    this.#showRequests(hasBlock ? target : null);
  }

  /** What `/blocks/describe` answered, as rows; empty while nothing is known. */
  showDetails(rows) {
    fillRows(this.details, rows);
  }

  #showRequests(target) {
    const found = target === null ? [] : sequencesOf(target.worker.shown, target.group, target.block);
    const blockSize = target?.worker.shown.geometry.groups[target.group].block_size;
    const lines = found.map(({ sequence, logical }) => [sequence, `tokens ${tokenRange(logical, blockSize)}, ${sequence.phase}`]);
    const key = JSON.stringify(lines.map(([sequence, text]) => [sequence.id, sequence.request, text]));
    if (key === this.requestsKey) return; // a rebuilt button would lose the focus
    this.requestsKey = key;
    this.requests.replaceChildren(...lines.map(([sequence, text]) => this.#requestLine(sequence, text)));
  }

  #requestLine(sequence, text) {
    const choose = () => this.onRequest(sequence.request);
    const title = "Show this request's blocks only";
    return element("li", {}, element("button", { type: "button", class: "request", title, click: choose }, sequence.request), ` ${text}`);
  }
}

function fillRows(list, rows) {
  while (list.children.length > 2 * rows.length) list.lastElementChild.remove();
  while (list.children.length < 2 * rows.length) list.append(element(list.children.length % 2 ? "dd" : "dt"));
  rows.forEach(([name, text], i) => {
    setText(list.children[2 * i], name);
    setText(list.children[2 * i + 1], text);
  });
}
