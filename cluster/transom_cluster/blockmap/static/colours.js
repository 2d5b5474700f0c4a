/** What colours mean: hue is the group, lightness and marks are the state. One number names a cell's whole look. */

import { ACTIVE, EMPTY, EVICTED, GONE, HELD, LOOSE, REPAIR, SHARED } from "./worker_state.js";

/** Blue and vermillion of Okabe and Ito, then what stays farthest apart for every kind of colour vision. All have 3:1 on the ground. */
export const HUES = {
  light: ["#0072b2", "#d55e00", "#922940", "#3295f6", "#bb7e90", "#154e87", "#915b77", "#b14a2f"],
  dark: ["#56b4e9", "#e8772e", "#f3f056", "#5f68d9", "#48fbf6", "#9e6375", "#ffa78f", "#c74723"],
};
export const REPAIR_SHARED = 8; // kinds of look beside the states
export const EVICTED_IN_USE = 9; // evicted, and given to a request since
export const FADE_EDGES_S = [5, 20, 60, 180, 600]; // a cached block fades when it gets older than these

const FADED_MIX = [0.56, 0.48, 0.41, 0.35, 0.29, 0.24];
const FRAME_MIX = [1, 0.94, 0.88, 0.82, 0.76, 0.7];
const EMPTY_MIX = 0.09;
const DIMMED_MIX = 0.2; // of what it would be, the rest is ground
const NUM_STYLES = HUES.light.length << 8;

/** The number of a look: hue (3 bits), kind (4), fade (3), dimmed (1). */
export function styleNumber(hue, kind, fade, isDimmed) {
  return ((hue % HUES.light.length) << 8) | (kind << 4) | (fade << 1) | (isDimmed ? 1 : 0);
}

export function kindOf(style) {
  return (style >> 4) & 15;
}

/** How far a cached block of that age has faded: 0 to 5; an unknown age is old. */
export function fadeOf(age_s) {
  if (age_s === null) return FADE_EDGES_S.length;
  let fade = 0;
  while (fade < FADE_EDGES_S.length && age_s > FADE_EDGES_S[fade]) fade++;
  return fade;
}

/** The pixel values of every look on a ground: {fill, ink} by style number; `ink` draws the mark. */
export function buildStyles(theme, ground, text) {
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
export function parseColour(text) {
  const value = parseInt(text.trim().slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

export function toCss([red, green, blue]) {
  return `rgb(${red}, ${green}, ${blue})`;
}

export function mix(from, to, share) {
  return from.map((value, i) => Math.round(value + (to[i] - value) * share));
}

/** The colours of a group's bands in the strip, in stacking order. */
export function bandColours(theme, hueIndex, ground) {
  const hue = parseColour(HUES[theme][hueIndex % HUES[theme].length]);
  return { active: hue, held: mix(ground, hue, 0.62), loose: mix(ground, hue, 0.34), empty: mix(ground, hue, EMPTY_MIX + 0.03) };
}

function lookOf(kind, fade, hue, ground, text) {
  const faded = mix(ground, hue, FADED_MIX[Math.min(fade, 5)]);
  switch (kind) {
    case ACTIVE: return { fill: hue, ink: hue };
    case SHARED: return { fill: hue, ink: ground };
    case REPAIR: return { fill: hue, ink: ground };
    case REPAIR_SHARED: return { fill: hue, ink: ground };
    case EVICTED_IN_USE: return { fill: hue, ink: ground };
    case HELD: return { fill: faded, ink: mix(ground, hue, FRAME_MIX[Math.min(fade, 5)]) };
    case LOOSE: return { fill: faded, ink: faded };
    case EVICTED: return { fill: text, ink: ground };
    case EMPTY: return { fill: mix(ground, hue, EMPTY_MIX), ink: mix(ground, hue, EMPTY_MIX) };
    case GONE: default: return { fill: ground, ink: ground };
  }
}

/** Page outlines by owner: 0 is a free page, else group hue + 1. */
function outlinesOf(theme, ground, text) {
  const free = toPixel(mix(ground, text, 0.16));
  return Uint32Array.from([free, ...HUES[theme].map((hue) => toPixel(mix(ground, parseColour(hue), 0.45)))]);
}

function toPixel([red, green, blue]) {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0; // canvas memory is RGBA, read as little-endian
}
