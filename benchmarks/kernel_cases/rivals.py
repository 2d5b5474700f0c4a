"""Other implementations (*rivals*) of a case on equal shapes. All are optional: a rival that cannot be imported is reported as
absent.

Rivals without paged caches get contiguous keys and values; their time does not include a gather, which favours them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernel_cases.paged import BLOCK, Paged, dense

Run = Callable[[], object]
Rivals = dict[str, Callable[[], Run]]  # each makes its inputs when it is its turn, and lets go of them after it


def decode_rivals(paged: Paged) -> Rivals:
    """FlexAttention and torch's own attention for one query a sequence, and FlashInfer over the same pages."""
    return {
        "sdpa": lambda: _sdpa(paged),
        "flex": lambda: _flex(paged),
        "flashinfer": lambda: _flashinfer_decode(paged),
    }


def prefill_rivals(paged: Paged, *, with_flex: bool) -> Rivals:
    """torch's flash backend, FlexAttention (which compiles for seconds), and FlashInfer."""
    rivals: Rivals = {"flash": lambda: _flash(paged), "flashinfer": lambda: _flashinfer_prefill(paged)}
    return rivals | ({"flex": lambda: _flex(paged)} if with_flex else {})


def _sdpa(paged: Paged) -> Run:
    q, k, v = dense(paged)
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _flash(paged: Paged) -> Run:
    q, k, v = dense(paged)
    group = q.shape[1] // k.shape[1]
    all_k, all_v = (part.repeat_interleave(group, 1) for part in (k, v))  # not every version's flash groups heads

    def run() -> object:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, all_k, all_v, is_causal=True)

    return run


def _flex(paged: Paged) -> Run:
    """Compiled on its first call, which is not timed; the block mask is made once, as a server would."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # else, after a handful of shapes, it would fall back to an eager one without a word
    q, k, v = dense(paged)
    compiled = torch.compile(flex_attention, dynamic=False)
    if q.shape[2] == 1:
        return lambda: compiled(q, k, v, enable_gqa=True)
    mask = create_block_mask(lambda b, h, row, key: row >= key, None, None, q.shape[2], k.shape[2], device=q.device)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)


def _flashinfer_decode(paged: Paged) -> Run:
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


def _flashinfer_prefill(paged: Paged) -> Run:
    import flashinfer

    rows, keys, values = (part[0].transpose(0, 1).contiguous() for part in dense(paged))
    return lambda: flashinfer.single_prefill_with_kv_cache(rows, keys, values, causal=True)
