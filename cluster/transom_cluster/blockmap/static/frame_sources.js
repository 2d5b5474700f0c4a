/**
 * Where frames come from: the live stream of server-sent events, with an API key and reconnection.
 *
 * It calls `onStatus({kind, message, retry_s})`, where `kind` is connecting, live, paused, lost or key.
 */

const KEY_STORAGE_NAME = "transom.api_key";
const FIRST_RETRY_S = 0.5;
const MAX_RETRY_S = 10;
const MAX_SILENCE_S = 25; // the server sends something every 5 s

/** The API key, kept for this tab only. */
export class ApiKeyStore {
  get() {
    return sessionStorage.getItem(KEY_STORAGE_NAME);
  }

  set(key) {
    sessionStorage.setItem(KEY_STORAGE_NAME, key);
  }

  headers() {
    const key = this.get();
    return key === null ? {} : { Authorization: `Bearer ${key}` };
  }
}

/** Show the dialog until the user gives a key. */
export function askForKey(dialog, wasRefused) {
  const input = dialog.querySelector("input");
  dialog.querySelector("[data-refused]").hidden = !wasRefused;
  input.value = "";
  dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    const form = dialog.querySelector("form");
    form.onsubmit = (event) => {
      event.preventDefault();
      const key = input.value.trim();
      if (!key) return;
      dialog.onclose = null;
      dialog.close();
      resolve(key);
    };
    dialog.onclose = () => dialog.showModal(); // without a key the page has no data
  });
}

/** Parses server-sent events from pieces of text of any length. */
export class SseParser {
  constructor() {
    this.parts = []; // of a line that has not ended; joined once, since the line of a whole frame has megabytes
    this.event = "message";
    this.data = [];
  }

  /** Take the next piece of text; the result is the events that are now complete: [{event, data}]. */
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

/** The live stream, read as long as the page is open. `askForKey(wasRefused)` resolves to the key to use. */
export class Connection {
  constructor({ url, keys, onEvent, onStatus, askForKey }) {
    Object.assign(this, { url, keys, onEvent, onStatus, askForKey });
    this.retry_s = FIRST_RETRY_S;
    this.abort = null;
    this.isPaused = false;
    this.wake = null; // ends the waiting of a paused connection
  }

  async run() {
    for (;;) {
      if (this.isPaused) await this.#waitForResume();
      const why = await this.#readOnce();
      if (why === null || this.isPaused) continue; // null: the user gave a key: connect at once
      this.onStatus({ kind: "lost", message: why, retry_s: this.retry_s });
      await sleep(this.retry_s);
      this.retry_s = Math.min(2 * this.retry_s, MAX_RETRY_S);
    }
  }

  /** Close the stream, so that nothing on the page changes, or open it again; the frames between are lost. */
  toggle() {
    this.isPaused = !this.isPaused;
    if (this.isPaused) this.abort?.abort(new Error("Paused."));
    else this.wake?.();
  }

  /** Close the stream and open it again, because a frame is missing. */
  restart() {
    this.abort?.abort(new Error("A frame was missed."));
  }

  async #waitForResume() {
    this.onStatus({ kind: "paused" });
    await new Promise((resolve) => {
      this.wake = resolve;
    });
    this.wake = null;
  }

  /** Read one stream to its end: why it ended, or null if the server wanted a key. */
  async #readOnce() {
    this.abort = new AbortController();
    try {
      this.onStatus({ kind: "connecting" });
      const response = await fetch(this.url, { headers: this.keys.headers(), cache: "no-store", signal: this.abort.signal });
      if (response.status === 401) {
        await this.#renewKey();
        return null;
      }
      if (!response.ok) return `The server answered ${response.status}.`;
      this.onStatus({ kind: "live" });
      await this.#readBody(response.body);
      return "The server closed the stream.";
    } catch (error) {
      return this.abort.signal.aborted ? this.abort.signal.reason.message : `No connection (${error.message}).`;
    } finally {
      this.abort.abort(new Error("This stream has ended.")); // closes the stream after a frame that could not be read
    }
  }

  async #renewKey() {
    this.onStatus({ kind: "key" });
    this.keys.set(await this.askForKey(this.keys.get() !== null));
  }

  async #readBody(body) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    const parser = new SseParser();
    for (;;) {
      const { done, value } = await this.#readSoon(reader);
      if (done) return;
      for (const { event, data } of parser.push(value)) {
        this.retry_s = FIRST_RETRY_S;
        this.onEvent(event, data);
      }
    }
  }

  async #readSoon(reader) {
    const silence = setTimeout(() => this.abort.abort(new Error(`Nothing came for ${MAX_SILENCE_S} s.`)), MAX_SILENCE_S * 1000);
    try {
      return await reader.read();
    } finally {
      clearTimeout(silence);
    }
  }
}

function sleep(duration_s) {
  return new Promise((resolve) => setTimeout(resolve, duration_s * 1000));
}
