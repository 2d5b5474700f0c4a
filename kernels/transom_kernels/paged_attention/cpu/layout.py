"""What a CPU kernel of attention is compiled for, how it multiplies numbers, and what a thread's memory holds while it runs.

- word: 32 bits of a vector's lane: one float32, or a pair of bfloat16 where the processor multiplies pairs (`Words.pairs`). Other
  bfloat16 and float16 numbers become float32 when they are loaded.
- unit: the keys between two multiples of UNIT_KEYS, which a decoding row attends to at once (`decode.py`).
- tile: some query tokens of a prompt with all query heads of a KV head, or KEY_TILE keys (`tile.py`).

Legend: G query heads per KV head, D key width, Dv value width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from transom_kernels.cpu.target import cpu_target

UNIT_KEYS = 256
KEY_TILE = 128
SUB_ROWS = 32  # rows of a prompt's tile that are computed together
MAX_DECODING_ROWS = 8  # a sequence with more new tokens is computed in tiles
TILE_ROWS = 192  # rows of a prompt's tile, about: they share the packing of keys

MASKED = -3e38  # the score of a key that is not seen
NO_MAXIMUM = -1e30  # the maximum of no scores: above MASKED, so that a masked score weighs 0 and no NaN comes up

_LANES = 16
VECTOR_BYTES = 4 * _LANES


@dataclass(frozen=True, slots=True)
class Words:
    """How rows of numbers are multiplied."""

    stored: str  # type of the numbers in memory (`quantised_kv.cpu_rows`)
    pairs: bool  # bfloat16 in pairs; else float32
    halves: bool = False  # 16-bit integers in pairs (`integers.py`)

    @property
    def elements(self) -> int:
        """Elements of a word."""
        return 2 if self.pairs or self.halves else 1

    def vectors(self, width: int) -> int:
        """Vectors of words that hold a row of `width` elements."""
        return -(-width // (self.elements * _LANES))

    def output_vectors(self, width: int) -> int:
        """Vectors of float32 that hold a row of `width` results."""
        return self.vectors(width) * self.elements


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKind:
    """What a kernel is compiled for: the parameters of its maker."""

    dtype: str  # of queries and results
    stored: str  # how caches are stored (`quantised_kv.cpu_rows`)
    group: int  # G
    width: int  # D
    value_width: int  # Dv
    has_soft_cap: bool = False
    sink_dtype: str | None = None  # of sink logits

    @property
    def words(self) -> Words:
        """How this processor multiplies rows of queries."""
        return Words(self.dtype, self._has_pairs)

    @property
    def cached(self) -> Words:
        """How this processor multiplies rows of the cache."""
        return Words(self.stored, self._has_pairs)

    @property
    def has_scales(self) -> bool:
        """Whether the cache is quantised."""
        return self.stored != self.dtype

    @property
    def uses_tiles(self) -> bool:
        """Whether prompts are multiplied by tile registers (AMX)."""
        return self._has_pairs and cpu_target().amx

    @property
    def partial_bytes(self) -> int:
        """Bytes of a unit's partial result: for each query head the weighted values, then a vector with maximum and sum."""
        return self.group * (self.words.output_vectors(self.value_width) + 1) * VECTOR_BYTES

    @property
    def tile_tokens(self) -> int:
        """Query tokens of a prompt's tile."""
        return max(1, TILE_ROWS // self.group)

    @property
    def _has_pairs(self) -> bool:
        return self.dtype == "bf16" and cpu_target().bf16


class _Memory:
    """Takes parts of a thread's memory, each at a multiple of 64 bytes."""

    def __init__(self) -> None:
        self.end = 0

    def take(self, num_bytes: int) -> int:
        """Return where the next part begins."""
        begin = self.end
        self.end += -(-num_bytes // VECTOR_BYTES) * VECTOR_BYTES
        return begin


class DecodeLayout(NamedTuple):
    """A thread's memory while it decodes: strides, then where each part begins, in bytes."""

    query_stride: int
    weight_bytes: int  # of one weight
    weight_stride: int  # of a query head's weights of a unit; the last vector has the scale of integer weights
    score_stride: int
    integer_query_stride: int  # the last vector has the query's scale
    partial_stride: int  # of a query head's partial result
    statistics: int  # from a query head's partial result to its maximum and sum
    queries: int
    key_groups: int  # addresses of groups of 16 keys
    value_groups: int
    key_copies: int  # rows of groups that are not adjacent in the cache
    value_copies: int
    scores: int
    weights: int
    integer_queries: int
    key_scales: int  # of quantised caches
    value_scales: int
    partial: int  # a unit's partial result
    total: int  # the row's result so far
    shift: int  # of compact tables (`policy_attention.cpu.table`)
    sums: int  # of a unit's attention probabilities (`policy_attention.cpu.mass`)
    num_bytes: int

    @classmethod
    def of(cls, kind: AttentionKind) -> DecodeLayout:
        """Lay out the memory."""
        words, memory, group = kind.words, _Memory(), kind.group
        query_stride = words.vectors(kind.width) * VECTOR_BYTES
        weight_bytes = 2 if words.pairs else 4
        weight_stride = UNIT_KEYS * weight_bytes + VECTOR_BYTES
        integer_query_stride = -(-kind.width // (2 * _LANES)) * VECTOR_BYTES + VECTOR_BYTES
        partial_stride = kind.partial_bytes // group
        return cls(
            query_stride=query_stride,
            weight_bytes=weight_bytes,
            weight_stride=weight_stride,
            score_stride=4 * UNIT_KEYS,
            integer_query_stride=integer_query_stride,
            partial_stride=partial_stride,
            statistics=partial_stride - VECTOR_BYTES,
            queries=memory.take(group * query_stride),
            key_groups=memory.take(8 * UNIT_KEYS // _LANES),
            value_groups=memory.take(8 * UNIT_KEYS // _LANES),
            key_copies=memory.take(UNIT_KEYS * kind.width * 4 + VECTOR_BYTES),
            value_copies=memory.take(UNIT_KEYS * kind.value_width * 4 + VECTOR_BYTES),
            scores=memory.take(group * 4 * UNIT_KEYS),
            weights=memory.take(group * weight_stride),
            integer_queries=memory.take(group * integer_query_stride),
            key_scales=memory.take(4 * UNIT_KEYS),
            value_scales=memory.take(4 * UNIT_KEYS),
            partial=memory.take(kind.partial_bytes),
            total=memory.take(kind.partial_bytes),
            shift=memory.take(8),
            sums=memory.take(4 * UNIT_KEYS),
            num_bytes=memory.end,
        )


class PromptLayout(NamedTuple):
    """A thread's memory while it computes a prompt's tile: strides, then where each part begins, in bytes."""

    rows: int  # of the tile: its tokens times G, and padding
    query_stride: int
    value_stride: int  # of a row's weighted values
    weight_bytes: int  # of one weight
    weight_stride: int
    score_stride: int
    key_panel: int  # of 16 packed keys
    value_panel: int  # of 16 columns of packed values
    zeros_bytes: int
    queries: int
    outputs: int
    sums: int  # of each row's weights: a vector
    maxima: int
    scores: int
    weights: int
    key_addresses: int
    value_addresses: int
    key_scales: int  # of quantised caches
    value_scales: int
    low_keys: int  # of each token, the keys between which it sees
    high_keys: int
    zeros: int  # a row for keys that no token sees
    keys: int
    values: int
    tile_registers: int
    shift: int  # of compact tables (`policy_attention.cpu.table`)
    num_bytes: int

    @classmethod
    def of(cls, kind: AttentionKind) -> PromptLayout:
        """Lay out the memory."""
        words, memory = kind.words, _Memory()
        rows = -(-kind.tile_tokens * kind.group // SUB_ROWS) * SUB_ROWS
        query_stride = words.vectors(kind.width) * VECTOR_BYTES
        value_stride = words.output_vectors(kind.value_width) * VECTOR_BYTES
        weight_bytes = 2 if words.pairs else 4
        weight_stride, score_stride = KEY_TILE * weight_bytes, KEY_TILE * 4
        key_panel = words.vectors(kind.width) * _LANES * VECTOR_BYTES
        value_panel = KEY_TILE // words.elements * VECTOR_BYTES
        zeros_bytes = max(query_stride, value_stride)
        return cls(
            rows=rows,
            query_stride=query_stride,
            value_stride=value_stride,
            weight_bytes=weight_bytes,
            weight_stride=weight_stride,
            score_stride=score_stride,
            key_panel=key_panel,
            value_panel=value_panel,
            zeros_bytes=zeros_bytes,
            queries=memory.take(rows * query_stride),
            outputs=memory.take(rows * value_stride),
            sums=memory.take(rows * VECTOR_BYTES),
            maxima=memory.take(rows * 4),
            scores=memory.take(SUB_ROWS * score_stride),
            weights=memory.take(SUB_ROWS * weight_stride),
            key_addresses=memory.take(KEY_TILE * 8),
            value_addresses=memory.take(KEY_TILE * 8),
            key_scales=memory.take(4 * KEY_TILE),
            value_scales=memory.take(4 * KEY_TILE),
            low_keys=memory.take(8 * kind.tile_tokens),
            high_keys=memory.take(8 * kind.tile_tokens),
            zeros=memory.take(zeros_bytes),
            keys=memory.take(KEY_TILE // _LANES * key_panel),
            values=memory.take(words.output_vectors(kind.value_width) * value_panel),
            tile_registers=memory.take(VECTOR_BYTES),
            shift=memory.take(8),
            num_bytes=memory.end,
        )
