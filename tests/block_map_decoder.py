"""Reads frames of the live block map as docs/block_map.md describes them, and keeps what they have told."""

import json
import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple

UNKNOWN = 0xFFFFFFFF
GONE, EMPTY, ACTIVE, LOOSE, HELD, REPAIR, EVICTED = range(7)


class Block(NamedTuple):
    state: int
    refs: int
    logical: int | None
    hash: int
    age: int | None


class Frame(NamedTuple):
    header: dict[str, Any]
    pages: list[tuple[int, int]]
    blocks: dict[tuple[int, int], Block]
    host_blocks: dict[tuple[int, int], int]  # states
    num_host_records: int


def decode(data: bytes) -> Frame:
    (length,) = struct.unpack_from("<I", data)
    header = json.loads(data[4 : 4 + length])
    at = -(-(4 + length) // 4) * 4
    assert not any(data[4 + length : at])
    arrays = {}
    for name, count in header["arrays"]:
        arrays[name] = struct.unpack_from(f"<{count}I", data, at)
        at += 4 * count
    assert at == len(data)
    pages, words = arrays["pages"], arrays["blocks"]
    blocks = {}
    for first, block, logical, digest, age in zip(*(words[k::5] for k in range(5)), strict=True):
        assert (first & 0xFF, block) not in blocks
        blocks[first & 0xFF, block] = Block(
            first >> 8 & 0xFF,
            first >> 16,
            None if logical == UNKNOWN else logical,
            digest,
            None if age == UNKNOWN else age,
        )
    records = arrays.get("host_blocks", ())
    host_blocks: dict[tuple[int, int], int] = {}
    for block, packed in zip(records[::2], records[1::2], strict=True):
        for each in range(block, block + (packed >> 16) + 1):
            assert (packed & 0xFF, each) not in host_blocks
            host_blocks[packed & 0xFF, each] = packed >> 8 & 0xFF
    return Frame(header, list(zip(pages[::2], pages[1::2], strict=True)), blocks, host_blocks, len(records) // 2)


@dataclass
class Map:
    """A watcher's picture of one worker."""

    blocks: dict[tuple[int, int], Block] = field(default_factory=dict)
    owners: dict[int, int] = field(default_factory=dict)
    sequences: dict[int, dict[str, Any]] = field(default_factory=dict)
    header: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    next_sequence: int = 0
    host_blocks: dict[tuple[int, int], int] = field(default_factory=dict)
    most_host_records: int = 0  # in one frame

    def take(self, data: bytes) -> Frame:
        frame = decode(data)
        header = frame.header
        assert header["sequence"] == self.next_sequence
        self.next_sequence += 1
        if header["whole"]:
            self.blocks, self.owners, self.sequences, self.host_blocks = {}, {}, {}, {}
        self.blocks |= frame.blocks
        self.host_blocks |= frame.host_blocks
        self.most_host_records = max(self.most_host_records, frame.num_host_records)
        self.owners |= dict(frame.pages)
        for sequence in header["sequences"]:
            self.sequences[sequence["id"]] = sequence
        for seq_id in header["gone"]:
            del self.sequences[seq_id]
        self.events += header["events"]
        self.header |= header
        return frame

    @property
    def shown(self) -> dict[tuple[int, int], Block]:
        """Without blocks that are gone, and without ages."""
        return {key: block._replace(age=None) for key, block in self.blocks.items() if block.state != GONE}

    @property
    def shown_in_host(self) -> dict[tuple[int, int], int]:
        """The states of the host tier's blocks, without those that are gone."""
        return {key: state for key, state in self.host_blocks.items() if state != GONE}
