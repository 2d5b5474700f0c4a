"""`add_lora_` on GPUs: the Triton kernels `shrink` and `expand`, and their launches.

    shrink:  inner[m, j] = sum_k a[s, j, k] * x[m, k]                              j = 0 to P * R - 1, s = slots[m]
    expand:  y[m, n] += scales[s, p] * sum_r b[s, r, n] * inner[m, p * R + r]      p is the part of column n

A program computes a tile of neighbouring rows and columns. It multiplies the tile by the weights of each slot that one of its rows
has, in turn, and stores the rows of that slot alone. Grids depend on M alone and slots are read on the device, so that a CUDA graph
can have both launches; a tile without adapters reads its slots and leaves.

K is cut into *pieces* of equal length. For few rows `shrink` has a program for each piece, so that many programs run at once, and
`expand` adds the products of the pieces (*splits*); for many rows `shrink` adds them itself, in the same order. Tiles have at most
32 rows: from 64 on, Hopper and Blackwell have other instructions, which may add in another order. So a row's result does not depend
on other rows, nor on their number.

Legend: M rows, K input width, N output width of all parts, S slots, P parts, R the largest rank.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from transom_kernels.launch import INTERPRETED, next_power_of_two
from transom_kernels.lora.reference import LoraWeights
from transom_kernels.prepared_launch import PreparedLaunch

FEW_ROWS = 128  # up to this many rows (a decoding batch) tiles are small, and K is split
MIN_PIECE, MAX_PIECES = 512, 8  # least elements of K in a piece, and most pieces


def add_lora_triton_(y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, weights: LoraWeights) -> None:
    """Add scale * B (A x) of each row's adapter to `y` [M, N], from `x` [M, K] and `slots` [M], of which -1 is no adapter."""
    num_rows, num_slots = len(slots), len(weights.a)
    if not num_rows:
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    key = (weights.rank, weights.starts, x.shape[1], num_slots, x.stride(0), y.stride(0))
    shrink_, expand_, (block_m, columns, splits, strips) = _launches(
        *key, num_rows <= FEW_ROWS, x.dtype == torch.float32
    )
    inner, tiles = x.new_empty(splits, num_rows, weights.a.shape[1], dtype=torch.float32), -(-num_rows // block_m)
    shrink_((tiles, columns, splits), (x, slots, weights.a, inner), num_rows)
    expand_((tiles, strips, 1), (y, slots, weights.b, weights.scales, inner), num_rows)


@cache
def _launches(
    rank: int,
    starts: tuple[int, ...],
    width: int,
    num_slots: int,
    x_stride: int,
    y_stride: int,
    is_few: bool,
    is_wide: bool,
) -> tuple[PreparedLaunch, PreparedLaunch, tuple[int, int, int, int]]:
    """Prepare both launches; return also the rows of a tile, the programs of `shrink` along columns and K, and of `expand` along
    columns. `is_wide`: in float32, which is multiplied without tensor cores, tiles are small."""
    parts = len(starts) - 1
    block_m, block_k = 16 if is_few else 32, 32 if is_wide else 128
    block_j = 16 if is_few or is_wide else min(64, next_power_of_two(parts * rank))
    # with 64 rows of B, tiles of `expand` spill registers on sm_80 and sm_100
    block_n, block_r = 32 if is_wide else 64 if is_few else 128, 16 if is_wide or is_few or rank <= 16 else 32
    piece = -(-max(MIN_PIECE, -(-width // MAX_PIECES)) // block_k) * block_k
    pieces = -(-width // piece)
    splits = pieces if is_few else 1
    shared = {"num_slots": num_slots, "R": rank, "P": parts, "BLOCK_M": block_m}
    of_k = {"K": width, "PIECE": piece, "PIECES": pieces // splits, "UPCAST": INTERPRETED}
    of_shrink = {"x_stride": x_stride, "BLOCK_J": block_j, "BLOCK_K": block_k} | of_k
    of_expand = {"y_stride": y_stride, "STARTS": starts, "SPLITS": splits, "BLOCK_N": block_n, "BLOCK_R": block_r}
    return (
        PreparedLaunch(shrink, shared | of_shrink, num_warps=4, num_stages=2 if is_wide else 3),
        PreparedLaunch(expand, shared | of_expand, num_warps=4, num_stages=2),
        (block_m, -(-parts * rank // block_j), splits, -(-starts[-1] // block_n)),
    )


@triton.jit(do_not_specialize=["num_rows"])
def shrink(
    x,  # [M, K]
    slots,  # [M] int32
    a,  # [S, P * R, K]
    inner,  # [splits, M, P * R] float32
    num_rows,
    num_slots,
    x_stride,
    K: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    PIECE: tl.constexpr,  # elements of K
    PIECES: tl.constexpr,  # of a split
    BLOCK_M: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,  # products in float32: for the interpreter, which cannot compute in bfloat16
):
    """Compute a tile of `inner`, over the pieces of one split. The grid is (tiles of rows, tiles of columns, splits)."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    split = tl.program_id(2)
    slot = tl.load(slots + m, mask=m < num_rows, other=-1)
    rows = x + m.to(tl.int64)[:, None] * x_stride
    s = tl.min(tl.where(slot >= 0, slot, num_slots), 0)
    while s < num_slots:
        is_own = (slot == s)[:, None]
        columns = a + s.to(tl.int64) * (P * R * K) + j[None, :] * K
        total = tl.zeros([BLOCK_M, BLOCK_J], tl.float32)
        for piece in range(split * PIECES, split * PIECES + PIECES):
            partial = tl.zeros([BLOCK_M, BLOCK_J], tl.float32)
            for first in range(0, PIECE, BLOCK_K):
                k = piece * PIECE + first + tl.arange(0, BLOCK_K)
                of_x = tl.load(rows + k[None, :], mask=is_own & (k < K)[None, :], other=0.0)
                of_a = tl.load(columns + k[:, None], mask=(k < K)[:, None] & (j < P * R)[None, :], other=0.0)
                if UPCAST:
                    of_x, of_a = of_x.to(tl.float32), of_a.to(tl.float32)
                partial = tl.dot(of_x, of_a, partial, input_precision="ieee")
            total += partial
        places = inner + (split * num_rows + m).to(tl.int64)[:, None] * (P * R) + j[None, :]
        tl.store(places, total, mask=is_own & (j < P * R)[None, :])
        s = tl.min(tl.where(slot > s, slot, num_slots), 0)


@triton.jit(do_not_specialize=["num_rows"])
def expand(
    y,  # [M, N]
    slots,  # [M] int32
    b,  # [S, R, N]
    scales,  # [S, P] float32
    inner,  # [SPLITS, M, P * R] float32
    num_rows,
    num_slots,
    y_stride,
    R: tl.constexpr,
    P: tl.constexpr,
    STARTS: tl.constexpr,  # first column of each part, and N
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Change a tile of y. The grid is (tiles of rows, tiles of columns)."""
    # A product in TF32x3 is one of float32 by three of TF32, which has all bits of numbers of 16 bits.
    PRECISION: tl.constexpr = "ieee" if y.dtype.element_ty == tl.float32 else "tf32x3"
    N: tl.constexpr = STARTS[P]
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = tl.load(slots + m, mask=m < num_rows, other=-1)
    rows = inner + m.to(tl.int64)[:, None] * (P * R)
    places = y + m.to(tl.int64)[:, None] * y_stride + n[None, :]
    s = tl.min(tl.where(slot >= 0, slot, num_slots), 0)
    while s < num_slots:
        is_own = (slot == s)[:, None]
        change = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for part in tl.static_range(P):
            is_of_part = (n >= STARTS[part]) & (n < STARTS[part + 1])
            if (tl.program_id(1) * BLOCK_N < STARTS[part + 1]) & ((tl.program_id(1) + 1) * BLOCK_N > STARTS[part]):
                total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                for first in range(0, R, BLOCK_R):
                    r = first + tl.arange(0, BLOCK_R)
                    of_a = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
                    for split in tl.static_range(SPLITS):
                        products = rows + split * num_rows.to(tl.int64) * (P * R) + (part * R + r)[None, :]
                        of_a += tl.load(products, mask=is_own & (r < R)[None, :], other=0.0)
                    of_b = b + (s.to(tl.int64) * R + r)[:, None] * N + n[None, :]
                    weights = tl.load(of_b, mask=(r < R)[:, None] & is_of_part[None, :], other=0.0)
                    total = tl.dot(of_a, weights.to(tl.float32), total, input_precision=PRECISION)
                change = tl.where(is_of_part[None, :], tl.load(scales + s * P + part) * total, change)
        mask = is_own & (n < N)[None, :]
        before = tl.load(places, mask=mask, other=0.0).to(tl.float32)
        tl.store(places, (before + change).to(y.dtype.element_ty), mask=mask)
        s = tl.min(tl.where(slot > s, slot, num_slots), 0)
