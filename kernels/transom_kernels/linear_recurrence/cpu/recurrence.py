"""`linear_recurrence` and `causal_convolution` on CPUs: the kernels `convolve` and `recur`, and their launches.

`op.py` has the formulas. `convolve` writes silu(convolution) of all tokens, then the cached rows. A work item is some channels of a
sequence. `recur` goes from token to token. A work item is `COLUMNS` columns of the state of a sequence's head: columns do not
depend on each other. Between a sequence's first and last token the state lies in the thread's scratch memory, where it fits the
first-level cache.

Legend: T tokens, B sequences, H heads, Hk key heads, D key width, Dv value width, L tokens of the convolution's kernel, C channels.
"""

from typing import Any, NamedTuple

import torch

from transom_kernels.cpu.arguments import RowArguments, numbers_of
from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.cpu.simd import (
    LOAD_SCALAR,
    exp,
    float_argument,
    fma,
    keep_nan,
    lane_sum,
    load_f32,
    load_i32,
    load_part_f32,
    load_scalar_f32,
    log1p,
    row_access,
    sigmoid,
    splat,
    sqrt,
    store_f32,
    vector_abs,
    vector_max,
)
from transom_kernels.cpu.work import argument, each_item, helper, row_address, scratch
from transom_kernels.linear_recurrence.cpu.advance import COLUMNS, make_advance
from transom_kernels.linear_recurrence.inputs import Convolution, RecurrenceInputs, StateBatch

ITEM_CHANNELS = 256  # of a work item of `convolve`
_MODULE = "transom_kernels.linear_recurrence.cpu.recurrence"
_STRIDE = 4 * COLUMNS  # bytes from row to row of a state in scratch memory


class BatchArguments(NamedTuple):
    """The words of a `StateBatch`."""

    query_offset: torch.Tensor  # [B + 1] int32
    read_block: torch.Tensor  # [B] int32
    write_block: torch.Tensor  # [B] int32


class ConvolveArguments(NamedTuple):
    """The argument words of the kernel `convolve`. Strides are in bytes."""

    batch: BatchArguments
    projected: RowArguments  # [T, C]
    weight: torch.Tensor  # [L, C], contiguous
    bias: torch.Tensor | None  # [C]
    mixed: torch.Tensor  # [T, C], contiguous: the result
    rows: torch.Tensor  # [ids, L - 1, C]
    rows_block: int
    rows_row: int
    length: int  # L
    channels: int  # C


class RecurArguments(NamedTuple):
    """The argument words of the kernel `recur`. Strides are in bytes."""

    batch: BatchArguments
    query: RowArguments  # [T, Hk * D]
    key: RowArguments  # [T, Hk * D]
    value: RowArguments  # [T, H * Dv]
    step_size: RowArguments  # [T, H], [T, H * D] or [T, H * Dv]
    strength: RowArguments  # [T, H]
    step_bias: torch.Tensor  # [H], [H * D] or [H * Dv]
    rate: torch.Tensor  # [H] or [H, D, Dv]
    skip: torch.Tensor | None  # [H] or [H * Dv]
    state: torch.Tensor  # [ids, H, D, Dv]
    state_block: int
    state_head: int
    state_row: int
    out: torch.Tensor  # [T, H * Dv], contiguous: tokens that pad the step become zeros
    num_sequences: int  # B
    num_tokens: int  # T
    key_heads: int  # Hk
    heads: int  # H
    width: int  # D
    value_width: int  # Dv
    query_scale: float
    most_strength: float
    most_decay: float


CONVOLVE, RECUR = numbers_of(ConvolveArguments), numbers_of(RecurArguments)


def fits_cpu_kernels(inputs: RecurrenceInputs) -> bool:
    """Return whether the kernels take these dtypes and strides."""
    rows = (inputs.projected, inputs.step_size, inputs.state, inputs.strength, *(inputs.selection or ()))
    fits = inputs.projected.dtype in DTYPES and all(one.stride(-1) == 1 for one in rows if one is not None)
    return fits and (inputs.convolution is None or convolution_fits_cpu_kernel(inputs.projected, inputs.convolution))


def convolution_fits_cpu_kernel(projected: torch.Tensor, convolution: Convolution) -> bool:
    """Return whether the kernel takes these dtypes and strides."""
    fits = projected.dtype in DTYPES and projected.stride(-1) == convolution.rows.stride(-1) == 1
    return fits and convolution.weight.is_contiguous()


def causal_convolution_cpu(projected: torch.Tensor, convolution: Convolution, batch: StateBatch) -> torch.Tensor:
    """Return silu(convolution), [T, C], and write the rows after each sequence's last token."""
    (tokens, channels), dtype, rows = projected.shape, projected.dtype, convolution.rows
    mixed = empty((tokens, channels), dtype)
    launch(
        cpu_kernel(_MODULE, "make_convolve", dtype=DTYPES[dtype]),
        len(batch.read_block) * -(-channels // ITEM_CHANNELS),
        ConvolveArguments(
            batch=_batch(batch),
            projected=RowArguments.of(projected),
            weight=convolution.weight,
            bias=convolution.bias,
            mixed=mixed,
            rows=rows,
            rows_block=rows.stride(0) * rows.element_size(),
            rows_row=rows.stride(1) * rows.element_size(),
            length=len(convolution.weight),
            channels=channels,
        ),
    )
    return mixed


def linear_recurrence_cpu(inputs: RecurrenceInputs) -> torch.Tensor:
    """Return the heads' results [T, H * Dv], and write the states and rows after each sequence's last token."""
    mixed, state, by = inputs.projected, inputs.state, inputs.decays_by
    if inputs.convolution is not None:
        mixed = causal_convolution_cpu(mixed, inputs.convolution, inputs.batch)
    _, heads, width, value_width = state.shape
    tokens, (query, key, value) = len(mixed), inputs.parts(mixed)
    out, sequences = empty((tokens, heads * value_width), mixed.dtype), len(inputs.batch.read_block)
    launch(
        cpu_kernel(
            _MODULE,
            "make_recur",
            dtype=DTYPES[mixed.dtype],
            delta=inputs.is_delta_rule,
            by=by,
            bounded=inputs.most_decay > 0,
        ),
        (sequences + 1) * heads * -(-value_width // COLUMNS),
        RecurArguments(
            batch=_batch(inputs.batch),
            query=RowArguments.of(query),
            key=RowArguments.of(key),
            value=RowArguments.of(value),
            step_size=RowArguments.of(inputs.step_size),
            strength=RowArguments.of(inputs.strength),
            step_bias=inputs.step_bias,
            rate=inputs.rate,
            skip=inputs.skip,
            state=state,
            state_block=4 * state.stride(0),
            state_head=4 * state.stride(1),
            state_row=4 * state.stride(2),
            out=out,
            num_sequences=sequences,
            num_tokens=tokens,
            key_heads=inputs.key_heads,
            heads=heads,
            width=width,
            value_width=value_width,
            query_scale=width**-0.5,
            most_strength=inputs.most_strength,
            most_decay=inputs.most_decay,
        ),
        scratch_bytes=3 * 4 * _padded(width) + (2 * width + 2) * _STRIDE,
    )
    return out


def _batch(batch: StateBatch) -> BatchArguments:
    return BatchArguments(batch.query_offset, batch.read_block, batch.write_block)


def _padded(width: int) -> int:
    """Return the width rounded up to whole vectors."""
    return -(-width // 16) * 16


def make_convolve(dtype: str) -> Any:
    """Build the kernel. A work item is ITEM_CHANNELS channels of a sequence."""
    load, store, size = row_access(dtype)

    @helper
    def row_before(arguments, earlier, token, begin):
        """Return the address of a token's row: of a new token, or a cached one; 0 if the row counts as zero."""
        if token >= begin:
            return row_address(arguments, CONVOLVE.projected, token)
        if earlier == 0:
            return 0
        index = argument(arguments, CONVOLVE.length) - 1 + token - begin
        return earlier + index * argument(arguments, CONVOLVE.rows_row)

    @helper
    def convolve_tokens(arguments, earlier, begin, end, first, last):
        channels, length = argument(arguments, CONVOLVE.channels), argument(arguments, CONVOLVE.length)
        weights, bias = argument(arguments, CONVOLVE.weight), argument(arguments, CONVOLVE.bias)
        for token in range(begin, end):
            out = argument(arguments, CONVOLVE.mixed) + token * channels * size
            for channel in range(first, last, 16):
                total = load(bias + channel * size, last - channel) if bias != 0 else splat(0.0)
                for tap in range(length):
                    row = row_before(arguments, earlier, token - (length - 1 - tap), begin)
                    if row != 0:
                        weight = load(weights + (tap * channels + channel) * size, last - channel)
                        total = fma(weight, load(row + channel * size, last - channel), total)
                store(out + channel * size, total * sigmoid(total), last - channel)

    @helper
    def keep_rows(arguments, earlier, begin, end, first, last, kept):
        """Write the rows of the last tokens. A row moves to a lower address, so the earliest is written first."""
        length = argument(arguments, CONVOLVE.length)
        for index in range(length - 1):
            row = row_before(arguments, earlier, end - (length - 1) + index, begin)
            for channel in range(first, last, 16):
                lanes = load(row + channel * size, last - channel) if row != 0 else splat(0.0)
                place = kept + index * argument(arguments, CONVOLVE.rows_row) + channel * size
                store(place, lanes, last - channel)

    @each_item
    def convolve(arguments, thread, item):
        channels = argument(arguments, CONVOLVE.channels)
        parts = (channels + ITEM_CHANNELS - 1) // ITEM_CHANNELS
        sequence, first = item // parts, item % parts * ITEM_CHANNELS
        last = min(first + ITEM_CHANNELS, channels)
        begin = load_i32(argument(arguments, CONVOLVE.batch.query_offset) + 4 * sequence)
        end = load_i32(argument(arguments, CONVOLVE.batch.query_offset) + 4 * (sequence + 1))
        read = load_i32(argument(arguments, CONVOLVE.batch.read_block) + 4 * sequence)
        write = load_i32(argument(arguments, CONVOLVE.batch.write_block) + 4 * sequence)
        rows, block = argument(arguments, CONVOLVE.rows), argument(arguments, CONVOLVE.rows_block)
        earlier = rows + read * block if read >= 0 else 0
        convolve_tokens(arguments, earlier, begin, end, first, last)
        if begin < end and write >= 0:
            keep_rows(arguments, earlier, begin, end, first, last, rows + write * block)

    return convolve


def make_recur(dtype: str, delta: bool, by: str, bounded: bool) -> Any:
    """Build the kernel for a `decays_by`, with a bound of decays or without.

    A work item is COLUMNS columns of a head's state in a sequence. Sequence B has the tokens that pad the step.
    """
    (load, store, size), load_scalar = row_access(dtype), LOAD_SCALAR[dtype]
    by_row, by_column = by == "row", by == "column"
    column_bytes = 4 * by_column  # from column to column of `decays`
    advance, advance_part = (make_advance(dtype, count, delta=delta, by=by) for count in (COLUMNS // 16, 1))

    @helper
    def widen(x, width, out, scale):
        """Store a query or key in float32; in the delta rule with the length `scale`."""
        total = splat(0.0)
        for d in range(0, width, 16):
            lanes = load(x + d * size, width - d)
            total = fma(lanes, lanes, total)
            store_f32(out + d * 4, lanes)
        if delta:
            factor = splat(scale / sqrt(lane_sum(total) + 1e-6))
            for d in range(0, width, 16):
                store_f32(out + d * 4, load_f32(out + d * 4) * factor)

    @helper
    def softplus(x):
        """Return max(x, 0) + log1p(exp(-|x|))."""
        return keep_nan(vector_max(x, splat(0.0)) + log1p(exp(splat(0.0) - vector_abs(x))), x)

    @helper
    def decay_of(step, rate):
        return keep_nan(exp(splat(0.0) - rate * step), step)

    @helper
    def step_of(arguments, token, head):
        """Return the step of a head."""
        given = load_scalar(row_address(arguments, RECUR.step_size, token) + head * size)
        return softplus(splat(given + load_scalar_f32(argument(arguments, RECUR.step_bias) + 4 * head)))

    @helper
    def store_decays(arguments, token, first, width, rate, out):
        """Store the decays of the rows of a head's state, whose first row is `first`."""
        given = row_address(arguments, RECUR.step_size, token) + first * size
        bias = argument(arguments, RECUR.step_bias) + 4 * first
        for d in range(0, width, 16):
            x = load(given + d * size, width - d) + load_part_f32(bias + 4 * d, min(16, width - d))
            if bounded:
                bound = splat(float_argument(arguments, RECUR.most_decay))
                store_f32(out + 4 * d, decay_of(keep_nan(sigmoid(rate * x), x), bound))
            else:
                store_f32(out + 4 * d, decay_of(softplus(x), rate))

    @helper
    def store_column_decays(arguments, token, head, first, columns, width, out):
        """Store what `advance` reads of some columns of a head's state: each row's decays, then the steps."""
        value_width = argument(arguments, RECUR.value_width)
        at = head * value_width + first
        given = row_address(arguments, RECUR.step_size, token) + at * size
        bias = argument(arguments, RECUR.step_bias) + 4 * at
        rates = argument(arguments, RECUR.rate) + 4 * (head * width * value_width + first)
        for column in range(0, columns, 16):
            count = min(16, columns - column)
            step = softplus(load(given + column * size, count) + load_part_f32(bias + 4 * column, count))
            store_f32(out + width * _STRIDE + 4 * column, step)
            for d in range(width):
                rate = load_part_f32(rates + 4 * (d * value_width + column), count)
                store_f32(out + d * _STRIDE + 4 * column, decay_of(step, rate))

    @helper
    def pad(arguments, head, first, columns):
        """Write zeros for the tokens that pad the step."""
        width = argument(arguments, RECUR.heads) * argument(arguments, RECUR.value_width)
        at = argument(arguments, RECUR.out) + (head * argument(arguments, RECUR.value_width) + first) * size
        begin = load_i32(argument(arguments, RECUR.batch.query_offset) + 4 * argument(arguments, RECUR.num_sequences))
        for token in range(begin, argument(arguments, RECUR.num_tokens)):
            for column in range(0, columns, 16):
                store(at + (token * width + column) * size, splat(0.0), columns - column)

    @helper
    def state_at(arguments, block, head):
        state = argument(arguments, RECUR.state) + block * argument(arguments, RECUR.state_block)
        return state + head * argument(arguments, RECUR.state_head)

    @helper
    def recur_columns(arguments, query, sequence, head, first, columns):
        """Compute some columns of a head's state in a sequence. `query` is scratch memory for queries, keys, decays and states."""
        width, value_width = argument(arguments, RECUR.width), argument(arguments, RECUR.value_width)
        heads, key_heads = argument(arguments, RECUR.heads), argument(arguments, RECUR.key_heads)
        begin = load_i32(argument(arguments, RECUR.batch.query_offset) + 4 * sequence)
        end = load_i32(argument(arguments, RECUR.batch.query_offset) + 4 * (sequence + 1))
        read = load_i32(argument(arguments, RECUR.batch.read_block) + 4 * sequence)
        write = load_i32(argument(arguments, RECUR.batch.write_block) + 4 * sequence)
        key = query + 4 * ((width + 15) // 16 * 16)
        decays = key + (key - query)
        own = decays + (key - query)
        skips = argument(arguments, RECUR.skip)
        skip, rate = splat(0.0), splat(0.0)
        if by_column:
            decays = own + width * _STRIDE
            for column in range(0, columns, 16):
                at = skips + 4 * (head * value_width + first + column)
                lanes = load_part_f32(at, min(16, columns - column)) if skips != 0 else splat(0.0)
                store_f32(decays + (width + 1) * _STRIDE + 4 * column, lanes)
        else:
            skip = splat(load_scalar_f32(skips + 4 * head)) if skips != 0 else splat(0.0)
            rate = splat(load_scalar_f32(argument(arguments, RECUR.rate) + 4 * head))
        state_row = argument(arguments, RECUR.state_row)
        source, source_stride = own, _STRIDE
        if read >= 0:
            source, source_stride = state_at(arguments, read, head) + 4 * first, state_row
        else:
            for d in range(width):
                for column in range(0, COLUMNS, 16):
                    store_f32(own + d * _STRIDE + 4 * column, splat(0.0))
        for token in range(begin, end):
            target, target_stride = own, _STRIDE
            if token == end - 1 and write >= 0:
                target, target_stride = state_at(arguments, write, head) + 4 * first, state_row
            key_head = head // (heads // key_heads) * width * size
            scale = float_argument(arguments, RECUR.query_scale)
            widen(row_address(arguments, RECUR.query, token) + key_head, width, query, scale)
            widen(row_address(arguments, RECUR.key, token) + key_head, width, key, 1.0)
            factor, decay = splat(0.0), splat(0.0)
            if by_row:
                store_decays(arguments, token, head * width, width, rate, decays)
            elif by_column:
                store_column_decays(arguments, token, head, first, columns, width, decays)
            else:
                factor = step_of(arguments, token, head)
                decay = decay_of(factor, rate)
            if delta:
                given = splat(load_scalar(row_address(arguments, RECUR.strength, token) + head * size))
                factor = keep_nan(sigmoid(given), given) * splat(float_argument(arguments, RECUR.most_strength))
            at = (head * value_width + first) * size
            value = row_address(arguments, RECUR.value, token) + at
            out = argument(arguments, RECUR.out) + token * heads * value_width * size + at
            if columns == COLUMNS:
                advance(
                    source, source_stride, target, target_stride, width, query, key, decays, value, out, decay, factor, skip, 0
                )  # fmt: skip
            else:
                for column in range(0, columns, 16):
                    advance_part(
                        source + 4 * column, source_stride, target + 4 * column, target_stride, width, query, key,
                        decays + column_bytes * column, value + column * size, out + column * size, decay, factor, skip,
                        min(16, columns - column),
                    )  # fmt: skip
            source, source_stride = target, target_stride

    @each_item
    def recur(arguments, thread, item):
        value_width, heads = argument(arguments, RECUR.value_width), argument(arguments, RECUR.heads)
        parts = (value_width + COLUMNS - 1) // COLUMNS
        sequence, head, first = item // parts // heads, item // parts % heads, item % parts * COLUMNS
        columns = min(COLUMNS, value_width - first)
        if sequence == argument(arguments, RECUR.num_sequences):
            pad(arguments, head, first, columns)
        else:
            recur_columns(arguments, scratch(thread), sequence, head, first, columns)

    return recur
