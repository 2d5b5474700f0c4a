/** Numbers, ages and times in words. */

const numbers = new Intl.NumberFormat("en");
const times = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export function formatCount(value) {
  return numbers.format(value);
}

/** "12 requests", "1 request". */
export function formatNoun(value, noun) {
  return `${formatCount(value)} ${noun}${value === 1 ? "" : "s"}`;
}

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

export function formatTime(time_s) {
  return times.format(new Date(time_s * 1000));
}

export function formatHash(hash) {
  return hash.toString(16).padStart(8, "0");
}

export function formatPercent(share) {
  return `${Math.round(100 * share)} %`;
}
