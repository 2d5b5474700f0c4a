"""Launches the Triton kernels of DeepSeek V4's latent attention (`kernel.py`), and chooses their tile sizes.

Legend: T queries, H heads, D width, W window slots, K entry slots, N entries of the longest sequence, P rows per block, E entries
that are pooled, R tokens per entry, G groups of R tokens that an entry reads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby

import torch

from transom_kernels.latent_attention.kernel import attend_rows, pool, score_entries
from transom_kernels.latent_attention.reference import LatentInputs
from transom_kernels.launch import INTERPRETED, MAX_REGISTERS, next_power_of_two, shared_bytes, split_width
from transom_kernels.paged_attention.triton.steps import combine
from transom_kernels.paged_attention.triton.tuning import MAX_PARTIAL_BYTES

MIN_DOT_ROWS = 16  # least rows of a product on tensor cores
SCORE_BYTES = 64 << 20  # most memory that the indexer's scores take at a time
SCORE_ROUNDS = 8  # blocks of keys per program if there are at least MANY_QUERIES queries
MANY_QUERIES = 128  # from this many queries on, one program per query fills the device
# shared memory of seven stages for 16 heads of width 512: more than sm_86, sm_89 and sm_120 have
SEVEN_STAGES_BYTES = 117_248
# Rows of a split, for each tile of heads: a query has 16 programs for 2,048 rows, whether a rank has 16 of its heads or 128.
# Its rows are 147,456 bytes (128 of 576 numbers), 16 heads' partial results 36,864: shorter splits would spend more on these.
SPLIT_ROWS = 128
COMBINED_SPLITS = 4  # that an iteration of `combine` reads
POOL_CHANNELS = 64  # channels of an entry that a program of `pool` computes
POOL_ROWS = 16  # rows of an entry that `pool` reads at once


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """The constants that a kernel is compiled for: heads and rows of an iteration, warps, and pipeline stages.

    Slots are loaded a stage before the rows that they name. While one iteration is computed, the rows of the next one are being
    loaded if there are five stages, and those of the next two if there are seven.
    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int


def attend_config(num_heads: int, width: int, element_bytes: int, shared_bytes: int) -> LatentConfig:
    """Return the configuration of `attend_rows` on a device whose programs may have `shared_bytes` of shared memory.

    Rows of 512 16-bit numbers (1 KiB) count as wide: accumulators of 64 heads of that width do not fit in registers. Two stages of
    32 rows of MLA's 576 do not fit into the least shared memory.
    """
    wide = width * element_bytes > 512
    if element_bytes > 2:  # float32: products without tensor cores, for exactness, not for speed
        return LatentConfig(block_h=MIN_DOT_ROWS, block_n=16 if wide else 32, num_warps=8, num_stages=1)
    block_h = min(32 if wide else 64, max(MIN_DOT_ROWS, next_power_of_two(num_heads)))
    has_seven = wide and block_h == MIN_DOT_ROWS and shared_bytes >= SEVEN_STAGES_BYTES
    few = width * element_bytes > 1024 and shared_bytes < SEVEN_STAGES_BYTES
    block_n = 16 if few else 32 if wide else 64
    return LatentConfig(block_h=block_h, block_n=block_n, num_warps=8, num_stages=7 if has_seven else 5)


def score_config(num_heads: int, width: int, element_bytes: int) -> LatentConfig:
    """Return the configuration of `score_entries`, which multiplies all heads of one query by a block of keys."""
    block_h = max(MIN_DOT_ROWS, next_power_of_two(num_heads))
    if element_bytes > 2:
        return LatentConfig(block_h=block_h, block_n=16, num_warps=8, num_stages=1)
    return LatentConfig(block_h=block_h, block_n=64, num_warps=4, num_stages=5)


def score_rounds(num_queries: int) -> int:
    """Return the blocks of keys per program: several if the queries fill the device, so that a query is loaded less often."""
    return SCORE_ROUNDS if num_queries >= MANY_QUERIES else 1


def queries_at_once(num_entries: int) -> int:
    """Return how many queries may be scored at once so that their scores take at most `SCORE_BYTES`; at least 1.

    From 16 on it is a multiple of 16, so that all tiles are equally aligned: Triton compiles a kernel for each alignment.
    """
    most = max(1, SCORE_BYTES // (4 * max(1, num_entries)))
    return most if most < 16 else most // 16 * 16


def latent_attention_triton(inputs: LatentInputs) -> torch.Tensor:
    """Return attention [T, H, D] of `q` [T, H, D]: softmax of (scale q . r over a query's rows r, and sink_logits) times r.

    Caches are [ids, P, 1, D]. The slots [T, W] and [T, K] name each query's rows; negative slots name none. Several programs share
    the rows of a sequence's only query, so that one query fills more of a device; a prompt has queries enough.
    """
    out = torch.empty(inputs.q.shape, dtype=inputs.q.dtype, device=inputs.q.device)
    for rows, is_single in _runs(inputs.counts or [1] * len(out)):
        at_once = rows.stop - rows.start
        if is_single:  # partial results of all heads and splits, whose rows are SPLIT_ROWS or more
            slots = sum(slots.shape[1] for _, slots in inputs.places)
            at_once = max(1, MAX_PARTIAL_BYTES // (4 * out[0].numel() * (slots // SPLIT_ROWS + 2)))
        for first in range(rows.start, rows.stop, at_once):
            part = slice(first, min(first + at_once, rows.stop))
            _attend(inputs, part, out[part], is_split=is_single)
    return out


def _runs(counts: Sequence[int]) -> Iterator[tuple[slice, bool]]:
    """Yield the rows of neighbouring sequences that all have one query, or all several, and whether they have one."""
    first = 0
    for is_single, run in groupby(counts, lambda count: count == 1):
        end = first + sum(run)
        if end > first:
            yield slice(first, end), is_single
        first = end


def _attend(inputs: LatentInputs, rows: slice, out: torch.Tensor, *, is_split: bool) -> None:
    """Write the attention of some rows to `out` [t, H, D]."""
    q, window_cache, window_slots = inputs.q[rows], inputs.window_cache, _aligned(inputs.window_slots[rows])
    tokens, heads, width = q.shape
    entry_cache, entry_slots = window_cache, window_slots[:, :0]
    if inputs.entry_cache is not None and inputs.entry_slots is not None:
        entry_cache, entry_slots = inputs.entry_cache, _aligned(inputs.entry_slots[rows])
    config = attend_config(heads, width, q.element_size(), shared_bytes(q.device))
    head_tiles, (d1, d2) = -(-heads // config.block_h), split_width(width)
    split = SPLIT_ROWS * head_tiles if is_split else 0
    splits = sum(-(-slots.shape[1] // split) for slots in (window_slots, entry_slots)) if is_split else 1
    partial, statistics = out, out
    if is_split:
        partial = torch.empty((tokens, splits, heads, width), dtype=torch.float32, device=q.device)
        statistics = torch.empty((tokens, splits, heads, 2), dtype=torch.float32, device=q.device)
    attend_rows[(tokens, head_tiles, splits)](
        q, window_cache, entry_cache, window_slots, entry_slots, inputs.sink_logits, partial,
        statistics, inputs.scale, heads,
        window_slots.shape[1], entry_slots.shape[1], q.stride(0), q.stride(1),
        *window_cache.stride()[:2], *entry_cache.stride()[:2],
        D=width, WINDOW_P=window_cache.shape[1], ENTRY_P=entry_cache.shape[1], UPCAST=INTERPRETED,
        BLOCK_H=config.block_h, D1=d1, D2=d2, BLOCK_N=config.block_n, SPLIT=split,
        num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    if is_split:
        combine[(tokens, heads, 1)](
            partial, statistics, out, _combine_items(tokens, splits, q.device), inputs.sink_logits, 1,
            GROUP=heads, E=width, HAS_SINK_LOGITS=True, BLOCK_E=next_power_of_two(width), BLOCK_S=COMBINED_SPLITS,
        )  # fmt: skip


def _aligned(slots: torch.Tensor) -> torch.Tensor:
    """Return slots that are contiguous, at a multiple of 16 bytes: Triton compiles another kernel for other addresses."""
    return slots.contiguous() if slots.data_ptr() % 16 == 0 else slots.clone()


@cache
def _combine_items(tokens: int, splits: int, device: torch.device) -> torch.Tensor:
    """Return the combine items [t, 4] of queries with `splits` partial results each (`paged_attention.triton.work_items`)."""
    token = torch.arange(tokens, dtype=torch.int32, device=device)
    ones = torch.ones_like(token)
    return torch.stack([token, ones, token * splits, ones * splits], dim=1)


def select_entries_triton(
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
    """Return the `top_k` entries [T, min(top_k, N)] with the largest sum_h head_weights[h] * relu(q_h . key) * scale, or -1.

    Query `t` sees the first `num_visible[t]` entries of sequence `sequence[t]`, whose keys are at `slots[sequence[t]]` [N]. A tile
    of queries is scored at a time, which bounds the memory of scores.
    """
    num_entries = slots.shape[1]
    chosen = min(top_k, num_entries)
    selected = torch.full((len(q), chosen), -1, dtype=torch.int64, device=q.device)
    step = queries_at_once(num_entries)
    scores = torch.empty((min(step, len(q)), num_entries), dtype=torch.float32, device=q.device)
    for begin in range(0, len(q) if chosen else 0, step):
        tile = slice(begin, begin + step)
        rows = scores[: len(q[tile])]
        _score(q[tile], head_weights[tile], key_cache, slots, sequence[tile], num_visible[tile], scale, rows)
        torch.topk(rows, chosen, dim=1, out=(rows.new_empty(len(rows), chosen), selected[tile]))
    return selected.masked_fill_(selected >= num_visible[:, None], -1)


def _score(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    key_cache: torch.Tensor,
    slots: torch.Tensor,
    sequence: torch.Tensor,
    num_visible: torch.Tensor,
    scale: float,
    scores: torch.Tensor,
) -> None:
    """Write the scores [t, N] of all entries for a tile of t queries."""
    (tokens, heads, width), num_entries = q.shape, slots.shape[1]
    config, rounds = score_config(heads, width, q.element_size()), score_rounds(tokens)
    score_entries[(tokens, -(-num_entries // (rounds * config.block_n)))](
        q, head_weights.contiguous(), key_cache, slots.contiguous(), sequence, num_visible, scores, scale, heads, num_entries,
        rounds, q.stride(0), q.stride(1), *key_cache.stride()[:2],
        D=width, P=key_cache.shape[1], UPCAST=INTERPRETED, BLOCK_H=config.block_h, BLOCK_D=next_power_of_two(width),
        BLOCK_N=config.block_n, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def pool_rows_triton(
    kv_cache: torch.Tensor, gate_cache: torch.Tensor, slots: torch.Tensor, position_bias: torch.Tensor
) -> torch.Tensor:
    """Return entries [E, D]: for each channel the sum over an entry's G * R rows of softmax(gate + bias) * kv.

    Row `g * R + r` of an entry is at `slots[e, g * R + r]` of both caches [ids, P, 1, G * D]; `op.pool_rows` has an example.
    """
    ratio, channels = position_bias.shape
    num_groups = slots.shape[1] // ratio
    width = channels // num_groups
    out = torch.empty((len(slots), width), dtype=torch.float32, device=slots.device)
    block = min(POOL_CHANNELS, next_power_of_two(width))
    if len(slots):
        pool[(len(slots), -(-width // block))](
            kv_cache, gate_cache, slots.contiguous(), position_bias, out, *kv_cache.stride()[:2], *gate_cache.stride()[:2],
            D=width, R=ratio, G=num_groups, P=kv_cache.shape[1], BLOCK_R=min(POOL_ROWS, next_power_of_two(slots.shape[1])),
            BLOCK_D=block, num_warps=4,
        )  # fmt: skip
    return out
