/** Which blocks a page holds, by group: page p owns the ids of a group that lie wholly inside it. */

/** The slab of one worker: pages, groups, and where each group's records start in flat arrays. */
export class Geometry {
  constructor(header) {
    this.model = header.model;
    this.pageBytes = header.page_bytes;
    this.numPages = header.num_pages;
    this.groups = header.groups;
    this.offsets = offsetsOf(header.groups);
    this.numRecords = header.groups.reduce((sum, group) => sum + group.num_blocks, 0);
    this.firstBlocks = header.groups.map((group) => this.#edges(group, 0));
    this.endBlocks = header.groups.map((group) => this.#edges(group, 1));
    this.maxBlocksPerPage = header.groups.map((_, g) => this.#mostBlocks(g));
    this.key = JSON.stringify([this.model, this.pageBytes, this.numPages, this.groups]);
  }

  /** The flat index of a block's record. */
  recordOf(group, block) {
    return this.offsets[group] + block;
  }

  /** The page that a block's first byte lies in. */
  pageOf(group, block) {
    return Math.floor((block * this.groups[group].stride_bytes) / this.pageBytes);
  }

  /** The blocks of another group that have bytes of a block, among those of its page. */
  blocksOver(group, block, other) {
    const page = this.pageOf(group, block);
    const [stride, otherStride] = [this.groups[group].stride_bytes, this.groups[other].stride_bytes];
    const first = Math.max(this.firstBlocks[other][page], Math.floor((block * stride) / otherStride));
    const end = Math.min(this.endBlocks[other][page], Math.ceil(((block + 1) * stride) / otherStride));
    return Array.from({ length: Math.max(0, end - first) }, (_, i) => first + i);
  }

  #edges(group, side) {
    const edges = new Uint32Array(this.numPages);
    const round = side === 0 ? Math.ceil : Math.floor;
    for (let page = 0; page < this.numPages; page++) {
      edges[page] = Math.min(round(((page + side) * this.pageBytes) / group.stride_bytes), group.num_blocks);
    }
    return edges;
  }

  #mostBlocks(group) {
    let most = 0;
    for (let page = 0; page < this.numPages; page++) {
      most = Math.max(most, this.endBlocks[group][page] - this.firstBlocks[group][page]);
    }
    return most;
  }
}

function offsetsOf(groups) {
  const offsets = [];
  let next = 0;
  for (const group of groups) {
    offsets.push(next);
    next += group.num_blocks;
  }
  return offsets;
}
