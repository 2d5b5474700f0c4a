/** When a worker was there, as far as this page saw it, and whether its frames have stopped. */

export const HERE = "here";
export const JUST_GONE = "just gone"; // shown for a little longer, so that its end can be seen
export const AWAY = "away";

export const JUST_GONE_S = 10;
export const QUIET_AFTER_S = 12; // a worker that rests sends a frame every 5 s

/** One worker's: from its first frame on, but for its absences. Times are the page's. */
export class Presence {
  constructor() {
    this.firstFrame_s = null;
    this.heard_s = null; // its last frame, or when it came
    this.isQuietTold = false;
    this.absences = []; // [from_s, until_s], in order; the last one is open (Infinity) while the worker is gone
  }

  /** Since when it is gone, null while it is there. */
  get goneSince_s() {
    const last = this.absences[this.absences.length - 1];
    return last?.[1] === Infinity ? last[0] : null;
  }

  get isGone() {
    return this.goneSince_s !== null;
  }

  leave(now_s) {
    if (!this.isGone) this.absences.push([now_s, Infinity]);
  }

  comeBack(now_s) {
    if (this.isGone || this.heard_s === null) this.heard_s = now_s;
    if (this.isGone) this.absences[this.absences.length - 1][1] = now_s;
  }

  /** A frame came. */
  framed(at_s) {
    this.comeBack(at_s);
    this.firstFrame_s ??= at_s;
    this.heard_s = at_s;
    this.isQuietTold = false;
    const last = this.absences[this.absences.length - 1];
    if (last !== undefined && last[1] > at_s) last[1] = at_s; // a moment may begin just before the frame that it is of
  }

  /** Forget absences that were over before a time. */
  forgetBefore(time_s) {
    this.absences = this.absences.filter(([, until_s]) => until_s >= time_s);
  }

  /** For how long it should have sent something and has not, 0 while all is well. The stream is open since `open_s`. */
  quiet_s(now_s, open_s) {
    if (this.isGone || this.heard_s === null || open_s === null) return 0;
    const quiet_s = now_s - Math.max(this.heard_s, open_s);
    return quiet_s > QUIET_AFTER_S ? quiet_s : 0;
  }

  /** `HERE`, `JUST_GONE` or `AWAY` now. */
  now(now_s) {
    if (!this.isGone) return HERE;
    return now_s - this.goneSince_s < JUST_GONE_S ? JUST_GONE : AWAY;
  }

  /** The same at a moment of the past. */
  at(time_s) {
    if (this.firstFrame_s === null || time_s < this.firstFrame_s) return AWAY;
    const absence = this.absences.findLast(([from_s]) => from_s < time_s);
    if (absence === undefined || time_s >= absence[1]) return HERE;
    return time_s - absence[0] < JUST_GONE_S ? JUST_GONE : AWAY;
  }
}
