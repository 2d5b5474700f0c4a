"""`latent_attention`, `pool_rows` and `select_entries` in torch: the specification, and the fallback where no kernel runs.

`LatentInputs` are the arguments of `latent_attention`. Gathered rows take memory, so queries (or entries) are computed in tiles of
as many as fit in TILE_ELEMENTS.

Legend: T queries, t queries of a tile, H heads, D width, W rows of the window, K entries of a query, N entries of the longest
sequence, P rows per block, E pooled entries, R tokens per entry, G groups of tokens that an entry reads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from transom_kernels.paged_attention.inputs import PagedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentInputs:
    """Queries, and the slots of the rows that each of them sees; a negative slot names no row."""

    q: torch.Tensor  # [T, H, D]
    window_cache: torch.Tensor  # [ids, P, 1, D], of q's dtype; any strides
    window_slots: torch.Tensor  # [T, W] int64
    sink_logits: torch.Tensor  # [H] float32
    scale: float
    entry_cache: torch.Tensor | None = None  # [ids, P, 1, D]
    entry_slots: torch.Tensor | None = None  # [T, K] int64
    # The number of neighbouring queries of each sequence. Kernels may share out the rows of a sequence's only query; without counts
    # each query is one.
    counts: Sequence[int] = ()

    @property
    def places(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The cache and slots of the window, then those of the entries if there are any."""
        window = (self.window_cache, self.window_slots)
        if self.entry_cache is None or self.entry_slots is None:
            return [window]
        return [window, (self.entry_cache, self.entry_slots)]

    def check(self) -> None:
        """Raise ValueError for tensors that do not fit together."""
        q, sinks = self.q, self.sink_logits
        if (self.entry_cache is None) != (self.entry_slots is None):
            raise ValueError("entry_cache and entry_slots belong together: give both or neither.")
        for cache, slots in self.places:
            if cache.dim() != 4 or cache.shape[2] != 1 or cache.shape[3] != q.shape[2] or cache.dtype != q.dtype:
                raise ValueError(
                    f"q {tuple(q.shape)} {q.dtype} does not fit a cache {tuple(cache.shape)} {cache.dtype}: give "
                    "one head of q's width and dtype."
                )
            if slots.dim() != 2 or len(slots) != len(q):
                raise ValueError(
                    f"slots {tuple(slots.shape)} do not fit {len(q)} queries: give a row of them for each."
                )
        if self.counts and sum(self.counts) != len(q):
            raise ValueError(f"counts add up to {sum(self.counts)}; there are {len(q)} queries.")
        if sinks.shape != (q.shape[1],) or sinks.dtype != torch.float32:
            raise ValueError(
                f"sink_logits {tuple(sinks.shape)} {sinks.dtype}: give one float32 for each of {q.shape[1]} heads."
            )


TILE_ELEMENTS = 2**20  # elements that are gathered at once: about what the private cache of a CPU core holds


def latent_attention_reference(inputs: LatentInputs) -> torch.Tensor:
    """Return attention [T, H, D] of `q` [T, H, D], in float32: softmax of (scale q . r over rows r, and sink_logits) times r."""
    q, places = inputs.q, inputs.places
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for tile in _tiles(len(q), sum(slots.shape[1] for _, slots in places) * q.shape[2]):
        rows = torch.cat([read_rows(cache, slots[tile]) for cache, slots in places], dim=1).float()  # [t, W + K, D]
        absent = torch.cat([slots[tile] < 0 for _, slots in places], dim=1)
        scores = torch.matmul(q[tile].float(), rows.transpose(1, 2)).mul_(inputs.scale)  # [t, H, W + K]
        scores.masked_fill_(absent[:, None], float("-inf"))
        sinks = inputs.sink_logits[:, None].expand(len(rows), -1, 1)
        weights = torch.cat([scores, sinks], dim=2).softmax(dim=2)[:, :, :-1]
        out[tile] = torch.matmul(weights, rows).to(out.dtype)
    return out


def pool_rows_reference(
    kv_cache: torch.Tensor, gate_cache: torch.Tensor, slots: torch.Tensor, position_bias: torch.Tensor
) -> torch.Tensor:
    """Return entries [E, D]: for each channel the sum over an entry's G * R rows of softmax(gate + position_bias) * kv."""
    ratio, channels = position_bias.shape
    num_groups = slots.shape[1] // ratio
    width = channels // num_groups
    bias = position_bias.view(ratio, num_groups, width).transpose(0, 1).reshape(num_groups * ratio, width)
    out = position_bias.new_empty(len(slots), width)
    for tile in _tiles(len(slots), slots.shape[1] * channels):
        kv, gate = (_own_series(read_rows(cache, slots[tile]), num_groups) for cache in (kv_cache, gate_cache))
        gate = (gate + bias).masked_fill_((slots[tile] < 0)[..., None], float("-inf"))
        out[tile] = kv.mul_(gate.softmax(dim=1)).sum(dim=1)
    return out


def _own_series(rows: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Return series `g` of the rows of each group `g`, [E, G * R, D]; `rows` are [E, G * R, G * D]."""
    if num_groups == 1:
        return rows
    entries, length, channels = rows.shape
    split = rows.view(entries, num_groups, length // num_groups, num_groups, channels // num_groups)
    return torch.cat([split[:, group, :, group] for group in range(num_groups)], dim=1)


def select_entries_reference(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    key_cache: torch.Tensor,
    slots: torch.Tensor,
    sequence: torch.Tensor,
    num_visible: torch.Tensor,
    *,
    top_k: int,
    scale: float,
) -> torch.Tensor:
    """Return the `top_k` entries [T, min(top_k, N)] with the largest sum_h head_weights[h] * relu(q_h . key) * scale, or -1."""
    num_entries = slots.shape[1]
    chosen = min(top_k, num_entries)
    out = torch.full((len(q), chosen), -1, dtype=torch.int64, device=q.device)
    numbers = torch.arange(num_entries, device=q.device)
    for tile in _tiles(len(q) if chosen else 0, num_entries * max(q.shape[1], q.shape[2])):
        unseen = numbers >= num_visible[tile, None]
        keys = read_rows(key_cache, slots[sequence[tile]].masked_fill(unseen, -1)).float()  # [t, N, D]
        products = torch.matmul(q[tile].float(), keys.transpose(1, 2)).relu_().mul_(scale)  # [t, H, N]
        scores = torch.matmul(head_weights[tile, None], products)[:, 0].masked_fill_(unseen, float("-inf"))
        best = scores.topk(chosen, dim=1).indices
        out[tile] = best.masked_fill_(best >= num_visible[tile, None], -1)
    return out


def rows_of_sequences(batch: PagedBatch, num_queries: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the slots [B, N] of the rows that a batch's block tables name, and each query's sequence [T] and visible rows [T].

    Nothing is read back from the device. The first layer that asks computes them, and the batch keeps them.
    """
    key = "rows of sequences"
    if key not in batch.scratch:
        device, size, table = batch.block_table.device, batch.block_size, batch.block_table.long()
        places = torch.arange(size, device=device)
        slots = (table[:, :, None] * size + places).masked_fill_(table[:, :, None] < 0, -1).flatten(1)
        queries = torch.arange(num_queries, dtype=torch.int32, device=device)
        sequence = torch.searchsorted(batch.query_offset[1:], queries, right=True).clamp_(max=max(0, len(table) - 1))
        positions = batch.start[sequence] + queries - batch.query_offset[sequence]
        batch.scratch[key] = slots, sequence, (positions.long() + 1).clamp_(max=slots.shape[1])
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = batch.scratch[key]
    return found


def _tiles(count: int, elements_each: int) -> list[slice]:
    """Split `count` queries or entries into slices whose gathered elements fit in TILE_ELEMENTS; each has at least one."""
    size = max(1, TILE_ELEMENTS // max(1, elements_each))
    return [slice(begin, begin + size) for begin in range(0, count, size)]


def read_rows(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return rows [..., D] of `cache` [ids, P, 1, D] at `slots` [...]; zeros at negative slots. Slot s: block s // P, row s % P."""
    ids, size, _, width = cache.shape
    block, row = cache.stride(0), cache.stride(1)
    unit = math.gcd(block, row)
    # every row starts at a multiple of `unit`, so one index_select over such starts copies whole rows
    starts = cache.as_strided((((ids - 1) * block + (size - 1) * row) // unit + 1, width), (unit, cache.stride(3)))
    present = slots.clamp(min=0)
    index = present // size * (block // unit) + present % size * (row // unit)
    rows = starts.index_select(0, index.flatten()).view(*slots.shape, width)
    absent = slots < 0
    return rows.masked_fill_(absent[..., None], 0.0) if absent.any() else rows
