"""`short_convolution` on GPUs: the Triton kernel `convolve` and its launch.

    out[t] = gate_out[t] * (bias + sum_d weight[L - 1 - d] * row[t - d])         row[t] = gate_in[t] * x[t], rounded as the cache

`op.py` says which rows are computed from the step's inputs and which are read from the cache. The grid is (T, blocks of channels).
A program finds its token's sequence by counting the sequences that end before the token.

Legend: T tokens, L tokens of the convolution's kernel, C channels, U units of D neighbouring channels, P block size in tokens,
B sequences, N table columns.
"""

import torch
import triton
import triton.language as tl

from transom_kernels.launch import next_power_of_two
from transom_kernels.short_convolution.reference import ConvolutionInputs

BLOCK_CHANNELS = 1024  # most channels of one program
BLOCK_SEQUENCES = 128  # ends of sequences that a program compares at a time


def short_convolution_triton(inputs: ConvolutionInputs) -> torch.Tensor:
    """Write the rows gate_in * x of `projected` [T, 3 C] to the cache, and return their gated convolution [T, C]."""
    projected, cache, batch, channels = inputs.projected.contiguous(), inputs.cache, inputs.batch, inputs.channels
    out = torch.empty(len(projected), channels, dtype=projected.dtype, device=projected.device)
    if not len(projected):
        return out
    block_c = min(BLOCK_CHANNELS, next_power_of_two(channels))
    convolve[(len(projected), -(-channels // block_c))](
        projected, inputs.weight, projected if inputs.bias is None else inputs.bias, out, cache, batch.slots,
        batch.query_offset, batch.start, batch.attend_from, batch.first_block, batch.block_table,
        len(batch.start), batch.block_table.shape[1], *cache.stride()[:3],
        BLOCK_SIZE=cache.shape[1], C=channels, D=cache.shape[3], L=len(inputs.weight), HAS_BIAS=inputs.bias is not None,
        BLOCK_B=BLOCK_SEQUENCES, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_sequences", "columns"])
def convolve(
    projected,  # [T, 3 C]
    weight,  # [L, C]
    bias,  # [C], or unused
    out,  # [T, C]
    cache,  # [ids, P, U, D]
    slots,  # [T] int64; below 0: not written
    query_offset,  # [B + 1] int32
    start,  # [B] int32
    attend_from,  # [B] int32
    first_block,  # [B] int32
    block_table,  # [B, N] int32
    num_sequences,
    columns,
    cache_stride_b,
    cache_stride_p,
    cache_stride_u,
    BLOCK_SIZE: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute `BLOCK_C` channels of one token; the module's docstring has the formula."""
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < C
    places = (c // D) * cache_stride_u + c % D  # of the channels in a cached row
    # --- the token's sequence ---
    b = tl.arange(0, BLOCK_B)
    sequence = tl.full((), 0, tl.int64)
    for first in range(0, num_sequences, BLOCK_B):
        ends = tl.load(query_offset + 1 + first + b, mask=first + b < num_sequences, other=2147483647)
        sequence += tl.sum((ends <= token).to(tl.int64), 0)
    # Tokens that pad a step belong to no sequence, and nothing precedes them.
    is_own = sequence < num_sequences
    begin = tl.load(query_offset + sequence, mask=is_own, other=0).to(tl.int64)
    begin = tl.where(is_own, begin, token)
    position = tl.load(start + sequence, mask=is_own, other=0) + token - begin
    low = tl.maximum(tl.load(attend_from + sequence, mask=is_own, other=0), 0)
    first_column = tl.load(first_block + sequence, mask=is_own, other=0)
    # --- the row of each token that the kernel reads, the earliest first ---
    total = tl.zeros([BLOCK_C], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(L):
        distance = L - 1 - tap
        is_new = token - distance >= begin
        new = projected + (token - distance) * (3 * C) + c
        gate = tl.load(new, mask=inside & is_new, other=0.0).to(tl.float32)
        x = tl.load(new + 2 * C, mask=inside & is_new, other=0.0).to(tl.float32)
        row = (gate * x).to(cache.dtype.element_ty)
        if tap == L - 1:
            slot = tl.load(slots + token)
            written = cache + (slot // BLOCK_SIZE) * cache_stride_b + (slot % BLOCK_SIZE) * cache_stride_p + places
            tl.store(written, row, mask=inside & (slot >= 0))
        else:
            before = position - distance
            column = before // BLOCK_SIZE - first_column
            is_cached = (before >= low) & (is_new == 0) & (column >= 0) & (column < columns)
            block = tl.load(block_table + sequence * columns + column, mask=is_cached, other=-1).to(tl.int64)
            cached = cache + block * cache_stride_b + (before % BLOCK_SIZE) * cache_stride_p + places
            is_cached &= block >= 0
            row = tl.where(is_new, row, tl.load(cached, mask=inside & is_cached, other=0.0))
        total += tl.load(weight + tap * C + c, mask=inside, other=0.0).to(tl.float32) * row.to(tl.float32)
    gate = tl.load(projected + token * (3 * C) + C + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * C + c, (gate * total).to(out.dtype.element_ty), mask=inside)
