"""KV cache groups: model layers that keep the same tokens for the same time share a group, and `live(n)` says which tokens.

`live(n)` are the token ranges whose KV must be present so that token `n` can be computed, after tokens 0 to n - 1. It decides which
blocks can be freed, what a prefix-cache hit needs, and what admission and the planner count. A new kind of attention needs only a
new case in `live`. Example: a window of W = 128 tokens, which counts the token that is computed: live(1000) = [873, 1000). The
ranges' lower bounds never decrease as `n` grows.

    full, latent         [0, n)                                                 latent: one compressed row per token (MLA)
    window               [n - W + 1, n)
    chunk                [start of n's chunk of C tokens, n)                    chunked local attention
    sinks_window         [0, S) and [n - W + 1, n)                              S attention sinks
    convolution          [n - W + 1, n)                                         inputs of a convolution with a kernel of W tokens
    compressed, indexer  [0, n), whole entries of r tokens                      entries that stand for r tokens; their index keys
    compressor_state     [start of n's entry - overlap * r, n)                  what the next compressed entry is made of
    state                [n - 1, n)                                             one snapshot of recurrent layers after n tokens

A snapshot stands for all tokens before it, and has one size whatever their number. It counts as the row of token n - 1, as if W
were 2. But a sequence keeps few snapshots: it updates one block in place, and begins another one only where it keeps a snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

Range = tuple[int, int]  # [start, end)


class GroupKind(StrEnum):
    """What a group's layers keep; the module's docstring has a table."""

    FULL = "full"
    WINDOW = "window"
    CHUNK = "chunk"
    SINKS_WINDOW = "sinks_window"
    CONVOLUTION = "convolution"
    LATENT = "latent"
    COMPRESSED = "compressed"
    INDEXER = "indexer"
    COMPRESSOR_STATE = "compressor_state"
    STATE = "state"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """One group: its kind, its layers and its block size in tokens. Sizes that its kind does not use are 0."""

    name: str
    kind: GroupKind
    layers: tuple[int, ...]
    block_size: int
    window: int = 0  # W, tokens, the one that is computed included; 2 for a state
    sinks: int = 0  # S, first tokens that are always kept
    chunk: int = 0  # C
    ratio: int = 0  # r, tokens per compressed entry
    overlap: int = 0  # entries before its own whose tokens a compressed entry reads

    @property
    def num_sink_blocks(self) -> int:
        """Return the number of sink blocks: the first logical blocks, which hold the sink tokens and never slide out."""
        return -(-self.sinks // self.block_size) if self.kind is GroupKind.SINKS_WINDOW else 0

    @property
    def is_window(self) -> bool:
        """Return whether the last `window` tokens are read, the one that is computed included, and perhaps sink tokens."""
        return self.kind in (GroupKind.WINDOW, GroupKind.SINKS_WINDOW, GroupKind.CONVOLUTION, GroupKind.STATE)

    @property
    def is_state(self) -> bool:
        """Return whether a block is a snapshot of recurrent layers, instead of rows of `block_size` tokens."""
        return self.kind is GroupKind.STATE

    @property
    def keeps_everything(self) -> bool:
        """Return whether no block is freed while the sequence runs (a *full group*); the other groups are *sliding groups*."""
        return self.kind in (GroupKind.FULL, GroupKind.LATENT, GroupKind.COMPRESSED, GroupKind.INDEXER)

    def with_window(self, *, sinks: int, window: int) -> GroupSpec:
        """Return the group as it is for a sequence that keeps only the first `sinks` tokens and a window of `window` tokens."""
        return replace(self, kind=GroupKind.SINKS_WINDOW, sinks=sinks, window=window)

    def first_live_block(self, n: int) -> int:
        """Return the first logical block of the window, the last run of live blocks, when `n` tokens are processed; at least
        `num_sink_blocks`."""
        ranges = self.live(n)
        begin = ranges[-1][0] if ranges and ranges[-1][1] == n else n
        return max(self.num_sink_blocks, begin // self.block_size)

    def live(self, n: int) -> tuple[Range, ...]:
        """Return the token ranges whose KV must be present to compute token `n`; empty ranges are left out."""
        match self.kind:
            case GroupKind.FULL | GroupKind.LATENT:
                ranges = [(0, n)]
            case GroupKind.WINDOW | GroupKind.CONVOLUTION | GroupKind.STATE:
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
