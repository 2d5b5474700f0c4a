"""The recurrent layers' operators on GPUs: their launches, and the Triton kernels `convolve` and `norm_groups`.

`convolve` writes silu(convolution) of all tokens, then the cached rows. Then `kernel.py` computes the recurrence, in two ways:

    recur_tokens     token by token: sequences with one token; all sequences in float32, where columns of a state have decays of
                     their own (Mamba-1), or if tokens are not more than sequences; it also writes zeros for the tokens that pad
                     the step
    recur_chunks     other sequences with more tokens: `CHUNK` tokens at a time by products of matrices, whose inputs have the 10
                     bits of TF32; the state itself is kept and summed in float32
    solve_chunks     comes before it for the delta rule, where a token's change depends on those of earlier tokens of its chunk

Legend: T tokens, B sequences, H heads, Hk key heads, D key width, Dv value width, L tokens of the convolution's kernel, C channels,
N row width.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from transom_kernels.launch import INTERPRETED, MAX_REGISTERS, next_power_of_two, warps_for
from transom_kernels.linear_recurrence.inputs import Convolution, GatedNorm, RecurrenceInputs, StateBatch
from transom_kernels.linear_recurrence.kernel import locate, recur_chunks, recur_tokens, solve_chunks
from transom_kernels.triton_math import silu

CHUNK = 16  # tokens
BLOCK_TOKENS, BLOCK_CHANNELS = 16, 128  # of a program of `convolve`
BLOCK_SEQUENCES = 128  # whose tokens a program counts at a time, to find its own
COLUMNS = 32  # of a state in a program


def causal_convolution_triton(projected: torch.Tensor, convolution: Convolution, batch: StateBatch) -> torch.Tensor:
    """Return silu(convolution), [T, C], and write the rows after each sequence's last token."""
    (tokens, channels), weight, bias, rows = projected.shape, convolution.weight, convolution.bias, convolution.rows
    mixed, sequences = projected.new_empty(tokens, channels), len(batch.read_block)
    if tokens:
        convolve[(tokens // BLOCK_TOKENS + sequences, -(-channels // BLOCK_CHANNELS))](
            projected, weight, bias if bias is not None else projected, mixed, rows,
            batch.query_offset, batch.read_block, batch.write_block, sequences, tokens,
            projected.stride(0), rows.stride(0), rows.stride(1),
            C=channels, L=len(weight), HAS_BIAS=bias is not None, HEAD=next_power_of_two(max(1, len(weight) - 1)),
            BLOCK_T=BLOCK_TOKENS, BLOCK_C=BLOCK_CHANNELS, BLOCK_B=BLOCK_SEQUENCES, num_warps=4,
        )  # fmt: skip
    return mixed


def linear_recurrence_triton(inputs: RecurrenceInputs) -> torch.Tensor:
    """Return the heads' results [T, H * Dv], and write the states and rows after each sequence's last token."""
    mixed, state, batch, by = inputs.projected, inputs.state, inputs.batch, inputs.decays_by
    if inputs.convolution is not None:
        mixed = causal_convolution_triton(mixed, inputs.convolution, batch)
    tokens, (_, heads, width, value_width) = len(mixed), state.shape
    sequences = len(batch.read_block)
    out = mixed.new_empty(tokens, heads * value_width)
    if not tokens:
        return out
    query, key, value = inputs.parts(mixed)
    gates: tuple[Any, ...] = (
        inputs.step_size, inputs.strength if inputs.strength is not None else inputs.step_size, inputs.step_bias, inputs.rate,
        inputs.skip if inputs.skip is not None else inputs.rate,
    )  # fmt: skip
    blocks = batch.query_offset, batch.read_block, batch.write_block
    numbers = (inputs.step_size.stride(0), gates[1].stride(0), *state.stride()[:3])
    shape: dict[str, Any] = {
        "H": heads, "HK": inputs.key_heads, "D": width, "DV": value_width, "DELTA": inputs.is_delta_rule,
        "HAS_SKIP": inputs.skip is not None, "BLOCK_D": max(16, next_power_of_two(width)), "MOST": inputs.most_strength,
        "BOUND": inputs.most_decay,
    }  # fmt: skip
    columns = min(COLUMNS, max(16, next_power_of_two(value_width)))
    uses_chunks = mixed.dtype != torch.float32 and tokens > sequences and by != "column"
    warps = max(4, warps_for(shape["BLOCK_D"] * columns) // 2)
    recur_tokens[(sequences + 1, heads, -(-value_width // columns))](
        query, key, value, *gates, out, state, *blocks, *numbers, query.stride(0), key.stride(0), value.stride(0),
        sequences, tokens, **shape, BY=by, ONE=uses_chunks, BLOCK_V=columns, num_warps=warps, maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    if uses_chunks:
        columns = 16 if width * (1 + inputs.is_delta_rule) > 128 else columns  # the delta rule needs more registers
        kinds: dict[str, Any] = {"BLOCK_T": CHUNK, "PRECISION": "tf32", "UPCAST": INTERPRETED}
        kinds |= {"num_warps": min(8, max(4, shape["BLOCK_D"] // 16)), "maxnreg": MAX_REGISTERS}
        solved = mixed
        if inputs.is_delta_rule:
            solved = torch.empty(tokens, heads, CHUNK * (1 + (by == "row")), dtype=torch.float32, device=mixed.device)
            solve_chunks[(tokens // CHUNK + sequences + 1, heads)](
                mixed, *gates[:4], solved, batch.query_offset, sequences, tokens, *numbers[:2],
                H=heads, HK=inputs.key_heads, D=width, DV=value_width, BY=by, MOST=inputs.most_strength, BOUND=inputs.most_decay,
                BLOCK_D=shape["BLOCK_D"], BLOCK_B=BLOCK_SEQUENCES, **kinds | {"num_warps": 4},
            )  # fmt: skip
        recur_chunks[(sequences, heads, -(-value_width // columns))](
            mixed, *gates, solved, out, state, *blocks, *numbers, **shape, BY=by, BLOCK_V=columns, **kinds
        )
    return out


@triton.jit(do_not_specialize=["num_sequences", "num_tokens"])
def convolve(
    projected,  # [T, C]
    weight,  # [L, C]
    bias,  # [C], or unused
    mixed,  # [T, C]: the result
    rows,  # [ids, L - 1, C]
    query_offset,  # [B + 1] int32
    read_block,  # [B] int32
    write_block,  # [B] int32
    num_sequences,
    num_tokens,
    projected_stride,
    rows_stride_b,
    rows_stride_l,
    C: tl.constexpr,
    L: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HEAD: tl.constexpr,  # a power of two, at least L - 1
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Compute `BLOCK_C` channels of a block of tokens of a sequence. The grid is (blocks, blocks of channels).

    The program of a sequence's last block also computes its first L - 1 tokens, the only ones that read cached rows, and writes the
    new rows: so they are read before they are written, even in the same place.
    """
    sequence, block = locate(query_offset, tl.program_id(0), num_sequences, num_tokens, BLOCK_T, BLOCK_B)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    index = block * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    if sequence < num_sequences:
        begin = tl.load(query_offset + sequence).to(tl.int64)
        count = tl.load(query_offset + sequence + 1).to(tl.int64) - begin
        new, target = projected + begin * projected_stride + c, mixed + begin * C + c
        shift = tl.zeros([1, BLOCK_C], tl.float32)
        if HAS_BIAS:
            shift += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)
        # --- tokens that read new rows alone ---
        inside = (index >= L - 1) & (index < count) & (c < C)
        total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32) + shift
        for tap in tl.static_range(L):
            x = tl.load(new + (index - (L - 1 - tap)) * projected_stride, mask=inside, other=0.0).to(tl.float32)
            total += tl.load(weight + tap * C + c, mask=c < C, other=0.0).to(tl.float32) * x
        tl.store(target + index * C, silu(total).to(mixed.dtype.element_ty), mask=inside)
        if block == (count - 1) // BLOCK_T:
            # --- the first tokens, and the new rows ---
            read = tl.load(read_block + sequence).to(tl.int64)
            write = tl.load(write_block + sequence).to(tl.int64)
            old, head = rows + read * rows_stride_b + c, tl.arange(0, HEAD)[:, None]
            is_old = (head < L - 1) & (c < C) & (read >= 0)
            total_first = tl.zeros([HEAD, BLOCK_C], tl.float32) + shift
            for tap in tl.static_range(L):
                at = head - (L - 1 - tap)
                fresh = tl.load(new + at * projected_stride, mask=(at >= 0) & (head < count) & (c < C), other=0.0)
                earlier = tl.load(old + (L - 1 + at) * rows_stride_l, mask=is_old & (at < 0), other=0.0)
                row = tl.where(at >= 0, fresh, earlier).to(tl.float32)
                total_first += tl.load(weight + tap * C + c, mask=c < C, other=0.0).to(tl.float32) * row
            is_first = (head < L - 1) & (head < count) & (c < C)
            tl.store(target + head * C, silu(total_first).to(mixed.dtype.element_ty), mask=is_first)
            at = count - (L - 1) + head
            fresh = tl.load(new + at * projected_stride, mask=(at >= 0) & (head < L - 1) & (c < C), other=0.0)
            earlier = tl.load(old + (L - 1 + at) * rows_stride_l, mask=is_old & (at < 0), other=0.0)
            kept = tl.where(at >= 0, fresh, earlier)
            tl.debug_barrier()  # wait until all warps of this program have read the old rows
            places = rows + write * rows_stride_b + head * rows_stride_l + c
            tl.store(places, kept, mask=(head < L - 1) & (c < C) & (write >= 0))


def gated_rms_norm_triton(norm: GatedNorm) -> torch.Tensor:
    """Return rms_norm(x) * weight * silu(gate), or with `gates_first` rms_norm(x * silu(gate)) * weight, of groups; [T, N]."""
    x, gate, weight, eps, size, gates_first, by_sigmoid = norm
    rows, width = x.shape
    out, block = x.new_empty(rows, width), next_power_of_two(size)
    groups = width // size
    block_g = min(max(1, 2048 // block), next_power_of_two(groups))
    if rows:
        norm_groups[(rows, -(-groups // block_g))](
            x, gate, x if weight is None else weight, out, x.stride(0), gate.stride(0), eps,
            GROUPS=groups, SIZE=size, SHARES_GATES=norm.shares_gates, HAS_WEIGHT=weight is not None,
            GATES_FIRST=gates_first, BY_SIGMOID=by_sigmoid,
            OWN_WEIGHTS=weight is not None and weight.numel() > size, BLOCK_G=block_g, BLOCK_N=block,
            num_warps=max(1, min(16, block_g * block // 512)),
        )  # fmt: skip
    return out


@triton.jit
def norm_groups(
    x,  # [T, N]
    gate,  # [T, N], or [T, GROUPS] with SHARES_GATES
    weight,  # [N] with OWN_WEIGHTS, else [SIZE]; or unused
    out,  # [T, N]
    x_stride,
    gate_stride,
    eps,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    SHARES_GATES: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    BY_SIGMOID: tl.constexpr,
    OWN_WEIGHTS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute `BLOCK_G` groups of a row. The grid is (T, blocks of groups)."""
    row = tl.program_id(0).to(tl.int64)
    g, n = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK_N)[None, :]
    inside, at = (g < GROUPS) & (n < SIZE), g * SIZE + n
    values = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    place = g + 0 * n if SHARES_GATES else at
    factor = tl.load(gate + row * gate_stride + place, mask=inside, other=0.0).to(tl.float32)
    factor = tl.sigmoid(factor) if BY_SIGMOID else silu(factor)
    if GATES_FIRST or not HAS_WEIGHT:
        values *= factor
    if HAS_WEIGHT:
        values *= tl.rsqrt(tl.sum(values * values, 1) / SIZE + eps)[:, None]
        values *= tl.load(weight + (at if OWN_WEIGHTS else n + 0 * g), mask=inside, other=0.0).to(tl.float32)
        if not GATES_FIRST:
            values *= factor
    tl.store(out + row * GROUPS * SIZE + at, values.to(out.dtype.element_ty), mask=inside)
