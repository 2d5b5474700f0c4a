"""The parameters of CPU kernels of attention, the way in which they multiply numbers, the layout of a thread's memory, and the
argument words. `policy_attention` and `latent_attention` share some of these.

- word: the 32 bits of a vector's lane: one float32, or a pair of bfloat16 if the processor multiplies pairs (`Words.pairs`).
  Otherwise bfloat16 and float16 numbers become float32 when they are loaded.
- unit: the keys between two multiples of UNIT_KEYS, which a decoding row attends to at once (`kernel.py`).
- tile: query tokens of a prompt with all query heads of a KV head. A key tile is KEY_TILE keys (`tile.py`).

Legend: T query tokens, H query heads, KVH KV heads, G query heads per KV head, D key width, Dv value width, B sequences, N table
columns.
"""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from transom_kernels.cpu.arguments import CacheArguments, numbers_of
from transom_kernels.cpu.target import cpu_target

UNIT_KEYS = 256
KEY_TILE = 128
SUB_ROWS = 32  # rows of a prompt's tile that are computed together
FEW_ROWS = 8  # a sequence with up to this many new tokens is computed row by row
SHORT_ROWS, SHORT_KEYS = 16, 32_768  # so is one with up to this many new tokens that read up to this many keys in all
TILE_ROWS = 192  # about the rows of a prompt's tile; keys are packed once for all of them

MASKED = -3e38  # the score of a key that is not seen
NO_MAXIMUM = (
    -1e30
)  # the maximum of no scores: above MASKED, so that the weight 2 ** (MASKED - maximum) is 0 and never NaN

_LANES = 16
VECTOR_BYTES = 4 * _LANES


def is_short(start: int, count: int) -> bool:
    """Return whether a sequence's `count` new tokens from position `start` on are so few, and read so few keys, that they may be
    batch rows of one token each. They are computed row by row in any case, so that both ways give the same bits."""
    return count <= SHORT_ROWS and count * (start + count) <= SHORT_KEYS


@dataclass(frozen=True, slots=True)
class Words:
    """The form in which rows of numbers are multiplied."""

    stored: str  # type of the numbers in memory (`quantised_kv.cpu_rows`)
    pairs: bool  # bfloat16 in pairs; else float32
    halves: bool = False  # 16-bit integers in pairs (`units.py`)

    @property
    def elements(self) -> int:
        """Elements of a word."""
        return 2 if self.pairs or self.halves else 1

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of queries and weights."""
        return 4 // self.elements

    def vectors(self, width: int) -> int:
        """Return how many vectors of words hold a row of `width` elements."""
        return -(-width // (self.elements * _LANES))

    def output_vectors(self, width: int) -> int:
        """Return how many vectors of float32 hold a row of `width` results."""
        return self.vectors(width) * self.elements


class AttentionKind(NamedTuple):
    """The parameters that a kernel of attention is compiled for."""

    dtype: str  # of queries and results
    stored: str  # how caches are stored (`quantised_kv.cpu_rows`)
    group: int  # G
    width: int  # D
    value_width: int  # Dv
    has_soft_cap: bool = False
    sink_dtype: str | None = None  # of sink logits

    @property
    def words(self) -> Words:
        """The form in which this processor multiplies rows of queries."""
        return Words(self.dtype, self._has_pairs)

    @property
    def cached(self) -> Words:
        """The form in which this processor multiplies rows of the cache."""
        return Words(self.stored, self._has_pairs)

    @property
    def has_scales(self) -> bool:
        """Return whether the cache is quantised, so that its rows have scales."""
        return self.stored != self.dtype

    @property
    def uses_tiles(self) -> bool:
        """Return whether the products of a prompt use tile registers (AMX)."""
        return self._has_pairs and cpu_target().amx

    @property
    def partial_bytes(self) -> int:
        """Bytes of a unit's partial result: for each query head the weighted values, then a vector with maximum and sum.

        The vectors of values are even in number, because sums over pairs (`Words.elements`) come two vectors at a time. Whether
        the cache is multiplied in pairs is not asked, so that `combine` is the same for all formats of caches.
        """
        pairs = Words(self.stored, pairs=True)
        return self.group * (pairs.output_vectors(self.value_width) + 1) * VECTOR_BYTES

    @property
    def tile_tokens(self) -> int:
        """Query tokens of a prompt's tile."""
        return max(1, TILE_ROWS // self.group)

    @property
    def _has_pairs(self) -> bool:
        return self.dtype == "bf16" and cpu_target().bf16


def memory_layout(sizes: dict[str, int], parts: dict[str, int]) -> Any:
    """Return a named tuple of `sizes`, the offset at which each part of a thread's memory begins, and `num_bytes`, the total.

    `parts` maps each part, in order, to its bytes; each part begins at a multiple of 64 bytes.
    """
    numbers, end = dict(sizes), 0
    for name, num_bytes in parts.items():
        numbers[name] = end
        end += -(-num_bytes // VECTOR_BYTES) * VECTOR_BYTES
    numbers["num_bytes"] = end
    return namedtuple("MemoryLayout", numbers)(**numbers)


def decode_layout(kind: AttentionKind) -> Any:
    """Return the layout of a thread's memory while it decodes: sizes and strides in bytes, and offsets (`memory_layout`)."""
    words, group = kind.words, kind.group
    sizes = {
        "query_stride": words.vectors(kind.width) * VECTOR_BYTES,
        "integer_query_stride": -(-kind.width // (2 * _LANES)) * VECTOR_BYTES + VECTOR_BYTES,  # with the query's scale
        "score_stride": 4 * UNIT_KEYS,
        "weight_bytes": words.element_bytes,
        "weight_stride": UNIT_KEYS * words.element_bytes + VECTOR_BYTES,  # with the scale of integer weights
        "partial_stride": kind.partial_bytes // group,  # of a query head
        # from a query head's partial result to its maximum and sum
        "statistics": kind.partial_bytes // group - VECTOR_BYTES,
    }
    parts = {
        "queries": group * sizes["query_stride"],
        "integer_queries": group * sizes["integer_query_stride"],
        "key_groups": 8 * UNIT_KEYS // _LANES,  # addresses of groups of 16 keys
        "value_groups": 8 * UNIT_KEYS // _LANES,
        "next_keys": 8 * UNIT_KEYS // _LANES,  # of the unit that is computed next
        "key_copies": UNIT_KEYS * kind.width * 4 + VECTOR_BYTES,  # rows of groups that are not adjacent in the cache
        "value_copies": UNIT_KEYS * kind.value_width * 4 + VECTOR_BYTES,
        "scores": group * sizes["score_stride"],
        "weights": group * sizes["weight_stride"],
        "key_scales": 4 * UNIT_KEYS,  # of quantised caches
        "value_scales": 4 * UNIT_KEYS,
        "partial": kind.partial_bytes,  # a unit's partial result
        "total": kind.partial_bytes,  # the row's result so far
        "shift": 8,  # of compact tables (`policy_attention.cpu.kernel`)
        "sums": 4 * UNIT_KEYS,  # of a unit's attention probabilities (`policy_attention.cpu.mass`)
    }
    return memory_layout(sizes, parts)


def prompt_layout(kind: AttentionKind) -> Any:
    """Return the layout of a thread's memory for a prompt's tile: sizes and strides in bytes, and offsets (`memory_layout`)."""
    words = kind.words
    rows = -(-kind.tile_tokens * kind.group // SUB_ROWS) * SUB_ROWS  # of the tile, and padding
    output_vectors = words.output_vectors(kind.value_width)
    sizes = {
        "rows": rows,
        "query_stride": words.vectors(kind.width) * VECTOR_BYTES,
        "value_stride": output_vectors * VECTOR_BYTES,  # of a row's weighted values
        "score_stride": 4 * KEY_TILE,
        "weight_bytes": words.element_bytes,
        "weight_stride": KEY_TILE * words.element_bytes,
        # of a row of zeros, which stands in for keys that no token sees
        "zeros_bytes": max(words.vectors(kind.width), output_vectors) * VECTOR_BYTES,
        "key_panel": words.vectors(kind.width) * _LANES * VECTOR_BYTES,  # of 16 packed keys
        "value_panel": KEY_TILE // words.elements * VECTOR_BYTES,  # of 16 columns of packed values
    }
    parts = {
        "queries": rows * sizes["query_stride"],
        "outputs": rows * sizes["value_stride"],
        "sums": rows * VECTOR_BYTES,  # of each row's weights: a vector, whose lanes are added at the end
        "maxima": rows * 4,
        "scores": SUB_ROWS * sizes["score_stride"],
        "weights": SUB_ROWS * sizes["weight_stride"],
        "key_addresses": 8 * KEY_TILE,
        "value_addresses": 8 * KEY_TILE,
        "key_scales": 4 * KEY_TILE,  # of quantised caches
        "value_scales": 4 * KEY_TILE,
        "low_keys": 8 * kind.tile_tokens,  # first and last key that each token sees (`tile.TileLoops`)
        "high_keys": 8 * kind.tile_tokens,
        "zeros": sizes["zeros_bytes"],
        "keys": KEY_TILE // _LANES * sizes["key_panel"],
        "values": output_vectors * sizes["value_panel"],
        "tile_registers": VECTOR_BYTES,
        "shift": 8,  # of compact tables (`policy_attention.cpu.kernel`)
    }
    return memory_layout(sizes, parts)


class ResultArguments(NamedTuple):
    """The words that the scores and the result of a row need; the kernel of `latent_attention` has them, too."""

    out: torch.Tensor | None  # [T, H, Dv], contiguous
    kv_heads: int
    scale: float
    soft_cap: float  # 0: none
    sink_logits: torch.Tensor | None  # [H]
    sink_stride: int  # bytes
    statistics: torch.Tensor | None  # [T, H, 2] float32: receives maximum and sum of each row's softmax


class WorkArguments(NamedTuple):
    """How the work of a step is cut into items (`launcher.Plan`). A sequence decodes, or is computed in tiles of its query tokens.

    `kernel.py` defines slots and units.
    """

    tiles: torch.Tensor | None = None  # [tiles, 2] int32: sequence and first token of each tile of a prompt
    num_tile_items: int = 0  # items that compute tiles; the others decode
    decoding: torch.Tensor | None = None  # int32: numbers of the sequences that decode; None: all sequences
    num_slots: int = 1  # items that share the work of a decoding row and KV head
    max_units: int = 0  # partial results that a row and KV head may have
    # [T, KVH, max_units, floats of a partial result] float32, if slots share rows
    partials: torch.Tensor | None = None


class AttentionArguments(NamedTuple):
    """The words that `paged_attention` and `policy_attention` share. Tables, positions and offsets are int32."""

    result: ResultArguments
    q: torch.Tensor  # [T, H, D]
    sink_q: torch.Tensor | None  # [T, H, D]: queries for the sink tokens, with q's strides; None: q
    q_row: int  # strides in bytes
    q_head: int
    keys: CacheArguments
    values: CacheArguments
    key_scales: CacheArguments  # of quantised caches
    value_scales: CacheArguments
    block_table: torch.Tensor  # [B, N]
    columns: int  # N
    block_size: int
    start: torch.Tensor  # [B]: position of the first query
    query_offset: torch.Tensor  # [B + 1]: rows of sequence b are [query_offset[b], query_offset[b + 1])
    work: WorkArguments


class PagedArguments(NamedTuple):
    """The words that only `paged_attention` has, after `AttentionArguments`: its block tables, and the mask rule."""

    first_block: torch.Tensor  # [B]: logical block of the first column after the sink blocks
    attend_from: torch.Tensor  # [B]: first position whose key may be read; sink tokens are exempt
    num_sink_blocks: int
    window: int  # 0: none
    num_sink_tokens: int
    chunk: int  # 0: none


RESULT = numbers_of(ResultArguments)
AT = numbers_of(AttentionArguments)
PAGED = numbers_of(PagedArguments, after=AttentionArguments)
