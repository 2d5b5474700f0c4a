/** Decodes frames: a JSON header, then arrays of little-endian u32. docs/block_map.md specifies the format. */

const HEADER_START_BYTE = 4;
const utf8 = new TextDecoder();

/** Decode a frame. `shift_s` is added to all its times: the demo replays a trace with present times. */
export function decodeFrame(bytes, shift_s = 0) {
  const headerBytes = readHeaderLength(bytes);
  const headerEnd = HEADER_START_BYTE + headerBytes;
  const header = JSON.parse(utf8.decode(bytes.subarray(HEADER_START_BYTE, headerEnd)));
  if (shift_s) shiftTimes(header, shift_s);
  const arrays = {};
  let offset = (headerEnd + 3) & ~3;
  for (const [name, length] of header.arrays) {
    arrays[name] = u32View(bytes, offset, length, name);
    offset += 4 * length;
  }
  const { pages = new Uint32Array(), blocks = new Uint32Array(), spilled = new Uint32Array(), host_blocks: hostBlocks = new Uint32Array() } = arrays;
  return { header, pages, blocks, spilled, hostBlocks };
}

/** Decode base64 text. */
export function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

/** The frames of a recorded trace, each preceded by its length. They share the trace's buffer. */
export function splitTrace(buffer) {
  const view = new DataView(buffer);
  const frames = [];
  let offset = 0;
  while (offset + 4 <= buffer.byteLength) {
    const length = view.getUint32(offset, true);
    offset += 4;
    if (offset + length > buffer.byteLength) {
      throw new Error(`The trace ends inside frame ${frames.length}: ${buffer.byteLength - offset} of ${length} bytes are there.`);
    }
    frames.push(new Uint8Array(buffer, offset, length));
    offset += length;
  }
  return frames;
}

function readHeaderLength(bytes) {
  if (bytes.byteLength < HEADER_START_BYTE) throw new Error(`A frame has at least 4 bytes, this one has ${bytes.byteLength}.`);
  const length = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength).getUint32(0, true);
  if (HEADER_START_BYTE + length > bytes.byteLength) {
    throw new Error(`A frame of ${bytes.byteLength} bytes cannot hold a header of ${length} bytes.`);
  }
  return length;
}

function u32View(bytes, offset, length, name) {
  if (offset + 4 * length > bytes.byteLength) {
    throw new Error(`Array ${name} needs ${4 * length} bytes, the frame has ${bytes.byteLength - offset} left.`);
  }
  const start = bytes.byteOffset + offset;
  if (start % 4 === 0) return new Uint32Array(bytes.buffer, start, length);
  return new Uint32Array(bytes.slice(offset, offset + 4 * length).buffer); // a view must be aligned
}

function shiftTimes(header, shift_s) {
  header.time_s += shift_s;
  for (const event of header.events) event.time_s += shift_s;
  for (const entry of header.history ?? []) entry[0] += shift_s;
}
