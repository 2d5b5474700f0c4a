/** Decodes frames: a JSON header, then arrays of little-endian u32. docs/block_map.md specifies the format. */

const HEADER_START_BYTE = 4;
const utf8 = new TextDecoder();

/** Decode a frame. */
export function decodeFrame(bytes) {
  const headerBytes = readHeaderLength(bytes);
  const headerEnd = HEADER_START_BYTE + headerBytes;
  const header = JSON.parse(utf8.decode(bytes.subarray(HEADER_START_BYTE, headerEnd)));
  const arrays = {};
  let offset = (headerEnd + 3) & ~3;
  for (const [name, length] of header.arrays) {
    arrays[name] = u32View(bytes, offset, length, name);
    offset += 4 * length;
  }
  const { pages = new Uint32Array(), blocks = new Uint32Array(), host_blocks: hostBlocks = new Uint32Array() } = arrays;
  return { header, pages, blocks, hostBlocks };
}

/** Decode base64 text. */
export function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
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
