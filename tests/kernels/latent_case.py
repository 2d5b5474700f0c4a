"""Latent rows in strided caches that hold NaN in unused slots, and which slots each query sees."""

from __future__ import annotations

import torch

from transom_kernels.kv_write.reference import write_rows
from transom_kernels.latent_attention.reference import LatentInputs

IDS, SIZE = 50, 3  # blocks of a cache, and rows of a block


def filled_cache(slots: torch.Tensor, width: int, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A cache [IDS, SIZE, 1, width] with gaps between blocks, random at `slots` and NaN elsewhere."""
    stride = SIZE * width + 24
    slab = torch.full((IDS * stride,), float("nan"), dtype=dtype)
    cache = slab.as_strided((IDS, SIZE, 1, width), (stride, width, SIZE * width, 1), 8)
    used = slots[slots >= 0].unique()
    write_rows(torch.randn(len(used), 1, width), cache, used)
    return cache


def random_slots(num_queries: int, most: int, *, fewest: int = 0) -> torch.Tensor:
    """Distinct slots, each query its own number of them, scattered among -1."""
    slots = torch.full((num_queries, most), -1, dtype=torch.int64)
    for row in slots:
        places = torch.randperm(most)[: int(torch.randint(fewest, most + 1, ()))]
        row[places] = torch.randperm(IDS * SIZE)[: len(places)]
    return slots


def latent_inputs(
    num_queries: int, window: int, entries: int, *, heads: int = 6, width: int = 40, dtype: torch.dtype = torch.float32
) -> LatentInputs:
    """Queries whose window is mostly a run of rows, and whose entries lie anywhere; the first query sees nothing."""
    window_slots, entry_slots = random_slots(num_queries, window), random_slots(num_queries, entries)
    run = torch.arange(num_queries)[:, None] + torch.arange(window) - window // 3
    window_slots[1::2] = run[1::2].clamp(min=-1)
    window_slots[0], entry_slots[0] = -1, -1
    return LatentInputs(
        q=torch.randn(num_queries, heads, width).to(dtype),
        window_cache=filled_cache(window_slots, width, dtype=dtype),
        window_slots=window_slots,
        entry_cache=filled_cache(entry_slots, width, dtype=dtype),
        entry_slots=entry_slots,
        sink_logits=torch.randn(heads),
        scale=0.2,
    )
