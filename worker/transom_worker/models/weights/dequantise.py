"""Dequantises weights that a checkpoint stores in few bits with a scale for each block of weights: MXFP4 and fp8.

- MXFP4: each byte holds two 4-bit numbers, the one with the even index in the low half; every 32 numbers of a row share a scale, a
  power of two.
- fp8: e4m3 numbers; each block of rows and columns shares a factor. The last blocks are smaller if the block size does not divide
  the matrix.

Legend: M rows, N columns, G groups of 32 columns.
"""

from __future__ import annotations

import torch

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
GROUP = 32  # columns with one MXFP4 scale
_EXPONENT_BIAS = 127


def dequantise_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, columns: slice = slice(None)) -> torch.Tensor:
    """Return `columns` of an MXFP4 tensor [..., 32 G] in bfloat16, which is exact.

    `blocks` [..., G, 16] and `scales` [..., G] are bytes.

    Raises:
        ValueError: the dtypes are wrong, or the shapes do not match each other.
    """
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(f"blocks are {blocks.dtype} and scales {scales.dtype}; both must be uint8")
    if blocks.shape != (*scales.shape, GROUP // 2):
        raise ValueError(
            f"blocks {list(blocks.shape)} need scales {list(blocks.shape[:-1])} and 16 bytes each, not {list(scales.shape)}"
        )
    groups, inside = _covering(columns, GROUP * scales.shape[-1], GROUP)
    blocks, scales = blocks[..., groups, :], scales[..., groups]
    return (_unpack_fp4(blocks) * _factors(scales)[..., None]).flatten(-2)[..., inside]


def dequantise_blockwise(
    values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], part: tuple[slice, ...] = ()
) -> torch.Tensor:
    """Return `part` (rows, columns) of `values` [M, N] in float32, each value multiplied by its block's factor.

    `scales` [M / block rows, N / block columns] has the factors. int8 `values` are MXFP4: bytes of two numbers, [M, N / 2], with
    the scales of MXFP4.

    Raises:
        ValueError: the shapes do not match each other.
    """
    if values.dim() != 2:
        raise ValueError(f"values have shape {list(values.shape)}; a matrix is needed")
    num_rows, num_columns = values.shape
    if values.dtype == torch.int8:
        block, num_columns = (1, GROUP), 2 * num_columns
    expected_shape = (-(-num_rows // block[0]), -(-num_columns // block[1]))
    if tuple(scales.shape) != expected_shape:
        raise ValueError(
            f"values [{num_rows}, {num_columns}] in blocks of {list(block)} need scales "
            f"{list(expected_shape)}, not {list(scales.shape)}"
        )
    rows, columns = (*part, *[slice(None)] * (2 - len(part)))
    blocks, inside = _covering(columns, num_columns, block[1])
    block_of_row = torch.arange(num_rows)[rows] // block[0]
    factors = _factors(scales[:, blocks])[block_of_row].repeat_interleave(block[1], dim=1)[:, inside].float()
    if values.dtype != torch.int8:
        return values[rows, columns].float() * factors
    pairs, inside = _covering(columns, num_columns, 2)
    return _unpack_fp4(values[rows, pairs].view(torch.uint8))[:, inside].float() * factors


def _covering(columns: slice, num_columns: int, block: int) -> tuple[slice, slice]:
    """Return the range of blocks that hold some of `columns`, and the range of these columns within those blocks.

    Columns 40 to 70 in blocks of 32 are in blocks [1, 3), at [8, 38).
    """
    start, stop, _ = columns.indices(num_columns)
    first = start // block
    return slice(first, -(-stop // block)), slice(start - first * block, stop - first * block)


def _unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """Return bfloat16 [..., 2 N] of bytes [..., N]; one look-up per byte gives both numbers."""
    pairs = torch.tensor([(_FP4[byte & 15], _FP4[byte >> 4]) for byte in range(256)], dtype=torch.bfloat16)
    return _look_up(pairs.view(torch.int32).flatten(), packed).view(torch.bfloat16)


def _factors(scales: torch.Tensor) -> torch.Tensor:
    """Return scales as numbers. A byte `b` stands for 2^(b - 127), which bfloat16 represents exactly."""
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.view(torch.uint8)
    if scales.dtype != torch.uint8:
        return scales.float()
    powers = torch.ldexp(torch.ones(256), torch.arange(256) - _EXPONENT_BIAS)
    return _look_up(powers.bfloat16(), scales)


def _look_up(table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return `table[indices]`; on a CPU, `index_select` is five times as fast as indexing."""
    return table.index_select(0, indices.flatten().int()).view(indices.shape)
