"""What one layer's attention reads and keeps. Groups, bytes and masks all follow from it. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """One entry for every `ratio` tokens beside a layer's window, each read from `1 + overlap` groups of `ratio` tokens.

    `index_size` is the width of the indexer's keys that choose among the entries; 0: every entry is read.
    """

    ratio: int
    overlap: int = 0
    index_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """What one layer's attention reads: everything, the last `window` tokens (the query included) and the first `sinks`, or the
    tokens since the last multiple of `chunk`.

    A `latent` layer has one row per token that is key and value at once, for all heads and so on every rank; `rope_size` of its
    width is rotary. A layer that `reads_cache_of` an earlier one has no cache; such layers come last.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None = None
    sinks: int = 0
    chunk: int | None = None
    latent: bool = False
    rope_size: int = 0
    compression: Compression | None = None
    reads_cache_of: int | None = None
    value_size: int | None = None  # None: as wide as a key
