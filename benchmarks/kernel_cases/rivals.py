"""Other implementations on the same shapes. None of them is needed: one that cannot be imported is no rival.

Those that know no pages get contiguous keys and values, which is an advantage: gathering is left out of their time.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernel_cases.paged import BLOCK, Paged, dense

Runs = dict[str, Callable[[], object]]


def decode_rivals(paged: Paged) -> Runs:
    """FlexAttention and torch's own attention for one query a sequence, and FlashInfer over the same pages."""
    q, k, v = dense(paged)
    runs: Runs = {"sdpa": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), "flex": _flex(q, k, v)}
    if importlib.util.find_spec("flashinfer"):
        runs["flashinfer"] = _flashinfer_decode(paged)
    return runs


def prefill_rivals(paged: Paged, *, with_flex: bool) -> Runs:
    """torch's flash backend, FlexAttention (which compiles for seconds), and FlashInfer where it can be imported."""
    q, k, v = dense(paged)
    group = q.shape[1] // k.shape[1]
    all_k, all_v = (
        k.repeat_interleave(group, 1),
        v.repeat_interleave(group, 1),
    )  # not every version's flash groups heads

    def flash() -> object:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, all_k, all_v, is_causal=True)

    runs: Runs = {"flash": flash}
    if with_flex:
        runs["flex"] = _flex(q, k, v)
    if importlib.util.find_spec("flashinfer"):
        runs["flashinfer"] = _flashinfer_prefill(q, k, v)
    return runs


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], object]:
    """Compiled on its first call, which is not timed; the block mask is made once, as a server would."""
    made: list[Callable[[], object]] = []

    def run() -> object:
        if not made:
            made.append(_make_flex(q, k, v))
        return made[0]()

    return run


def _make_flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], object]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    if q.shape[2] == 1:
        return lambda: compiled(q, k, v, enable_gqa=True)
    mask = create_block_mask(lambda b, h, row, key: row >= key, None, None, q.shape[2], k.shape[2], device=q.device)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)


def _flashinfer_decode(paged: Paged) -> Callable[[], object]:
    import flashinfer

    device, batch = paged.q.device, paged.batch
    lengths = [len(table) for table in batch.block_table_host]
    pages = torch.tensor([block for table in batch.block_table_host for block in table], device=device).int()
    last = torch.tensor(
        [(s + c - 1) % BLOCK + 1 for s, c in zip(batch.start_host, batch.count_host, strict=True)], device=device
    ).int()
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=device), "HND"
    )
    heads, kv_heads, size = paged.q.shape[1], paged.k_cache.shape[2], paged.q.shape[2]
    begins = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    wrapper.plan(
        begins, pages, last, heads, kv_heads, size, BLOCK, q_data_type=paged.q.dtype, kv_data_type=paged.q.dtype
    )
    caches = tuple(cache.transpose(1, 2) for cache in (paged.k_cache, paged.v_cache))  # [ids, KVH, P, D], as they lie
    return lambda: wrapper.run(paged.q, caches)


def _flashinfer_prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], object]:
    import flashinfer

    rows, keys, values = (part[0].transpose(0, 1).contiguous() for part in (q, k, v))
    return lambda: flashinfer.single_prefill_with_kv_cache(rows, keys, values, causal=True)
