/** One line beside the block that is looked at. */

import { blockLine, pageLine } from "./block_text.js";
import { setText } from "./dom.js";

const OFFSET_CSS_PX = 14;

/** Shows itself inside `box`, where the map scrolls. */
export class Tooltip {
  constructor({ tip, box }) {
    this.tip = tip;
    this.box = box;
  }

  /** `rect` is the block's on the screen, in CSS pixels of the box. */
  show(target, rect) {
    this.tip.hidden = target === null || rect === null;
    if (this.tip.hidden) return;
    setText(this.tip, lineOf(target));
    const { clientWidth, clientHeight } = this.box;
    const left = Math.min(rect.left + rect.width + OFFSET_CSS_PX, clientWidth - this.tip.offsetWidth - 4);
    const below = rect.top + rect.height + OFFSET_CSS_PX;
    const fitsBelow = below + this.tip.offsetHeight < clientHeight;
    this.tip.style.left = `${Math.max(4, left)}px`;
    this.tip.style.top = `${fitsBelow ? below : Math.max(4, rect.top - this.tip.offsetHeight - OFFSET_CSS_PX)}px`;
  }
}

/** What the tooltip says. */
export function lineOf({ worker, page, group, block }) {
  return block === null ? pageLine(worker.shown, page) : blockLine(worker.shown, group, block);
}
