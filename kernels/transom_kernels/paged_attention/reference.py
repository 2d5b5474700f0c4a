"""Attention over a paged cache in torch: the specification of `paged_attention`, and the fallback where no kernel runs.

The fallback computes on macOS, on CUDA without Triton, and with TRANSOM_KERNELS=reference. Everything is float32. It computes one
sequence at a time, and long prompts in tiles of query tokens, which bounds the memory of scores.

Legend: T query tokens, R query tokens of a tile, L keys that at least one of these R sees, H query heads, KVH KV heads, G query
heads per KV head, D key width, Dv value width, P block size in tokens.
"""

import torch

from transom_kernels.paged_attention.inputs import AttentionInputs, PagedBatch, PagedInputs
from transom_kernels.quantised_kv import dequantise_rows

MAX_SCORES = 1 << 24  # of a tile: 64 MiB of float32


def paged_attention_reference(inputs: PagedInputs) -> torch.Tensor:
    """Return attention [T, H, Dv] of `q` [T, H, D]: softmax(scale q k^T) v over the keys that each query sees.

    A query sees keys of its own sequence that `rule` admits; `batch` says where they are stored.
    """
    batch, rule = inputs.batch, inputs.rule
    out = inputs.q.new_empty(*inputs.q.shape[:2], inputs.value_width)
    first_row = 0
    for b, (start, count) in enumerate(zip(batch.start_host, batch.count_host, strict=True)):
        sinks_end, low = rule.key_ranges(start, start + count, batch.attend_from_host[b])
        for begin, end in tiles_of(count, inputs.q.shape[1] * (sinks_end + start + count - low)):
            rows = slice(first_row + begin, first_row + end)
            out[rows] = _attend(inputs, b, torch.arange(start + begin, start + end), inputs.q[rows]).to(out.dtype)
        first_row += count
    return out


def tiles_of(count: int, scores_per_token: int) -> list[tuple[int, int]]:
    """Split `count` query tokens into ranges [begin, end) with at most MAX_SCORES scores each, but at least one token."""
    tokens = max(1, MAX_SCORES // max(1, scores_per_token))
    return [(begin, min(begin + tokens, count)) for begin in range(0, count, tokens)]


def _attend(inputs: PagedInputs, b: int, positions: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return attention [R, H, Dv] of queries [R, H, D] of sequence `b` at `positions` [R]."""
    batch, rule, attend_from = inputs.batch, inputs.rule, inputs.batch.attend_from_host[b]
    end = int(positions[-1]) + 1
    sinks_end, low = rule.key_ranges(int(positions[0]), end, attend_from)
    keys = torch.cat([torch.arange(sinks_end), torch.arange(low, end)])  # [L] positions
    blocks = torch.cat([_blocks_of(batch, b, 0, sinks_end), _blocks_of(batch, b, low, end)])
    place = (blocks.to(q.device), (keys % batch.block_size).to(q.device))
    scores = scores_of(inputs, q, stored_rows(inputs.k_cache, inputs.k_scale, place))
    scores.masked_fill_(~rule.visible(positions, keys, attend_from).to(q.device), float("-inf"))
    _, _, weights = softmax_of(scores, inputs.sink_logits)
    return weighted_sum(weights, stored_rows(inputs.v_cache, inputs.v_scale, place))


def _blocks_of(batch: PagedBatch, b: int, begin: int, end: int) -> torch.Tensor:
    """Return the block id of each key at the positions [begin, end) of sequence `b`, [end - begin]."""
    keys, size = torch.arange(begin, end), batch.block_size
    if not len(keys):
        return keys
    ids = torch.tensor(batch.block_ids(b, begin // size, -(-end // size)))
    return ids[keys // size - begin // size]


def stored_rows(
    cache: torch.Tensor, scale: torch.Tensor | None, place: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Return keys or values [L, KVH, width] in float32; `place` is their block ids [L] and their offsets in the blocks [L]."""
    return cache[place].float() if scale is None else dequantise_rows(cache[place], scale[place])


def scores_of(inputs: AttentionInputs, q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return scores [H, R, L] of queries [R, H, D] and keys [L, KVH, D]: scale * (q . k), then the soft cap."""
    grouped = q.float().reshape(len(q), inputs.kv_heads, inputs.group, -1)
    scores = torch.einsum("rkgd,lkd->kgrl", grouped, keys).flatten(0, 1) * inputs.scale
    return scores if inputs.soft_cap is None else inputs.soft_cap * torch.tanh(scores / inputs.soft_cap)


def softmax_of(
    scores: torch.Tensor, sink_logits: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the rows' maximum and softmax sum, [H, R] each, sink logit included, and the weights [H, R, L]; no key: weights 0."""
    num_keys = scores.shape[2]
    if sink_logits is not None:
        sinks = sink_logits.float()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sinks], dim=2)
    lowest = torch.finfo(torch.float32).min  # instead of -inf, since -inf - -inf is NaN
    top = scores.amax(dim=2).clamp(min=lowest) if scores.shape[2] else scores.new_full(scores.shape[:2], lowest)
    weights = torch.exp(scores - top[..., None])
    total = weights.sum(dim=2)
    return top, total, weights[..., :num_keys] / torch.where(total > 0, total, 1.0)[..., None]


def weighted_sum(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the sum [R, H, Dv] over keys of weights [H, R, L] times values [L, KVH, Dv]."""
    kv_heads = values.shape[1]
    grouped = weights.reshape(kv_heads, weights.shape[0] // kv_heads, *weights.shape[1:])
    return torch.einsum("kgrl,lke->rkge", grouped, values).flatten(1, 2)
