"""Frames of the live block map, encoded from docs/block_map.md alone, about a worker that a test moves by hand."""

import json
import struct
from dataclasses import dataclass, field
from math import ceil
from typing import Any

UNLEASED, FREE, ACTIVE, EVICTABLE, PINNED, REPAIR, EVICTED = range(7)
UNKNOWN = 0xFFFFFFFF
HOST_COUNTS = {"empty": FREE, "loose": EVICTABLE, "held": PINNED}
TOTALS = ("hit_tokens", "repaired_tokens", "missed_tokens", "evicted_blocks", "preemptions", "repairs")
BANDS = {"active": (ACTIVE, REPAIR), "held": (PINNED,), "loose": (EVICTABLE,), "empty": (FREE, EVICTED)}


def encode(header: dict[str, Any], **arrays: list[int]) -> bytes:
    """One frame."""
    text = json.dumps({**header, "arrays": [[name, len(words)] for name, words in arrays.items()]}).encode()
    words = [word for array in arrays.values() for word in array]
    return struct.pack("<I", len(text)) + text + bytes(-(4 + len(text)) % 4) + struct.pack(f"<{len(words)}I", *words)


@dataclass
class FakeWorker:
    """Pages, blocks and sequences of one worker. Changes gather until `frame` is asked for."""

    worker: str = "w0"
    page_bytes: int = 4096
    num_pages: int = 24
    strides: dict[str, int] = field(default_factory=lambda: {"full": 256, "window(128)": 128})
    time_s: float = 1_700_000_000.0
    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0))
    history: list[list[Any]] = field(default_factory=list)
    running: int = 0
    waiting: int = 0
    host_pages: int = 0

    def __post_init__(self) -> None:
        self.number = 0
        self.owners = [0] * self.num_pages
        self.records: dict[tuple[int, int], tuple[int, int, int, int, int]] = {}
        self.sequences: dict[int, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.host_states: dict[tuple[int, int], int] = {}
        self._host_records: list[int] = []
        self._changed_pages: set[int] = set()
        self._changed: set[tuple[int, int]] = set()
        self._changed_sequences: set[int] = set()
        self._gone: list[int] = []

    def blocks_of(self, group: int, page: int) -> range:
        """The blocks that lie wholly inside a page."""
        stride = list(self.strides.values())[group]
        return range(ceil(page * self.page_bytes / stride), (page + 1) * self.page_bytes // stride)

    def lease(self, group: int, *pages: int) -> None:
        """Lease pages to a group; their blocks are free."""
        for page in pages:
            self.owners[page] = group + 1
            self._changed_pages.add(page)
            for block in self.blocks_of(group, page):
                self.put(group, block, FREE)

    def give_back(self, page: int) -> None:
        """Free a page; its blocks are gone."""
        group = self.owners[page] - 1
        self.owners[page] = 0
        self._changed_pages.add(page)
        for block in self.blocks_of(group, page):
            del self.records[group, block]
            self._changed.add((group, block))

    def put(
        self,
        group: int,
        block: int,
        state: int,
        *,
        references: int = 0,
        logical: int = UNKNOWN,
        hash_prefix: int = 0,
        age: int = 0,
    ) -> None:
        """Set a block's record; `age` in tenths of a second."""
        self.records[group, block] = (state, references, logical, hash_prefix, age)
        self._changed.add((group, block))

    def put_host(self, group: int, block: int, count: int, state: int) -> None:
        """Set the state of a run of blocks of the host tier."""
        self.host_states |= {(group, each): state for each in range(block, block + count)}
        self._host_records += self._host_run(group, block, count, state)

    def _host_run(self, group: int, block: int, count: int, state: int) -> list[int]:
        return [block, group | state << 8 | (count - 1) << 16]

    def _host_arrays(self, whole: bool) -> dict[str, list[int]]:
        if not self.host_pages:
            return {}
        records, self._host_records = self._host_records, []
        if whole:
            states = sorted(self.host_states.items())
            records = [word for (group, block), state in states for word in self._host_run(group, block, 1, state)]
        return {"host_blocks": records}

    def _host_header(self, whole: bool) -> dict[str, Any]:
        counts = [
            {
                name: sum(state == wanted for (of, _), state in self.host_states.items() if of == group)
                for name, wanted in HOST_COUNTS.items()
            }
            for group in range(len(self.strides))
        ]
        num_blocks = [self.page_bytes * self.host_pages // stride for stride in self.strides.values()]
        return {
            "free_pages": 0,
            "counts": counts,
            **({"num_pages": self.host_pages, "num_blocks": num_blocks} if whole else {}),
        }

    def sequence(self, seq_id: int, request: str, runs: list[list[list[int]]], **values: Any) -> None:
        """Add or change a sequence."""
        plain = {"phase": "decode", "processed": 32, "num_tokens": 33, "num_prompt_tokens": 32, "num_cached_tokens": 0}
        self.sequences[seq_id] = {"id": seq_id, "request": request, **plain, "repair": None, **values, "runs": runs}
        self._changed_sequences.add(seq_id)

    def end(self, seq_id: int) -> None:
        """A sequence ended."""
        del self.sequences[seq_id]
        self._gone.append(seq_id)

    def event(self, kind: str, *, request: str | None = None, group: int | None = None, count: int = 1) -> None:
        """Something happened."""
        self.events.append(
            {"time_s": self.time_s, "kind": kind, "request": request, "group": group, "count": count, "detail": ""}
        )

    def frame(self, *, whole: bool = False, after_s: float = 0.5) -> bytes:
        """The next frame: what changed since the last one, or everything."""
        self.time_s += after_s
        header = self._header(whole)
        pages = range(self.num_pages) if whole else sorted(self._changed_pages)
        keys = sorted(self.records) if whole else sorted(self._changed)
        header["sequences"] = [self.sequences[i] for i in sorted(self.sequences if whole else self._changed_sequences)]
        header["gone"] = self._gone
        self.number += 1
        self.events, self._gone = [], []
        self._changed_pages, self._changed, self._changed_sequences = set(), set(), set()
        return encode(
            header,
            pages=[word for page in pages for word in (page, self.owners[page])],
            blocks=[word for key in keys for word in self._record(*key)],
            **self._host_arrays(whole),
        )

    def _record(self, group: int, block: int) -> tuple[int, ...]:
        state, references, logical, hash_prefix, age = self.records.get(
            (group, block), (UNLEASED, 0, UNKNOWN, 0, UNKNOWN)
        )
        return (group | state << 8 | references << 16, block, logical, hash_prefix, age)

    def counts(self) -> list[dict[str, int]]:
        """Blocks by group and state."""
        found: list[list[int]] = [[] for _ in self.strides]
        for (group, _), (state, references, *_rest) in self.records.items():
            found[group].append(ACTIVE if state == EVICTED and references else state)
        return [{band: sum(states.count(s) for s in wanted) for band, wanted in BANDS.items()} for states in found]

    def _header(self, whole: bool) -> dict[str, Any]:
        header: dict[str, Any] = {
            "worker": self.worker,
            "sequence": self.number,
            "time_s": self.time_s,
            "whole": whole,
            "counts": self.counts(),
            "free_pages": self.owners.count(0),
            "running": self.running,
            "waiting": self.waiting,
            "totals": dict(self.totals),
            "events": self.events,
        }
        if self.host_pages:
            header["host"] = self._host_header(whole)
        if whole:
            header |= {"model": "demo", "identity": "0123456789abcdef" * 4, "history": self.history}
            header |= {"page_bytes": self.page_bytes, "num_pages": self.num_pages, "groups": self._groups()}
        return header

    def _groups(self) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "kind": name.split("(")[0],
                "block_size": 16,
                "stride_bytes": stride,
                "block_bytes": stride - 8,
                "num_blocks": self.page_bytes * self.num_pages // stride,
            }
            for name, stride in self.strides.items()
        ]
