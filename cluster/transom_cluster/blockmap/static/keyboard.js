/** Keyboard shortcuts. Text fields keep their keys, and the user can switch off shortcuts of a single key. */

const STORAGE_NAME = "transom.blocks.no_shortcuts";
const MAP_MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const TEXT_INPUTS = "input:not([type=range]):not([type=checkbox]), textarea, select";
const USES_SPACE = "button, input, select, summary, a";

/** `actions` is what the keys do. On the element `map` arrow keys move the cursor; `off` is the checkbox. */
export class Keyboard {
  constructor({ map, off, actions }) {
    Object.assign(this, { map, off, actions });
    off.checked = localStorage.getItem(STORAGE_NAME) === "1";
    off.addEventListener("change", () => localStorage.setItem(STORAGE_NAME, off.checked ? "1" : "0"));
    document.addEventListener("keydown", (event) => this.#handle(event));
  }

  #handle(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const action = this.#actionOf(event.key, event.target);
    if (action === null) return;
    event.preventDefault();
    action();
  }

  #actionOf(key, target) {
    const { actions } = this;
    if (key === "Escape") return actions.clear;
    if (target === this.map && this.#mapAction(key)) return this.#mapAction(key);
    if (target.matches?.(TEXT_INPUTS) || this.off.checked) return null;
    if (key === " ") return target.matches?.(USES_SPACE) ? null : actions.toggle;
    return this.#letterAction(key);
  }

  #mapAction(key) {
    const { actions } = this;
    if (MAP_MOVES[key]) return () => actions.move(...MAP_MOVES[key]);
    const found = {
      PageUp: () => actions.movePage(-1), PageDown: () => actions.movePage(1),
      Home: () => actions.moveToEnd(false), End: () => actions.moveToEnd(true), Enter: actions.chooseRequest,
    };
    return found[key] ?? null;
  }

  #letterAction(key) {
    const { actions } = this;
    const found = {
      f: actions.focusFilter, m: actions.focusMap,
      "+": () => actions.zoom(1), "=": () => actions.zoom(1), "-": () => actions.zoom(-1), 0: () => actions.zoom(0),
      t: actions.switchTheme, s: actions.saySummary, "?": actions.help,
    };
    return found[key] ?? null;
  }
}
