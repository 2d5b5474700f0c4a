"""Loads rows of quantised caches in Triton kernels, dequantising in registers, and quantises and stores rows.

Loads return stored numbers, without the row's scale: kernels multiply products by the scale afterwards. `format.py` says more.

Legend: N rows, D numbers of a row, H heads.
"""

import triton
import triton.language as tl

from transom_kernels.triton_math import round_to_nearest


@triton.jit
def load_numbers(
    cache,
    rows,  # [N] offsets of rows, in elements of the cache
    FIRST: tl.constexpr,  # index in the row of the first number to load, even
    COUNT: tl.constexpr,  # how many numbers to load, even
    D: tl.constexpr,
    kept,  # [N]: rows to read
    PACKED: tl.constexpr,  # int4: two numbers in a byte
):
    """Load numbers [N, COUNT] of rows from FIRST on; zeros in rows that are not `kept`, and from D on."""
    if PACKED:
        element = FIRST // 2 + tl.arange(0, COUNT // 2)
        inside = kept[:, None] & (element < D // 2)[None, :]
        # 0x88 is two zeros: int4 numbers are stored plus 8
        both = tl.load(cache + rows[:, None] + element[None, :], mask=inside, other=0x88)
        return tl.interleave((both & 15).to(tl.int8) - 8, (both >> 4).to(tl.int8) - 8)
    else:
        element = FIRST + tl.arange(0, COUNT)
        inside = kept[:, None] & (element < D)[None, :]
        return tl.load(cache + rows[:, None] + element[None, :], mask=inside, other=0.0)


@triton.jit
def store_quantised(
    cache,
    scales,
    rows,  # [H] offsets of rows in the cache, in elements
    places,  # [H] offsets of the rows' scales
    numbers,  # [H, BLOCK] float32
    is_number,  # [BLOCK]: which places of a row are numbers, not padding
    kept,  # [H]: rows to write
    LARGEST: tl.constexpr,  # the format's largest number
    TO_INTEGER: tl.constexpr,  # int8 or int4, else an 8-bit float
    PACKED: tl.constexpr,  # int4: two numbers in a byte
    BLOCK: tl.constexpr,
):
    """Quantise rows and store them and their scales: scale = largest magnitude / LARGEST, stored number = number / scale, rounded.

    Numbers are clamped before they are cast, since integer casts wrap around.
    """
    numbers = tl.where(is_number[None, :], numbers, 0.0)
    undefined = tl.sum(numbers * 0.0, 1)  # NaN where a number is not finite
    scale = tl.max(tl.abs(numbers), 1) / LARGEST + undefined  # [H]
    tl.store(scales + places, scale, mask=kept)
    has_scale = scale > 0
    scaled = tl.where(has_scale[:, None], numbers / tl.where(has_scale, scale, 1.0)[:, None], 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    if TO_INTEGER:
        scaled = round_to_nearest(scaled)
    if PACKED:
        even, odd = tl.split(tl.reshape(scaled.to(tl.int32) + 8, [rows.shape[0], BLOCK // 2, 2]))
        half = tl.arange(0, BLOCK // 2)
        exists, _ = tl.split(tl.reshape(is_number.to(tl.int32), [BLOCK // 2, 2]))
        inside = kept[:, None] & (exists > 0)[None, :]
        tl.store(cache + rows[:, None] + half[None, :], (even | (odd << 4)).to(tl.uint8), mask=inside)
    else:
        place = cache + rows[:, None] + tl.arange(0, BLOCK)[None, :]
        tl.store(place, scaled.to(cache.dtype.element_ty), mask=kept[:, None] & is_number[None, :])
