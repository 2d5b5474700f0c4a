/**
 * Writes text into the page: numbers, ages and times in words, and elements that hold them. Text is only ever set as text, so
 * that no request id can become markup.
 */

const numbers = new Intl.NumberFormat("en");
const times = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export function formatCount(value) {
  return numbers.format(value);
}

/** "12 requests", "1 request". */
export function formatNoun(value, noun) {
  return `${formatCount(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** A duration as "1.5 s", "90 s", "5 min" or "2.5 h"; "unknown" for null. */
export function formatAge(age_s) {
  if (age_s === null) return "unknown";
  if (age_s < 10) return `${age_s.toFixed(1)} s`;
  if (age_s < 120) return `${Math.round(age_s)} s`;
  if (age_s < 7200) return `${Math.round(age_s / 60)} min`;
  return `${(age_s / 3600).toFixed(1)} h`;
}

export function formatBytes(numBytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (numBytes >= 1024 && unit + 1 < units.length) [numBytes, unit] = [numBytes / 1024, unit + 1];
  return `${numBytes >= 100 || Number.isInteger(numBytes) ? Math.round(numBytes) : numBytes.toFixed(1)} ${units[unit]}`;
}

/** The local time of day of a time in seconds since the epoch, as "14:05:09". */
export function formatTime(time_s) {
  return times.format(new Date(time_s * 1000));
}

/** Make an element, such as `element("td", {class: "number"}, "12")`. A function among the attributes is an event listener. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** A button that shows a request's id; a click calls `onRequest(id)`. */
export function requestButton(request, onRequest) {
  const title = "Show this request's blocks only";
  return element("button", { type: "button", class: "request", title, click: () => onRequest(request) }, request);
}

/** Set an element's text if it differs: setting it costs a layout. */
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}
