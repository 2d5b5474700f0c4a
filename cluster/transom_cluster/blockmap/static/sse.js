/** Server-sent events out of pieces of text. */

/** Feed it text as it comes; it returns the events that are complete: {event, data}. */
export class SseParser {
  constructor() {
    this.parts = []; // of a line that has not ended: joined once, since a whole frame is megabytes long
    this.event = "message";
    this.data = [];
  }

  push(text) {
    const events = [];
    let start = 0;
    for (let end = text.indexOf("\n"); end >= 0; end = text.indexOf("\n", start)) {
      this.parts.push(text.slice(start, end));
      start = end + 1;
      const line = this.parts.length === 1 ? this.parts[0] : this.parts.join("");
      this.parts = [];
      this.#takeLine(line.endsWith("\r") ? line.slice(0, -1) : line, events);
    }
    if (start < text.length) this.parts.push(text.slice(start));
    return events;
  }

  #takeLine(line, events) {
    if (line === "") this.#finish(events);
    else if (!line.startsWith(":")) this.#takeField(line);
  }

  #takeField(line) {
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const skip = line[colon + 1] === " " ? 2 : 1;
    const value = colon < 0 ? "" : line.slice(colon + skip);
    if (name === "event") this.event = value;
    if (name === "data") this.data.push(value);
  }

  #finish(events) {
    if (this.data.length) events.push({ event: this.event, data: this.data.join("\n") });
    this.event = "message";
    this.data = [];
  }
}
