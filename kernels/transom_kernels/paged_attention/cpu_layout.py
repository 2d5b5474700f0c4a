"""Sizes for the CPU kernels of `paged_attention`: how elements are multiplied, where a thread's memory holds what.

- word: 32 bits of a vector's lane: one float32, or a pair of bfloat16 where the processor multiplies pairs (`Words.pairs`). Other
  bfloat16 and float16 numbers become float32 when they are loaded.
- unit: the keys between two multiples of UNIT_KEYS, which a decoding row attends to at once (`cpu_decode.py`).
- tile: some query tokens of a prompt with all query heads of a KV head, or KEY_TILE keys (`cpu_tile.py`).

Legend: G query heads per KV head, D key width, Dv value width.
"""

from __future__ import annotations

from dataclasses import dataclass

from transom_kernels.cpu.target import cpu_target

UNIT_KEYS = 256
KEY_TILE = 128
SUB_ROWS = 32  # rows of a prompt's tile that are computed together
MAX_DECODING_ROWS = 8  # a sequence with more new tokens is computed in tiles
TILE_ROWS = 192  # rows of a prompt's tile, about: they share the packing of keys

_LANES = 16
VECTOR_BYTES = 4 * _LANES


@dataclass(frozen=True, slots=True)
class Words:
    """How rows of numbers are multiplied."""

    stored: str  # type of the numbers in memory (`quantised_kv.cpu_rows`)
    pairs: bool  # bfloat16 in pairs; else float32
    halves: bool = False  # 16-bit integers in pairs (`cpu_integers.py`)

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


def words_of(dtype: str, stored: str | None = None) -> Words:
    """How this processor multiplies rows of queries of a dtype, or rows of a quantised cache with them."""
    return Words(stored or dtype, dtype == "bf16" and cpu_target().bf16)


def is_quantised(dtype: str, stored: str | None) -> bool:
    """Whether a cache that is stored like this has scales."""
    return stored is not None and stored != dtype


def uses_tiles(dtype: str) -> bool:
    """Whether prompts are multiplied by tile registers (AMX)."""
    return words_of(dtype).pairs and cpu_target().amx


def partial_floats(dtype: str, group: int, value_width: int) -> int:
    """Floats of a unit's partial result of one KV head: for each query head the weighted values, then maximum, sum, padding."""
    return group * (words_of(dtype).output_vectors(value_width) * _LANES + _LANES)


class _Memory:
    """Takes parts of a thread's memory, each at a multiple of 64 bytes."""

    def __init__(self) -> None:
        self.end = 0

    def take(self, num_bytes: int) -> int:
        """Return where the next part begins."""
        begin = self.end
        self.end += -(-num_bytes // VECTOR_BYTES) * VECTOR_BYTES
        return begin


class DecodeLayout:
    """A thread's memory while it decodes, in bytes from its beginning."""

    def __init__(self, dtype: str, group: int, width: int, value_width: int) -> None:
        """Lay out the memory."""
        words, memory = words_of(dtype), _Memory()
        self.query_stride = words.vectors(width) * VECTOR_BYTES
        self.weight_bytes = 2 if words.pairs else 4
        self.weight_stride = UNIT_KEYS * self.weight_bytes + VECTOR_BYTES  # and the scale of integers
        self.score_stride = UNIT_KEYS * 4
        self.integer_query_stride = -(-width // (2 * _LANES)) * VECTOR_BYTES + VECTOR_BYTES  # and the query's scale
        self.partial_bytes = 4 * partial_floats(dtype, group, value_width)
        self.partial_stride = self.partial_bytes // group
        self.statistics = self.partial_stride - VECTOR_BYTES  # of maximum and sum behind a query head's weighted values
        self.queries = memory.take(group * self.query_stride)
        self.key_groups = memory.take(8 * UNIT_KEYS // _LANES)
        self.value_groups = memory.take(8 * UNIT_KEYS // _LANES)
        self.key_copies = memory.take(UNIT_KEYS * width * 4 + VECTOR_BYTES)
        self.value_copies = memory.take(UNIT_KEYS * value_width * 4 + VECTOR_BYTES)
        self.scores = memory.take(group * self.score_stride)
        self.weights = memory.take(group * self.weight_stride)
        self.integer_queries = memory.take(group * self.integer_query_stride)
        self.key_scales = memory.take(4 * UNIT_KEYS)  # of quantised caches
        self.value_scales = memory.take(4 * UNIT_KEYS)
        self.partial = memory.take(self.partial_bytes)
        self.total = memory.take(self.partial_bytes)
        self.num_bytes = memory.end


class PromptLayout:
    """A thread's memory while it computes a prompt's tile, in bytes from its beginning."""

    def __init__(self, dtype: str, group: int, width: int, value_width: int) -> None:
        """Lay out the memory."""
        words, memory = words_of(dtype), _Memory()
        self.tokens = max(1, TILE_ROWS // group)
        self.rows = -(-self.tokens * group // SUB_ROWS) * SUB_ROWS
        self.query_stride = words.vectors(width) * VECTOR_BYTES
        self.value_stride = words.output_vectors(value_width) * VECTOR_BYTES
        self.weight_bytes = 2 if words.pairs else 4
        self.weight_stride = KEY_TILE * self.weight_bytes
        self.score_stride = KEY_TILE * 4
        self.zeros_bytes = max(self.query_stride, self.value_stride)
        self.queries = memory.take(self.rows * self.query_stride)
        self.outputs = memory.take(self.rows * self.value_stride)
        self.sums = memory.take(self.rows * VECTOR_BYTES)
        self.maxima = memory.take(self.rows * 4)
        self.scores = memory.take(SUB_ROWS * self.score_stride)
        self.weights = memory.take(SUB_ROWS * self.weight_stride)
        self.key_addresses = memory.take(KEY_TILE * 8)
        self.value_addresses = memory.take(KEY_TILE * 8)
        self.key_scales = memory.take(4 * KEY_TILE)  # of quantised caches
        self.value_scales = memory.take(4 * KEY_TILE)
        self.low_keys = memory.take(8 * self.tokens)  # of each token, the keys between which it sees
        self.high_keys = memory.take(8 * self.tokens)
        self.zeros = memory.take(self.zeros_bytes)
        self.key_panel = words.vectors(width) * _LANES * VECTOR_BYTES  # bytes of 16 packed keys
        self.keys = memory.take(KEY_TILE // _LANES * self.key_panel)
        self.value_panel = KEY_TILE // words.elements * VECTOR_BYTES  # bytes of 16 columns of packed values
        self.values = memory.take(words.output_vectors(value_width) * self.value_panel)
        self.tile_registers = memory.take(VECTOR_BYTES)
        self.num_bytes = memory.end
