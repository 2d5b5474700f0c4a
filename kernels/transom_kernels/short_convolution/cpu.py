"""`short_convolution` on CPUs: the kernel `convolve` and its launch. A work item is a group of units of one token.

    out[t] = gate_out[t] * (bias + sum_d weight[L - 1 - d] * row[t - d])         row[t] = gate_in[t] * x[t], rounded as the cache

`op.py` says which rows are computed from the step's inputs and which are read from the cache. A sum begins with the bias and goes
on from the earliest token to the token itself.

Legend: T tokens, L tokens of the convolution's kernel, C channels, U units of D neighbouring channels, P block size in tokens,
B sequences, N table columns.
"""

from typing import Any, NamedTuple

import torch

from transom_kernels.cpu.arguments import CacheArguments, RowArguments, numbers_of
from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.cpu.simd import ROUND, fma, load_i32, load_i64, row_access, splat
from transom_kernels.cpu.work import argument, each_item, helper, row_address, sequence_of
from transom_kernels.quantised_kv.cpu_rows import cache_address
from transom_kernels.short_convolution.reference import ConvolutionInputs

ITEM_CHANNELS = 512  # about as many channels as one work item computes


class ConvolveArguments(NamedTuple):
    """The argument words of the kernel `convolve`."""

    projected: RowArguments  # [T, 3 C]
    weight: torch.Tensor  # [L, C], contiguous
    bias: torch.Tensor | None  # [C]
    out: torch.Tensor  # [T, C], contiguous
    cache: CacheArguments
    slots: torch.Tensor  # [T] int64; below 0: not written
    query_offset: torch.Tensor  # [B + 1] int32
    start: torch.Tensor  # [B] int32
    attend_from: torch.Tensor  # [B] int32
    first_block: torch.Tensor  # [B] int32
    block_table: torch.Tensor  # [B, N] int32
    num_sequences: int  # B
    columns: int  # N
    block_size: int  # P
    length: int  # L
    channels: int  # C
    width: int  # D
    item_channels: int  # a multiple of D


AT = numbers_of(ConvolveArguments)


def fits_cpu_kernel(inputs: ConvolutionInputs) -> bool:
    """Return whether the kernel takes these dtypes and strides: the channels of a row or a unit must be adjacent."""
    return (
        inputs.projected.dtype in DTYPES
        and inputs.projected.stride(1) == inputs.cache.stride(3) == 1
        and inputs.weight.is_contiguous()
    )


def short_convolution_cpu(inputs: ConvolutionInputs) -> torch.Tensor:
    """Write the rows gate_in * x of `projected` [T, 3 C] to the cache, and return their gated convolution [T, C]."""
    projected, batch, channels = inputs.projected, inputs.batch, inputs.channels
    out = empty((len(projected), channels), projected.dtype)
    width = inputs.cache.shape[3]
    item_channels = -(-min(ITEM_CHANNELS, channels) // width) * width
    arguments = ConvolveArguments(
        projected=RowArguments.of(projected),
        weight=inputs.weight,
        bias=inputs.bias,
        out=out,
        cache=CacheArguments.of(inputs.cache),
        slots=batch.slots,
        query_offset=batch.query_offset,
        start=batch.start,
        attend_from=batch.attend_from,
        first_block=batch.first_block,
        block_table=batch.block_table,
        num_sequences=len(batch.start),
        columns=batch.block_table.shape[1],
        block_size=batch.block_size,
        length=len(inputs.weight),
        channels=channels,
        width=width,
        item_channels=item_channels,
    )
    kernel = cpu_kernel("transom_kernels.short_convolution.cpu", "make_convolve", dtype=DTYPES[projected.dtype])
    launch(kernel, len(projected) * -(-channels // item_channels), arguments)
    return out


@helper
def _cached_row(arguments, sequence, position):
    """Return the address of unit 0 of the cached row at a position; 0 if the row counts as zero."""
    if position < max(0, load_i32(argument(arguments, AT.attend_from) + 4 * sequence)):
        return 0
    size, columns = argument(arguments, AT.block_size), argument(arguments, AT.columns)
    column = position // size - load_i32(argument(arguments, AT.first_block) + 4 * sequence)
    if column < 0 or column >= columns:
        return 0
    block = load_i32(argument(arguments, AT.block_table) + 4 * (sequence * columns + column))
    return cache_address(arguments, AT.cache, block, position % size, 0) if block >= 0 else 0


def make_convolve(dtype: str) -> Any:
    """Build the kernel. A work item is `item_channels` channels of a token."""
    (load, store, size), rounded = row_access(dtype), ROUND[dtype]

    @helper
    def own_row(arguments, token, channel, count):
        """Return channels of the row of a token of this step."""
        gate = row_address(arguments, AT.projected, token) + channel * size
        x = gate + 2 * argument(arguments, AT.channels) * size
        return rounded(load(gate, count) * load(x, count))

    @each_item
    def convolve(arguments, thread, item):
        channels, width = argument(arguments, AT.channels), argument(arguments, AT.width)
        length, per_item = argument(arguments, AT.length), argument(arguments, AT.item_channels)
        parts = (channels + per_item - 1) // per_item
        token, first = item // parts, item % parts * per_item
        sequence = sequence_of(argument(arguments, AT.query_offset), argument(arguments, AT.num_sequences), token)
        # Tokens that pad a step belong to no sequence, and nothing precedes them.
        begin, position = token, 0
        if sequence < argument(arguments, AT.num_sequences):
            begin = load_i32(argument(arguments, AT.query_offset) + 4 * sequence)
            position = load_i32(argument(arguments, AT.start) + 4 * sequence) + token - begin
        slot = load_i64(argument(arguments, AT.slots) + 8 * token)
        block_size, unit_stride = argument(arguments, AT.block_size), argument(arguments, AT.cache.head)
        written = cache_address(arguments, AT.cache, slot // block_size, slot % block_size, 0) if slot >= 0 else 0
        gates = row_address(arguments, AT.projected, token) + channels * size
        weights, bias = argument(arguments, AT.weight), argument(arguments, AT.bias)
        out = argument(arguments, AT.out) + token * channels * size
        for unit in range(first // width, min(first + per_item, channels) // width):
            for inside in range(0, width, 16):
                channel, count = unit * width + inside, width - inside
                total = load(bias + channel * size, count) if bias != 0 else splat(0.0)
                for tap in range(length):
                    distance = length - 1 - tap
                    weight = load(weights + (tap * channels + channel) * size, count)
                    if token - distance >= begin:
                        total = fma(weight, own_row(arguments, token - distance, channel, count), total)
                    elif position >= distance:
                        row = _cached_row(arguments, sequence, position - distance)
                        if row != 0:
                            total = fma(weight, load(row + unit * unit_stride + inside * size, count), total)
                if written != 0:
                    row = own_row(arguments, token, channel, count)
                    store(written + unit * unit_stride + inside * size, row, count)
                store(out + channel * size, load(gates + channel * size, count) * total, count)

    return convolve
