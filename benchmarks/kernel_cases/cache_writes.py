"""`prepare_qkv` (norms, RoPE and cache write in one pass) and `block_copy`.

Legend: T tokens, H query heads, KVH KV heads, D head width, P block size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernel_cases.case import Case, Check, Prepared, Scale, Target, Tensors
from kernel_cases.paged import BLOCK, Heads
from transom_kernels.block_copy.gpu import copy_blocks_triton
from transom_kernels.kv_write.gpu import prepare_qkv_triton
from transom_kernels.kv_write.prepare import Preparation

ERROR_LIMIT = 6e-3
LLAMA, TINY = Heads(query=32, kv=8, size=128), Heads(query=4, kv=2, size=16)
TARGET = Target(least=0.80, of="bandwidth")


def cases(scale: Scale) -> Iterator[Case]:
    """Of a long prompt, of a decoding batch, and of blocks that move."""
    many, few = scale.pick(32_768, 6), scale.pick(64, 3)
    for tokens, with_norm in ((many, False), (many, True), (few, False)):
        yield Case(
            name=f"kv_write{' with norms' if with_norm else ''} tokens {tokens}",
            prepare=partial(_write, TINY if scale.is_tiny else LLAMA, tokens, with_norm),
            formula="queries, keys and values in and out, the rotary tables and slots",
            target=TARGET if tokens == many else None,
        )
    for pairs in scale.some((16, 1024), (1024,), (2,)):
        yield Case(
            name=f"block copies {pairs}",
            prepare=partial(_copies, pairs, scale.pick(512 << 10, 256)),
            formula="twice the blocks",
        )


def _write(heads: Heads, tokens: int, with_norm: bool, device: torch.device) -> Prepared:
    size, num_rows = heads.size, heads.query + 2 * heads.kv
    fused = torch.randn(tokens, num_rows, size, device=device, dtype=torch.bfloat16)
    q, k, v = fused.split_with_sizes((heads.query, heads.kv, heads.kv), dim=1)
    angles = torch.rand(tokens, size // 2, device=device) * 6.28
    cos = torch.cat([angles.cos(), angles.cos()], -1).bfloat16()
    sin = torch.cat([-angles.sin(), angles.sin()], -1).bfloat16()
    slots = torch.randperm(2 * tokens, device=device)[:tokens]
    part, ids = BLOCK * heads.kv * size, -(-2 * tokens // BLOCK)
    slab = torch.empty(ids * 2 * part, device=device, dtype=torch.bfloat16)
    shape, strides = (ids, BLOCK, heads.kv, size), (2 * part, size, BLOCK * size, 1)
    caches = [slab.as_strided(shape, strides, at) for at in (0, part)]
    weights = [torch.randn(count, size, device=device).bfloat16() for count in (heads.query, heads.kv)]
    how = Preparation(norm=True, q_weight=weights[0], k_weight=weights[1]) if with_norm else Preparation()

    def run() -> Tensors:
        out = prepare_qkv_triton(q, k, v, *caches, slots, (cos, sin), how)
        return out, *(cache[slots // BLOCK, slots % BLOCK] for cache in caches)

    def rotated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.double()
        if with_norm:
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + how.eps) * weight.double()
        return wide * cos.double()[:, None] + wide.roll(size // 2, -1) * sin.double()[:, None]

    def check(out: Tensors) -> list[Check]:
        wanted = (rotated(q, weights[0]), rotated(k, weights[1]), v.double())
        return [Check(got=got, wanted=expected, limit=ERROR_LIMIT) for got, expected in zip(out, wanted, strict=True)]

    return Prepared(
        run=run,
        timed=lambda: prepare_qkv_triton(q, k, v, *caches, slots, (cos, sin), how),
        check=check,
        num_bytes=2 * fused.nbytes + cos.nbytes + sin.nbytes + slots.nbytes,
    )


def _copies(num_pairs: int, block_bytes: int, device: torch.device) -> Prepared:
    slab = torch.randint(0, 256, (2 * num_pairs, block_bytes), dtype=torch.uint8, device=device)
    order = torch.randperm(2 * num_pairs).tolist()
    pairs = list(zip(order[:num_pairs], order[num_pairs:], strict=True))

    def run() -> Tensors:
        copy_blocks_triton(slab, slab, pairs)
        return (slab,)

    def check(out: Tensors) -> list[Check]:
        sources, targets = (torch.tensor([pair[side] for pair in pairs], device=device) for side in (0, 1))
        return [Check(got=out[0][targets], wanted=slab[sources], limit=0.0)]

    return Prepared(run=run, check=check, num_bytes=2 * num_pairs * block_bytes, captured=False)
