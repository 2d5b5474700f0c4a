/**
 * What colours mean: the hue is the group, lightness and marks are the state. The system's theme, light or dark, chooses the colours.
 *
 * Style: the whole look of a cell as one number. Kind: the part of a style that comes from the block's state.
 *
 *     bits  10 ... 8   7 ... 4   3 ... 1   0
 *           hue        kind      fade      dimmed
 *
 * Ground: the colour behind the cells. Ink: the colour of a mark on a cell.
 */

import { ACTIVE, EVICTABLE, EVICTED, FREE, PINNED, REPAIR, SHARED } from "./worker_state.js";

/**
 * Okabe and Ito's blue and vermillion, then the hues that differ most for all kinds of colour vision. All have a contrast of at least 3
 * to the ground.
 */
const HUES = {
  light: ["#0072b2", "#d55e00", "#922940", "#3295f6", "#bb7e90", "#154e87", "#915b77", "#b14a2f"],
  dark: ["#56b4e9", "#e8772e", "#f3f056", "#5f68d9", "#48fbf6", "#9e6375", "#ffa78f", "#c74723"],
};
export const REPAIR_SHARED = 8; // kinds beside the states of worker_state.js
export const EVICTED_IN_USE = 9; // evicted, and a request uses it again

const FADE_EDGES_S = [5, 20, 60, 180, 600]; // at each of these ages a cached block gets paler
const FADED_MIX = [0.56, 0.48, 0.41, 0.35, 0.29, 0.24];
const FRAME_MIX = [1, 0.94, 0.88, 0.82, 0.76, 0.7];
const FREE_MIX = 0.09;
const DIMMED_MIX = 0.2; // share of the block's colour; the remainder is ground
const NUM_STYLES = HUES.light.length << 8;

export function styleNumber(hue, kind, fade, isDimmed) {
  return ((hue % HUES.light.length) << 8) | (kind << 4) | (fade << 1) | (isDimmed ? 1 : 0);
}

export function kindOf(style) {
  return (style >> 4) & 15;
}

/** How far a cached block of an age has faded: 0 to 5. A block of unknown age is as pale as an old one. */
export function fadeOf(age_s) {
  if (age_s === null) return FADE_EDGES_S.length;
  let fade = 0;
  while (fade < FADE_EDGES_S.length && age_s > FADE_EDGES_S[fade]) fade++;
  return fade;
}

/** The pixel values of all styles on a ground: {fill, ink} by style, the ground itself, and the outlines of pages. */
function buildStyles(theme, ground, text) {
  const fill = new Uint32Array(NUM_STYLES);
  const ink = new Uint32Array(NUM_STYLES);
  for (let style = 0; style < NUM_STYLES; style++) {
    const hue = parseColour(HUES[theme][style >> 8]);
    const look = lookOf(kindOf(style), (style >> 1) & 7, hue, ground, text);
    const dim = (colour) => (style & 1 ? mix(ground, colour, DIMMED_MIX) : colour);
    fill[style] = toPixel(dim(look.fill));
    ink[style] = toPixel(dim(look.ink));
  }
  return { fill, ink, ground: toPixel(ground), outlines: outlinesOf(theme, ground, text) };
}

/** [red, green, blue] of "#rrggbb". */
function parseColour(text) {
  const value = parseInt(text.trim().slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

export function toCss([red, green, blue]) {
  return `rgb(${red}, ${green}, ${blue})`;
}

function mix(from, to, share) {
  return from.map((value, i) => Math.round(value + (to[i] - value) * share));
}

/** The colours of a group's blocks by state in the strip. */
export function bandColours(theme, hueIndex, ground) {
  const hue = parseColour(HUES[theme][hueIndex % HUES[theme].length]);
  return { active: hue, pinned: mix(ground, hue, 0.62), evictable: mix(ground, hue, 0.34), free: mix(ground, hue, FREE_MIX + 0.03) };
}

function lookOf(kind, fade, hue, ground, text) {
  const faded = mix(ground, hue, FADED_MIX[Math.min(fade, 5)]);
  switch (kind) {
    case ACTIVE: return { fill: hue, ink: hue };
    case SHARED: case REPAIR: case REPAIR_SHARED: case EVICTED_IN_USE: return { fill: hue, ink: ground };
    case PINNED: return { fill: faded, ink: mix(ground, hue, FRAME_MIX[Math.min(fade, 5)]) };
    case EVICTABLE: return { fill: faded, ink: faded };
    case EVICTED: return { fill: text, ink: ground };
    case FREE: return { fill: mix(ground, hue, FREE_MIX), ink: mix(ground, hue, FREE_MIX) };
    default: return { fill: ground, ink: ground };
  }
}

/** The outlines of pages: index 0 for pages that no group leases, else hue + 1. */
function outlinesOf(theme, ground, text) {
  const free = toPixel(mix(ground, text, 0.16));
  return Uint32Array.from([free, ...HUES[theme].map((hue) => toPixel(mix(ground, parseColour(hue), 0.45)))]);
}

function toPixel([red, green, blue]) {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0; // a canvas stores RGBA bytes, read here as one little-endian word
}

/** A hue for each group name, in the order in which the page first sees the names, so that all workers have the same. */
export class GroupHues {
  constructor() {
    this.names = [];
  }

  /** The hue of each group of a worker. */
  of(geometry) {
    return geometry.groups.map((group) => this.indexOf(group.name));
  }

  indexOf(name) {
    const known = this.names.indexOf(name);
    return known >= 0 ? known : this.names.push(name) - 1;
  }
}

/** The system's theme, light or dark. `onChange` is called when the colours have changed. */
export class Theme {
  constructor(onChange) {
    this.onChange = onChange;
    this.version = 0;
    this.isDark = matchMedia("(prefers-color-scheme: dark)");
    this.isDark.addEventListener("change", () => this.#apply());
    this.#apply();
  }

  #apply() {
    const name = this.isDark.matches ? "dark" : "light";
    const style = getComputedStyle(document.documentElement); // the style sheet defines the ground
    const [ground, text] = ["--ground", "--text"].map((variable) => parseColour(style.getPropertyValue(variable)));
    this.styles = buildStyles(name, ground, text);
    this.colours = { theme: name, ground, text };
    this.version += 1;
    this.onChange();
  }
}
