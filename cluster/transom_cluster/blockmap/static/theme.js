/** Light or dark: as the system says until the user chooses. The style sheet owns the ground colours. */

import { buildStyles, parseColour } from "./colours.js";

const STORAGE_NAME = "transom.blocks.theme";
const darkSystem = matchMedia("(prefers-color-scheme: dark)");

/** `onChange` is called when colours have to be made anew. */
export class Theme {
  constructor({ button, onChange }) {
    this.root = document.documentElement;
    this.button = button;
    this.onChange = onChange;
    this.version = 0;
    this.chosen = localStorage.getItem(STORAGE_NAME);
    button.addEventListener("click", () => this.toggle());
    darkSystem.addEventListener("change", () => this.#apply());
    this.#apply();
  }

  get name() {
    return this.chosen ?? (darkSystem.matches ? "dark" : "light");
  }

  toggle() {
    this.chosen = this.name === "dark" ? "light" : "dark";
    localStorage.setItem(STORAGE_NAME, this.chosen);
    this.#apply();
  }

  #apply() {
    this.root.dataset.theme = this.name;
    this.button.textContent = this.name === "dark" ? "Light" : "Dark";
    const read = (name) => getComputedStyle(this.root).getPropertyValue(name);
    const [ground, text] = [parseColour(read("--ground")), parseColour(read("--text"))];
    this.styles = buildStyles(this.name, ground, text);
    this.colours = { theme: this.name, ground, text, accent: read("--accent").trim() };
    this.version += 1;
    this.onChange();
  }
}
