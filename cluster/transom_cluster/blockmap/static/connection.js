/** The live stream: fetched with the API key, read event by event, opened again when it breaks. */

import { SseParser } from "./sse.js";

const FIRST_RETRY_S = 0.5;
const LONGEST_RETRY_S = 10;
const SILENCE_S = 25; // the server says something every 5 s

/** Reads the stream for as long as the page lives. `askForKey(wasRefused)` resolves to the key to use. */
export class Connection {
  constructor({ url, keys, onEvent, onStatus, askForKey }) {
    this.url = url;
    this.keys = keys;
    this.onEvent = onEvent;
    this.onStatus = onStatus;
    this.askForKey = askForKey;
    this.retry_s = FIRST_RETRY_S;
    this.abort = null;
  }

  async run() {
    for (;;) {
      const why = await this.#readOnce();
      if (why === null) continue; // a key was given: at once
      this.onStatus({ kind: "lost", message: why, retry_s: this.retry_s });
      await sleep(this.retry_s);
      this.retry_s = Math.min(2 * this.retry_s, LONGEST_RETRY_S);
    }
  }

  /** Drop the stream and open it anew, such as after a gap in the frames. */
  restart() {
    this.abort?.abort(new Error("A frame was missed."));
  }

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
      this.abort.abort(new Error("This stream is done with.")); // a frame that could not be read leaves it open
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
    const silence = setTimeout(() => this.abort.abort(new Error(`Nothing came for ${SILENCE_S} s.`)), SILENCE_S * 1000);
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
