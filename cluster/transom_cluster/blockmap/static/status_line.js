/** Whether what is shown is live, and what is wrong if not. */

import { setText } from "./dom.js";

const WORDS = {
  connecting: "Connecting", live: "Connected", lost: "Connection lost", key: "API key wanted", demo: "Demo: a recorded trace", failed: "No demo",
};

/** Shows a status {kind, message, retry_s} of the connection or the demo. */
export class StatusLine {
  constructor({ pill, message, announcer }) {
    Object.assign(this, { pill, message, announcer });
    this.kind = "";
  }

  show({ kind, message = "", retry_s = null }) {
    this.pill.dataset.kind = kind;
    setText(this.pill, WORDS[kind]);
    const retry = retry_s === null ? "" : ` Trying again in ${retry_s} s.`;
    setText(this.message, `${message}${retry}`);
    if (kind !== this.kind && kind !== "connecting") this.announcer.say(`${WORDS[kind]}. ${message}`);
    if (kind !== "connecting") this.kind = kind;
  }
}
