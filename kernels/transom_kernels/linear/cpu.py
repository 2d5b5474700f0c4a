"""Launches the CPU kernels of linear layers: declares arguments, cuts work into items, chooses instructions and block sizes.

- panel: 16 outputs of a packed weight (`layout.py`). group: two panels, which are multiplied together.
- step: the part of K that one multiplication takes. chunk: some steps; a long K is multiplied chunk by chunk.
- block: rows of x. A work item multiplies one block by several groups.

Legend: M rows, K input width, N output width.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from transom_kernels.cpu.arguments import RowArguments, numbers_of
from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.cpu.layer_output import OutputArguments
from transom_kernels.cpu.pool import pool
from transom_kernels.cpu.target import cpu_target
from transom_kernels.cpu.tiles import CONFIG_BYTES
from transom_kernels.linear.layout import GROUPS_OF_CHUNK, LINE, STEP_BYTES, TILE_ROWS, Method, padded_width
from transom_kernels.linear.weights import PackedWeight
from transom_kernels.quantised_linear import PackedPanels
from transom_kernels.quantised_linear.cpu import launch_quantised

_BLOCK_BYTES = 1 << 20  # most bytes of x that a block multiplies at once: half of a usual second-level cache
_MOST_ROWS, _MANY_ROWS = 512, 256  # most rows of a block; most rows if they are so long that K is cut into chunks
_FEW_ROWS = 2 * TILE_ROWS  # blocks of up to this many rows are multiplied without chunks of K
_ITEMS_PER_THREAD = (4, 8)  # least and most: with fewer, threads are idle at the end; each item costs a claim

_KERNELS = "transom_kernels.linear"


class LinearArguments(NamedTuple):
    """The argument words of the kernel `linear`."""

    x: RowArguments  # [M, K]
    num_rows: int  # M
    width: int  # K
    panels: torch.Tensor  # the weight
    panel_bytes: int
    num_panels: int
    block_rows: int
    groups_of_item: int
    chunk_steps: int
    own_offset: int  # bytes of scratch before a thread's copy of x
    own_stride: int  # bytes from row to row of that copy; 0: x is multiplied without a copy
    output: OutputArguments


AT = numbers_of(LinearArguments)


def linear_cpu(
    x: torch.Tensor,
    weight: PackedWeight | PackedPanels,
    residual: torch.Tensor | None,
    *,
    scale: float,
    soft_cap: float | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return `residual + cap(scale * (x @ weight.T + bias))` [M, N] of `x` [M, K]; cap(y) is `soft_cap * tanh(y / soft_cap)`."""
    out = empty((x.shape[0], weight.num_outputs), out_dtype)
    residual = residual if residual is None or residual.stride(1) == 1 else residual.contiguous()
    output = OutputArguments(
        out=RowArguments.of(out),
        num_outputs=weight.num_outputs,
        bias=weight.bias,
        residual=RowArguments.of(residual),
        scale=scale,
        soft_cap=soft_cap or 0.0,
    )
    _launch(x, weight, output, out_dtype, None)
    return out


def heads_linear_cpu(x: torch.Tensor, weights: Sequence[PackedWeight]) -> torch.Tensor:
    """Return `x[:, h] @ weights[h].T` [T, H, N] of `x` [T, H, K], by a launch for each head."""
    out = empty((x.shape[0], len(weights), weights[0].num_outputs), x.dtype)
    for head, weight in enumerate(weights):
        output = OutputArguments(RowArguments.of(out[:, head]), weight.num_outputs, weight.bias)
        _launch(x[:, head], weight, output, x.dtype, None)
    return out


def gated_linear_cpu(x: torch.Tensor, weight: PackedWeight | PackedPanels, activation: str) -> torch.Tensor:
    """Return `activation(x @ gate.T + gate bias) * (x @ up.T + up bias)` [M, N] of `x` [M, K]."""
    out = empty((x.shape[0], weight.num_outputs), x.dtype)
    _launch(x, weight, OutputArguments(RowArguments.of(out), weight.num_outputs, weight.bias), x.dtype, activation)
    return out


def table_fits(table: PackedWeight | torch.Tensor) -> bool:
    """Return whether the kernel takes this table's dtype and strides."""
    return isinstance(table, PackedWeight) or (table.dtype in DTYPES and (table.stride(1) == 1 or table.shape[1] == 1))


def embedding_rows_cpu(
    ids: torch.Tensor, table: PackedWeight | torch.Tensor, *, first_id: int, scale: float
) -> torch.Tensor:
    """Return the rows `ids - first_id` of a table [N, K] times `scale`, [M, K]; zeros for rows that the table lacks."""
    packed = isinstance(table, PackedWeight)
    if isinstance(table, PackedWeight):
        memory, stride, num_rows, width = table.panels, table.panel_bytes, table.num_outputs, table.width
    else:
        memory, stride, (num_rows, width) = table, table.stride(0) * table.itemsize, table.shape
    out = empty((len(ids), width), table.dtype)
    launch(
        cpu_kernel(f"{_KERNELS}.table_kernel", "make_embedding_rows", dtype=DTYPES[table.dtype], packed=packed),
        len(ids),
        [ids, memory, stride, num_rows, width, out, width * table.dtype.itemsize, first_id, scale],
        scratch_bytes=LINE,
    )
    return out


@cache
def method_of(dtype: torch.dtype) -> Method:
    """Return the method by which this processor multiplies numbers of `dtype` fastest (`layout.Method`)."""
    target = cpu_target()
    if dtype == torch.bfloat16 and target.bf16:
        return "tiles" if target.amx else "pairs"
    return "wide"


@cache
def _num_registers() -> int:
    """Return roughly how many vectors of 16 lanes fit into the registers."""
    target = cpu_target()
    if target.avx512:
        return 32
    return 8 if target.avx2 or not target.x86 else 4


def _launch(
    x: torch.Tensor,
    weight: PackedWeight | PackedPanels,
    output: OutputArguments,
    out_dtype: torch.dtype,
    activation: str | None,
) -> None:
    if isinstance(weight, PackedPanels):
        launch_quantised(x, weight, output, out_dtype, activation)
        return
    x = x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
    num_rows, width = x.shape
    dtype, method = DTYPES[x.dtype], method_of(x.dtype)
    steps = weight.panel_bytes // STEP_BYTES[method]
    block, num_blocks = _blocks(num_rows, width * x.itemsize)
    per_item, items = _items(-(-weight.num_panels // 2), num_blocks, pool().num_threads)
    own_size = 4 if method == "wide" else x.itemsize
    padded = padded_width(width, dtype)
    # a thread multiplies its own copy of x if x must be padded, or widened to float32
    copies = padded != width or (method == "wide" and x.dtype != torch.float32)
    own_stride = -(-padded * own_size // LINE) * LINE + LINE if copies else 0
    chunk = _chunk(block, steps, -(-padded * own_size // steps))
    # for each row the sums of two panels; TILE_ROWS more rows, since the last tile of AMX repeats rows (`cpu_kernel.py`)
    sums_bytes = (block + TILE_ROWS) * 2 * LINE * (GROUPS_OF_CHUNK if chunk < steps else 1)
    launch(
        cpu_kernel(
            f"{_KERNELS}.cpu_kernel",
            "make_linear",
            method=method,
            dtype=dtype,
            out_dtype=DTYPES[out_dtype],
            activation=activation,
            registers=_num_registers(),
        ),
        items * num_blocks if num_rows else 0,
        LinearArguments(
            x=RowArguments.of(x),
            num_rows=num_rows,
            width=width,
            panels=weight.panels,
            panel_bytes=weight.panel_bytes,
            num_panels=weight.num_panels,
            block_rows=block,
            groups_of_item=per_item,
            chunk_steps=chunk,
            own_offset=CONFIG_BYTES + sums_bytes,
            own_stride=own_stride,
            output=output,
        ),
        scratch_bytes=CONFIG_BYTES + sums_bytes + block * own_stride,
    )


@cache
def _blocks(num_rows: int, row_bytes: int) -> tuple[int, int]:
    """Return the rows of a block, and how many blocks there are; several blocks are whole numbers of _FEW_ROWS rows."""
    most = min(_MOST_ROWS, max(_MANY_ROWS, _BLOCK_BYTES // max(row_bytes, 1)))
    count = -(-num_rows // most) or 1
    block = -(-num_rows // count)
    block = block if count == 1 else -(-block // _FEW_ROWS) * _FEW_ROWS
    return max(block, 1), -(-num_rows // max(block, 1)) or 1


@cache
def _chunk(block: int, steps: int, step_bytes: int) -> int:
    """Return the steps of a chunk of K: all if a block's rows fit into the second-level cache, else those of about equal parts.

    A part is a multiple of the 4 steps that a vector product unrolls.
    """
    if block <= _FEW_ROWS:
        return steps
    parts = -(-block * steps * step_bytes // _BLOCK_BYTES)
    return min(steps, -(-steps // parts // 4) * 4) if parts > 1 else steps


@cache
def _items(num_groups: int, num_blocks: int, num_threads: int) -> tuple[int, int]:
    """Return the groups of an item and the items of a block, such that the thread with the most work has as little as possible."""
    least, most = (max(1, per_thread * num_threads // num_blocks) for per_thread in _ITEMS_PER_THREAD)
    sizes = range(max(1, num_groups // most), max(1, -(-num_groups // least)) + 1)

    def longest(size: int) -> tuple[int, int]:
        rounds = -(-(-(-num_groups // size) * num_blocks) // num_threads)
        return rounds * size, -size

    size = min(sizes, key=longest)
    return size, -(-num_groups // size)
