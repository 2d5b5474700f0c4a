"""A minimal runner for one model: one KV cache group, head-major caches full of NaN, blocks in random order."""

from __future__ import annotations

import random

import torch

from transom_core.model_config.architecture import Architecture
from transom_kernels.paged_attention.batch import PagedBatch
from transom_worker.models.layers.forward_batch import ForwardBatch, LayerCache

BLOCK = 4


class TinyRunner:
    """Feeds chunks of sequences to a model; remembers each sequence's tokens and blocks."""

    def __init__(self, model, architecture: Architecture, dtype: torch.dtype, *, num_blocks: int = 200) -> None:
        self.model, self.architecture = model, architecture
        layer = architecture.layers[0]
        elements = BLOCK * layer.num_kv_heads * layer.head_size
        stride = 2 * elements * architecture.num_layers
        slab = torch.full((num_blocks * stride,), float("nan"), dtype=dtype)
        shape = (num_blocks, BLOCK, layer.num_kv_heads, layer.head_size)
        strides = (stride, layer.head_size, BLOCK * layer.head_size, 1)
        self.caches = tuple(
            LayerCache(
                k=slab.as_strided(shape, strides, 2 * i * elements),
                v=slab.as_strided(shape, strides, (2 * i + 1) * elements),
            )
            for i in range(architecture.num_layers)
        )
        self.free = list(range(num_blocks))
        random.Random(0).shuffle(self.free)
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, list[int]] = {}

    def step(self, work: dict[str, list[int]], *, all_rows=False, logit_rows=None) -> dict[str, torch.Tensor]:
        """Append tokens to sequences; logits of each one's last row (or all rows, or those of one sequence), [rows, V]."""
        ids, positions, slots, starts, counts = [], [], [], [], []
        for name, new in work.items():
            known, table = self.tokens.setdefault(name, []), self.tables.setdefault(name, [])
            starts.append(len(known))
            counts.append(len(new))
            positions.extend(range(len(known), len(known) + len(new)))
            known.extend(new)
            ids.extend(new)
            while len(table) * BLOCK < len(known):
                table.append(self.free.pop())
            slots.extend(table[p // BLOCK] * BLOCK + p % BLOCK for p in range(starts[-1], len(known)))
        ends = torch.tensor(counts).cumsum(0)
        rows = torch.arange(sum(counts)) if all_rows else ends - 1
        rows = rows if logit_rows is None else torch.tensor(logit_rows, dtype=torch.int64)
        batch = ForwardBatch(
            token_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            groups=(self._paged([self.tables[name] for name in work], slots, starts, counts),),
            group_of_layer=(0,) * self.architecture.num_layers,
            caches=self.caches,
            logit_rows=rows,
        )
        logits = self.model.forward(batch)
        if logit_rows is not None:
            return dict.fromkeys(work, logits)
        parts = logits.split(counts if all_rows else 1)
        return dict(zip(work, parts, strict=True))

    def _paged(self, tables, slots, starts, counts) -> PagedBatch:
        width = max(map(len, tables))
        zeros = [0] * len(tables)
        return PagedBatch(
            block_size=BLOCK,
            num_sink_blocks=0,
            block_table=torch.tensor([t + [-1] * (width - len(t)) for t in tables], dtype=torch.int32),
            first_block=torch.tensor(zeros, dtype=torch.int32),
            attend_from=torch.tensor(zeros, dtype=torch.int32),
            slots=torch.tensor(slots),
            query_offset=torch.tensor([0, *counts]).cumsum(0).int(),
            start=torch.tensor(starts, dtype=torch.int32),
            block_table_host=tables,
            first_block_host=zeros,
            attend_from_host=zeros,
            start_host=starts,
            count_host=counts,
        )
