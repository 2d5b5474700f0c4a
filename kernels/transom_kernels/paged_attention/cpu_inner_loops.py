"""The inner loops of the CPU kernels of `paged_attention`, emitted as LLVM code so that accumulators stay in registers.

Vectors are of words (`cpu_layout.py`).

- row: one key or one value of one head, whose elements are adjacent in the cache.
- group: the rows of 16 keys, one behind the other. Groups are found through arrays of addresses, so they may lie anywhere.

Legend: R query rows, K words that are summed, N vectors of 16 columns.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from transom_kernels.cpu.simd import NUM_BYTES, f32x16
from transom_kernels.cpu.target import cpu_target
from transom_kernels.cpu.vector_code import (
    F32,
    F32_16,
    I8,
    I16,
    I32,
    I32_16,
    I64,
    LANES,
    Loop,
    broadcast,
    constant,
    dot_halves,
    dot_pairs,
    emit_prefetch,
    int32,
    int64,
    load,
    multiply_add,
    shuffle,
    store,
)
from transom_kernels.paged_attention.cpu_layout import VECTOR_BYTES, Words
from transom_kernels.quantised_kv.cpu_rows import (
    emit_halves,
    emit_numbers,
    emit_pairs,
    load_first,
    row_bytes,
)

_GROUPS_AHEAD = 4  # keys are asked for so many groups before they are read
_I = types.int64
_I16_32 = ir.VectorType(I16, 2 * LANES)


def num_accumulators() -> int:
    """How many vectors of sums fit into registers, beside what is multiplied."""
    return 24 if cpu_target().avx512 else 6


def row_vector(b, words: Words, address, index: int, width: int):
    """Vector `index` of a row of `width` numbers; what lies behind the row is finite and is not read."""
    first = index * LANES * words.elements
    count = min(width - first, LANES * words.elements)
    address = b.add(address, int64(row_bytes(words.stored, first)))
    emit = emit_halves if words.halves else emit_pairs if words.pairs else emit_numbers
    return emit(b, address, words.stored, count)


def multiply(b, words: Words, total, x, y):
    """total + x * y, lane by lane; of pairs, the products of both."""
    if words.halves:
        return b.add(total, dot_halves(b, x, y))
    return dot_pairs(b, total, x, y) if words.pairs else multiply_add(b, x, y, total)


def splat_at(b, words: Words, address):
    """The word at an address in every lane."""
    if words.elements == 2:
        return broadcast(b, load(b, address, I32, 4), I32_16)
    return broadcast(b, load(b, address, F32, 4), F32_16)


def zeros(words: Words):
    """The sum of no products."""
    return constant(I32_16, 0) if words.halves else constant(F32_16, 0.0)


def sums_of_lanes(b, vectors):
    """A vector whose lane i is the sum of the 16 lanes of vector i; a tree of additions, the same for every lane."""

    add = b.fadd if vectors[0].type == F32_16 else b.add

    def reduce(vectors):
        if len(vectors) == 1:
            return vectors[0], LANES
        half = len(vectors) // 2
        (x, width), (y, _) = reduce(vectors[:half]), reduce(vectors[half:])
        low = [base + lane for base in range(0, 2 * LANES, width) for lane in range(width // 2)]
        high = [lane + width // 2 for lane in low]
        return add(shuffle(b, x, y, low), shuffle(b, x, y, high)), width // 2

    return reduce(list(vectors))[0]


def make_group_scores(words: Words, heads: int, width: int, value_width: int, strides: tuple[int, int]):
    """group_scores(keys, values, num_groups, queries, scores): scores[h, key] = the product of query and key, unscaled.

    `keys` and `values` are the addresses of groups; values are asked for, because they are read next. `strides` are the bytes of a
    query in words and of a head's scores. Integer queries end in a scale, which multiplies their scores.
    """
    query_stride, score_stride = strides
    num_vectors, key_bytes = words.vectors(width), row_bytes(words.stored, width)
    lines_of_keys = range(0, LANES * key_bytes, 64)
    lines_of_values = range(0, LANES * row_bytes(words.stored, value_width), 64)
    kind = I32_16 if words.elements == 2 else F32_16
    unrolled = heads * num_vectors <= 16

    def load_query(b, queries, head):
        at = b.add(queries, b.mul(head, int64(query_stride)))
        query = [load(b, b.add(at, int64(VECTOR_BYTES * j)), kind, 64) for j in range(num_vectors)]
        return [*query, load(b, b.add(at, int64(query_stride - VECTOR_BYTES)), F32, 4)] if words.halves else query

    def emit_head(b, key, query, place):
        products = []
        for t in range(LANES):
            total, row = zeros(words), b.add(key, int64(t * key_bytes))
            for j in range(num_vectors):
                total = multiply(b, words, total, row_vector(b, words, row, j, width), query[j])
            products.append(total)
        sums = sums_of_lanes(b, products)
        if words.halves:
            sums = b.fmul(b.sitofp(sums, F32_16), broadcast(b, query[-1], F32_16))
        store(b, sums, place, 64)

    @intrinsic
    def group_scores(typingctx, keys, values, num_groups, queries, scores):
        def emit(context, b, sig, args):
            keys, values, num_groups, queries, scores = args
            last = b.sub(num_groups, int64(1))
            held = [load_query(b, queries, int64(h)) for h in range(heads)] if unrolled else []

            def body(group, carried):
                ahead = b.add(group, int64(_GROUPS_AHEAD))
                ahead = b.select(b.icmp_signed("<", ahead, last), ahead, last)
                for at, index, lines in ((keys, ahead, lines_of_keys), (values, group, lines_of_values)):
                    address = load(b, b.add(at, b.shl(index, int64(3))), I64, 8)
                    for line in lines:
                        emit_prefetch(b, b.add(address, int64(line)))
                key = load(b, b.add(keys, b.shl(group, int64(3))), I64, 8)
                out = b.add(scores, b.shl(group, int64(6)))
                if unrolled:
                    for h in range(heads):
                        emit_head(b, key, held[h], b.add(out, int64(h * score_stride)))
                else:

                    def one_head(h, carried):
                        emit_head(b, key, load_query(b, queries, h), b.add(out, b.mul(h, int64(score_stride))))
                        return carried

                    Loop(b, int64(heads), 1, [], one_head)
                return carried

            Loop(b, num_groups, 1, [], body)
            return context.get_dummy_value()

        return types.void(_I, _I, _I, _I, _I), emit

    return group_scores


def make_weighted_sum(words: Words, heads: int, width: int, strides: tuple[int, int]):
    """weighted_sum(values, num_groups, weights, out): out[h] = the sum over keys of weights[h, key] * values[key].

    `values` are the addresses of groups. `weights` are float32, or bfloat16 where `words` are pairs, or 16-bit integers that end in
    a scale. `strides` are the bytes of a head's weights and results. Results are float32 in the order of the values' columns; as
    many columns are computed at once as registers hold sums for.
    """
    weight_stride, out_stride = strides
    value_bytes = row_bytes(words.stored, width)
    step = max(words.elements, num_accumulators() // heads // words.elements * words.elements)
    keys_at_once = LANES if words.output_vectors(width) * heads <= 32 else 4  # how far the loop is unrolled

    def emit_keys(b, sums, first, num, value, weights):
        """Add a word's keys: a pair, or one."""
        columns = range(first // words.elements, (first + num) // words.elements)
        vectors = [row_vector(b, words, value, j, width) for j in columns]
        if words.elements == 2:
            others = [row_vector(b, words, b.add(value, int64(value_bytes)), j, width) for j in columns]
            vectors = [half for x, y in zip(vectors, others, strict=True) for half in _interleave(b, x, y)]
        for h in range(heads):
            weight = splat_at(b, words, b.add(weights, int64(h * weight_stride)))
            for j in range(num):
                sums[h * num + j] = multiply(b, words, sums[h * num + j], vectors[j], weight)

    def emit_slice(b, first, num, values, num_groups, weights, out):
        """The results' vectors [first, first + num)."""

        def body(k, sums):
            sums = list(sums)
            group = load(b, b.add(values, b.shl(b.lshr(k, int64(4)), int64(3))), I64, 8)
            group = b.add(group, b.mul(b.and_(k, int64(15)), int64(value_bytes)))
            at = b.add(weights, b.shl(k, int64(1 if words.elements == 2 else 2)))
            for t in range(0, keys_at_once, words.elements):
                value = b.add(group, int64(t * value_bytes))
                emit_keys(b, sums, first, num, value, b.add(at, int64(t * 4 // words.elements)))
            return sums

        initial = [zeros(words)] * (heads * num)
        sums = Loop(b, b.shl(num_groups, int64(4)), keys_at_once, initial, body).results
        for h in range(heads):
            vectors = sums[h * num : (h + 1) * num]
            if words.halves:
                scale = load(b, b.add(weights, int64((h + 1) * weight_stride - VECTOR_BYTES)), F32, 4)
                vectors = [b.fmul(b.sitofp(x, F32_16), broadcast(b, scale, F32_16)) for x in vectors]
            if words.elements == 2:
                vectors = [half for j in range(0, num, 2) for half in _in_order(b, vectors[j], vectors[j + 1])]
            for j in range(num):
                store(b, vectors[j], b.add(out, int64(h * out_stride + (first + j) * VECTOR_BYTES)), 64)

    @intrinsic
    def weighted_sum(typingctx, values, num_groups, weights, out):
        def emit(context, b, sig, args):
            total = words.output_vectors(width)
            for first in range(0, total, step):
                emit_slice(b, first, min(step, total - first), *args)
            return context.get_dummy_value()

        return types.void(_I, _I, _I, _I), emit

    return weighted_sum


def make_move_row(stored: str, width: int):
    """move_row(row, out): copy a row; what lies behind `out`, up to the end of a vector, is overwritten, too."""
    num_bytes = row_bytes(stored, width)
    element = I16 if num_bytes % 2 == 0 and stored in NUM_BYTES else I8
    vector = F32_16 if stored == "f32" else ir.VectorType(element, VECTOR_BYTES * 8 // element.width)
    size = VECTOR_BYTES // vector.count

    @intrinsic
    def move_row(typingctx, row, out):
        def emit(context, b, sig, args):
            row, out = args
            for at in range(0, num_bytes, VECTOR_BYTES):
                part = load_first(b, b.add(row, int64(at)), vector, min(vector.count, (num_bytes - at) // size))
                store(b, part, b.add(out, int64(at)), size)
            return context.get_dummy_value()

        return types.void(_I, _I), emit

    return move_row


def _interleave(b, x, y):
    """Pairs of equal elements of x and y: of elements 0-3, 8-11, 16-19, 24-27, and of the others (one instruction each)."""
    x, y = b.bitcast(x, _I16_32), b.bitcast(y, _I16_32)
    order = [[s * 32 + lane * 8 + d + part for lane in range(4) for d in range(4) for s in (0, 1)] for part in (0, 4)]
    return [b.bitcast(shuffle(b, x, y, lanes), I32_16) for lanes in order]


def _in_order(b, first, second):
    """32 sums of `_interleave`'s pairs in the order of their columns."""
    low = [s * 16 + lane * 4 + d for lane in range(2) for s in (0, 1) for d in range(4)]
    return shuffle(b, first, second, low), shuffle(b, first, second, [lane + 8 for lane in low])


def make_product(words: Words, rows: int, columns: int, strides: tuple[int, int, int], *, adds: bool):
    """product(c, a, b, count): C = A B, or C += A B, for `rows` rows and `columns` panels of 16 columns.

    A [R, K] and B [panels, K, 16] are words, C [R, panels * 16] is float32; `strides` are the bytes of a row of C, of a row of A
    and of a panel of B. `count` is K, above 0.
    """
    c_stride, a_stride, panel_stride = strides
    kind = I32_16 if words.pairs else F32_16

    @intrinsic
    def product(typingctx, c, a, panels, count):
        def emit(context, b, sig, args):
            c, a, panels, count = args
            places = [b.add(c, int64(r * c_stride + j * VECTOR_BYTES)) for r in range(rows) for j in range(columns)]
            zero = constant(F32_16, 0.0)
            initial = [load(b, place, F32_16, 64) if adds else zero for place in places]

            def body(k, sums):
                sums = list(sums)
                at = b.add(panels, b.shl(k, int64(6)))
                right = [load(b, b.add(at, int64(panel_stride * j)), kind, 64) for j in range(columns)]
                left = b.add(a, b.shl(k, int64(2)))
                for r in range(rows):
                    word = splat_at(b, words, b.add(left, int64(r * a_stride)))
                    for j in range(columns):
                        sums[r * columns + j] = multiply(b, words, sums[r * columns + j], right[j], word)
                return sums

            for place, total in zip(places, Loop(b, count, 1, initial, body).results, strict=True):
                store(b, total, place, 64)
            return context.get_dummy_value()

        return types.void(_I, _I, _I, _I), emit

    return product


def make_pack_keys(words: Words, width: int):
    """pack_keys(addresses, panel): 16 keys as a panel [words of a key, 16]."""

    @intrinsic
    def pack_keys(typingctx, addresses, panel):
        def emit(context, b, sig, args):
            addresses, panel = args
            keys = [load(b, b.add(addresses, int64(8 * t)), I64, 8) for t in range(LANES)]
            for j in range(words.vectors(width)):
                columns = _transpose(b, [row_vector(b, words, key, j, width) for key in keys])
                for k, column in enumerate(columns):
                    store(b, column, b.add(panel, int64((j * LANES + k) * VECTOR_BYTES)), 64)
            return context.get_dummy_value()

        return types.void(_I, _I), emit

    return pack_keys


def _transpose(b, rows):
    """16 vectors whose lanes and numbers are exchanged."""
    rows = list(rows)
    for s in (1, 2, 4, 8):
        low = [lane if not lane & s else LANES + lane - s for lane in range(LANES)]
        high = [lane + s if not lane & s else LANES + lane for lane in range(LANES)]
        for i in range(LANES):
            if not i & s:
                x, y = rows[i], rows[i + s]
                rows[i], rows[i + s] = shuffle(b, x, y, low), shuffle(b, x, y, high)
    return rows


def make_pack_values(words: Words, width: int, panel_stride: int):
    """pack_values(addresses, out): two values as rows of panels: one row of pairs, or two of float32; panels lie apart."""

    @intrinsic
    def pack_values(typingctx, addresses, out):
        def emit(context, b, sig, args):
            addresses, out = args
            values = [load(b, b.add(addresses, int64(8 * t)), I64, 8) for t in range(2)]
            for j in range(words.vectors(width)):
                x, y = (row_vector(b, words, value, j, width) for value in values)
                if words.pairs:
                    x, y = b.bitcast(x, _I16_32), b.bitcast(y, _I16_32)
                    for part in range(2):
                        lanes = [s * 32 + part * 16 + d for d in range(16) for s in (0, 1)]
                        pairs = b.bitcast(shuffle(b, x, y, lanes), I32_16)
                        store(b, pairs, b.add(out, int64((2 * j + part) * panel_stride)), 64)
                else:
                    for t, vector in enumerate((x, y)):
                        store(b, vector, b.add(out, int64(j * panel_stride + t * VECTOR_BYTES)), 64)
            return context.get_dummy_value()

        return types.void(_I, _I), emit

    return pack_values


def make_copy_row(words: Words, width: int):
    """copy_row(row, out): a row as words, with zeros behind it."""

    @intrinsic
    def copy_row(typingctx, row, out):
        def emit(context, b, sig, args):
            row, out = args
            for j in range(words.vectors(width)):
                store(b, row_vector(b, words, row, j, width), b.add(out, int64(j * VECTOR_BYTES)), 64)
            return context.get_dummy_value()

        return types.void(_I, _I), emit

    return copy_row


@intrinsic
def keep_visible(typingctx, scores, first, low, high, sinks_end, other):
    """The scores of keys k = first + lane with k <= high and (k >= low or k < sinks_end); `other` for the rest."""

    def emit(context, b, sig, args):
        scores, first, low, high, sinks_end, other = args
        lanes = ir.Constant(I32_16, list(range(LANES)))

        def relative(key):
            return broadcast(b, b.trunc(b.sub(key, first), I32), I32_16)

        seen = b.or_(b.icmp_signed(">=", lanes, relative(low)), b.icmp_signed("<", lanes, relative(sinks_end)))
        seen = b.and_(seen, b.icmp_signed("<=", lanes, relative(high)))
        return b.select(seen, scores, broadcast(b, other, F32_16))

    return f32x16(f32x16, _I, _I, _I, _I, types.float32), emit


@intrinsic
def first_lane(typingctx, x):
    """Lane 0 of a vector."""

    def emit(context, b, sig, args):
        return b.extract_element(args[0], int32(0))

    return types.float32(f32x16), emit
