"""The Triton kernels of the recurrence: `recur_tokens`, `solve_chunks` and `recur_chunks`. `op.py` has the formulas.

In a chunk of tokens let c_i be the sum of the log decays up to token i, and S the state before the chunk. With the changes u_i of
the tokens (what is multiplied by k_i and added to the state),

    out_i = e^c_i S^T q_i + sum over j <= i of e^(c_i - c_j) (q_i . k_j) u_j           S' = e^c S + sum of e^(c - c_j) k_j u_j^T

Mamba-2 has u_i = step_i v_i. In the delta rule u_i also depends on the changes of earlier tokens of the chunk, which is a
triangular system: (1 + A) u = beta (v - e^c S^T k) with A_ij = beta_i e^(c_i - c_j) (k_i . k_j) for j < i. The inverse of 1 + A
does not depend on the state, so `solve_chunks` computes it for all chunks at once (the WY form).

If rows of a state have decays of their own (Kimi Linear), c has a number for each row, and both sums of products q_i . k_j and
k_i . k_j have the factor e^(c_i - c_j) inside. It is computed pair by pair, since e^c_i e^-c_j may be 0 times infinity in float32.

Queries and keys stay as they are in memory. Where the delta rule needs them normalised, results are multiplied by their inverse
lengths instead.

Legend: T tokens, B sequences, H heads, HK key heads, D key width, DV value width, C channels, BLOCK_T tokens of a chunk.
"""

import triton
import triton.language as tl

from transom_kernels.triton_math import softplus


@triton.jit
def locate(query_offset, program, num_sequences, num_tokens, BLOCK_T: tl.constexpr, BLOCK_B: tl.constexpr):
    """Return the sequence of a program, and the program's number among the blocks of BLOCK_T tokens of this sequence.

    Sequence B has the tokens that pad the step. A program that has no block gets a larger number.
    """
    b = tl.arange(0, BLOCK_B)
    sequence, before, total = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    for first in range(0, num_sequences + 1, BLOCK_B):
        at = first + b
        begin = tl.load(query_offset + at, mask=at <= num_sequences, other=0)
        end = tl.load(query_offset + at + 1, mask=at < num_sequences, other=0)
        end = tl.where(at == num_sequences, num_tokens, end)
        blocks = ((end - begin + BLOCK_T - 1) // BLOCK_T).to(tl.int64)
        is_before = (total + tl.cumsum(blocks, 0) <= program) & (at <= num_sequences)
        sequence += tl.sum(is_before.to(tl.int64), 0)
        before += tl.sum(tl.where(is_before, blocks, 0), 0)
        total += tl.sum(blocks, 0)
    return sequence, program - before


@triton.jit
def _steps(step_size, step_bias, at, channel, inside):
    """Return the steps of tokens, or of one token's channels; 0 for those that are not inside."""
    x = tl.load(step_size + at + channel, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, softplus(x + tl.load(step_bias + channel)), 0.0)


@triton.jit
def _row_decays(step_size, step_bias, at, channel, inside, rate, BOUND: tl.constexpr):
    """Return the logarithms of the decays of rows of a state; 0 for tokens that are not inside."""
    if BOUND == 0:
        return -rate * _steps(step_size, step_bias, at, channel, inside)
    x = tl.load(step_size + at + channel, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, -BOUND * tl.sigmoid(rate * (x + tl.load(step_bias + channel))), 0.0)


@triton.jit(do_not_specialize=["num_sequences", "num_tokens"])
def recur_tokens(
    query,  # [T, HK * D]
    key,  # [T, HK * D]
    value,  # [T, H * DV]
    step_size,  # [T, H], or [T, H * D] or [T, H * DV]: of rows or columns of a state (BY)
    strength,  # [T, H], or unused
    step_bias,  # [H], [H * D] or [H * DV]
    rate,  # [H], or by column [H, D, DV]
    skip,  # [H], or by column [H * DV]; or unused
    out,  # [T, H * DV]
    state,  # [ids, H, D, DV]
    query_offset,  # [B + 1] int32
    read_block,  # [B] int32
    write_block,  # [B] int32
    step_stride,
    strength_stride,
    state_stride_b,
    state_stride_h,
    state_stride_d,
    query_stride,
    key_stride,
    value_stride,
    num_sequences,
    num_tokens,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    DELTA: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BY: tl.constexpr,  # head, row or column
    MOST: tl.constexpr,  # `most_strength`
    BOUND: tl.constexpr,  # `most_decay`
    ONE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute some columns of a head's state in a sequence, token by token. The grid is (B + 1, H, blocks of columns).

    With ONE it does so only where the sequence has one token. Sequence B has the tokens that pad the step.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    d, v = tl.arange(0, BLOCK_D), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    begin = tl.load(query_offset + sequence).to(tl.int64)
    results = out + head * DV + v
    if sequence == num_sequences:
        for token in range(begin, num_tokens):
            tl.store(results + token * H * DV, tl.zeros([BLOCK_V], out.dtype.element_ty), mask=v < DV)
    else:
        count = tl.load(query_offset + sequence + 1) - begin
        if (count == 1) | ((count > 1) & (not ONE)):
            read, write = tl.load(read_block + sequence).to(tl.int64), tl.load(write_block + sequence).to(tl.int64)
            inside = (d < D)[:, None] & (v < DV)[None, :]
            places = state + head * state_stride_h + d[:, None] * state_stride_d + v[None, :]
            own = tl.load(places + read * state_stride_b, mask=inside & (read >= 0), other=0.0)
            # Rows from D on and columns from DV on hold zeros, whatever their decay; their steps are those of the last ones.
            channel = head
            if BY == "row":
                channel = head * D + tl.minimum(d, D - 1)
            if BY == "column":
                channel = head * DV + tl.minimum(v, DV - 1)
                rates = tl.load(rate + (head * D + d[:, None]) * DV + v[None, :], mask=inside, other=0.0)
            else:
                rates = tl.load(rate + head)
            key_head = head // (H // HK) * D + d
            for token in range(begin, begin + count):
                q = tl.load(query + token * query_stride + key_head, mask=d < D, other=0.0).to(tl.float32)
                k = tl.load(key + token * key_stride + key_head, mask=d < D, other=0.0).to(tl.float32)
                x = tl.load(value + token * value_stride + head * DV + v, mask=v < DV, other=0.0).to(tl.float32)
                at = token * step_stride
                if BY == "row":
                    own *= tl.exp(_row_decays(step_size, step_bias, at, channel, channel >= 0, rates, BOUND))[:, None]
                else:
                    step = _steps(step_size, step_bias, at, channel, channel >= 0)
                    own *= tl.exp(-rates * (step[None, :] if BY == "column" else step))
                if DELTA:
                    q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * D**-0.5
                    k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
                    beta = MOST * tl.sigmoid(tl.load(strength + token * strength_stride + head).to(tl.float32))
                    change = beta * (x - tl.sum(own * k[:, None], 0))
                else:
                    change = step * x
                own += k[:, None] * change[None, :]
                result = tl.sum(own * q[:, None], 0)
                if HAS_SKIP:
                    result += tl.load(skip + (channel if BY == "column" else head)) * x
                tl.store(results + token * H * DV, result.to(out.dtype.element_ty), mask=v < DV)
            tl.store(places + write * state_stride_b, own, mask=inside & (write >= 0))


@triton.jit
def _pairs(log_decay, t, BLOCK_T: tl.constexpr):
    """Return c [BLOCK_T], the sums of log decays, and e^(c_i - c_j) [BLOCK_T, BLOCK_T], which is 0 where j > i."""
    c = tl.cumsum(log_decay, 0)
    return c, tl.exp(tl.where(t[:, None] >= t[None, :], c[:, None] - c[None, :], float("-inf")))


@triton.jit(do_not_specialize=["num_sequences", "num_tokens"])
def solve_chunks(
    mixed,  # [T, C]
    step_size,  # [T, H], or [T, H * D]: of rows of a state (BY)
    strength,  # [T, H]
    step_bias,  # [H] or [H * D]
    rate,  # [H]
    solved,  # [T, H, BLOCK_T] float32: the result, a row of the inverse for each token; [T, H, 2, BLOCK_T] by rows: and the weights
    query_offset,  # [B + 1] int32
    num_sequences,
    num_tokens,
    step_stride,
    strength_stride,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BY: tl.constexpr,  # head or row
    MOST: tl.constexpr,
    BOUND: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,  # whether products are of float32: the interpreter has none of bfloat16
):
    """Compute the inverse of 1 + A for a chunk of a sequence and a head, and by rows the weights of changes in results as well. The
    grid is (chunks, H).

    Row i of the inverse is that of the unit matrix minus the sum over j < i of A_ij times row j. The program keeps A in its own
    rows of the result, where it reads them again.
    """
    head, t, d = tl.program_id(1), tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    sequence, chunk = locate(query_offset, tl.program_id(0), num_sequences, num_tokens, BLOCK_T, BLOCK_B)
    if sequence < num_sequences:
        begin = tl.load(query_offset + sequence).to(tl.int64)
        count = tl.load(query_offset + sequence + 1) - begin - chunk * BLOCK_T
        begin += chunk * BLOCK_T
        inside = t < count
        CHANNELS: tl.constexpr = 2 * HK * D + H * DV
        WIDTH: tl.constexpr = 2 * BLOCK_T if BY == "row" else BLOCK_T
        first_key = mixed + begin * CHANNELS + (HK + head // (H // HK)) * D + d
        has_key = inside[:, None] & (d < D)[None, :]
        key = tl.load(first_key[None, :] + t[:, None] * CHANNELS, mask=has_key, other=0.0)
        wide = key.to(tl.float32)
        if UPCAST:
            key = wide
        length = tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)
        at = (begin + t) * strength_stride + head
        beta = MOST * tl.sigmoid(tl.load(strength + at, mask=inside, other=0.0).to(tl.float32))
        places = solved + ((begin + t) * H + head)[:, None] * WIDTH + t[None, :]
        at = (begin + t) * step_stride
        if BY == "row":
            queries = first_key[None, :] - HK * D + t[:, None] * CHANNELS
            query = tl.load(queries, mask=has_key, other=0.0).to(tl.float32)
            channel, head_rate = head * D + tl.minimum(d, D - 1), tl.load(rate + head)
            decays = _row_decays(step_size, step_bias, at[:, None], channel[None, :], inside[:, None], head_rate, BOUND)
            c = tl.cumsum(decays, 0)
            own_c = tl.zeros([BLOCK_D], tl.float32)
            product, weight = tl.zeros([BLOCK_T, BLOCK_T], tl.float32), tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
            for j in range(0, BLOCK_T):
                is_token = (d >= 0) & (j < count)
                place = (begin + j) * step_stride
                own_c += _row_decays(step_size, step_bias, place, channel, is_token, head_rate, BOUND)
                own_key = tl.load(first_key + j * CHANNELS, mask=is_token & (d < D), other=0.0).to(tl.float32)
                decayed = tl.exp(tl.where(t[:, None] >= j, c - own_c[None, :], float("-inf"))) * own_key[None, :]
                product = tl.where(t[None, :] == j, tl.sum(wide * decayed, 1)[:, None], product)
                weight = tl.where(t[None, :] == j, tl.sum(query * decayed, 1)[:, None], weight)
            query_length = tl.rsqrt(tl.sum(query * query, 1) + 1e-6) * D**-0.5
            tl.store(places + BLOCK_T, weight * query_length[:, None] * length[None, :], mask=inside[:, None])
        else:
            step = _steps(step_size, step_bias, at, head, inside)
            _, pairs = _pairs(-tl.load(rate + head) * step, t, BLOCK_T)
            product = tl.dot(key, tl.trans(key), input_precision=PRECISION) * pairs
        product *= (beta * length)[:, None] * length[None, :]
        tl.store(places, product, mask=inside[:, None])
        tl.debug_barrier()  # other warps read these rows
        inverse = tl.where(t[:, None] == t[None, :], 1.0, 0.0)
        for i in range(1, BLOCK_T):
            row = tl.load(solved + ((begin + i) * H + head) * WIDTH + t, mask=(t < i) & (i < count), other=0.0)
            others = tl.sum(row[:, None] * inverse, 0)
            inverse = tl.where(t[:, None] == i, inverse - others[None, :], inverse)
        tl.debug_barrier()  # all warps have read the rows
        tl.store(places, inverse, mask=inside[:, None])


@triton.jit
def recur_chunks(
    mixed,  # [T, C]
    step_size,  # [T, H], or [T, H * D]: of rows of a state (BY)
    strength,  # [T, H], or unused
    step_bias,  # [H] or [H * D]
    rate,  # [H]
    skip,  # [H], or unused
    solved,  # of `solve_chunks`, or unused
    out,  # [T, H * DV]
    state,  # [ids, H, D, DV]
    query_offset,  # [B + 1] int32
    read_block,  # [B] int32
    write_block,  # [B] int32
    step_stride,
    strength_stride,
    state_stride_b,
    state_stride_h,
    state_stride_d,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    DELTA: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BY: tl.constexpr,  # head or row
    MOST: tl.constexpr,
    BOUND: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,  # whether products are of float32: the interpreter has none of bfloat16
):
    """Compute some columns of a head's state in a sequence with several tokens. The grid is that of `recur_tokens`."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(query_offset + sequence).to(tl.int64)
    count = tl.load(query_offset + sequence + 1) - begin
    if count > 1:
        t, d, v = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        read, write = tl.load(read_block + sequence).to(tl.int64), tl.load(write_block + sequence).to(tl.int64)
        inside_state = (d < D)[:, None] & (v < DV)[None, :]
        places = state + head * state_stride_h + d[:, None] * state_stride_d + v[None, :]
        own = tl.load(places + read * state_stride_b, mask=inside_state & (read >= 0), other=0.0)
        for first in range(0, count, BLOCK_T):
            inside, token = first + t < count, begin + first + t
            # --- load the chunk ---
            rows = mixed + token[:, None] * (2 * HK * D + H * DV)
            has_key = inside[:, None] & (d < D)[None, :]
            query = tl.load(rows + head // (H // HK) * D + d[None, :], mask=has_key, other=0.0)
            key = tl.load(rows + (HK + head // (H // HK)) * D + d[None, :], mask=has_key, other=0.0)
            has_value = inside[:, None] & (v < DV)[None, :]
            value = tl.load(rows + 2 * HK * D + head * DV + v[None, :], mask=has_value, other=0.0).to(tl.float32)
            at, head_rate = token * step_stride, tl.load(rate + head)
            solved_row = solved + (token * H + head)[:, None] * (2 * BLOCK_T if BY == "row" else BLOCK_T) + t[None, :]
            # `known_factor` and `to_chunk` scale what keys and queries read from the state before, `to_end` what keys add to it.
            if BY == "row":
                channel = head * D + tl.minimum(d, D - 1)
                decays = _row_decays(
                    step_size, step_bias, at[:, None], channel[None, :], inside[:, None], head_rate, BOUND
                )
                c, last = tl.cumsum(decays, 0), tl.sum(decays, 0)
                weight = tl.load(solved_row + BLOCK_T, mask=inside[:, None], other=0.0)
                key, query = key.to(tl.float32), query.to(tl.float32)
                key_length = tl.rsqrt(tl.sum(key * key, 1) + 1e-6)
                query_length = tl.rsqrt(tl.sum(query * query, 1) + 1e-6) * D**-0.5
                old_key, query, key = key * tl.exp(c), query * tl.exp(c), key * tl.exp(last[None, :] - c)
                to_chunk, to_end, kept = query_length, key_length, tl.exp(last)[:, None]
                known_factor = key_length
            else:
                step = _steps(step_size, step_bias, at, head, inside)
                c, pairs = _pairs(-head_rate * step, t, BLOCK_T)
                last = tl.sum(-head_rate * step, 0)
                if UPCAST:
                    key, query = key.to(tl.float32), query.to(tl.float32)
                weight = tl.dot(query, tl.trans(key), input_precision=PRECISION) * pairs
                key, query = key.to(tl.float32), query.to(tl.float32)
                old_key, to_chunk, to_end, kept = key, tl.exp(c), tl.exp(last - c), tl.exp(last)
                if DELTA:
                    key_length = tl.rsqrt(tl.sum(key * key, 1) + 1e-6)
                    query_length = tl.rsqrt(tl.sum(query * query, 1) + 1e-6) * D**-0.5
                    known_factor = key_length * to_chunk
                    weight *= query_length[:, None] * key_length[None, :]
                    to_chunk *= query_length
                    to_end *= key_length
            # --- the changes ---
            if DELTA:
                at = token * strength_stride + head
                beta = MOST * tl.sigmoid(tl.load(strength + at, mask=inside, other=0.0).to(tl.float32))
                known = tl.dot(old_key, own, input_precision=PRECISION) * known_factor[:, None]
                change = tl.where(inside, beta, 0.0)[:, None] * (value - known)
                inverse = tl.load(solved_row, mask=inside[:, None], other=0.0)
                change = tl.dot(inverse, change, input_precision=PRECISION)
            else:
                change = step[:, None] * value
            # --- results, and the state after the chunk ---
            result = tl.dot(query, own, input_precision=PRECISION) * to_chunk[:, None]
            result += tl.dot(weight, change, input_precision=PRECISION)
            if HAS_SKIP:
                result += tl.load(skip + head) * value
            at = token[:, None] * H * DV + head * DV + v[None, :]
            tl.store(out + at, result.to(out.dtype.element_ty), mask=has_value)
            own = own * kept + tl.dot(tl.trans(key), change * to_end[:, None], input_precision=PRECISION)
        tl.store(places + write * state_stride_b, own, mask=inside_state & (write >= 0))
