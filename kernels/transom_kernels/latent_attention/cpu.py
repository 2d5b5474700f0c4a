"""Launches the CPU kernel of `latent_attention`, and declares its arguments.

Legend: T queries, H heads, D latent width, W rows of the window, K entries, P rows per block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from transom_kernels.cpu.arguments import numbers_of
from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.latent_attention.inputs import LatentInputs
from transom_kernels.paged_attention.cpu.arguments import ResultArguments
from transom_kernels.paged_attention.cpu.layout import AttentionKind, decode_layout

_MAX_HEADS = 32  # of an item: they share the rows that are copied for them


class RowsArguments(NamedTuple):
    """Rows that queries read: those of the window, or the entries. Strides are in bytes."""

    cache: torch.Tensor | None = None  # [ids, P, 1, D]
    slots: torch.Tensor | None = None  # [T, W] or [T, K] int64; negative: absent
    num_slots: int = 0  # W or K
    slot_row: int = 0  # from a query's slots to the next query's
    block_rows: int = 1  # P
    block: int = 0
    row: int = 0

    @classmethod
    def of(cls, cache: torch.Tensor | None, slots: torch.Tensor | None) -> RowsArguments:
        """The words of a cache and its slots; no slots where there is none."""
        if cache is None or slots is None:
            return cls()
        block, row = (stride * cache.element_size() for stride in cache.stride()[:2])
        return cls(cache, slots, slots.shape[1], slots.stride(0) * slots.element_size(), cache.shape[1], block, row)


class LatentArguments(NamedTuple):
    """What the kernel gets after `ResultArguments`, whose KV heads are here groups of heads."""

    q: torch.Tensor  # [T, H, D]
    q_row: int  # bytes
    q_head: int
    window: RowsArguments
    entries: RowsArguments


LATENT = numbers_of(LatentArguments, after=ResultArguments)


def fits_cpu_kernel(inputs: LatentInputs) -> bool:
    """Whether the kernel takes these tensors: the elements of a row, and the slots of a query, must be adjacent."""
    tensors = [inputs.q, *(tensor for place in inputs.places for tensor in place)]
    return inputs.q.dtype in DTYPES and all(tensor.stride(-1) == 1 or tensor.shape[-1] == 1 for tensor in tensors)


def latent_attention_cpu(inputs: LatentInputs) -> torch.Tensor:
    """Attention [T, H, D] of `q` [T, H, D]: softmax over a query's rows r, and the sink, of (scale q . r, sink_logits) times r.

    Caches are [ids, P, 1, D], slots [T, W] and [T, K]; `op.latent_attention` has the whole contract.
    """
    q, sinks = inputs.q, inputs.sink_logits
    rows, heads, width = q.shape
    out = empty((rows, heads, width), q.dtype)
    heads_at_once = max(count for count in range(1, _MAX_HEADS + 1) if heads % count == 0)
    dtype, size = DTYPES[q.dtype], q.element_size()
    kind = AttentionKind(
        dtype=dtype, stored=dtype, group=heads_at_once, width=width, value_width=width, sink_dtype="f32"
    )
    result = ResultArguments(
        out=out,
        kv_heads=heads // heads_at_once,
        scale=float(inputs.scale),
        soft_cap=0.0,
        sink_logits=sinks,
        sink_stride=4 * sinks.stride(0),
        statistics=None,
    )
    own = LatentArguments(
        q=q,
        q_row=q.stride(0) * size,
        q_head=q.stride(1) * size,
        window=RowsArguments.of(inputs.window_cache, inputs.window_slots),
        entries=RowsArguments.of(inputs.entry_cache, inputs.entry_slots),
    )
    most_rows = own.window.num_slots + own.entries.num_slots
    kernel = cpu_kernel("transom_kernels.latent_attention.cpu_kernel", "make_attend", **kind._asdict())
    scratch_bytes = decode_layout(kind).num_bytes + 8 * (most_rows + 16)  # the list of a query's rows follows
    launch(kernel, rows * (heads // heads_at_once), (result, own), scratch_bytes=scratch_bytes)
    return out
