"""KV cache groups and their one rule of retention, `live(n)`.

Layers that keep the same thing for the same time share a group. What can be freed, what a hit needs, what admission and the
planner count: all follow from `live(n)`, the token ranges that must be present so that token `n` can be computed after `n`
tokens (a window `W` counts the query itself). Lower bounds grow with `n`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

Range = tuple[int, int]  # [start, end)


class GroupKind(StrEnum):
    """What a group's layers keep."""

    FULL = "full"
    WINDOW = "window"
    CHUNK = "chunk"
    SINKS_WINDOW = "sinks_window"
    LATENT = "latent"
    COMPRESSED = "compressed"
    INDEXER = "indexer"
    COMPRESSOR_STATE = "compressor_state"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """One group: its rule, its layers and its block size in tokens. Unused sizes stay 0."""

    name: str
    kind: GroupKind
    layers: tuple[int, ...]
    block_size: int
    window: int = 0  # W, tokens, the query included
    sinks: int = 0  # S, first tokens kept for ever
    chunk: int = 0  # C
    ratio: int = 0  # r, tokens per compressed entry
    overlap: int = 0  # earlier compressor groups that an entry reads

    @property
    def num_sink_blocks(self) -> int:
        """First logical blocks that never slide out (those that hold sink tokens)."""
        return -(-self.sinks // self.block_size) if self.kind is GroupKind.SINKS_WINDOW else 0

    @property
    def keeps_everything(self) -> bool:
        """Whether nothing is ever freed while the sequence runs."""
        return self.kind in (
            GroupKind.FULL,
            GroupKind.LATENT,
            GroupKind.COMPRESSED,
            GroupKind.INDEXER,
        )

    def live(self, n: int) -> tuple[Range, ...]:
        """Non-empty token ranges that must be present to compute token `n` after `n` tokens."""
        match self.kind:
            case GroupKind.FULL | GroupKind.LATENT:
                ranges = [(0, n)]
            case GroupKind.WINDOW:
                ranges = [(max(0, n - self.window + 1), n)]
            case GroupKind.CHUNK:
                ranges = [(n - n % self.chunk, n)]
            case GroupKind.SINKS_WINDOW:
                sinks_end = min(self.sinks, n)
                ranges = [(0, sinks_end), (max(self.sinks, n - self.window + 1), n)]
            case GroupKind.COMPRESSED | GroupKind.INDEXER:
                ranges = [(0, n - n % self.ratio)]
            case GroupKind.COMPRESSOR_STATE:
                ranges = [(max(0, n - n % self.ratio - self.overlap * self.ratio), n)]
        return tuple((a, b) for a, b in ranges if a < b)
