"""Launches the CPU kernel of `latent_attention`.

Legend: T queries, H heads, D latent width, W rows of the window, K entries, P rows per block.
"""

from __future__ import annotations

import torch

from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.cpu.recording import Argument
from transom_kernels.latent_attention import cpu_arguments as words
from transom_kernels.paged_attention import cpu_arguments as shared
from transom_kernels.paged_attention.cpu_layout import DecodeLayout

_MAX_HEADS = 32  # of an item: they share the rows that are copied for them


def fits_cpu_kernel(
    q: torch.Tensor,
    window_cache: torch.Tensor,
    window_slots: torch.Tensor,
    entry_cache: torch.Tensor | None,
    entry_slots: torch.Tensor | None,
) -> bool:
    """Whether the kernel takes these tensors: the elements of a row, and the slots of a query, must be adjacent."""
    present = [tensor for tensor in (q, window_cache, window_slots, entry_cache, entry_slots) if tensor is not None]
    return q.dtype in DTYPES and all(tensor.stride(-1) == 1 or tensor.shape[-1] == 1 for tensor in present)


def latent_attention_cpu(
    q: torch.Tensor,
    window_cache: torch.Tensor,
    window_slots: torch.Tensor,
    sink_logits: torch.Tensor,
    *,
    scale: float,
    entry_cache: torch.Tensor | None = None,
    entry_slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """The contract is that of `op.latent_attention`."""
    rows, heads, width = q.shape
    out = empty((rows, heads, width), q.dtype)
    heads_at_once = max(count for count in range(1, _MAX_HEADS + 1) if heads % count == 0)
    dtype, size = DTYPES[q.dtype], q.element_size()
    arguments: list[Argument] = [0] * words.NUM_WORDS
    arguments[shared.OUT] = out
    arguments[shared.SINK_LOGITS], arguments[shared.SINK_STRIDE] = sink_logits, 4 * sink_logits.stride(0)
    arguments[shared.KV_HEADS], arguments[shared.SCALE] = heads // heads_at_once, float(scale)
    arguments[words.QUERIES] = q
    arguments[words.QUERY_ROW], arguments[words.QUERY_HEAD] = q.stride(0) * size, q.stride(1) * size
    num_slots = 0
    for place, (cache, slots) in enumerate(((window_cache, window_slots), (entry_cache, entry_slots))):
        if cache is not None and slots is not None:
            at = words.CACHE + place * words.PLACE_WORDS
            arguments[at : at + words.PLACE_WORDS] = (
                cache, slots, slots.shape[1], slots.stride(0) * slots.element_size(),
                cache.shape[1], cache.stride(0) * size, cache.stride(1) * size,
            )  # fmt: skip
            num_slots += slots.shape[1]
    kernel = cpu_kernel(
        "transom_kernels.latent_attention.cpu_kernel", "make_attend", dtype=dtype, heads=heads_at_once, width=width
    )
    scratch_bytes = DecodeLayout(dtype, heads_at_once, width, width).num_bytes + 8 * (num_slots + 16)
    launch(kernel, rows * (heads // heads_at_once), arguments, scratch_bytes=scratch_bytes)
    return out
