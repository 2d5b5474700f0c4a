"""`linear_recurrence` on CPUs: the kernels `convolve` and `recur`, and their launches. `op.py` has the formulas.

`convolve` writes silu(convolution) of all tokens, then the cached rows. A work item is some channels of a sequence. `recur` goes
from token to token. A work item is `COLUMNS` columns of the state of a sequence's head: columns do not depend on each other.
Between a sequence's first and last token the state lies in the thread's scratch memory, where it fits the first-level cache.

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
from transom_kernels.linear_recurrence.cpu.advance import make_advance
from transom_kernels.linear_recurrence.inputs import RecurrenceInputs

COLUMNS = 64  # of a state, for a work item of `recur`
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
    out: torch.Tensor  # [T, H * Dv], contiguous: tokens that pad the step become zeros
    rows: torch.Tensor  # [ids, L - 1, C]
    rows_block: int
    rows_row: int
    num_sequences: int  # B
    num_tokens: int  # T
    length: int  # L
    channels: int  # C
    out_width: int  # H * Dv


class RecurArguments(NamedTuple):
    """The argument words of the kernel `recur`. Strides are in bytes."""

    batch: BatchArguments
    mixed: torch.Tensor  # [T, C], contiguous
    step_size: RowArguments  # [T, H] or [T, H * D]
    strength: RowArguments  # [T, H]
    step_bias: torch.Tensor  # [H] or [H * D]
    log_rate: torch.Tensor  # [H]
    skip: torch.Tensor | None  # [H]
    state: torch.Tensor  # [ids, H, D, Dv]
    state_block: int
    state_head: int
    state_row: int
    out: torch.Tensor  # [T, H * Dv], contiguous
    channels: int  # C
    key_heads: int  # Hk
    heads: int  # H
    width: int  # D
    value_width: int  # Dv
    query_scale: float


CONVOLVE, RECUR = numbers_of(ConvolveArguments), numbers_of(RecurArguments)


def fits_cpu_kernels(inputs: RecurrenceInputs) -> bool:
    """Return whether the kernels take these dtypes and strides."""
    rows = [inputs.projected, inputs.step_size, inputs.rows, inputs.state]
    rows += [] if inputs.strength is None else [inputs.strength]
    return (
        inputs.projected.dtype in DTYPES
        and all(tensor.stride(-1) == 1 for tensor in rows)
        and inputs.weight.is_contiguous()
    )


def linear_recurrence_cpu(inputs: RecurrenceInputs) -> torch.Tensor:
    """Return the heads' results [T, H * Dv], and write the states and rows after each sequence's last token."""
    (tokens, channels), dtype = inputs.projected.shape, inputs.projected.dtype
    state, rows, batch = inputs.state, inputs.rows, BatchArguments(*_batch(inputs))
    _, heads, width, value_width = state.shape
    mixed, out = empty((tokens, channels), dtype), empty((tokens, heads * value_width), dtype)
    sequences, name = len(inputs.batch.read_block), DTYPES[dtype]
    launch(
        cpu_kernel(_MODULE, "make_convolve", dtype=name),
        (sequences + 1) * -(-channels // ITEM_CHANNELS),
        ConvolveArguments(
            batch=batch,
            projected=RowArguments.of(inputs.projected),
            weight=inputs.weight,
            bias=inputs.bias,
            mixed=mixed,
            out=out,
            rows=rows,
            rows_block=rows.stride(0) * rows.element_size(),
            rows_row=rows.stride(1) * rows.element_size(),
            num_sequences=sequences,
            num_tokens=tokens,
            length=len(inputs.weight),
            channels=channels,
            out_width=heads * value_width,
        ),
    )
    launch(
        cpu_kernel(_MODULE, "make_recur", dtype=name, delta=inputs.is_delta_rule, by_row=inputs.decays_by_row),
        sequences * heads * -(-value_width // COLUMNS),
        RecurArguments(
            batch=batch,
            mixed=mixed,
            step_size=RowArguments.of(inputs.step_size),
            strength=RowArguments.of(inputs.strength),
            step_bias=inputs.step_bias,
            log_rate=inputs.log_rate,
            skip=inputs.skip,
            state=state,
            state_block=4 * state.stride(0),
            state_head=4 * state.stride(1),
            state_row=4 * state.stride(2),
            out=out,
            channels=channels,
            key_heads=inputs.key_heads,
            heads=heads,
            width=width,
            value_width=value_width,
            query_scale=width**-0.5,
        ),
        scratch_bytes=(3 * 4 * _padded(width)) + width * _STRIDE,
    )
    return out


def _batch(inputs: RecurrenceInputs) -> tuple[torch.Tensor, ...]:
    batch = inputs.batch
    return batch.query_offset, batch.read_block, batch.write_block


def _padded(width: int) -> int:
    """Return the width rounded up to whole vectors."""
    return -(-width // 16) * 16


def make_convolve(dtype: str) -> Any:
    """Build the kernel. A work item is ITEM_CHANNELS channels of a sequence; sequence B stands for the tokens that pad the step."""
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
        channels, sequences = argument(arguments, CONVOLVE.channels), argument(arguments, CONVOLVE.num_sequences)
        parts = (channels + ITEM_CHANNELS - 1) // ITEM_CHANNELS
        sequence, first = item // parts, item % parts * ITEM_CHANNELS
        begin = load_i32(argument(arguments, CONVOLVE.batch.query_offset) + 4 * sequence)
        if sequence == sequences:
            width = argument(arguments, CONVOLVE.out_width)
            for token in range(begin, argument(arguments, CONVOLVE.num_tokens)):
                for channel in range(first, min(first + ITEM_CHANNELS, width), 16):
                    out = argument(arguments, CONVOLVE.out) + (token * width + channel) * size
                    store(out, splat(0.0), width - channel)
        else:
            last = min(first + ITEM_CHANNELS, channels)
            end = load_i32(argument(arguments, CONVOLVE.batch.query_offset) + 4 * (sequence + 1))
            read = load_i32(argument(arguments, CONVOLVE.batch.read_block) + 4 * sequence)
            write = load_i32(argument(arguments, CONVOLVE.batch.write_block) + 4 * sequence)
            rows, block = argument(arguments, CONVOLVE.rows), argument(arguments, CONVOLVE.rows_block)
            earlier = rows + read * block if read >= 0 else 0
            convolve_tokens(arguments, earlier, begin, end, first, last)
            if begin < end and write >= 0:
                keep_rows(arguments, earlier, begin, end, first, last, rows + write * block)

    return convolve


def make_recur(dtype: str, delta: bool, by_row: bool) -> Any:
    """Build the kernel. A work item is COLUMNS columns of a head's state in a sequence."""
    (load, _, size), load_scalar = row_access(dtype), LOAD_SCALAR[dtype]
    advance, advance_part = (make_advance(dtype, count, delta=delta, by_row=by_row) for count in (COLUMNS // 16, 1))

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
            step = softplus(load(given + d * size, width - d) + load_part_f32(bias + 4 * d, min(16, width - d)))
            store_f32(out + 4 * d, decay_of(step, rate))

    @helper
    def state_at(arguments, block, head):
        state = argument(arguments, RECUR.state) + block * argument(arguments, RECUR.state_block)
        return state + head * argument(arguments, RECUR.state_head)

    @each_item
    def recur(arguments, thread, item):
        width, value_width = argument(arguments, RECUR.width), argument(arguments, RECUR.value_width)
        heads, key_heads = argument(arguments, RECUR.heads), argument(arguments, RECUR.key_heads)
        parts = (value_width + COLUMNS - 1) // COLUMNS
        sequence, head, first = item // parts // heads, item // parts % heads, item % parts * COLUMNS
        columns = min(COLUMNS, value_width - first)
        begin = load_i32(argument(arguments, RECUR.batch.query_offset) + 4 * sequence)
        end = load_i32(argument(arguments, RECUR.batch.query_offset) + 4 * (sequence + 1))
        read = load_i32(argument(arguments, RECUR.batch.read_block) + 4 * sequence)
        write = load_i32(argument(arguments, RECUR.batch.write_block) + 4 * sequence)
        query = scratch(thread)
        key = query + 4 * ((width + 15) // 16 * 16)
        decays = key + (key - query)
        own = decays + (key - query)
        state_row = argument(arguments, RECUR.state_row)
        source, source_stride = own, _STRIDE
        if read >= 0:
            source, source_stride = state_at(arguments, read, head) + 4 * first, state_row
        else:
            for d in range(width):
                for column in range(0, COLUMNS, 16):
                    store_f32(own + d * _STRIDE + 4 * column, splat(0.0))
        rate = exp(splat(load_scalar_f32(argument(arguments, RECUR.log_rate) + 4 * head)))
        skips = argument(arguments, RECUR.skip)
        skip = splat(load_scalar_f32(skips + 4 * head)) if skips != 0 else splat(0.0)
        for token in range(begin, end):
            target, target_stride = own, _STRIDE
            if token == end - 1 and write >= 0:
                target, target_stride = state_at(arguments, write, head) + 4 * first, state_row
            mixed = argument(arguments, RECUR.mixed) + token * argument(arguments, RECUR.channels) * size
            key_head = mixed + head // (heads // key_heads) * width * size
            widen(key_head, width, query, float_argument(arguments, RECUR.query_scale))
            widen(key_head + key_heads * width * size, width, key, 1.0)
            factor, decay = splat(0.0), splat(0.0)
            if by_row:
                store_decays(arguments, token, head * width, width, rate, decays)
            else:
                factor = step_of(arguments, token, head)
                decay = decay_of(factor, rate)
            if delta:
                given = splat(load_scalar(row_address(arguments, RECUR.strength, token) + head * size))
                factor = keep_nan(sigmoid(given), given)
            at = (head * value_width + first) * size
            value = mixed + 2 * key_heads * width * size + at
            out = argument(arguments, RECUR.out) + token * heads * value_width * size + at
            if columns == COLUMNS:
                advance(
                    source, source_stride, target, target_stride, width, query, key, decays, value, out, decay, factor, skip, 0
                )  # fmt: skip
            else:
                for column in range(0, columns, 16):
                    advance_part(
                        source + 4 * column, source_stride, target + 4 * column, target_stride, width, query, key, decays,
                        value + column * size, out + column * size, decay, factor, skip, min(16, columns - column),
                    )  # fmt: skip
            source, source_stride = target, target_stride

    return recur
