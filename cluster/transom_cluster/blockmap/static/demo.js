/** Replays a recorded trace in a loop, at the pace it was recorded at, as if it happened now. */

import { decodeFrame, splitTrace } from "./frames.js";

const PAUSE_BETWEEN_LOOPS_S = 1;

/** `onFrame(bytes, shift_s)` gets each frame when it is due. Never returns. */
export async function replayTrace(url, { onFrame, onStatus }) {
  onStatus({ kind: "connecting" });
  const response = await fetch(url);
  if (!response.ok) {
    onStatus({ kind: "failed", message: `There is no recorded trace at ${url} (the server answered ${response.status}).` });
    return;
  }
  const frames = splitTrace(await response.arrayBuffer());
  const times_s = frames.map((bytes) => decodeFrame(bytes).header.time_s);
  onStatus({ kind: "demo" });
  for (;;) await replayOnce(frames, times_s, onFrame);
}

async function replayOnce(frames, times_s, onFrame) {
  const shift_s = Date.now() / 1000 - times_s[0];
  for (let i = 0; i < frames.length; i++) {
    await until(times_s[i] + shift_s);
    onFrame(frames[i], shift_s);
  }
  await until(Date.now() / 1000 + PAUSE_BETWEEN_LOOPS_S);
}

function until(time_s) {
  const wait_ms = time_s * 1000 - Date.now();
  return new Promise((resolve) => setTimeout(resolve, Math.max(0, wait_ms)));
}
