"""Numbers of a KV block as bytes to float32 and back, by the name of their format.

Formats with a *scale* keep numbers in few bits, and one float32 for all numbers of a token and KV head (a *row*): number = stored
number * scale, where scale = largest magnitude of the row / largest number of the format.

    float32, float16, bfloat16     as they are
    fp8                            float8_e4m3fn with a scale, numbers up to 448
    int8                           with a scale, numbers up to 127
    int4                           with a scale, numbers up to 7; two in a byte, the first in the low half, each plus 8

Conversions round to nearest, halves to even, as the kernels do.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}
PLAIN = ("float32", "float16", "bfloat16")
_INT4_OFFSET = 8
_FP8_NAN = 0x7F
_SIGN = 0x80


def decode(data: Bytes, number_format: str) -> Floats:
    """Return plain numbers, whose bytes are `data` [..., bytes of a row], as float32 [..., numbers of a row]."""
    if number_format == "bfloat16":
        return (_view(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return _view(data, np.float16 if number_format == "float16" else np.float32).astype(np.float32)


def encode(numbers: Floats, number_format: str) -> Bytes:
    """Return the bytes of numbers in a plain format."""
    if number_format == "bfloat16":
        bits = numbers.astype(np.float32).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return _view(np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded), np.uint8)
    with np.errstate(over="ignore"):  # to infinity, as torch does
        return _view(numbers.astype(np.float16 if number_format == "float16" else np.float32), np.uint8)


def dequantise(data: Bytes, scales: Floats, number_format: str) -> Floats:
    """Return the numbers [..., numbers of a row] of quantised rows `data` [..., bytes] with `scales` [...]."""
    if number_format == "int4":
        halves = np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)
        stored = halves.astype(np.float32) - _INT4_OFFSET
    elif number_format == "int8":
        stored = data.view(np.int8).astype(np.float32)
    else:
        stored = _fp8_numbers()[data]
    return stored * scales[..., None]


def quantise(numbers: Floats, number_format: str) -> tuple[Bytes, Floats]:
    """Return the bytes and the scales of numbers [..., numbers of a row].

    A row of zeros has the scale 0, and a row with a number that is not finite the scale NaN.
    """
    largest = np.float32(LARGEST[number_format])
    magnitude = np.abs(numbers).max(axis=-1)
    scales = np.where(np.isfinite(magnitude), magnitude / largest, np.nan).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.where(scales[..., None] > 0, numbers / scales[..., None], np.float32(0)).clip(-largest, largest)
    if number_format == "fp8":
        return _to_fp8(scaled), scales
    stored = np.nan_to_num(np.rint(scaled))
    if number_format == "int8":
        return stored.astype(np.int8).view(np.uint8), scales
    halves = (stored + _INT4_OFFSET).astype(np.uint8)
    return halves[..., 0::2] | halves[..., 1::2] << 4, scales


def rotate(numbers: Floats) -> Floats:
    """Return rows [..., D] multiplied by the orthonormal Hadamard matrix, block by block where D is no power of two.

    The matrix is its own inverse: it also turns rotated rows into plain ones.
    """
    width = numbers.shape[-1]
    block = width & -width
    rows = numbers.reshape(*numbers.shape[:-1], width // block, block)
    rotated: Floats = (rows @ _hadamard(block)).reshape(numbers.shape)
    return rotated


def _view(array: NDArray[Any], dtype: type[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array).view(dtype)


@cache
def _hadamard(width: int) -> Floats:
    matrix = np.ones((1, 1), dtype=np.float32)
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    orthonormal: Floats = matrix / np.sqrt(np.float32(width))
    return orthonormal


@cache
def _fp8_numbers() -> Floats:
    """The number of each code of float8_e4m3fn: a sign, 4 bits of exponent with bias 7, 3 bits of fraction, no infinity."""
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent > 0, (1 + fraction / 8) * 2.0 ** (exponent - 7), fraction / 8 * 2.0**-6)
    magnitude[codes & _FP8_NAN == _FP8_NAN] = np.nan
    return np.where(codes & _SIGN, -magnitude, magnitude).astype(np.float32)


def _to_fp8(numbers: Floats) -> Bytes:
    magnitudes = _fp8_numbers()[:_FP8_NAN].astype(np.float64)  # in order of their codes
    halfway = (magnitudes[1:] + magnitudes[:-1]) / 2
    wanted = np.abs(numbers).astype(np.float64)
    lower, upper = np.searchsorted(halfway, wanted, side="left"), np.searchsorted(halfway, wanted, side="right")
    codes = np.where(lower % 2 == 0, lower, upper)  # they differ where a number lies halfway: the even code
    codes = np.where(np.isnan(numbers), _FP8_NAN, codes)
    return np.where(np.signbit(numbers), codes | _SIGN, codes).astype(np.uint8)
