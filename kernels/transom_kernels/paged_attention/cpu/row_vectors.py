"""Emits LLVM code for rows of numbers as vectors of words (`layout.py`): loads that widen, multiply-adds, copies, masks.

A *row* is a query, or one key or value of one head, whose elements are adjacent.
"""

from llvmlite import ir

from transom_kernels.cpu.language import FLOAT, FLOATS, INT, NOTHING, emits
from transom_kernels.cpu.simd import NUM_BYTES
from transom_kernels.cpu.target import cpu_target
from transom_kernels.cpu.vector_code import (
    F32,
    F32_16,
    I8,
    I16,
    I32,
    I32_16,
    LANES,
    broadcast,
    constant,
    dot_halves,
    dot_pairs,
    int32,
    int64,
    load,
    multiply_add,
    store,
)
from transom_kernels.paged_attention.cpu.layout import VECTOR_BYTES, Words
from transom_kernels.quantised_kv.cpu_rows import emit_halves, emit_numbers, emit_pairs, load_first, row_bytes

I16_32 = ir.VectorType(I16, 2 * LANES)


def num_accumulators() -> int:
    """Return how many vectors of sums fit into registers together with the operands."""
    return 24 if cpu_target().avx512 else 6


def row_vector(b, words: Words, address, index: int, width: int):
    """Load vector `index` of a row of `width` numbers. Lanes after the row are any finite numbers; memory after it is not read."""
    first = index * LANES * words.elements
    count = min(width - first, LANES * words.elements)
    address = b.add(address, int64(row_bytes(words.stored, first)))
    emit = emit_halves if words.halves else emit_pairs if words.pairs else emit_numbers
    return emit(b, address, words.stored, count)


def multiply(b, words: Words, total, x, y):
    """Return total + x * y, lane by lane; with pairs, both products are added."""
    if words.halves:
        return b.add(total, dot_halves(b, x, y))
    return dot_pairs(b, total, x, y) if words.pairs else multiply_add(b, x, y, total)


def splat_at(b, words: Words, address):
    """Return a vector with the word at an address in every lane."""
    if words.elements == 2:
        return broadcast(b, load(b, address, I32, 4), I32_16)
    return broadcast(b, load(b, address, F32, 4), F32_16)


def zeros(words: Words):
    """Return a vector of zeros of the type of sums."""
    return constant(I32_16, 0) if words.halves else constant(F32_16, 0.0)


def make_copy_row(words: Words, width: int):
    """Build copy_row(row, out), which copies a row as words, in whole vectors."""

    @emits(NOTHING, INT, INT)
    def copy_row(b, row, out):
        for j in range(words.vectors(width)):
            store(b, row_vector(b, words, row, j, width), b.add(out, int64(j * VECTOR_BYTES)), 64)

    return copy_row


def make_move_row(stored: str, width: int):
    """Build move_row(row, out), which copies a row as it is stored; after the row, `out` gets zeros up to the end of a vector."""
    num_bytes = row_bytes(stored, width)
    element = I16 if num_bytes % 2 == 0 and stored in NUM_BYTES else I8
    vector = F32_16 if stored == "f32" else ir.VectorType(element, VECTOR_BYTES * 8 // element.width)
    size = VECTOR_BYTES // vector.count

    @emits(NOTHING, INT, INT)
    def move_row(b, row, out):
        for at in range(0, num_bytes, VECTOR_BYTES):
            part = load_first(b, b.add(row, int64(at)), vector, min(vector.count, (num_bytes - at) // size))
            store(b, part, b.add(out, int64(at)), size)

    return move_row


@emits(FLOATS, FLOATS, INT, INT, INT, INT, FLOAT)
def keep_visible(b, scores, first, low, high, sinks_end, other):
    """Return the scores of keys k = first + lane with k <= high and (k >= low or k < sinks_end), and `other` for the rest."""
    lanes = ir.Constant(I32_16, list(range(LANES)))

    def relative(key):
        return broadcast(b, b.trunc(b.sub(key, first), I32), I32_16)

    seen = b.or_(b.icmp_signed(">=", lanes, relative(low)), b.icmp_signed("<", lanes, relative(sinks_end)))
    seen = b.and_(seen, b.icmp_signed("<=", lanes, relative(high)))
    return b.select(seen, scores, broadcast(b, other, F32_16))


@emits(FLOAT, FLOATS)
def first_lane(b, x):
    """Return lane 0 of a vector."""
    return b.extract_element(x, int32(0))
