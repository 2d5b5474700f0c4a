"""The formats of quantised KV caches, the check that caches fit their scales, and quantisation of rows in torch: the specification
of what the kernels do.

A *row* is the key or the value of one token and KV head. A quantised cache stores a row's numbers in few bits, and a second tensor
the row's *scale* in float32: number = stored number * scale. The scale is the row's largest magnitude divided by the format's
largest number, so that every row uses the format's whole range. Scales are [ids, P, KVH], the shape of a cache without its last
axis.

    format   dtype of the cache   stored numbers                                         bytes of a row of D numbers, with its scale
    fp8      float8_e4m3fn        -448 to 448, 3 bits of fraction                        D + 4
    int8     int8                 -127 to 127                                            D + 4
    int4     uint8                -7 to 7; 2i in the low half of byte i, 2i + 1 in the   D / 2 + 4
                                  high half, each plus 8

A row of zeros has the scale 0. A row with a number that is not finite has the scale NaN, so that all its numbers are read as NaN.

Legend: P block size in tokens, KVH KV heads, D numbers of a row.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KvFormat:
    """A format of quantised rows."""

    name: str
    dtype: torch.dtype  # of a cache's elements
    largest: float  # the stored number that stands for a row's largest magnitude
    numbers_per_element: int


FP8 = KvFormat("fp8", torch.float8_e4m3fn, 448.0, 1)
INT8 = KvFormat("int8", torch.int8, 127.0, 1)
INT4 = KvFormat("int4", torch.uint8, 7.0, 2)
FORMATS = {kv_format.dtype: kv_format for kv_format in (FP8, INT8, INT4)}  # dtype of a cache -> its format


_FP8_CAPABILITY = (8, 9)  # the least compute capability for which Triton has 8-bit floats

# dtype of a cache -> its stored type, the name that CPU kernels use (`cpu_rows.py`)
STORED = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    FP8.dtype: "e4m3",
    INT8.dtype: "i8",
    INT4.dtype: "i4",
}


def format_of(cache: torch.Tensor) -> KvFormat | None:
    """Return the format of a quantised cache; None if the cache is not quantised."""
    return FORMATS.get(cache.dtype)


def head_width(cache: torch.Tensor) -> int:
    """Return how many numbers a row of a cache [..., elements of a row] has, quantised or not."""
    kv_format = format_of(cache)
    return int(cache.shape[-1]) * (1 if kv_format is None else kv_format.numbers_per_element)


def is_packed(cache: torch.Tensor) -> bool:
    """Return whether several numbers share an element of the cache, as in int4."""
    kv_format = format_of(cache)
    return kv_format is not None and kv_format.numbers_per_element > 1


def refuse_old_device(cache: torch.Tensor) -> None:
    """Raise ValueError if the cache is fp8 and its device is too old: Triton has no 8-bit floats there."""
    if cache.dtype == FP8.dtype and cache.device.type == "cuda":
        capability = torch.cuda.get_device_capability(cache.device)
        if capability < _FP8_CAPABILITY:
            raise ValueError(
                f"A KV cache of fp8 needs compute capability {'.'.join(map(str, _FP8_CAPABILITY))}; this device has "
                f"{'.'.join(map(str, capability))}. Choose int8, int4 or bfloat16."
            )


def check_kv(
    dtype: torch.dtype,
    caches: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
) -> None:
    """Raise ValueError unless key and value caches have one dtype, and each fits its scales, or `dtype` if it has none."""
    if caches[0].dtype != caches[1].dtype:
        raise ValueError(f"The caches are {caches[0].dtype} and {caches[1].dtype}; keys and values need one dtype.")
    for name, cache, scale in zip("kv", caches, scales, strict=True):
        check_cache(name, dtype, cache, scale)


def check_cache(name: str, dtype: torch.dtype, cache: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Raise ValueError unless a cache [ids, P, KVH, elements] fits its scales, or has `dtype` if it has none.

    `name` is "k" or "v", for the message.
    """
    if scale is None:
        if cache.dtype != dtype:
            kinds = ", ".join(f"{kv_format.dtype} ({kv_format.name})" for kv_format in FORMATS.values())
            raise ValueError(
                f"{name}_cache is {cache.dtype} without {name}_scale, beside numbers of {dtype}. Give a cache of {dtype}, or one "
                f"of {kinds} with its scales."
            )
        return
    if cache.dtype not in FORMATS:
        raise ValueError(f"{name}_cache is {cache.dtype}, which has no scales: give None as {name}_scale.")
    if scale.shape != cache.shape[:3] or scale.dtype != torch.float32:
        raise ValueError(
            f"{name}_scale is {tuple(scale.shape)} of {scale.dtype}, but {name}_cache is {tuple(cache.shape)}: give one float32 "
            f"for each token and KV head, {tuple(cache.shape[:3])}."
        )


_INT4_OFFSET = 8


def quantise_rows(rows: torch.Tensor, kv_format: KvFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [..., D] as elements of a cache [..., D / numbers per element], and their scales [...] in float32.

    Numbers are rounded to nearest, ties to even.

    Raises:
        ValueError: D is not a multiple of the format's numbers per element.
    """
    if rows.shape[-1] % kv_format.numbers_per_element:
        raise ValueError(
            f"Rows have {rows.shape[-1]} numbers; {kv_format.name} packs {kv_format.numbers_per_element} into one byte, so "
            f"give an even width, or choose {' or '.join(f.name for f in FORMATS.values() if f.numbers_per_element == 1)}."
        )
    wide = rows.float()
    largest = wide.abs().amax(dim=-1)
    scale = torch.where(largest.isfinite(), largest / kv_format.largest, torch.nan)
    scaled = torch.where(scale[..., None] > 0, wide / scale[..., None], 0.0).clamp(
        -kv_format.largest, kv_format.largest
    )
    if kv_format is INT4:
        nibbles = scaled.round().to(torch.int16) + _INT4_OFFSET
        return (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).to(torch.uint8), scale
    return (scaled.round() if kv_format.dtype is torch.int8 else scaled).to(kv_format.dtype), scale


def dequantise_rows(elements: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return rows [..., D] in float32 from a cache's elements and their scales [...]."""
    if elements.dtype is INT4.dtype:
        numbers = torch.stack([elements & 15, elements >> 4], dim=-1).flatten(-2).float() - _INT4_OFFSET
    else:
        numbers = elements.float()
    return numbers * scale[..., None]
