"""The specification of `latent_attention`, `pool_rows` and `select_entries`: one query and one entry at a time.

Legend: D width, R tokens per entry, G groups of tokens that an entry reads.
"""

from __future__ import annotations

import torch


def _row(cache: torch.Tensor, slot: int) -> torch.Tensor:
    """The row at a slot, in float32."""
    return cache[slot // cache.shape[1], slot % cache.shape[1], 0].float()


def latent_attention_reference(
    q: torch.Tensor,
    window_cache: torch.Tensor,
    window_slots: torch.Tensor,
    sink_logits: torch.Tensor,
    *,
    scale: float,
    entry_cache: torch.Tensor,
    entry_slots: torch.Tensor,
) -> torch.Tensor:
    """The contract is that of `op.latent_attention`."""
    out = torch.zeros_like(q)
    for t in range(len(q)):
        rows = [_row(window_cache, slot) for slot in window_slots[t].tolist() if slot >= 0]
        rows += [_row(entry_cache, slot) for slot in entry_slots[t].tolist() if slot >= 0]
        for head in range(q.shape[1]):
            scores = [float(q[t, head].float() @ row) * scale for row in rows]
            weights = torch.tensor([*scores, float(sink_logits[head])]).softmax(0)
            for weight, row in zip(weights, rows, strict=False):
                out[t, head] += (weight * row).to(q.dtype)
    return out


def pool_rows_reference(
    kv_cache: torch.Tensor, gate_cache: torch.Tensor, slots: torch.Tensor, position_bias: torch.Tensor
) -> torch.Tensor:
    """The contract is that of `compress.pool_rows`."""
    ratio, channels = position_bias.shape
    num_groups = slots.shape[1] // ratio
    width = channels // num_groups
    entries = []
    for entry in slots.tolist():
        kv, gate = [], []
        for position, slot in enumerate(entry):
            if slot >= 0:
                series = slice(position // ratio * width, (position // ratio + 1) * width)
                kv.append(_row(kv_cache, slot)[series])
                gate.append((_row(gate_cache, slot) + position_bias[position % ratio])[series])
        entries.append((torch.stack(kv) * torch.stack(gate).softmax(0)).sum(0))
    return torch.stack(entries)


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
) -> list[set[int]]:
    """The contract is that of `index.select_entries`, but each query's selected entries come as a set."""
    chosen = []
    for t in range(len(q)):
        table = slots[int(sequence[t])].tolist()
        scores = []
        for entry in range(int(num_visible[t])):
            products = (q[t].float() @ _row(key_cache, table[entry])).relu() * scale
            scores.append(float(head_weights[t] @ products))
        chosen.append(set(sorted(range(len(scores)), key=lambda entry: -scores[entry])[:top_k]))
    return chosen
