"""The inner loops of `linear_recurrence` on CPUs: a token's change of some columns of a head's state, and its results.

Every sum is over the D rows of the state in their order, in one chain for each column, so a result depends neither on how many
columns are computed together nor on where the state lies.

Legend: D key width, rows of a state; a state's columns belong to the numbers of a value.
"""

from typing import Any

from llvmlite import ir

from transom_kernels.cpu.language import FLOATS, INT, NOTHING, emits
from transom_kernels.cpu.vector_code import (
    F32,
    F32_16,
    LANES,
    Loop,
    broadcast,
    constant,
    emit_load,
    emit_load_part,
    emit_store,
    emit_store_part,
    int64,
    load,
    multiply_add,
)

COLUMNS = 64  # of a state, for a work item


def make_advance(dtype: str, num_vectors: int, *, delta: bool, by: str) -> Any:
    """Build the function that computes one token for `num_vectors` vectors of columns, or for the first `count` of one vector.

    S = decay * S + k (factor * v)^T, or with `delta` decay * S + k (factor * (v - decay * S^T k))^T; out = S^T q + skip * v.
    Arguments (addresses and strides in bytes):

        source, source_stride    the state before: address of its first row, and stride from row to row
        target, target_stride    the state after, which may be at the same place
        depth                    D
        query, key               D float32 each
        decays                   by "row": the decays of the state's D rows; by "column": rows of `COLUMNS` float32, the decays of
                                 the state's D rows, then the factors and skips; by "head" unused
        value, out               the columns' numbers of the value and of the result, in `dtype`
        decay, factor, skip      vectors, all lanes alike, unless `decays` has them
        count                    columns, if there are fewer than 16
    """

    @emits(NOTHING, *[INT] * 10, *[FLOATS] * 3, INT)
    def advance(
        b, source, source_stride, target, target_stride, depth, query, key, decays, value, out, decay, factor, skip, count
    ):  # fmt: skip
        def loads(address: ir.Value, kind: str) -> list[ir.Value]:
            if num_vectors == 1:
                return [emit_load_part(b, address, count, kind)]
            size = LANES * (4 if kind == "f32" else 2)
            return [emit_load(b, b.add(address, int64(size * i)), kind) for i in range(num_vectors)]

        def stores(address: ir.Value, vectors: list[ir.Value], kind: str) -> None:
            if num_vectors == 1:
                emit_store_part(b, address, vectors[0], count, kind)
                return
            size = LANES * (4 if kind == "f32" else 2)
            for i, vector in enumerate(vectors):
                emit_store(b, b.add(address, int64(size * i)), vector, kind)

        def row(first: ir.Value, stride: ir.Value, d: ir.Value) -> ir.Value:
            return b.add(first, b.mul(stride, d))

        def number(numbers: ir.Value, d: ir.Value) -> ir.Value:
            return broadcast(b, load(b, row(numbers, int64(4), d), F32, 4), F32_16)

        def of_columns(d: ir.Value) -> list[ir.Value]:
            return loads(row(decays, int64(4 * COLUMNS), d), "f32")

        def recall(d: ir.Value, known: list[ir.Value]) -> list[ir.Value]:
            k = b.fmul(number(key, d), number(decays, d)) if by == "row" else number(key, d)
            state = loads(row(source, source_stride, d), "f32")
            return [multiply_add(b, s, k, total) for s, total in zip(state, known, strict=True)]

        def update(d: ir.Value, results: list[ir.Value]) -> list[ir.Value]:
            k, q = number(key, d), number(query, d)
            kept = of_columns(d) if by == "column" else [number(decays, d) if by == "row" else decay] * num_vectors
            state = [b.fmul(own, s) for own, s in zip(kept, loads(row(source, source_stride, d), "f32"), strict=True)]
            state = [multiply_add(b, k, add, s) for add, s in zip(changes, state, strict=True)]
            stores(row(target, target_stride, d), state, "f32")
            return [multiply_add(b, s, q, total) for s, total in zip(state, results, strict=True)]

        zeros, values = [constant(F32_16, 0.0)] * num_vectors, loads(value, dtype)
        wanted = values
        if delta:
            known = Loop(b, depth, 1, zeros, recall).results
            known = known if by == "row" else [b.fmul(decay, total) for total in known]
            wanted = [b.fsub(v, total) for v, total in zip(values, known, strict=True)]
        factors, skips = [factor] * num_vectors, [skip] * num_vectors
        if by == "column":
            factors, skips = of_columns(depth), of_columns(b.add(depth, int64(1)))
        changes = [b.fmul(own, w) for own, w in zip(factors, wanted, strict=True)]
        results = Loop(b, depth, 1, zeros, update).results
        stores(
            out, [multiply_add(b, own, v, total) for own, v, total in zip(skips, values, results, strict=True)], dtype
        )

    return advance
