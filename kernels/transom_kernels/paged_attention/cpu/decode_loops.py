"""The inner loops of decoding: scores, and weighted sums of values. They are emitted as LLVM code to keep sums in registers.

- words: what a lane of a vector holds: a float32, or a pair of bfloat16 or of 16-bit integers (`layout.Words`).
- row: one key or one value of one head, whose elements are adjacent in the cache.
- group: 16 adjacent rows. Arrays of addresses say where groups are, so that each group may be anywhere.
"""

from transom_kernels.cpu.language import INT, NOTHING, emits
from transom_kernels.cpu.target import cpu_target
from transom_kernels.cpu.vector_code import (
    F32,
    F32_16,
    I32_16,
    I64,
    LANES,
    Loop,
    broadcast,
    emit_prefetch,
    int64,
    load,
    shuffle,
    store,
)
from transom_kernels.paged_attention.cpu.layout import VECTOR_BYTES, Words
from transom_kernels.paged_attention.cpu.row_vectors import (
    I16_32,
    multiply,
    num_accumulators,
    row_vector,
    splat_at,
    zeros,
)
from transom_kernels.quantised_kv.cpu_rows import row_bytes

_GROUPS_AHEAD = 4


def sums_of_lanes(b, vectors):
    """Return a vector whose lane i is the sum of the 16 lanes of vector i; every lane is added by the same tree."""

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
    """Build group_scores(keys, values, num_groups, queries, scores): scores[h, key] = q[h] . key, without the softmax scale.

    `keys` and `values` are arrays of addresses of groups; values are only prefetched, because they are read next, a row of them
    for each key: if too many prefetches wait for memory, products wait too. `strides` are the bytes of a query in words and of a
    head's scores. Integer queries end in a scale, which multiplies their scores.
    """
    query_stride, score_stride = strides
    num_vectors, key_bytes = words.vectors(width), row_bytes(words.stored, width)
    value_bytes = row_bytes(words.stored, value_width)
    kind = I32_16 if words.elements == 2 else F32_16
    unrolled = heads * num_vectors <= 16  # the queries of all heads stay in registers

    def load_query(b, queries, head):
        at = b.add(queries, b.mul(head, int64(query_stride)))
        query = [load(b, b.add(at, int64(VECTOR_BYTES * j)), kind, 64) for j in range(num_vectors)]
        return [*query, load(b, b.add(at, int64(query_stride - VECTOR_BYTES)), F32, 4)] if words.halves else query

    def emit_head(b, key, query, place, read_next):
        products = []
        for t in range(LANES):
            for group, size in read_next:
                _prefetch_rows(b, group, t, 1, size)
            total, row = zeros(words), b.add(key, int64(t * key_bytes))
            for j in range(num_vectors):
                total = multiply(b, words, total, row_vector(b, words, row, j, width), query[j])
            products.append(total)
        sums = sums_of_lanes(b, products)
        if words.halves:
            sums = b.fmul(b.sitofp(sums, F32_16), broadcast(b, query[-1], F32_16))
        store(b, sums, place, 64)

    @emits(NOTHING, INT, INT, INT, INT, INT)
    def group_scores(b, keys, values, num_groups, queries, scores):
        last = b.sub(num_groups, int64(1))
        held = [load_query(b, queries, int64(h)) for h in range(heads)] if unrolled else []

        def body(group, carried):
            ahead = b.add(group, int64(_GROUPS_AHEAD))
            ahead = b.select(b.icmp_signed("<", ahead, last), ahead, last)
            read_next = [
                (load(b, b.add(at, b.shl(index, int64(3))), I64, 8), size)
                for at, index, size in ((keys, ahead, key_bytes), (values, group, value_bytes))
            ]
            key = load(b, b.add(keys, b.shl(group, int64(3))), I64, 8)
            out = b.add(scores, b.shl(group, int64(6)))
            if unrolled:
                for h in range(heads):
                    emit_head(b, key, held[h], b.add(out, int64(h * score_stride)), [] if h else read_next)
            else:
                for address, size in read_next:
                    _prefetch_rows(b, address, 0, LANES, size)

                def one_head(h, carried):
                    emit_head(b, key, load_query(b, queries, h), b.add(out, b.mul(h, int64(score_stride))), [])
                    return carried

                Loop(b, int64(heads), 1, [], one_head)
            return carried

        Loop(b, num_groups, 1, [], body)

    return group_scores


def _prefetch_rows(b, group, first: int, count: int, size: int) -> None:
    """Prefetch the cache lines that begin in the rows [first, first + count) of a group; a row has `size` bytes.

    Into the second-level cache: blocks of a sequence lie far apart, so that the processor does not foresee the next one, and
    prefetches into the first level would wait for its few outstanding misses (half as many bytes a second on AMD's Zen 4). Intel's
    processors, of which those with AMX are known here, need a buffer of the first level for each, too; but they foresee the second
    half of a group. Without its prefetches 32 sequences of 2,048 tokens decode 1.15 times as fast.
    """
    end = (first + count) * size
    if cpu_target().amx:
        end = min(end, LANES * size // 2)
    for line in range(-(-first * size // 64) * 64, end, 64):
        emit_prefetch(b, b.add(group, int64(line)), level=2)


def make_weighted_sum(words: Words, heads: int, width: int, strides: tuple[int, int], key_bytes: int = 0):
    """Build weighted_sum(values, num_groups, weights, out, next_keys): out[h] = the sum over keys of weights[h, key] * values[key].

    `values` is an array of addresses of groups. `weights` are float32, or bfloat16 if `words` are pairs, or 16-bit integers
    followed by a scale. With `key_bytes`, the bytes of a key, the groups at the addresses `next_keys` are prefetched, one for each
    group of values. `strides` are the bytes of a head's weights and of its results. Results are float32 in the order of the
    values' columns; as many columns are computed at once as there are registers for sums.
    """
    weight_stride, out_stride = strides
    value_bytes = row_bytes(words.stored, width)
    step = max(words.elements, num_accumulators() // heads // words.elements * words.elements)
    keys_at_once = LANES if words.output_vectors(width) * heads <= 32 else 4  # how far the loop is unrolled

    def emit_keys(b, sums, first, num, value, weights):
        """Add the weighted values of one word of weights: those of two keys, or of one."""
        columns = range(first // words.elements, (first + num) // words.elements)
        vectors = [row_vector(b, words, value, j, width) for j in columns]
        if words.elements == 2:
            others = [row_vector(b, words, b.add(value, int64(value_bytes)), j, width) for j in columns]
            vectors = [half for x, y in zip(vectors, others, strict=True) for half in _interleave(b, x, y)]
        for h in range(heads):
            weight = splat_at(b, words, b.add(weights, int64(h * weight_stride)))
            for j in range(num):
                sums[h * num + j] = multiply(b, words, sums[h * num + j], vectors[j], weight)

    def emit_slice(b, first, num, values, num_groups, weights, out, next_keys):
        """Compute the vectors [first, first + num) of the results."""

        def body(k, sums):
            sums = list(sums)
            group = load(b, b.add(values, b.shl(b.lshr(k, int64(4)), int64(3))), I64, 8)
            group = b.add(group, b.mul(b.and_(k, int64(15)), int64(value_bytes)))
            if next_keys is not None:
                read_next = load(b, b.add(next_keys, b.shl(b.lshr(k, int64(4)), int64(3))), I64, 8)
                read_next = b.add(read_next, b.mul(b.and_(k, int64(15)), int64(key_bytes)))
            at = b.add(weights, b.shl(k, int64(1 if words.elements == 2 else 2)))
            for t in range(0, keys_at_once, words.elements):
                if next_keys is not None:
                    _prefetch_rows(b, read_next, t, words.elements, key_bytes)
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

    @emits(NOTHING, INT, INT, INT, INT, INT)
    def weighted_sum(b, values, num_groups, weights, out, next_keys):
        total = words.output_vectors(width)
        for first in range(0, total, step):
            prefetched = next_keys if key_bytes and first == 0 else None
            emit_slice(b, first, min(step, total - first), values, num_groups, weights, out, prefetched)

    return weighted_sum


def _interleave(b, x, y):
    """Return two vectors of pairs (x[i], y[i]): i = 0-3, 8-11, 16-19, 24-27, and the other i. In this order each takes one
    instruction; `_in_order` restores the order of columns."""
    x, y = b.bitcast(x, I16_32), b.bitcast(y, I16_32)
    order = [[s * 32 + lane * 8 + d + part for lane in range(4) for d in range(4) for s in (0, 1)] for part in (0, 4)]
    return [b.bitcast(shuffle(b, x, y, lanes), I32_16) for lanes in order]


def _in_order(b, first, second):
    """Return 32 sums over pairs of `_interleave` in the order of their columns."""
    low = [s * 16 + lane * 4 + d for lane in range(2) for s in (0, 1) for d in range(4)]
    return shuffle(b, first, second, low), shuffle(b, first, second, [lane + 8 for lane in low])
